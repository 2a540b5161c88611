"""Coordinate descent on weight codes, and the exponents searched before it."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.numerics.realization import code_descent, gptq

ROWS = 40
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture
def problem(float64):
  """Weights `[2, 32, 5]`, a correlated Hessian, and GPTQ's codes, float64."""
  rng = np.random.default_rng(0)
  mixing = rng.standard_normal((64, 64)) * np.geomspace(1, 0.05, 64)
  x = rng.standard_normal((300, 64)) @ mixing
  hessian = jnp.asarray(x.T @ x / 300)
  weight = jnp.asarray(rng.standard_normal((2, 32, ROWS)))
  factor = gptq.factor(hessian)
  return weight, hessian, factor, gptq.reconstruct(weight, factor.upper)


def damped(hessian):
  return hessian + 0.01 * jnp.trace(hessian) / len(hessian) * jnp.eye(len(hessian))


def test_descent_is_a_loop_over_columns(problem):
  weight, hessian, factor, start = problem
  flat, full = np.asarray(weight).reshape(64, ROWS), np.asarray(damped(hessian))
  decoded = np.asarray(start.decoded).reshape(64, ROWS).copy()
  scales = 2.0 ** np.repeat(np.asarray(start.exponent), 32, axis=0)
  for _, j in itertools.product(range(2), range(64)):
    slope = full[j] @ (flat - decoded)
    vertex = decoded[j] + slope / full[j, j]
    grid = np.concatenate([-MAGNITUDES[:0:-1], MAGNITUDES])[:, None] * scales[j]
    value = grid[np.abs(grid - vertex).argmin(0), np.arange(ROWS)]
    step = value - decoded[j]
    better = step * (step * full[j, j] - 2 * slope) < 0
    decoded[j] = np.where(better, value, decoded[j])
  found = code_descent.descend(weight, start, hessian, factor.damping, passes=2)
  np.testing.assert_array_equal(np.asarray(found.decoded).reshape(64, ROWS), decoded)


def test_no_pass_raises_the_loss_and_the_end_has_no_better_code(problem):
  weight, hessian, factor, start = problem
  objective = damped(hessian)
  losses = [float(gptq.reconstruction_loss(weight, start.decoded, objective))]
  found = start
  for _ in range(30):
    found = code_descent.descend(weight, found, hessian, factor.damping)
    losses.append(float(gptq.reconstruction_loss(weight, found.decoded, objective)))
  assert all(b <= a for a, b in itertools.pairwise(losses))
  assert losses[-1] < 0.98 * losses[0]
  gap = np.asarray(weight - found.decoded).reshape(64, ROWS)
  slope, pivots = np.asarray(objective) @ gap, np.diag(objective)[:, None]
  scales = 2.0 ** np.repeat(np.asarray(found.exponent), 32, axis=0)
  decoded = np.asarray(found.decoded).reshape(64, ROWS)
  for value in np.concatenate([-MAGNITUDES, MAGNITUDES]):
    step = value * scales - decoded
    assert (step * (step * pivots - 2 * slope) > -1e-9).all()


def test_codes_decode_to_what_is_claimed_and_exponents_stay(problem):
  weight, hessian, factor, start = problem
  found = code_descent.descend(weight, start, hessian, factor.damping, passes=2)
  np.testing.assert_array_equal(found.exponent, start.exponent)
  decoded = mxfp4.decode(found.tensor(), jnp.float32)
  np.testing.assert_array_equal(decoded, mxfp4.from_blocks(found.decoded))


def test_columns_without_inputs_keep_their_codes(problem):
  weight, hessian, _, start = problem
  dead = np.asarray(hessian).copy()
  dead[7], dead[:, 7] = 0, 0
  found = code_descent.descend(weight, start, jnp.asarray(dead), 0.0)
  np.testing.assert_array_equal(found.codes[0, 7], start.codes[0, 7])


def test_searched_exponents_are_the_better_of_two_on_independent_columns(float64):
  rng = np.random.default_rng(3)
  weight = jnp.asarray(rng.standard_normal((3, 32, 40)))
  upper = jnp.eye(96)
  found = gptq.reconstruct(weight, upper, scales="searched")
  floor = mxfp4.block_exponent(weight)
  scales = [2.0 ** np.asarray(e)[:, None] for e in (floor, floor + 1)]
  edges = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
  nearest = lambda scaled: MAGNITUDES[np.searchsorted(edges, np.abs(scaled), "right")]
  tries = [np.copysign(nearest(weight / s), weight) * s for s in scales]
  errors = np.stack([np.square(weight - t).sum(1) for t in tries])
  chosen = errors[1] < errors[0]
  assert 0.1 < chosen.mean() < 0.9
  np.testing.assert_array_equal(found.exponent, np.asarray(floor) + chosen)
  np.testing.assert_array_equal(
    found.decoded, np.where(chosen[:, None], tries[1], tries[0])
  )


def test_searched_exponents_lower_the_loss_of_gptq(problem):
  weight, hessian, factor, start = problem
  found = gptq.reconstruct(weight, factor.upper, scales="searched")
  assert not np.array_equal(found.exponent, start.exponent)
  loss = lambda result: gptq.reconstruction_loss(weight, result.decoded, hessian)
  assert loss(found) < loss(start)
