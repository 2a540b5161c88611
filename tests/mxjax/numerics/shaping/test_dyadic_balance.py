import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.methods.hires import stage1
from mxjax.numerics import block_batches, implementations, mxfp4
from mxjax.numerics.realization import gptq, one_code
from mxjax.numerics.shaping import dyadic_balance, reference_chart

JB = [
  f"{kind}_{step}" for kind in ("rtn", "gptq") for step in ("full", "half", "identity")
]


def operands(vectors, name):
  return [jnp.asarray(vectors[name + k].T[None]) for k in ("X", "W")]


@jax.jit
def risks_of(x, w):
  n = x.shape[-1]
  moment, tiles = reference_chart.block_moment, dyadic_balance.subgroup_moments
  errors = [mxfp4.round_blocks(a) - a for a in (x, w)]
  return dyadic_balance.bilateral_risks(
    moment(x) / n, tiles(errors[0]) / n, moment(w), tiles(errors[1])
  )


@functools.partial(jax.jit, static_argnames="kind")
def rounded_trial(x, w, u, kind):
  """Rounded and exact operands of a trial, with its own codes."""
  scale = dyadic_balance.diagonal(u)[..., None]
  xs = (x.astype(jnp.float64) * scale).astype(jnp.float32)
  ws = (w.astype(jnp.float64) / scale).astype(jnp.float32)
  if kind == "gptq":
    moment = reference_chart.block_moment(xs) / x.shape[-1]
    upper = gptq.factor(moment.astype(jnp.float32)).upper
    w_hat = gptq.reconstruct_local(ws, upper).decoded
    gram, cross = one_code.tables(ws, w_hat)
    return one_code.refined_blocks(xs, gram, cross), w_hat, xs, ws
  return mxfp4.round_blocks(xs), mxfp4.round_blocks(ws), xs, ws


def losses_by_definition(x, w, steps, kind):
  """J_b from the n x m outputs, each trial with its own codes."""
  losses = []
  for u in steps:
    wide = [np.asarray(a[0], np.float64) for a in rounded_trial(x, w, u, kind)]
    exact = wide[2].T @ wide[3]
    error = wide[0].T @ wide[1] - exact
    losses.append((error**2).sum() / (exact**2).sum())
    e, gap = wide[0] - wide[2], wide[1] - wide[3]
    gram = lambda a, b: a @ b.T
    trace = lambda *grams: (grams[0] * grams[1]).sum()
    # The module's formula of the numerator, from 32 x 32 moments alone.
    numerator = (
      trace(gram(wide[1], wide[1]), gram(e, e))
      + 2 * trace(gram(wide[1], gap), gram(e, wide[2]))
      + trace(gram(gap, gap), gram(wide[2], wide[2]))
    )
    traced = numerator / trace(gram(wide[3], wide[3]), gram(wide[2], wide[2]))
    np.testing.assert_allclose(traced, losses[-1], rtol=1e-9)
  return np.asarray(losses)


@pytest.mark.parametrize("median", ["middle", "lower"])
def test_golden_proposals(vectors, float64, median):
  r_a, r_w = (
    jnp.asarray(vectors[f"balance/{k}"].astype(np.float64)) for k in ("rA", "rW")
  )
  u = dyadic_balance.propose(r_a, r_w, median=median)
  golden = "balance/u" if median == "middle" else "balance/u_lowermedian"
  np.testing.assert_allclose(u, vectors[golden], atol=1e-9)
  np.testing.assert_allclose(u.sum(-1), 0, atol=1e-9)
  assert float(jnp.abs(u).max()) <= 1 / 8


@pytest.mark.parametrize("case", JB)
def test_golden_losses_and_acceptance(vectors, float64, case):
  name = f"jb/{case}/"
  x, w = operands(vectors, name)
  r_a, r_w = risks_of(x, w)
  np.testing.assert_allclose(r_a[0], vectors[name + "risk_A"], rtol=1e-5)
  np.testing.assert_allclose(r_w[0], vectors[name + "risk_W"], rtol=1e-5)
  u = dyadic_balance.propose(r_a, r_w)
  np.testing.assert_allclose(u[0], vectors[name + "u"], atol=1e-5)
  steps = [u * s for s in dyadic_balance.STEPS]
  losses = losses_by_definition(x, w, steps, case.split("_")[0])
  np.testing.assert_allclose(losses, vectors[name + "J"], rtol=1e-3)
  accepted = dyadic_balance.accept(jnp.asarray(losses)[:, None])
  assert float(accepted[0]) == float(vectors[name + "accept"])


