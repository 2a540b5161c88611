"""The fit of a block's map to the codes of its weights, against NumPy in float64."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.numerics.shaping import map_fit

BLOCKS, ROWS = 2, 192
RULES = mxfp4.PAPER_RULES


@pytest.fixture(scope="module")
def problem():
  """Folded weights and a metric of the inputs that is far from I."""
  rng = np.random.default_rng(5)
  weight = rng.standard_normal((BLOCKS, 32, ROWS)) * 0.05
  root = rng.standard_normal((BLOCKS, 32, 32)) / 6 + np.eye(32)
  return tuple(jnp.asarray(each, jnp.float32) for each in (weight, root @ root.mT))


def nearest(columns):
  """Decoded codes to nearest, at the better of two exponents."""
  floor = np.asarray(mxfp4.block_exponent(jnp.asarray(columns, jnp.float32)))
  grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  tried = []
  for step in (0, 1):
    scale = np.exp2(floor.astype(float) + step)[:, None]
    near = grid[np.abs((np.abs(columns) / scale)[..., None] - grid).argmin(-1)]
    tried.append(np.copysign(near, columns) * scale)
  error = [np.square(each - columns).sum(1, keepdims=True) for each in tried]
  return np.where(error[1] < error[0], *tried[::-1])


def loss(matrix, codes, weight, moment):
  """What is minimized, for codes that are given, by block."""
  matrix, codes, weight, moment = (
    np.asarray(each, np.float64) for each in (matrix, codes, weight, moment)
  )
  size = lambda columns: np.einsum("bin,bij,bjn->b", columns, moment, columns)
  held = 0.05 / 32 * np.square(codes).sum((1, 2))
  return size(matrix.mT @ codes - weight) + held * size((matrix - np.eye(32)).mT)


def test_the_losses_are_those_of_the_definition(problem):
  weight, moment = problem
  found = map_fit.fit(weight, moment, turns=3)
  identity = np.broadcast_to(np.eye(32), moment.shape)
  wide = np.asarray(found.correction, np.float64)
  folded = np.linalg.inv(wide).mT @ np.asarray(weight, np.float64)
  for measured, matrix, columns in (
    (found.before, identity, np.asarray(weight, np.float64)),
    (found.after, wide, folded),
  ):
    expected = loss(matrix, nearest(columns), weight, moment)
    # A code that lies between two values may fall otherwise in float32.
    np.testing.assert_allclose(measured, expected, rtol=1e-3)


def test_a_is_the_minimum_for_its_codes_in_any_metric(problem):
  """Moved a little in any direction, it costs more, in the metric S too."""
  weight, moment = problem
  codes = jnp.asarray(nearest(np.asarray(weight, np.float64)), jnp.float32)
  solved = np.asarray(map_fit.solved(codes, weight), np.float64)
  least = loss(solved, codes, weight, moment)
  rng = np.random.default_rng(0)
  for _ in range(20):
    way = rng.standard_normal(solved.shape)
    both = [loss(solved + size * way, codes, weight, moment) for size in (0.01, -0.01)]
    assert all((each > least).all() for each in both)
    # The slope there is zero: both ways cost the same.
    np.testing.assert_allclose(both[0] - least, both[1] - least, rtol=0.02)


PAGE = pathlib.Path(__file__).parents[4] / "docs" / "concepts" / "hires.md"
TOLD = re.search(
  r"normal weights it takes (\d+) % at (\d+) rows, (\d+) % at (\d+) and (\d+) % at "
  r"([\d,]+) rows, after eight turns",
  " ".join(PAGE.read_text().split()),
)
SHARES = [int(each.replace(",", "")) for each in TOLD.groups()]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("share", "rows"), [*zip(SHARES[::2], SHARES[1::2], strict=True)]
)
def test_normal_weights_lose_as_much_error_as_the_page_says(share, rows):
  rng = np.random.default_rng(1)
  weight = jnp.asarray(rng.standard_normal((BLOCKS, 32, rows)), jnp.float32)
  identity = jnp.broadcast_to(jnp.eye(32, dtype=jnp.float32)[None], (BLOCKS, 32, 32))
  found = map_fit.fit(weight, identity, turns=8)
  removed = 1 - np.asarray(found.after / found.before)
  # Another draw of weights moves it by up to a percent.
  assert abs(100 * removed.mean() - share) < 1.5


def test_weights_that_a_map_puts_on_the_grid_are_found_there():
  """With few moves from I, the codes behind a small change of the map come back."""
  rng = np.random.default_rng(2)
  grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  codes = rng.choice(grid, (1, 32, 512)) * rng.choice([-1, 1], (1, 32, 512))
  codes[:, 0] = 6.0
  change = np.eye(32) + rng.standard_normal((1, 32, 32)) * 0.01
  weight = jnp.asarray(change.mT @ codes, jnp.float32)
  identity = jnp.eye(32, dtype=jnp.float32)[None]
  found = map_fit.fit(weight, identity, turns=4)
  assert found.after[0] < 0.1 * found.before[0]
  # The ridge of .05 holds A back by a twentieth of a column's mean square.
  assert (
    np.abs(found.correction - change).max() < 0.2 * np.abs(change - np.eye(32)).max()
  )


def test_more_turns_are_never_worse_and_none_leave_nonsense(problem):
  weight, moment = problem
  losses = [np.asarray(map_fit.fit(weight, moment, turns=n).after) for n in (1, 4, 8)]
  assert (losses[1] <= losses[0]).all() and (losses[2] <= losses[1]).all()
  broken = weight.at[1, 3, 5].set(jnp.nan)
  found = map_fit.fit(broken.at[0].set(0), moment, turns=4)
  assert np.array_equal(found.correction, np.broadcast_to(np.eye(32), moment.shape))
  assert found.after[0] == 0


def test_a_turn_that_costs_more_is_not_kept():
  """Rounding is not the nearest in the metric S, so that a turn may end worse."""
  rng = np.random.default_rng(0)
  weight = jnp.asarray(rng.standard_normal((1, 32, 64)), jnp.float32)
  axes = np.linalg.qr(rng.standard_normal((32, 32)))[0]
  moment = jnp.asarray((axes * np.geomspace(1, 1e4, 32)) @ axes.T, jnp.float32)[None]
  fourth, fifth = (map_fit.fit(weight, moment, turns=n) for n in (4, 5))
  worse = map_fit.solved(
    map_fit.measured(fourth.correction, weight, moment, RULES)[0], weight
  )
  assert map_fit.measured(worse, weight, moment, RULES)[1] > fourth.after
  assert np.array_equal(fifth.correction, fourth.correction)
  assert fifth.after == fourth.after


@pytest.mark.parametrize("condition", [1.0, 30.0, 1e4])
def test_the_inverse_is_one(condition):
  rng = np.random.default_rng(3)
  left, right = (np.linalg.qr(rng.standard_normal((32, 32)))[0] for _ in "lr")
  matrix = left @ np.diag(np.geomspace(1, condition, 32)) @ right
  found = map_fit.inverse(jnp.asarray(matrix, jnp.float32)[None])[0]
  error = np.abs(np.asarray(found, np.float64) @ matrix - np.eye(32)).max()
  assert error < 1e-5 * condition
