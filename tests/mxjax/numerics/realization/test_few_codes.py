"""The rule of a few codes, against its definition and against one code at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4, native
from mxjax.numerics.native import few_codes as native_few_codes
from mxjax.numerics.native import refinement
from mxjax.numerics.realization import few_codes, one_code
from mxjax.numerics.realization.activation_quantizers import FewCodes
from tests import refusals
from tests.cases import slow
from tests.mxjax.numerics.native.test_refinement import (
  BLOCKS,
  BOTH,
  hard_inputs,
  maps,
  same_bits,
  tables,
)

EVEN = mxfp4.Rules(scale_rule="even")


@functools.partial(
  jax.jit, static_argnames=("rules", "changes", "implementation", "is_mapped")
)
def refined(x, gram, matrix, rules, changes, implementation, is_mapped=False):
  mapping = matrix if is_mapped else None
  how = {"changes": changes, "matrix": mapping, "implementation": implementation}
  return few_codes.refined_blocks(x, gram, rules, **how)


def problem(tokens=257, seed=0):
  rng = np.random.default_rng(seed)
  return hard_inputs(rng, tokens), tables(rng)[0], maps(rng)


@pytest.mark.slow
@pytest.mark.parametrize("is_mapped", [*slow(False), True])
@pytest.mark.parametrize("changes", [*slow(1, 2), 5])
@pytest.mark.parametrize("rules", [mxfp4.PAPER_RULES, EVEN], ids=["floor", "even"])
@pytest.mark.parametrize("tokens", [*slow(32), 257])
def test_the_kernel_has_the_bits_of_the_reference(tokens, rules, changes, is_mapped):
  operands = problem(tokens)
  got, want = (refined(*operands, rules, changes, how, is_mapped) for how in BOTH)
  same_bits(got, want)


def objective(q, x, gram):
  moved = np.asarray(q, np.float64) - np.asarray(x, np.float64)
  return np.einsum("bin,bij,bjn->bn", moved, np.asarray(gram, np.float64), moved)


def test_every_change_is_the_best_one_after_those_before_it():
  rng = np.random.default_rng(1)
  x = jnp.asarray(rng.standard_t(3, (BLOCKS, 32, 40)), jnp.float32)
  gram = tables(rng)[0]
  states = [mxfp4.round_blocks(x)]
  states += [refined(x, gram, None, mxfp4.PAPER_RULES, k, "native") for k in (1, 2, 3)]
  exponent = mxfp4.block_exponent(x)
  scale = np.asarray(mxfp4.scale_of(exponent), np.float64)
  legal = np.array([*mxfp4.MAGNITUDES, *(-m for m in mxfp4.MAGNITUDES)])
  wide = np.asarray(gram, np.float64)
  for before, after in zip(states[:-1], states[1:], strict=True):
    q, moved = (np.asarray(a, np.float64) for a in (before, before - x))
    slope = np.einsum("bij,bjn->bin", wide, moved)[..., None]
    steps = legal * scale[:, None, :, None] - q[..., None]
    curvature = np.einsum("bii->bi", wide)[:, :, None, None]
    best = (2 * steps * slope + steps**2 * curvature).min((1, 3))
    reached = objective(after, x, gram) - objective(before, x, gram)
    size = objective(before, x, gram)
    np.testing.assert_allclose(reached, np.minimum(best, 0), atol=1e-5 * size.max())
    assert ((after != before).sum(1) <= 1).all()
  assert (states[3] != states[0]).sum(1).max() == 3


@pytest.mark.slow
def test_more_changes_never_raise_the_objective_and_end_at_a_local_minimum():
  x, gram, _ = problem()
  x = jnp.clip(x, -1e3, 1e3)
  values = [
    objective(refined(x, gram, None, EVEN, k, "native"), x, gram) for k in (1, 2, 4, 32)
  ]
  for less, more in zip(values[1:], values[:-1], strict=True):
    assert (less <= more * (1 + 1e-5)).all()
    assert (less < more).mean() > 0.02
  same_bits(*(refined(x, gram, None, EVEN, k, "native") for k in (32, 48)))


def test_one_change_is_the_one_code_rule_without_the_weights_own_error():
  x, gram, matrix = problem()
  want = one_code.refined_blocks(x, gram, jnp.zeros_like(gram), matrix=matrix)
  same_bits(refined(x, gram, matrix, mxfp4.PAPER_RULES, 1, "native", True), want)


def test_exponents_round_up_from_seven_scales_only_where_they_are_asked_to():
  x = jnp.zeros((1, 32, 32), jnp.float32).at[0, 0].set(jnp.linspace(4, 7.99, 32))
  top = np.asarray(x[0, 0])
  gram = one_code.pack_symmetric(jnp.eye(32)[None])
  for rounds_up, largest in ((False, 6.0), (True, 8.0)):
    rule = FewCodes(gram, 2, rounds_up)
    got = np.asarray(rule.round(x, mxfp4.PAPER_RULES))[0, 0]
    np.testing.assert_array_equal(got[top >= 7], largest)
    assert (got[top < 6.9] <= 6).all()
  both = rule.scale_rules(mxfp4.Rules(scale_rule="rceil")), rule.scale_rules(EVEN)
  assert both == (mxfp4.Rules(scale_rule="rceil"), EVEN)


def test_what_is_not_finite_marks_its_block():
  rng = np.random.default_rng(6)
  x = np.asarray(rng.standard_normal((BLOCKS, 32, 64)), np.float32)
  x[0] *= np.float32(2.0**120)
  x[1, :, :32] *= np.float32(2.0**-120)
  x[2, 4, 5], x[2, 7, 40] = np.nan, np.inf
  gram = jnp.zeros((BLOCKS, 32, 32)).at[0].set(tables(rng)[0][0])
  got, want = (
    np.asarray(refined(jnp.asarray(x), gram, None, EVEN, 3, how)) for how in BOTH
  )
  np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
  assert np.isnan(got).sum() == 2 * 32
  same_bits(np.nan_to_num(got), np.nan_to_num(want))


def test_a_rule_that_changes_no_code_is_refused():
  rule = lambda changes: lambda: FewCodes(jnp.zeros((1, 528)), changes)
  refusals.check([(rule(changes), f"got {changes}", "Nearest") for changes in (0, -1)])


def test_the_rule_takes_the_kernel_in_a_jitted_function():
  x, gram, _ = problem()
  rule = FewCodes(one_code.pack_symmetric(gram), 2, True)
  text = jax.jit(lambda x: rule.round(x, mxfp4.PAPER_RULES)).lower(x).as_text()
  name = {"maps": False, "changes": 2, "scale_rule": "even"}
  assert native_few_codes.kernel_name(**name) in text


def test_what_the_kernel_cannot_take_is_refused_by_name(monkeypatch):
  x, gram, _ = problem(64)
  call = functools.partial(few_codes.refined_blocks, x, gram, implementation="native")
  narrow = lambda: few_codes.refined_blocks(x[..., :31], gram, implementation="native")
  refusals.check(
    [
      (lambda: call(mxfp4.Rules(scale_rule="rceil")), "scale rules floor and even"),
      (lambda: call(mxfp4.Rules(tie_rule="even")), "ties away"),
      (narrow, "at least 32 tokens", "31"),
    ],
    NotImplementedError,
  )
  monkeypatch.setattr(native, "is_installed", lambda: False)
  refinement.machine_obstacle.cache_clear()
  with pytest.raises(NotImplementedError, match="pip install llvmlite"):
    call()
  refinement.machine_obstacle.cache_clear()
