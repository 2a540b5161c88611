"""The refinement in the processor's own vector instructions, against the reference."""

import functools
import threading
import time
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.layers.linear import linear
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4, native
from mxjax.numerics.native import refinement
from mxjax.numerics.realization import one_code
from mxjax.numerics.realization.activation_quantizers import OneCode
from tests.cases import slow

BLOCKS = 3
BOTH = "native", "xla"


@pytest.fixture
def asked_anew():
  """What stands in the way of the kernel is not remembered, before and after."""
  refinement.machine_obstacle.cache_clear()
  yield
  refinement.machine_obstacle.cache_clear()


def tables(rng, blocks=BLOCKS):
  weight = rng.standard_normal((blocks, 32, 48)).astype(np.float32)
  decoded = mxfp4.round_blocks(jnp.asarray(weight))
  return one_code.tables(jnp.asarray(weight), decoded)


def maps(rng, blocks=BLOCKS):
  noise = rng.standard_normal((blocks, 32, 32)) / 8
  return jnp.asarray((np.eye(32) + noise).astype(np.float32))


def hard_inputs(rng, tokens):
  """Blocks with outliers, zeros of both signs, ties, and all sizes of exponents."""
  x = rng.standard_t(2, (BLOCKS, 32, tokens)).astype(np.float32)
  exponents = rng.integers(-40, 40, (BLOCKS, 1, tokens))
  x *= np.exp2(exponents * (rng.random((BLOCKS, 1, tokens)) < 0.5)).astype(np.float32)
  x[:, :, ::7] = 0.0
  x[:, ::3, ::5] = -0.0
  grid = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], np.float32)
  ties = rng.choice(grid, (BLOCKS, 32, len(range(3, tokens, 11))))
  x[:, :, 3::11] = ties * rng.choice([-1, 1], ties.shape)
  return jnp.asarray(x)


def same_bits(a, b):
  np.testing.assert_array_equal(
    np.asarray(a).view(np.int32), np.asarray(b).view(np.int32)
  )


@pytest.mark.parametrize("is_mapped", [*slow(False), True])
@pytest.mark.parametrize("tokens", [*slow(32), 257])
def test_refined_codes_have_the_bits_of_the_reference(tokens, is_mapped):
  rng = np.random.default_rng(tokens)
  x, (gram, cross) = hard_inputs(rng, tokens), tables(rng)
  matrix = maps(rng) if is_mapped else None
  refine = jax.jit(one_code.refined_blocks, static_argnames="implementation")
  call = functools.partial(refine, x, gram, cross, matrix=matrix)
  got, expected = (call(implementation=how) for how in BOTH)
  same_bits(got, expected)
  mapped = x if matrix is None else jax.jit(one_code.block_products)(matrix, x)
  changed = np.asarray(got) != np.asarray(mxfp4.round_blocks(mapped))
  assert 0.1 < changed.any(1).mean() < 1  # the rule did something, and not everywhere


