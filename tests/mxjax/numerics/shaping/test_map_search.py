"""The search of a block's map, against the recorded program that it was taken from."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg

from mxjax.numerics import mxfp4
from mxjax.numerics.shaping import map_search, reference_chart

pytestmark = pytest.mark.usefixtures("float64")

BLOCKS, ROWS, TOKENS = 2, 40, 96
GOLDEN = pathlib.Path(__file__).parents[3] / "golden" / "ptq_by_a_model"


@pytest.fixture(scope="module")
def recorded():
  """Functions of the best program after 20 calls, by name."""
  source = json.loads((GOLDEN / "champions.json").read_text())["call 20"]
  found = {}
  exec(source, found)  # noqa: S102
  return found


@pytest.fixture
def problem(float64):
  """Inputs and weights `[blocks, 32, n]` with loud channels, and their moments A, B."""
  rng = np.random.default_rng(0)
  mixing = np.eye(32) + 0.2 * rng.standard_normal((BLOCKS, 32, 32))
  x = mixing @ rng.standard_normal((BLOCKS, 32, TOKENS))
  x[:, [3, 20]] *= 12
  weight = rng.standard_t(5, (BLOCKS, 32, ROWS)) * 0.05
  x, weight = (jnp.asarray(each, jnp.float32) for each in (x, weight))
  moments = [
    reference_chart.block_moment(each) / each.shape[-1] for each in (x, weight)
  ]
  return x, weight, *moments


@pytest.fixture
def axes(problem):
  """Q'C of an uncapped chart and its inverse transposed."""
  chart = reference_chart.geometric_chart(*problem[2:], max_condition=1e6)
  return chart, *map_search.principal_axes(chart, *problem[2:])


def test_candidates_are_those_of_the_recorded_program(recorded):
  turned, phases = map_search.turns(36)
  for step in (1, 2):
    theirs, factors = recorded["rotations"](step)
    mine = slice(12 * step, 12 * step + 12)
    np.testing.assert_array_equal(turned[mine], theirs)
    np.testing.assert_allclose(phases[mine], factors, rtol=1e-15)
  assert (np.sort(map_search.orders(36), axis=1) == np.arange(32)).all()
  np.testing.assert_array_equal(map_search.orders(2)[0], np.arange(32))
  assert sorted(np.log2(phases[:8]) * 8) == pytest.approx(range(8))


def test_principal_axes_are_those_of_the_recorded_program(recorded, problem, axes):
  """Up to the sign of an axis, and the volume that a chart leaves out."""
  _, _, activation, weight = problem
  for block in range(BLOCKS):
    sums = [
      jnp.zeros((12, 32, 32)).at[0].set(moment[block]).at[1, 0, 0].set(1)
      for moment in (activation, weight)
    ]
    # The program was run without the tests' strictness.
    with jax.numpy_rank_promotion("allow"):
      state = recorded["solve"](0, *sums, None, jnp.zeros((12, 32, 32)))
    volume = np.abs(np.linalg.det(state[1])) ** (1 / 32)
    theirs, mine = np.abs(state[1]) / volume, np.abs(axes[1][block])
    # Both sort axes by the same spectrum.
    np.testing.assert_allclose(mine, theirs, atol=1e-4 * theirs.max())


def test_every_coordinate_of_every_candidate_has_the_same_variance(problem, axes):
  _, _, activation, weight = problem
  turned, phases = map_search.turns(5)
  for turn, phase in zip(turned, phases, strict=True):
    for matrix, moment in (
      (phase * turn @ axes[1], activation),
      (turn @ axes[2] / phase, weight),
    ):
      mapped = np.asarray(matrix @ reference_chart.ridge(moment) @ matrix.mT)
      diagonal = np.diagonal(mapped, axis1=1, axis2=2)
      assert (np.ptp(diagonal, axis=1) < 1e-6 * diagonal.mean(1)).all()


def test_axes_of_a_capped_chart_are_still_its_rotation(problem):
  _, _, *moments = problem
  chart = reference_chart.geometric_chart(*moments, max_condition=4.0)
  turned, inverse = map_search.principal_axes(chart, *moments)
  np.testing.assert_allclose(turned.mT @ turned, chart.mT @ chart, atol=1e-9)
  np.testing.assert_allclose(
    turned @ inverse.mT, np.tile(np.eye(32), (2, 1, 1)), atol=1e-9
  )


def test_a_block_of_zeros_has_axes():
  zeros = jnp.zeros((1, 32, 32))
  chart = reference_chart.geometric_chart(zeros, zeros)
  for found in map_search.principal_axes(chart, zeros, zeros):
    assert np.isfinite(found).all()


@pytest.mark.slow
def test_losses_are_the_errors_of_both_operands(recorded, problem, axes):
  """Of nearest inputs by float64 sums; of weights as the recorded program has it."""
  x, weight, activation, of_weight = problem
  turned, phases = map_search.turns(3)
  found = map_search.losses(
    turned, phases, *axes[1:], x, weight, activation, of_weight, changes=0
  )
  for k, block in np.ndindex(3, BLOCKS):
    matrix = phases[k] * turned[k] @ np.asarray(axes[1][block])
    fold = linalg.inv(matrix).T
    mapped = jnp.asarray(matrix @ np.asarray(x[block], float), jnp.float32)
    error = np.asarray(mxfp4.round_blocks(mapped[None])[0], float) - np.asarray(mapped)
    gram = fold @ np.asarray(of_weight[block]) @ fold.T
    of_inputs = np.einsum("in,ij,jn->", error, gram, error) / TOKENS
    metric = matrix @ np.asarray(activation[block]) @ matrix.T
    folded = jnp.asarray(fold @ np.asarray(weight[block], float))
    of_rows = float(recorded["rounding_loss"](folded, jnp.asarray(metric))) / ROWS
    assert found[k, block] == pytest.approx(of_inputs + of_rows, rel=2e-3)


@pytest.mark.slow
def test_the_loss_of_inputs_is_that_of_the_rule(problem, axes):
  """More codes that change lower it, and only the part of the inputs."""
  x, weight, *moments = problem
  turned, phases = map_search.turns(2)
  of = lambda changes: np.asarray(
    map_search.losses(turned, phases, *axes[1:], x, weight, *moments, changes=changes)
  )
  nearest, one, two = (of(changes) for changes in (0, 1, 2))
  assert (one < nearest).all() and (two < one).all()


@pytest.mark.slow
def test_inputs_that_are_not_rounded_have_no_part_of_the_loss(problem, axes):
  x, weight, *moments = problem
  turned, phases = map_search.turns(2)
  of = lambda inputs, changes: np.asarray(
    map_search.losses(
      turned, phases, *axes[1:], inputs, weight, *moments, changes=changes
    )
  )
  alone = of(x, None)
  np.testing.assert_array_equal(alone, of(3 * x, None))
  np.testing.assert_array_equal(alone, of(jnp.zeros_like(x), 0))
  assert (alone < of(x, 2)).all()
