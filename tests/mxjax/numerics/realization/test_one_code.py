import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.numerics.realization import one_code

CASES = ["gptq", "rtn", "nomismatch", "zeroW", "zerox", "m1", "ties", "signed_zero"]


def to_codes(elements):
  """Element values to codes, with the paper's code 0 for a new zero."""
  elements = np.asarray(elements)
  index = np.searchsorted(mxfp4.MAGNITUDES, np.abs(elements))
  return (index + 8 * np.signbit(elements)).astype(np.uint8)


def refine_rows(x, weight, decoded):
  blocks = [mxfp4.to_blocks(jnp.asarray(a, jnp.float32)) for a in (x, weight, decoded)]
  gram, cross = one_code.tables(blocks[1], blocks[2])
  return one_code.refine(blocks[0], gram, cross), gram, cross


@pytest.mark.parametrize("case", CASES)
def test_golden_refinement(vectors, case):
  name = f"onecode/{case}/"
  x, w, w_hat = (vectors[name + k] for k in ("X", "W", "What"))
  got, gram, cross = refine_rows(x, w, w_hat)
  for array, golden in ((gram, "G_Q"), (cross, "K_Q")):
    expected = vectors[name + golden]
    scale = max(np.abs(expected).max(), 1e-30)
    assert np.abs(np.asarray(array[0]) - expected).max() <= 1e-5 * scale
  np.testing.assert_array_equal(to_codes(got.nearest[0].T), vectors[name + "nearest"])
  np.testing.assert_array_equal(got.exponent.T + 127, vectors[name + "exps"])
  clear = vectors[name + "gap"] > 1e-4
  exact = case in ("ties", "signed_zero", "zeroW", "zerox")
  rows = slice(None) if exact else clear
  np.testing.assert_array_equal(
    to_codes(got.elements[0].T)[rows], vectors[name + "codes"][rows]
  )
  best = vectors[name + "best"]
  tolerance = 1e-5 * np.abs(best) + 1e-6 * np.abs(best).max()
  assert (np.abs(np.asarray(got.score[0]) - best) <= tolerance + 1e-30).all()


def test_golden_multi_block_activations(vectors):
  got, _, _ = refine_rows(vectors["act/X"], vectors["act/W"], vectors["act/What"])
  codes = to_codes(mxfp4.from_blocks(got.elements))
  assert (codes != vectors["act/codes"]).mean() < 1e-3
  np.testing.assert_array_equal(got.exponent.T + 127, vectors["act/exps"])
  changed = int((np.asarray(got.elements) != np.asarray(got.nearest)).sum())
  assert abs(changed - int(vectors["act/changed"])) <= 0.01 * vectors["act/changed"]


def random_problem(seed, rows=24, n=300):
  rng = np.random.default_rng(seed)
  w = rng.standard_normal((rows, 32)).astype(np.float32)
  w_hat = np.asarray(mxfp4.decode(mxfp4.encode(w), jnp.float32))
  x = rng.standard_t(3, (n, 32)).astype(np.float32)
  return x, w, w_hat


def test_refinement_equals_brute_force_over_512_candidates():
  x, w, w_hat = random_problem(0)
  got, _, _ = refine_rows(x, w, w_hat)
  scale = 2.0 ** np.asarray(got.exponent[0]).astype(np.float64)
  values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  values = np.concatenate([values, -values])
  nearest = np.asarray(got.nearest[0].T, np.float64)
  target = x.astype(np.float64) @ w.T.astype(np.float64)
  for row in range(len(x)):
    candidates = np.repeat(nearest[row][None], 513, 0)
    for coordinate in range(32):
      for code in range(16):
        candidates[1 + 16 * coordinate + code, coordinate] = values[code]
    error = candidates * scale[row] @ w_hat.T.astype(np.float64) - target[row]
    objective = (error**2).sum(-1)
    chosen = np.asarray(got.elements[0, :, row], np.float64) * scale[row]
    reached = ((chosen @ w_hat.T.astype(np.float64) - target[row]) ** 2).sum()
    assert reached <= objective.min() * (1 + 1e-5)
    assert (chosen != nearest[row] * scale[row]).sum() <= 1


def enumerate_codes(nearest, scale, slope, curvature):
  """The definition: fifteen scores in code order, the first lowest wins."""
  best, value = np.full(nearest.shape, np.inf, np.float32), nearest
  for candidate in (*mxfp4.MAGNITUDES, *(-m for m in mxfp4.MAGNITUDES[1:])):
    delta = (np.float32(candidate) - nearest) * scale
    score = np.asarray(one_code.code_score(delta, slope, curvature))
    value = np.where(score < best, np.float32(candidate), value)
    best = np.minimum(score, best)
  return best, value


