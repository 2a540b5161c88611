"""Passes of a program over the tiles of a block, and blocks reached one by one."""

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.discovery.core import candidate_source
from mxjax.discovery.core.task import ContractError
from mxjax.discovery.tasks.ptq import programs
from mxjax.discovery.tasks.ptq.candidate_passes import Passes
from mxjax.methods.baselines import wush
from tests.discovery.tasks.ptq.test_programs import executor, traced


def passes(source, count=1, told=lambda sums: sums):
  """Passes of a source, as the evaluator runs them."""
  table, hooks = executor().artifacts, traced(executor(), source).computation
  measures = (
    table.batched(hooks["measure_inputs"]),
    table.batched(hooks["measure_weights"]),
  )
  return Passes(*measures, table.unit(hooks["solve"]), count, told)


SUMS = """
import jax.numpy as jnp
PLAN = {"transform": "solved"}
def sums(tile, index, step, state):
  moment = jnp.matmul(tile, tile.T, precision="highest").astype(jnp.float64)
  return jnp.stack([moment, index * moment] + 10 * [jnp.zeros((32, 32))])
def measure_inputs(tile, index, step, state):
  return (step + 1) * sums(tile, index, step, state)
def measure_weights(tile, index, step, state):
  return sums(tile, index, step, state)
def solve(step, input_sums, weight_sums, curvature, state):
  return state.at[0].add(input_sums[0] + input_sums[1] + weight_sums[1])
"""


def operands(tokens=64, rows=96):
  rng = np.random.default_rng(0)
  x, weight = rng.normal(size=(3, 2, 32, tokens)), rng.normal(size=(2, 32, rows))
  narrow = lambda array: jnp.asarray(array, jnp.float32)
  return narrow(weight), LinearInputs([narrow(x[:2]), narrow(x[2:])])


def expected_maps(weight, inputs):
  x = np.stack([inputs.sequence(n) for n in range(3)]).astype(np.float64)
  weight = np.asarray(weight, np.float64)
  order = 1 + np.arange(3)
  of_inputs = np.einsum("s,sbit,sbjt->bij", order, x, x)
  first_rows = np.arange(weight.shape[-1]) // 32 * 32
  of_weights = np.einsum("r,bir,bjr->bij", first_rows, weight, weight)
  # The second pass weights inputs twice.
  return np.eye(32) + 3 * of_inputs + 2 * of_weights


@pytest.mark.slow
def test_passes_sum_all_tiles_and_hand_on_their_state(float64):
  weight, inputs = operands()
  maps = passes(SUMS, count=2).maps(weight, inputs)
  np.testing.assert_allclose(maps, expected_maps(weight, inputs), rtol=1e-4, atol=1e-2)
  told = lambda sums: [jnp.roll(part, 1, axis=0) for part in sums]
  swapped = passes(SUMS, count=2, told=told).maps(weight, inputs)
  np.testing.assert_array_equal(swapped, maps[::-1])


@pytest.mark.parametrize(
  ("lengths", "matrix", "message"),
  [
    ((48, 96), "state[0]", "multiple of 32 tokens in a calibration sequence"),
    ((64, 80), "state[0]", "multiple of 32 weight rows"),
    ((64, 96), "jnp.log(-state[0])", "solve: returned NaN"),
    ((64, 96), "jnp.ones((32, 32))", "solve: a map with condition number"),
  ],
)
def test_what_passes_cannot_use_is_a_contract_error(float64, lengths, matrix, message):
  solve = (
    "def solve(step, input_sums, weight_sums, curvature, state):\n"
    f"  return state.at[0].set({matrix})\n"
  )
  source = candidate_source.with_functions(SUMS, solve)
  with pytest.raises(ContractError, match=message):
    passes(source).maps(*operands(*lengths))


@pytest.mark.slow
def test_blocks_reached_are_those_of_the_librarys_wush(float64):
  weight, inputs = operands()
  hook = traced(executor(), programs.source("wush")).computation["encode_weight"]
  encode = executor().artifacts.batched(hook)
  maps, result = passes(programs.source("wush")).reach(weight, inputs, encode)
  expected, transforms = wush.round_blocks(
    weight, wush.damped_factor(inputs)[0], inputs.rules, "wush"
  )
  np.testing.assert_array_equal(maps, transforms.astype(jnp.float64))
  np.testing.assert_array_equal(result.codes, expected.codes)
  np.testing.assert_array_equal(result.exponent, expected.exponent)