@pytest.mark.parametrize("is_mapped", [False, True], ids=["alone", "mapped"])
def test_the_objective_is_the_references(is_mapped):
  rng = np.random.default_rng(5)
  x = jnp.asarray(rng.standard_t(3, (BLOCKS, 32, 700)).astype(np.float32))
  gram, cross = tables(rng)
  matrix = maps(rng) if is_mapped else None
  objective = functools.partial(one_code.refined_objective, x, gram, cross)
  got, expected = (objective(matrix=matrix, implementation=how) for how in BOTH)
  assert got.shape == (BLOCKS, 700)
  np.testing.assert_allclose(got, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


def test_extremes_of_the_range_and_what_is_not_finite():
  rng = np.random.default_rng(6)
  x = np.asarray(rng.standard_normal((BLOCKS, 32, 64)), np.float32)
  x[0] *= np.float32(2.0**120)
  x[1, :, :32] *= np.float32(2.0**-120)
  x[2, 4, 5], x[2, 7, 40] = np.nan, np.inf
  gram, cross = (jnp.zeros_like(t).at[0].set(t[0]) for t in tables(rng))
  refine = functools.partial(one_code.refined_blocks, jnp.asarray(x), gram, cross)
  got, expected = (np.asarray(refine(implementation=how)) for how in BOTH)
  np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
  assert np.isnan(got).sum() == 2 * 32
  same_bits(np.nan_to_num(got), np.nan_to_num(expected))


def test_a_linear_takes_it_and_keeps_its_bits():
  rng = np.random.default_rng(7)
  weight = jnp.asarray(rng.standard_normal((48, 96)).astype(np.float32))
  packed = mxfp4.encode(weight)
  blocks = mxfp4.to_blocks(weight)
  decoded = mxfp4.to_blocks(mxfp4.decode(packed, jnp.float32))
  gram, cross = one_code.tables(blocks, decoded)
  rounding = OneCode(one_code.pack_symmetric(gram), cross)
  leaf = QuantizedLinear(packed, None, rounding)
  x = jnp.asarray(rng.standard_normal((2, 40, 96)).astype(np.float32))
  text = jax.jit(linear).lower(x, leaf).as_text()
  assert refinement.kernel_name(maps=False, decodes=True) in text
  reference = functools.partial(linear, implementation="xla")
  assert "mxjax_refined" not in jax.jit(reference).lower(x, leaf).as_text()
  same_bits(jax.jit(linear)(x, leaf), jax.jit(reference)(x, leaf))


def test_calls_from_several_threads_do_not_wait_for_each_other():
  rng = np.random.default_rng(8)
  x, (gram, cross) = hard_inputs(rng, 600), tables(rng)
  refine = jax.jit(functools.partial(one_code.refined_blocks, implementation="native"))
  expected = np.asarray(refine(x, gram, cross))
  wrong = []

  def work():
    for _ in range(50):
      wrong.append((np.asarray(refine(x, gram, cross)) != expected).sum())

  with futures.ThreadPoolExecutor(4) as pool:
    list(pool.map(lambda _: work(), range(4)))
  assert len(wrong) == 200 and sum(wrong) == 0


def test_threads_that_need_a_kernel_first_make_it_once():
  """XLA refuses a second kernel of one name."""
  made, start = [], threading.Barrier(4)

  @native.once
  def make(name):
    made.append(name)
    # Other threads run meanwhile.
    time.sleep(0.05)
    return object()

  def work(_):
    start.wait()
    return make("kernel")

  with futures.ThreadPoolExecutor(4) as pool:
    found = list(pool.map(work, range(4)))
  assert made == ["kernel"] and found == found[:1] * 4
  assert make("another") is not found[0]


def test_another_interface_of_xla_is_not_called(monkeypatch, asked_anew):
  why_not = "version 1 of XLA's C interface, and here it is 0"
  monkeypatch.setattr(refinement, "KNOWN_INTERFACE", "1")
  assert why_not in refinement.obstacle(jnp.ones((1, 32, 32)))


def test_tables_of_another_shape_are_never_read_past_their_end():
  rng = np.random.default_rng(10)
  x, (gram, cross) = hard_inputs(rng, 64), tables(rng)
  refine = functools.partial(one_code.refined_blocks, x, cross=cross)
  one = refine(gram[:1], implementation="native")
  same_bits(one, refine(jnp.stack([gram[0]] * BLOCKS), implementation="native"))
  with pytest.raises(ValueError, match="broadcast"):
    refine(gram[:2], implementation="native")
  rows = jnp.ones((BLOCKS, 16, 64))
  with pytest.raises(NotImplementedError, match=r"got \(3, 16, 64\)"):
    one_code.refined_blocks(rows, gram, cross, implementation="native")


@pytest.mark.slow
def test_an_explicit_choice_never_falls_back(monkeypatch, asked_anew):
  rng = np.random.default_rng(9)
  gram, cross = tables(rng)
  few, many = jnp.ones((BLOCKS, 32, 31)), jnp.ones((BLOCKS, 32, 32))
  call = functools.partial(one_code.refined_blocks, gram=gram, cross=cross)
  with pytest.raises(NotImplementedError, match="at least 32 tokens, got 31"):
    call(few, implementation="native")
  with pytest.raises(NotImplementedError, match="paper's rules only"):
    call(many, rules=mxfp4.Rules(scale_rule="even"), implementation="native")
  with pytest.raises(ValueError, match="'cuda'"):
    call(many, implementation="cuda")
  assert call(few).shape == few.shape
  monkeypatch.setattr(native, "is_installed", lambda: False)
  refinement.machine_obstacle.cache_clear()
  with pytest.raises(NotImplementedError, match="pip install llvmlite"):
    call(many, implementation="native")
  assert call(many).shape == many.shape


@pytest.mark.slow
def test_of_equal_changes_the_lowest_coordinate_is_taken():
  x = jnp.full((1, 32, 32), 2.4, jnp.float32).at[:, 20].set(6.0)
  gram = jnp.eye(32)[None]
  cross = jnp.zeros((1, 32, 32)).at[:, 3:9, 20].set(1.0)  # six equal slopes
  nearest = mxfp4.round_blocks(x)
  for implementation in ("native", "xla"):
    got = one_code.refined_blocks(x, gram, cross, implementation=implementation)
    changed = np.argwhere(np.asarray(got != nearest)[0, :, 0]).ravel()
    assert changed.tolist() == [3]