@jax.jit
def trial_losses(x, w, transform, steps):
  """J_b as the pipeline computes it: prepared trials and refinement scores."""
  n = x.shape[-1]
  raw = reference_chart.block_moment(x) / n
  moment = transform @ raw @ transform.mT
  wt = jnp.linalg.solve(transform.mT, w.astype(jnp.float64))
  trials = [
    dyadic_balance.prepare_trial(wt, moment, u, dyadic_balance.trial_factor(moment, u))
    for u in steps
  ]
  objective = dyadic_balance.trial_objective(
    x,
    dyadic_balance.scaled_transform(transform, jnp.stack(steps)).astype(jnp.float32),
    jnp.stack([t.gram for t in trials]),
    jnp.stack([t.cross for t in trials]),
  )
  weight_terms = jnp.stack([t.weight_term for t in trials])
  signal = (jnp.einsum("bim,bjm->bij", wt, wt) * moment).sum((-2, -1))
  return (objective / n + weight_terms) / signal[None]


@pytest.mark.parametrize("case", [c for c in JB if c.startswith("gptq")])
def test_fast_path_equals_the_definition(vectors, float64, case):
  name = f"jb/{case}/"
  x, w = operands(vectors, name)
  u = jnp.asarray(vectors[name + "u"])[None]
  steps = [u * s for s in dyadic_balance.STEPS]
  identity = jnp.eye(32, dtype=jnp.float64)[None]
  fast = np.asarray(trial_losses(x, w, identity, steps))
  np.testing.assert_allclose(fast[:, 0], vectors[name + "J"], rtol=1e-3)
  exact = losses_by_definition(x, w, steps, "gptq")
  np.testing.assert_allclose(fast[:, 0], exact, rtol=1e-5)


@pytest.mark.parametrize("case", ["gauss", "heavy", "corr", "sparse", "outlier"])
def test_golden_balance_after_shaping(vectors, float64, case):
  name = f"shape/{case}/"
  x, w = operands(vectors, name)
  transform = jnp.asarray(vectors[name + "T"])[None]
  exact = [np.asarray(a, np.float64) for a in (transform, x, w)]
  mapped = (exact[0] @ exact[1]).astype(np.float32)
  folded = np.linalg.solve(exact[0].mT, exact[2]).astype(np.float32)
  r_a, r_w = risks_of(mapped, folded)
  np.testing.assert_allclose(r_a[0], vectors[name + "risk_A"], rtol=2e-3)
  np.testing.assert_allclose(r_w[0], vectors[name + "risk_W"], rtol=2e-3)
  u = jnp.asarray(vectors[name + "u"])[None]
  steps = [u * s for s in dyadic_balance.STEPS]
  losses = np.asarray(trial_losses(x, w, transform, steps))[:, 0]
  expected = vectors[name + "J_gptq"]
  np.testing.assert_allclose(losses, expected, rtol=2e-3)
  margins = np.abs(expected[:2] - expected[2]) / expected[2]
  if margins.min() > 2e-3:
    accepted = dyadic_balance.accept(jnp.asarray(losses)[:, None])
    assert float(accepted[0]) == float(vectors[name + "accept_gptq"])


@pytest.mark.slow
def test_block_losses_of_a_wide_layer(vectors, float64):
  x, w = (mxfp4.to_blocks(jnp.asarray(vectors[f"jb_layer/{k}"])) for k in ("X", "W"))
  u = dyadic_balance.propose(*risks_of(x, w))
  np.testing.assert_allclose(u, vectors["jb_layer/u"], atol=1e-5)
  identity = jnp.broadcast_to(jnp.eye(32, dtype=jnp.float64), (3, 32, 32))
  losses = trial_losses(x, w, identity, [u * s for s in dyadic_balance.STEPS])
  np.testing.assert_allclose(losses, vectors["jb_layer/J_block"], rtol=2e-3)
  np.testing.assert_array_equal(
    dyadic_balance.accept(losses), vectors["jb_layer/accept_block"]
  )


@pytest.mark.slow
def test_hires_balances_a_wide_layer_block_by_block(vectors, float64):
  """Trials quantize one block alone, not the whole linear (reading A11)."""
  x, w = (mxfp4.to_blocks(jnp.asarray(vectors[f"jb_layer/{k}"])) for k in ("X", "W"))
  inputs = LinearInputs([x[None]])
  identity = jnp.broadcast_to(jnp.eye(32, dtype=jnp.float64), (3, 32, 32))
  _, record = stage1.balance(w, inputs, inputs.moment(), identity)
  losses = np.asarray(record["balance_losses"], float)
  expected = vectors["jb_layer/J_block"]
  is_measured = ~np.isnan(losses)
  is_refused = expected[0] > expected[2]
  assert is_refused.any() and not is_refused.all()
  np.testing.assert_array_equal(is_measured[1], is_refused)
  assert is_measured[[0, 2]].all()
  np.testing.assert_allclose(losses[is_measured], expected[is_measured], rtol=2e-3)
  assert np.nanmax(np.abs(losses / vectors["jb_layer/J_layer"] - 1)) > 2e-2
  np.testing.assert_array_equal(
    record["balance_steps"], vectors["jb_layer/accept_block"]
  )


