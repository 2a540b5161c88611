"""The passes of a program: sums over the tiles of a block, and a solve on the sums.

The program says what a tile contributes and what follows from the sums. Trusted code
streams the calibration sequences and the weights, adds, and checks what is solved for.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.discovery.core.task import ContractError
from mxjax.discovery.tasks.ptq.candidate_codes import (
  Function,
  checked,
  decoded,
  encoded,
  legal,
  map_units,
  neighbours_in_linear,
  require_finite,
)
from mxjax.discovery.tasks.ptq.interface import EXPONENT_SLACK, MATRICES
from mxjax.methods.baselines.wush import damped_factor
from mxjax.numerics import mxfp4
from mxjax.numerics.precision import HIGHEST
from mxjax.numerics.realization import gptq
from mxjax.numerics.shaping import nearest_plane

TILE = 32
"""Columns of a block, tokens or weight rows, that a measurement sees together."""
MAX_CONDITION = 1e4
"""Largest condition number of a block's map; above it, folding loses float32 digits."""


def require_map(place: str, maps: np.ndarray) -> None:
  """Rejects maps `[blocks, 32, 32]` that are not finite or cannot be inverted.

  Raises:
    ContractError: A map is refused; the message names the hook.
  """
  require_finite(place, maps)
  worst = float(np.linalg.cond(maps).max())
  if not worst <= MAX_CONDITION:
    raise ContractError(
      f"{place}: a map with condition number {worst:.3g} has no usable inverse; at "
      f"most {MAX_CONDITION:g}."
    )


def _require_tiles(what: str, columns: int) -> None:
  if columns % TILE:
    raise ContractError(
      f"passes: expected a multiple of {TILE} {what}, because a measurement sees a "
      f"tile of {TILE}, got {columns}; use another length, or transform measured."
    )


def _tiles(block: jax.Array) -> jax.Array:
  """Cuts `[32, n]` into tiles of its columns, `[n / 32, 32, 32]`."""
  return block.reshape(mxfp4.BLOCK_SIZE, -1, TILE).swapaxes(0, 1)


def _sums(
  function: Function,
  blocks: jax.Array,
  index: jax.Array,
  step: jax.Array,
  state: jax.Array,
) -> jax.Array:
  """Adds up a hook over the tiles of every block, one block at a time.

  `blocks` is `[blocks, 32, n]`, `index` int32 `[n / 32]`; the result is like `state`.
  """

  def one(item: tuple[jax.Array, jax.Array]) -> jax.Array:
    block, own = item
    return function(_tiles(block), index, step, own)[0].sum(0)

  return jax.lax.map(one, (blocks, state))


@functools.partial(jax.jit, static_argnames="function")
def _weight_sums(
  function: Function, weight: jax.Array, step: jax.Array, state: jax.Array
) -> jax.Array:
  rows = jnp.arange(0, weight.shape[-1], TILE, dtype=jnp.int32)
  return _sums(function, weight.astype(jnp.float64), rows, step, state)


