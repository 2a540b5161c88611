"""How long work takes, about: told before it begins."""

import math
import time
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from mxjax import methods
from mxjax.audit import plan
from mxjax.methods.baselines import batquant, focus, spinquant
from mxjax.methods.hires import searched_map
from mxjax.methods.program import Program
from mxjax.numerics import mxfp4
from mxjax.numerics.shaping import map_descent

STARTING, STARTING_FIT = 10.0, 15.0
"""Seconds to compile the programs of a method, and those of each of its fits."""
STARTING_TWO_SIDED = 60.0
"""What two-sided programs add, whatever the tokens: programs, and rows in groups."""
REDUCING = 2.0
"""Time of a run over that of its model passes: with Hessians, moments and solves."""
ROUNDING, REVISITING, FITTING = 2100, 36_000, 3200
"""What an element takes, in FLOP of products of the same time: one rounded among the
inputs of a search or in a step of a descent of maps, one revisited among the weights of
a search, and one in a turn of a fit of maps. `benchmarks/map_work.py` timed them beside
products on two cores, where rounding takes far longer than its operations suggest."""
SPINQUANT, FOCUS, BATQUANT = 14.0, 17.0, 8.0
"""What baselines take to learn on a token, in passes of a token through all linears."""
CLIPPING = 16_000
"""FLOP of products that a weight takes in a step of batquant, whatever the tokens.
`benchmarks/learning_work.py` timed all four beside products on two cores."""


def products_a_second(dtype: str) -> float:
  """Measures products on the first device, in FLOP/s, within half a second."""
  matrix = jnp.ones((1024, 1024), dtype)
  run = jax.jit(lambda a: a @ a)
  jax.block_until_ready(run(matrix))
  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    jax.block_until_ready(run(matrix))
    seconds.append(time.perf_counter() - start)
  # The least time: what else the machine does only adds to it. A term of a product is
  # two operations, a multiplication and a sum.
  return 2 * 1024**3 / min(seconds)


def expected_seconds(
  planned: plan.Plan,
  names: Iterable[str],
  mesh: str | None = None,
  test_tokens: int = 0,
  rate: float | None = None,
  compared_tokens: int = 0,
) -> float | None:
  """Estimates the wall time of methods and their evaluation on one CPU.

  `planned` is for the calibration set; `rate` in FLOP/s is measured if absent. Of the
  `test_tokens`, predictions of the first `compared_tokens` are compared with the float
  model's. None on a mesh or another device, where no run has been timed. On the
  embedded model it is within a factor of two.
  """
  if mesh or jax.default_backend() != "cpu":
    return None
  rate = rate or products_a_second(planned.dtype)
  one_pass = planned.forward_flops / planned.model_passes
  flops = 2.0 * planned.target_weights * test_tokens
  # A comparison runs both models again.
  compared = 2 * 2.0 * planned.target_weights * compared_tokens
  seconds = flops / rate
  for name in names:
    program = methods.get(name)
    work = REDUCING * one_pass * (1 + len(program.recover))
    work += flops + compared + _map_work(planned, program)
    work += _learning_work(planned, program)
    if program.tune or program.weighting != "uniform":
      work += planned.prediction_flops
    if getattr(program, "two_sided", False):
      seconds += STARTING_TWO_SIDED
    seconds += STARTING + STARTING_FIT * len(program.recover) + work / rate
  return seconds


def _learning_work(planned: plan.Plan, program: Program) -> float:
  """Counts what baselines learn by gradients, in FLOP of products."""
  a_token = 2.0 * planned.target_weights
  if not isinstance(program, spinquant.SpinQuant | focus.Focus | batquant.BatQuant):
    return 0.0
  size = min(program.batch, planned.sequences)
  if isinstance(program, spinquant.SpinQuant):
    return SPINQUANT * a_token * program.steps * size * planned.length
  if isinstance(program, focus.Focus):
    steps = program.epochs * (planned.sequences // size)
    return FOCUS * a_token * steps * size * planned.length
  tokens = size * min(program.tokens or planned.length, planned.length)
  a_step = BATQUANT * a_token * tokens + CLIPPING * planned.target_weights
  return a_step * program.steps


def _map_work(planned: plan.Plan, program: Program) -> float:
  """Counts what searches, descents and fits of maps take, in FLOP of products.

  They see a bounded number of tokens, so more calibration text does not make them
  longer.
  """
  option = lambda name: getattr(program, name, 0)
  tokens = planned.forward_flops / planned.model_passes / (2 * planned.target_weights)
  if program.activations == "float":
    tokens = 0.0  # No inputs are rounded.
  inputs = planned.blocks * mxfp4.BLOCK_SIZE
  rows = planned.target_weights / inputs
  # As the search samples rows: at an even stride, rounded up.
  searched_rows = rows / math.ceil(rows / searched_map.ROWS)
  candidate = ROUNDING * min(tokens, searched_map.TOKENS) + REVISITING * searched_rows
  seen = (min(tokens, searched_map.DESCENT_TOKENS) + rows) / map_descent.PARTS
  step, turn = ROUNDING * seen, FITTING * rows
  # With `candidates=1` nothing is chosen, but the one is measured all the same.
  by_input = option("candidates") * candidate + option("map_steps") * step
  return inputs * (by_input + option("map_fits") * turn)