def test_a_block_without_weights_has_no_loss(vectors, float64):
  """Its signal is zero, which divides its losses (Eq. serb-realized-loss)."""
  x, w = (mxfp4.to_blocks(jnp.asarray(vectors[f"jb_layer/{k}"])) for k in ("X", "W"))
  inputs = LinearInputs([x[None]])
  identity = jnp.broadcast_to(jnp.eye(32, dtype=jnp.float64), (3, 32, 32))
  _, record = stage1.balance(w.at[0].set(0), inputs, inputs.moment(), identity)
  full, _, same = record["balance_losses"]
  assert full[0] == same[0] == 0
  assert all(loss > 0 for loss in full[1:])


def test_the_largest_step_that_does_not_raise_the_loss_is_accepted(float64):
  losses = np.random.default_rng(0).uniform(size=(3, 500))
  steps = dyadic_balance.accept(jnp.asarray(losses))
  is_good = losses[:2] <= losses[2]
  np.testing.assert_array_equal(steps, np.select([*is_good], [1.0, 0.5], 0.0))


def test_a_silent_operand_proposes_nothing(float64):
  zero, one = jnp.zeros((1, 8)), jnp.ones((1, 8))
  np.testing.assert_array_equal(dyadic_balance.propose(zero, zero), 0)
  assert float(jnp.abs(dyadic_balance.propose(zero, one)).max()) < 1e-12


def test_error_moments_are_the_diagonal_tiles_of_the_whole(float64):
  rng = np.random.default_rng(3)
  x = jnp.asarray(rng.standard_normal((3, 32, 50)), jnp.float32)
  whole = np.asarray(reference_chart.block_moment(x))
  got = dyadic_balance.subgroup_moments(x)
  assert got.shape == dyadic_balance.subgroup_shape(3)
  for group in range(8):
    at = slice(4 * group, 4 * group + 4)
    np.testing.assert_allclose(got[:, group], whole[:, at, at], rtol=1e-12)
  np.testing.assert_array_equal(
    dyadic_balance.subgroup_tiles(jnp.asarray(whole))[:, 2], whole[:, 8:12, 8:12]
  )


def listing(wanted):
  """Tables of five blocks, and a list of them with the wanted ones first."""
  rng = np.random.default_rng(5)
  x = jnp.asarray(rng.standard_normal((5, 32, 40)), jnp.float32)
  transform, root, cross = (
    jnp.asarray(rng.standard_normal((5, 32, 32)), jnp.float32) for _ in range(3)
  )
  others = [block for block in range(5) if block not in wanted]
  order = jnp.asarray([*wanted, *others], jnp.int32)
  return x, order, jnp.int32(len(wanted)), transform, root @ root.mT, 0.1 * cross


@pytest.mark.parametrize("wanted", [[], [4], [0, 2, 3], [0, 1, 2, 3, 4]])
def test_listed_blocks_get_what_they_get_among_all(float64, wanted):
  x, order, count, *tables = listing(wanted)
  everywhere = dyadic_balance.trial_objective(x, *(table[None] for table in tables))[0]
  objective = dyadic_balance.listed_objective(x, order, count, *tables)
  got, everywhere = np.asarray(objective), np.asarray(everywhere)
  np.testing.assert_allclose(got[wanted], everywhere[wanted], rtol=1e-6)
  # What is not wanted is skipped, but for a block that fills the last turn.
  others = [block for block in range(5) if block not in wanted]
  assert (got[others] == 0).sum() >= len(others) - block_batches.LISTED_AT_ONCE + 1


def loops(traced):
  """Loops in what JAX traced, at any depth: `while` where no one knows their length."""
  return re.findall(r"\b(while|scan)\[", str(traced))


def test_on_a_gpu_the_half_step_takes_all_blocks_without_a_loop(float64, monkeypatch):
  wanted = [0, 2, 3]
  x, order, count, *tables = listing(wanted)
  # Functions of their own, because JAX keeps what it traced of one.
  form = lambda: lambda *args: dyadic_balance.listed_objective.__wrapped__(*args)
  found = lambda: loops(jax.make_jaxpr(form())(x, order, count, *tables))
  run = lambda: np.asarray(jax.jit(form())(x, order, count, *tables))
  listed, on_cpu = found(), run()
  assert listed.count("while") == 1
  with monkeypatch.context() as patch:
    patch.setattr(implementations, "target_platform", lambda: "gpu")
    assert not found()
  # The same arithmetic, so a block's decision does not depend on the form.
  monkeypatch.setattr(block_batches, "_is_batched", lambda: False)
  np.testing.assert_array_equal(run()[wanted], on_cpu[wanted])
