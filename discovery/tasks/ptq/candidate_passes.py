"""The passes of a program: sums over the tiles of a block, and a solve on the sums.

The program says what a tile contributes and what follows from the sums. Trusted code
streams the calibration sequences and the weights, adds, and checks what is solved for.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.discovery.core.task import ContractError
from mxjax.discovery.sandbox.processor import spent_on
from mxjax.discovery.tasks.ptq.candidate_codes import (
  ROWS,
  UNITS,
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
TILES = 4
"""Tiles that a program of a measurement takes at once; see `UNITS`."""
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


def _tiles(blocks: np.ndarray) -> np.ndarray:
  """Cuts `[blocks, 32, n]` into tiles of its columns, `[blocks, n / 32, 32, 32]`."""
  return blocks.reshape(len(blocks), mxfp4.BLOCK_SIZE, -1, TILE).swapaxes(1, 2)


@functools.partial(jax.jit, static_argnames="function")
def _add_tiles(
  function: Function,
  count: jax.Array,
  valid: jax.Array,
  units: tuple[jax.Array, ...],
  others: tuple[jax.Array, ...],
  state: jax.Array | None,
  sums: list[jax.Array],
) -> list[jax.Array]:
  """Adds what a hook makes of some tiles to the sums of the first `count` blocks.

  `units` are `[UNITS, TILES, 32, 32]`, of which the first `valid` tiles count; `others`
  are the same for every block, and `state` and `sums` are by block. Tiles are added one
  after another, as a sum over all of them would.
  """

  def one(place: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
    told = [each[place] for each in units]
    own = () if state is None else (state[place],)
    made = function(*told, *others, *own)

    def add(tile: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
      return [total + each[tile] for total, each in zip(totals, made, strict=True)]

    totals = jax.lax.fori_loop(0, valid, add, [each[place] for each in sums])
    pairs = zip(sums, totals, strict=True)
    return [each.at[place].set(total) for each, total in pairs]

  return jax.lax.fori_loop(0, count, one, sums)


def _sums(
  function: Function,
  units: Sequence[np.ndarray],
  shape: tuple[int, ...],
  *,
  outputs: int = 1,
  index: np.ndarray | None = None,
  step: Any = None,
  state: np.ndarray | None = None,
) -> list[np.ndarray]:
  """Adds up a hook over the tiles of every block, `[blocks, 32, n]` each of `units`.

  It takes `UNITS` blocks and `TILES` tiles at once, so that it is compiled once for
  linears of every shape. `index` is int32 `[n / 32]`. Returns its `outputs`, float64
  `[blocks, *shape]`.
  """
  tiles = [_tiles(each) for each in units]
  blocks, columns = tiles[0].shape[:2]
  # What fills up is the last one again: zeros might keep a hook's loop from ending.
  at = lambda first, size, most: np.minimum(np.arange(first, first + size), most - 1)
  parts = []
  for first in range(0, blocks, UNITS):
    places, count = at(first, UNITS, blocks), min(UNITS, blocks - first)
    own = None if state is None else np.asarray(state)[places]
    sums: Any = [np.zeros((UNITS, *shape)) for _ in range(outputs)]
    for start in range(0, columns, TILES):
      some, valid = at(start, TILES, columns), min(TILES, columns - start)
      told = tuple(each[places[:, None], some] for each in tiles)
      others = () if index is None else (index[some], step)
      added = _add_tiles(
        function, np.int32(count), np.int32(valid), told, others, own, sums
      )
      # As host arrays again: those of a hook are committed to a device, which would be
      # another program.
      sums = [np.asarray(each) for each in execution.block_on_cpu(added)]
    parts.append([np.asarray(each)[:count] for each in sums])
  return [np.concatenate(each) for each in zip(*parts, strict=True)]


def measured_tables(
  function: Function, weight: jax.Array, decoded: jax.Array
) -> list[jax.Array]:
  """Sums a program's tables over the rows of folded and decoded weights.

  Both weights are float32 `[blocks, 32, rows]`, the two tables `[blocks, 32, 32]`.

  Raises:
    ContractError: A table is not finite, or the rows do not divide into tiles.
  """
  _require_tiles("weight rows", weight.shape[-1])
  operands = np.asarray(weight), np.asarray(decoded)
  with spent_on(function):
    sums = _sums(function, operands, (TILE, TILE), outputs=2)
  # Sums are float64; activation codes are scored in float32, as in the paper.
  tables = [each.astype(np.float32) for each in sums]
  require_finite("tables", *tables)
  return [jnp.asarray(each) for each in tables]


class MapsAndCodes(NamedTuple):
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
      with spent_on(self.measure_inputs):
        of_inputs = self._of_inputs(inputs, step, state)
      state = self._solved(weight, step, of_inputs, eye, state)
    require_map("solve", state[:, 0])
    return jnp.asarray(state[:, 0])

  def _of_inputs(self, inputs: LinearInputs, step: Any, state: np.ndarray) -> Any:
    """Measures the inputs of a pass, sequence after sequence."""
    total = np.zeros(state.shape)
    for index in range(inputs.sequences):
      blocks = np.asarray(inputs.sequence(index))
      same = np.full(inputs.length // TILE, index, np.int32)
      (sums,) = _sums(
        self.measure_inputs,
        [blocks],
        state.shape[1:],
        index=same,
        step=step,
        state=state,
      )
      total += sums
    return jnp.asarray(total)

  def _solved(
    self, weight: jax.Array, step: Any, of_inputs: Any, curvature: Any, state: Any
  ) -> np.ndarray:
    """Measures weights and solves one pass, for all blocks that are given."""
    wide = np.asarray(weight, np.float64)
    rows = np.arange(0, wide.shape[-1], TILE, dtype=np.int32)
    with spent_on(self.measure_weights):
      (sums,) = _sums(
        self.measure_weights,
        [wide],
        state.shape[1:],
        index=rows,
        step=step,
        state=state,
      )
    of_weights = jnp.asarray(sums)
    steps = np.full(len(state), int(step), np.int32)
    told = self.told((of_inputs, of_weights))
    return map_units(self.solve, steps, *told, curvature, state)[0]

  def reach(
    self, weight: jax.Array, inputs: LinearInputs, encode: Function
  ) -> MapsAndCodes:
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
      # What the loss still asks of this block, given the errors of those rounded before
      # it.
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
      # Its codes are chosen in the coordinates of the map, where R is upper again by a
      # QR.
      codes, exponent = encoded(encode, exact[None], upper[None])
      codes, exponent = codes[0], exponent[0]
      value, is_legal = execution.block_on_cpu(checked(codes, exponent, exact))
      require_legal(is_legal)
      # Its error in native coordinates takes the place of its weights, which the blocks
      # before it then make good.
      native = execution.block_on_cpu(_native(chosen, value))
      start = index * size
      residual = residual.at[start : start + size].set(wide[index] - native)
      maps.append(chosen)
      results.append(gptq.Reconstruction(codes, exponent, value))
    # They were visited from the last to the first.
    together = lambda *leaves: jnp.stack(leaves[::-1])
    return MapsAndCodes(together(*maps), jax.tree.map(together, *results))


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
      # By the root, so that a product of inputs, such as the Hessian's, has the weight
      # once.
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
      with spent_on(self.measure):
        measure = _LinearStep(self.measure)
        sums = inputs.reduce(measure, zeros, step, state, *weights)
      require_finite("measure_linear", np.asarray(sums))
      if self.is_shuffled:
        sums = neighbours_in_linear(sums)
      with spent_on(self.solve):
        state = execution.block_on_cpu(_solved_linear(self.solve, step, sums, state))
      require_finite("solve_linear", np.asarray(state))
    with spent_on(self.encode):
      codes, exponent, value, is_legal = encoded_linear(self.encode, weight, state)
    require_legal(is_legal, "encode_linear")
    return gptq.Reconstruction(codes, exponent, value)


def _of_linear(blocks: int, input_map: Any) -> jax.Array:
  """Returns the first state of a linear, float32 `[2, width, width]`."""
  maps = np.eye(mxfp4.BLOCK_SIZE)[None].repeat(blocks, 0)
  if input_map is not None:
    maps = np.asarray(input_map.matrix)
  # Axes: matrix, block and coordinate of the row, block and coordinate of the column.
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


def encoded_linear(
  function: Function, weight: jax.Array, state: jax.Array
) -> list[jax.Array]:
  """Encodes whole rows of folded weights `[blocks, 32, rows]`, `ROWS` at once.

  So an encoder is compiled once for each width, and not for each number of rows. Rows
  are independent; where they are no multiple, the last one fills up. Returns codes,
  exponents, values and legality as `_encoded_rows`.
  """
  rows = weight.shape[-1]
  parts = []
  for start in range(0, rows, ROWS):
    places = np.minimum(np.arange(start, start + ROWS), rows - 1)
    some = execution.block_on_cpu(jnp.asarray(np.asarray(weight)[..., places]))
    parts.append(execution.block_on_cpu(_encoded_rows(function, some, state)))
  together = [np.concatenate(each, axis=-1) for each in zip(*parts, strict=True)]
  return [jnp.asarray(each[..., :rows]) for each in together]


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
  # The first matrix is the map: a program that solves for none leaves blocks as they
  # are.
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