@functools.partial(jax.jit, static_argnames="function")
def _table_sums(
  function: Function, weight: jax.Array, decoded: jax.Array
) -> list[jax.Array]:
  def one(pair: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
    tables = function(*map(_tiles, pair))
    return [table.sum(0).astype(jnp.float32) for table in tables]

  return jax.lax.map(one, (weight, decoded))


def measured_tables(
  function: Function, weight: jax.Array, decoded: jax.Array
) -> list[jax.Array]:
  """Sums a program's tables over the rows of folded and decoded weights.

  Both weights are float32 `[blocks, 32, rows]`, the two tables `[blocks, 32, 32]`.

  Raises:
    ContractError: A table is not finite, or the rows do not divide into tiles.
  """
  _require_tiles("weight rows", weight.shape[-1])
  tables = execution.block_on_cpu(_table_sums(function, weight, decoded))
  require_finite("tables", *map(np.asarray, tables))
  return tables


@dataclasses.dataclass(frozen=True)
class _InputStep:
  """Adds a calibration sequence's tiles to the sums of a pass."""

  function: Function

  def __call__(
    self,
    carry: jax.Array,
    blocks: jax.Array,
    index: jax.Array,
    rules: mxfp4.Rules,
    step: jax.Array,
    state: jax.Array,
  ) -> jax.Array:
    del rules
    tiles = jnp.full(blocks.shape[-1] // TILE, index, jnp.int32)
    return carry + _sums(self.function, blocks, tiles, step, state)


class Reached(NamedTuple):
  """What visiting all blocks from the last to the first decided.

  `maps` is float64 `[blocks, 32, 32]`; the codes are in the coordinates of the maps.
  """

  maps: jax.Array
  result: gptq.Reconstruction


@dataclasses.dataclass(frozen=True)
class Passes:
  """The passes of a program, on the blocks of one linear.

  Attributes:
    measure_inputs: Batched hook.
    measure_weights: Batched hook.
    solve: Hook of one unit.
    count: Passes that run.
    told: What a control lets `solve` know in place of a block's own sums.
  """

  measure_inputs: Function
  measure_weights: Function
  solve: Function
  count: int
  told: Callable[[Any], Any]

  def maps(self, weight: jax.Array, inputs: LinearInputs) -> jax.Array:
    """Runs all passes on raw weights `[blocks, 32, rows]` and their inputs.

    Returns the map of every block, float64 `[blocks, 32, 32]`.

    Raises:
      ContractError: A map is not finite or has no inverse, or a length does not divide
        into tiles.
    """
    _require_tiles("tokens in a calibration sequence", inputs.length)
    _require_tiles("weight rows", weight.shape[-1])
    eye = np.broadcast_to(np.eye(mxfp4.BLOCK_SIZE), (weight.shape[0], 32, 32))
    state = _first_state(len(eye))
    for step in map(jnp.int32, range(self.count)):
      zeros = jnp.zeros(state.shape, jnp.float64)
      of_inputs = inputs.reduce(_InputStep(self.measure_inputs), zeros, step, state)
      state = self._solved(weight, step, of_inputs, eye, state)
    require_map("solve", state[:, 0])
    return jnp.asarray(state[:, 0])

  def _solved(
    self, weight: jax.Array, step: Any, of_inputs: Any, curvature: Any, state: Any
  ) -> np.ndarray:
    """Measures weights and solves one pass, for all blocks that are given."""
    measured = _weight_sums(self.measure_weights, weight, step, jnp.asarray(state))
    of_weights = execution.block_on_cpu(measured)
    steps = np.full(len(state), int(step), np.int32)
    told = self.told((of_inputs, of_weights))
    return map_units(self.solve, steps, *told, curvature, state)[0]

  def reach(self, weight: jax.Array, inputs: LinearInputs, encode: Function) -> Reached:
    """Visits blocks from the last to the first; each runs its passes and is encoded.

    `weight` is raw, `[blocks, 32, rows]`, and `encode` the batched encoder. A block's
    weights carry the errors of later blocks, so its map can answer them.

    Raises:
      ContractError: As for `maps`, or the codes of a block are not legal.
    """
    _require_tiles("weight rows", weight.shape[-1])
    blocks, size, rows = weight.shape
    factor, _ = damped_factor(inputs)
    wide = weight.astype(jnp.float64)
    residual = wide.reshape(-1, rows)
    maps, results = [], []
    for index in reversed(range(blocks)):
      goal = execution.block_on_cpu(
        nearest_plane.target(factor, residual, jnp.int32(index))
      )
      target = execution.block_on_cpu(_compensated(goal.factor, goal.value))
      state, tile = _first_state(1), np.asarray(goal.factor)[None]
      for step in map(jnp.int32, range(self.count)):
        nothing = jnp.zeros(state.shape, jnp.float64)
        state = self._solved(target[None], step, nothing, tile, state)
      require_map("solve", state[:, 0])
      # The runtime applies the map in float32, so the codes have to fit that one.
      chosen = jnp.asarray(state[0, 0].astype(np.float32).astype(np.float64))
      upper, inverse = execution.block_on_cpu(_plane(goal.factor, chosen))
      exact = execution.block_on_cpu(_in_map(inverse, target))
      codes, exponent = encoded(encode, exact[None], upper[None])
      codes, exponent = codes[0], exponent[0]
      value, is_legal = execution.block_on_cpu(checked(codes, exponent, exact))
      require_legal(is_legal)
      native = execution.block_on_cpu(_native(chosen, value))
      start = index * size
      residual = residual.at[start : start + size].set(wide[index] - native)
      maps.append(chosen)
      results.append(gptq.Reconstruction(codes, exponent, value))
    together = lambda *leaves: jnp.stack(leaves[::-1])
    return Reached(together(*maps), jax.tree.map(together, *results))


@dataclasses.dataclass(frozen=True)
class _LinearStep:
  """Adds a calibration sequence to the sums of a linear's pass."""

  function: Function

  def __call__(
    self,
    carry: jax.Array,
    blocks: jax.Array,
    index: jax.Array,
    rules: mxfp4.Rules,
    step: jax.Array,
    state: jax.Array,
    weights: jax.Array | None = None,
  ) -> jax.Array:
    del rules
    inputs = blocks.reshape(-1, blocks.shape[-1])
    if weights is not None:
      inputs = inputs * jnp.sqrt(weights[index])[None]
    return carry + self.function(inputs, index.astype(jnp.int32), step, state)[0]


@dataclasses.dataclass(frozen=True)
class LinearPasses:
  """The passes of a program on a whole linear, and its encoder of a row.

  Attributes:
    measure: Hook of one unit.
    solve: Hook of one unit.
    encode: Batched hook.
    count: Passes that run.
    is_shuffled: Whether a control tells `solve` each block's sums as its neighbour's.
  """

  measure: Function
  solve: Function
  encode: Function
  count: int
  is_shuffled: bool = False

  def codes(
    self, weight: jax.Array, inputs: LinearInputs, input_map: Any
  ) -> gptq.Reconstruction:
    """Runs all passes, and encodes folded weights `[blocks, 32, rows]`, float32.

    `inputs` are in native coordinates; `input_map`, which may be None, has a matrix for
    each block. Tokens are multiplied by the roots of their weights, if they have any.

    Raises:
      ContractError: Sums or a state are not finite, or codes are not legal.
    """
    state = _of_linear(weight.shape[0], input_map)
    weights = () if inputs.token_weights is None else (inputs.token_weights,)
    for step in map(jnp.int32, range(self.count)):
      zeros = jnp.zeros(state.shape, jnp.float32)
      measure = _LinearStep(self.measure)
      sums = inputs.reduce(measure, zeros, step, state, *weights)
      require_finite("measure_linear", np.asarray(sums))
      if self.is_shuffled:
        sums = neighbours_in_linear(sums)
      state = execution.block_on_cpu(_solved_linear(self.solve, step, sums, state))
      require_finite("solve_linear", np.asarray(state))
    codes, exponent, value, is_legal = execution.block_on_cpu(
      _encoded_rows(self.encode, weight, state)
    )
    require_legal(is_legal, "encode_linear")
    return gptq.Reconstruction(codes, exponent, value)


def _of_linear(blocks: int, input_map: Any) -> jax.Array:
  """Returns the first state of a linear, float32 `[2, width, width]`."""
  maps = np.eye(mxfp4.BLOCK_SIZE)[None].repeat(blocks, 0)
  if input_map is not None:
    maps = np.asarray(input_map.matrix)
  tiles = np.zeros((2, blocks, mxfp4.BLOCK_SIZE, blocks, mxfp4.BLOCK_SIZE), np.float32)
  for index, each in enumerate(maps):
    tiles[0, index, :, index] = each
  width = blocks * mxfp4.BLOCK_SIZE
  return jnp.asarray(tiles.reshape(2, width, width))


@functools.partial(jax.jit, static_argnames="function")
def _solved_linear(
  function: Function, step: jax.Array, sums: jax.Array, state: jax.Array
) -> jax.Array:
  return function(step, sums, state)[0]


@functools.partial(jax.jit, static_argnames="function")
def _encoded_rows(
  function: Function, weight: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Encodes whole rows; returns codes, exponents, values and legality by block."""
  blocks, size, rows = weight.shape
  codes, exponent = function(weight.reshape(-1, rows).T, state)
  codes, exponent = codes.T.reshape(blocks, size, rows), exponent.T
  is_legal = legal(codes, exponent, weight)
  return codes, exponent, decoded(codes, exponent), is_legal


def require_legal(is_legal: jax.Array, place: str = "encode_weight") -> None:
  """Rejects weights with an illegal block, from `candidate_codes.legal`.

  Raises:
    ContractError: A block is not legal; the message counts them.
  """
  if not bool(is_legal.all()):
    bad = int((~is_legal).sum())
    raise ContractError(
      f"{place}: {bad} of {is_legal.size} blocks have a code over 15 or an "
      f"exponent more than {EXPONENT_SLACK} from that of their largest value."
    )


def _first_state(blocks: int) -> np.ndarray:
  state = np.zeros((blocks, MATRICES, mxfp4.BLOCK_SIZE, mxfp4.BLOCK_SIZE))
  state[:, 0] = np.eye(mxfp4.BLOCK_SIZE)
  return state


@jax.jit
def _compensated(factor: jax.Array, value: jax.Array) -> jax.Array:
  """Returns the weights `[32, rows]` that are best given the later blocks' errors."""
  return jax.lax.linalg.triangular_solve(factor, value, left_side=True, lower=False)


@jax.jit
def _plane(factor: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns R of the block's loss in the coordinates of its map, and T^-T."""
  upper = jnp.linalg.qr(factor @ chosen.mT)[1]
  return upper.astype(jnp.float32), jnp.linalg.inv(chosen).mT


@jax.jit
def _in_map(inverse: jax.Array, target: jax.Array) -> jax.Array:
  """Returns a block's weights `[32, rows]` in the coordinates of its map, float32."""
  exact = jnp.einsum("ij,jm->im", inverse, target, precision=HIGHEST)
  return exact.astype(jnp.float32)


@jax.jit
def _native(chosen: jax.Array, value: jax.Array) -> jax.Array:
  """Returns decoded weights `[32, rows]` in native coordinates, float64."""
  return jnp.einsum("ji,jm->im", chosen, value.astype(jnp.float64), precision=HIGHEST)
