"""The least-squares refit of block maps to rounded weights."""

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics.realization import gptq, map_refit

BLOCKS, ROWS, TOKENS = 3, 40, 500


@pytest.fixture
def problem(float64):
  """Correlated inputs `[500, 96]`, weights `[3, 32, 40]` and their nearest values."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((TOKENS, 96)) @ rng.standard_normal((96, 96))
  weight = rng.standard_normal((BLOCKS, 32, ROWS))
  decoded = np.asarray(gptq.round_to_nearest(jnp.asarray(weight)).decoded)
  return x / 10, weight, decoded


def undamped(problem):
  x, weight, decoded = problem
  hessian = jnp.asarray(x.T @ x / TOKENS)
  gram = np.einsum("bim,bjm->bij", decoded, decoded)
  own = np.asarray(map_refit.own_moments(hessian))
  inverses = (jnp.asarray(np.linalg.inv(moments)) for moments in (gram, own))
  return map_refit.refit(jnp.asarray(weight), jnp.asarray(decoded), hessian, *inverses)


def outputs(x, weight):
  return x @ weight.reshape(-1, weight.shape[-1])


def test_each_block_takes_its_least_squares_optimum(problem):
  """On the tokens themselves, by another solver, two sweeps in order."""
  x, weight, decoded = problem
  parts = np.split(x, BLOCKS, axis=1)
  expected = [np.eye(32)] * BLOCKS
  for block in [*range(BLOCKS)] * 2:
    others = sum(
      parts[c] @ expected[c].T @ decoded[c] for c in range(BLOCKS) if c != block
    )
    wanted = outputs(x, weight) - others
    slopes = np.linalg.lstsq(parts[block], wanted, rcond=None)[0]
    expected[block] = (slopes @ np.linalg.pinv(decoded[block])).T
  np.testing.assert_allclose(undamped(problem).correction, expected, atol=1e-8)


def test_the_cross_table_is_what_a_block_still_predicts(problem):
  x, weight, decoded = problem
  found = undamped(problem)
  used = np.asarray(map_refit.effective(jnp.asarray(decoded), found.correction))
  error = outputs(x, weight) - outputs(x, used)
  for block, part in enumerate(np.split(x, BLOCKS, axis=1)):
    slopes = np.linalg.lstsq(part, error, rcond=None)[0]
    expected = decoded[block] @ slopes.T
    np.testing.assert_allclose(found.cross[block], expected, atol=1e-8)


def test_the_error_of_the_outputs_falls(problem):
  x, weight, decoded = problem
  used = map_refit.effective(jnp.asarray(decoded), undamped(problem).correction)
  error = lambda weights: np.square(outputs(x, weight - np.asarray(weights))).sum()
  assert error(used) < 0.5 * error(decoded)


def test_damping_is_a_share_of_the_mean_diagonal(float64):
  moment = np.diag(np.arange(1.0, 33.0))[None]
  expected = np.linalg.inv(moment + 0.01 * 16.5 * np.eye(32))
  found = map_refit.damped_inverses(jnp.asarray(moment))
  np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_dead_inputs_and_weights_change_nothing(problem):
  x, weight, decoded = problem
  x, decoded = x * (np.arange(96) >= 32), decoded * np.array([1, 0, 1])[:, None, None]
  hessian = jnp.asarray(x.T @ x / TOKENS)
  gram = jnp.asarray(np.einsum("bim,bjm->bij", decoded, decoded))
  moments = gram, map_refit.own_moments(hessian)
  found = map_refit.refit(
    *map(jnp.asarray, (weight, decoded, hessian)),
    *map(map_refit.damped_inverses, moments),
  )
  np.testing.assert_array_equal(found.correction[:2], np.stack([np.eye(32)] * 2))
  assert np.isfinite(found.correction).all()
  assert not np.asarray(found.cross[:2]).any()