@pytest.mark.parametrize("grain", [None, 0.25, 1.0])
def test_two_scores_decide_what_fifteen_would(grain):
  rng = np.random.default_rng(3)
  shape = (32, 20_000)
  nearest = rng.choice(mxfp4.MAGNITUDES, shape) * rng.choice([-1, 1], shape)
  nearest = nearest.astype(np.float32)
  scale = np.exp2(rng.integers(-20, 20, (1, shape[1]))).astype(np.float32)
  slope = rng.standard_t(2, shape) * np.exp2(rng.integers(-6, 6, shape))
  curvature = rng.chisquare(4, (32, 1))
  if grain:  # many exact ties
    slope, curvature = np.round(slope / grain) * grain, np.ceil(curvature)
    curvature[:4] = 0
    slope[:4] = 0
  slope, curvature = slope.astype(np.float32), curvature.astype(np.float32)
  operands = map(jnp.asarray, (nearest, scale, slope * scale, curvature))
  got_score, got = map(np.asarray, one_code.best_code(*operands))
  score, value = enumerate_codes(nearest, scale, slope * scale, curvature)
  changes = score < 0
  assert changes.mean() > 0.2
  np.testing.assert_array_equal(got_score < 0, changes)
  np.testing.assert_array_equal(got_score[changes], score[changes])
  np.testing.assert_array_equal(got[changes], value[changes])
  assert not np.signbit(got[changes & (got == 0)]).any()


def test_refinement_never_raises_the_block_objective():
  for seed in range(5):
    x, w, w_hat = random_problem(seed, rows=7)
    got, _, _ = refine_rows(x, w, w_hat)
    scale = np.exp2(np.asarray(got.exponent[0], np.float64))[:, None]
    target = x.astype(np.float64) @ w.T

    q = [np.asarray(a[0].T, np.float64) * scale for a in (got.elements, got.nearest)]
    after, before = (((a @ w_hat.T - target) ** 2).sum(-1) for a in q)
    assert (after <= before * (1 + 1e-6)).all()
    assert (after < before).mean() > 0.3
    gap = ((w_hat - w).astype(np.float64) @ x.T) ** 2
    claimed = np.asarray(got.nearest_objective[0]) + gap.sum(0)
    np.testing.assert_allclose(claimed, before, rtol=1e-3, atol=1e-3)
    gained = -np.minimum(np.asarray(got.score[0]), 0)
    np.testing.assert_allclose(before - after, gained, rtol=1e-3, atol=1e-3)


def test_exact_ties_are_the_same_in_and_out_of_jit():
  rng = np.random.default_rng(6)
  w = rng.integers(-2, 3, (4, 32)).astype(np.float32)
  w_hat = rng.integers(-2, 3, (4, 32)).astype(np.float32)
  x = jnp.asarray(rng.integers(-12, 13, (1, 32, 500)).astype(np.float32) / 2)
  tables = one_code.tables(*(mxfp4.to_blocks(jnp.asarray(a)) for a in (w, w_hat)))
  eager, jitted = (
    refine(x, *tables) for refine in (one_code.refine, jax.jit(one_code.refine))
  )
  np.testing.assert_array_equal(eager.elements, jitted.elements)


def test_symmetric_packing_round_trips():
  rng = np.random.default_rng(7)
  half = rng.standard_normal((3, 32, 32)).astype(np.float32)
  gram = jnp.asarray(half + half.transpose(0, 2, 1))
  packed = one_code.pack_symmetric(gram)
  assert packed.shape == (3, 528)
  np.testing.assert_array_equal(one_code.unpack_symmetric(packed), gram)


@pytest.mark.slow
def test_the_expected_cross_is_what_a_blocks_inputs_foretell_of_all_weight_errors():
  """The regression of the whole linear's output error on the inputs of one block."""
  rng = np.random.default_rng(8)
  x = rng.standard_normal((96, 96)) @ rng.standard_normal((96, 2000))
  w, w_hat = rng.standard_normal((2, 40, 96))
  hessian = x @ x.T / 2000
  args = (w.T.reshape(3, 32, 40), w_hat.T.reshape(3, 32, 40), hessian)
  got = one_code.expected_cross(*(jnp.asarray(a, jnp.float32) for a in args))
  error = (w - w_hat) @ x
  for b in range(3):
    at = slice(32 * b, 32 * b + 32)
    own = hessian[at, at]
    ridge = one_code.RIDGE * np.trace(own) / 32 * np.eye(32)
    guess = error @ x[at].T / 2000 @ np.linalg.inv(own + ridge)
    wanted = w_hat[:, at].T @ guess
    np.testing.assert_allclose(got[b], wanted, rtol=1e-3, atol=1e-3 * abs(wanted).max())


@pytest.mark.slow
def test_the_expected_cross_of_independent_blocks_is_that_of_the_block_alone():
  rng = np.random.default_rng(9)
  w, w_hat = jnp.asarray(rng.standard_normal((2, 2, 32, 40)), jnp.float32)
  _, alone = one_code.tables(w, w_hat)
  got = one_code.expected_cross(w, w_hat, jnp.eye(64) * 3)
  np.testing.assert_allclose(got * (1 + one_code.RIDGE), alone, rtol=1e-4, atol=1e-4)
  # Without inputs nothing is foretold, and nothing is divided by zero.
  none = one_code.expected_cross(w, w_hat, jnp.zeros((64, 64)))
  np.testing.assert_array_equal(none, np.zeros((2, 32, 32)))
