"""The float8 product for few rows in Mosaic GPU: steps divided over all programs.

A launch takes one or more linears of one width, Y_l = X_l W_l'. Its work is a list of
units: 512 columns of a tile of 128 outputs and up to 256 rows, tile after tile and
linear after linear. Each program takes an equal range of the list (stream-K), wherever
tiles begin, so that all multiprocessors read weights at the same time, whatever the
number of outputs. A tile is the sum of parts by neighbouring programs. Each takes its
range from the last tile to the first: what it has of a tile that a later program ends
comes first, goes to memory, and is there long before the later program, which takes
that tile last, adds it. A program waits for earlier ones only, so programs that do not
fit on the GPU at once cannot stop each other.

Parts are float32 and are added in the order of the programs after the last part, so a
result depends on shapes and on the number of multiprocessors, never on time.

A memory warp group keeps up to `STAGES` steps of 128 columns in flight by TMA, scales
included. Two compute warp groups have 64 outputs each: they decode a step's weights to
registers (`weights.by_blocks`) while the products of the step before run.

For [12288, 4096] it reads 26.7 MB of weights and scales, and parts take about 64 KB a
row, which stay in the second-level cache. `benchmarks/stream_k_counts.py` counts them
and predicts times. The reference is `mxfp4.decode` and a product.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import lowering
from mxjax.pallas_kernels.mosaic import device, weights
from mxjax.pallas_kernels.mosaic.device import gpu

OUTPUTS, GROUPS = 64, 2
"""Outputs of a warp group, and groups that compute."""
STAGES = 8
"""Steps in flight, at most."""
UNIT = 4
"""Steps of a unit: their scales, 16 bytes a row, are the least that TMA copies."""
COLUMNS = UNIT * weights.COLUMNS
"""Columns of a unit."""
_ACROSS = OUTPUTS * GROUPS
_WORDS = weights.COLUMNS // 8
_SCALES = UNIT * weights.BLOCKS
_BYTES = 220 * 1024
"""Of shared memory, without barriers and what alignment takes."""


@dataclasses.dataclass(frozen=True)
class Work:
  """Static properties of a launch.

  Attributes:
    rows: Rows of all tiles together, zeros behind the inputs included.
    tile: Rows of a tile, a multiple of 8.
    outputs: Outputs of each linear, multiples of 128.
    units: Units of a tile, 512 columns each.
    programs: Programs of the launch, at most one for each multiprocessor.
    stages: Steps of 128 columns in flight, at most `STAGES`.
    interpret: Whether the kernel is interpreted.
  """

  rows: int
  tile: int
  outputs: tuple[int, ...]
  units: int
  programs: int
  stages: int
  interpret: bool = False

  @classmethod
  def of(
    cls,
    rows: int,
    outputs: Sequence[int],
    width: int,
    dtype: jax.typing.DTypeLike,
    interpret: bool = False,
    *,
    most: int = STAGES,
    reserved: int = 0,
  ) -> "Work":
    """Divides the products of `[rows, width]` by each of `[outputs, width]`.

    `dtype` is that of the results, bfloat16 or float32; `width` is a multiple of 512.
    At most `most` steps are in flight, in shared memory less `reserved` bytes.
    """
    # Half of the registers of a compute group hold the sums of a tile of 256 rows.
    size = jnp.dtype(dtype).itemsize
    tiles = -(-rows // (256 if size == 2 else 128))
    # Tiles of about one size, in the multiples of 8 rows that the copy engine
    # addresses.
    tile = 8 * -(-rows // (8 * tiles))
    units = width // COLUMNS
    total = tiles * sum(n // _ACROSS for n in outputs) * units
    # No more programs than the longest range needs: fewer tiles are then cut.
    longest = -(-total // lowering.multiprocessors())
    left = (
      _BYTES
      - reserved
      - GROUPS * OUTPUTS * tile * size
      - (most // UNIT + 1) * _ACROSS * _SCALES
    )
    # A step has 128 columns of inputs, a byte each, and half a byte for each weight.
    stages = min(most, left // (weights.COLUMNS * tile + _ACROSS * 4 * _WORDS))
    shape = tiles * tile, tile, tuple(outputs), units
    return cls(*shape, -(-total // longest), stages, interpret)

  @property
  def tiles(self) -> int:
    """Returns the number of tiles of all linears."""
    return self.row_tiles * sum(n // _ACROSS for n in self.outputs)

  @property
  def row_tiles(self) -> int:
    """Returns how many tiles lie beside each other along the rows."""
    return self.rows // self.tile

  @property
  def total(self) -> int:
    """Returns the number of units."""
    return self.tiles * self.units

  @property
  def scale_slots(self) -> int:
    """Returns the slots of scales: with fewer, a copy would meet what is still read."""
    return -(-(self.stages + UNIT - 1) // UNIT)

  def start(self, program: Any) -> Any:
    """Returns a program's first unit; that of the next is its end."""
    return lax.div(program * self.total, self.programs)

  def owner(self, unit: Any) -> Any:
    """Returns the program that has a unit."""
    # The last program p with floor(p * total / programs) <= unit.
    return lax.div((unit + 1) * self.programs - 1, self.total)


@dataclasses.dataclass(frozen=True)
class Part:
  """What a program has of a tile: units `first` to `last`, and how many it did before.

  All but `work` are int32.
  """

  tile: jax.Array
  first: jax.Array
  last: jax.Array
  before: jax.Array
  work: Work

  @property
  def row(self) -> jax.Array:
    """Returns the first row."""
    return lax.rem(self.tile, jnp.int32(self.work.row_tiles)) * self.work.tile

  def step(self, unit: Any, step: int) -> jax.Array:
    """Returns how many steps the program took before a step of a unit."""
    return (self.before + unit - self.first) * UNIT + step

  def slot(self, unit: Any, step: int) -> jax.Array:
    """Returns the stage of a step of a unit."""
    return lax.rem(self.step(unit, step), jnp.int32(self.work.stages))

  def scale_slot(self, unit: Any) -> jax.Array:
    """Returns where the scales of a unit are."""
    return lax.rem(self.before + unit - self.first, jnp.int32(self.work.scale_slots))

  def of_linear(self, run: Callable[[int, jax.Array], None]) -> None:
    """Runs with the index of the tile's linear and the tile's first output."""
    begin = 0
    for linear, outputs in enumerate(self.work.outputs):
      tiles = outputs // _ACROSS * self.work.row_tiles
      local = self.tile - begin
      first = lax.div(local, jnp.int32(self.work.row_tiles)) * _ACROSS
      is_mine = (local >= 0) & (local < tiles)
      if len(self.work.outputs) == 1:
        run(linear, first)
      else:
        pl.when(is_mine)(functools.partial(run, linear, first))
      begin += tiles


def walk(work: Work, take: Callable[[Part], None]) -> None:
  """Takes the parts of this program's range, from the last tile to the first."""
  program = lax.axis_index("program")
  start, end = work.start(program), work.start(program + 1)
  newest = lax.div(end - 1, jnp.int32(work.units))
  oldest = lax.div(start, jnp.int32(work.units))

  def run(index: jax.Array, carry: None) -> None:
    tile = newest - index
    top = jnp.minimum(end, (tile + 1) * work.units)
    first = jnp.maximum(start, tile * work.units) - tile * work.units
    take(Part(tile, first, top - tile * work.units, end - top, work))
    return carry

  lax.fori_loop(0, newest - oldest + 1, run, None)


def _own(of_each: Sequence[Any], linear: int) -> Any:
  """Returns a linear's own of what each linear has, or all together."""
  return of_each[linear if len(of_each) > 1 else 0]


def each_step(part: Part, run: Callable[[jax.Array, int], None]) -> None:
  """Runs with every unit of a part and every step of it."""

  def run_unit(unit: jax.Array, carry: None) -> None:
    for step in range(UNIT):
      run(unit, step)
    return carry

  lax.fori_loop(part.first, part.last, run_unit, None)


def await_slot(s: dict[str, Any], part: Part, unit: jax.Array, step: int) -> None:
  """Waits until the slot of a step is free; the first steps find theirs so."""

  @pl.when(part.step(unit, step) >= part.work.stages)
  def _() -> None:
    gpu.barrier_wait(s["consumed"].at[part.slot(unit, step)])


def copy_weights(
  refs: dict[str, Any], s: dict[str, Any], part: Part, unit: jax.Array, step: int
) -> None:
  """Starts the copy of a step's weights, and with a unit's first of its scales."""
  slot = part.slot(unit, step)

  def copy(linear: int, output: jax.Array) -> None:
    across, at = pl.ds(output, _ACROSS), unit * UNIT + step
    if step == 0:
      place, here = part.scale_slot(unit), pl.ds(unit * _SCALES, _SCALES)
      source, arrived = refs["scales"][linear], s["scales_arrived"].at[place]
      gpu.copy_gmem_to_smem(source.at[across, here], s["scales"].at[place], arrived)
    here = pl.ds(at * _WORDS, _WORDS)
    source = refs["words"][linear].at[across, here]
    gpu.copy_gmem_to_smem(source, s["words"].at[slot], s["arrived"].at[slot])

  part.of_linear(copy)


def copy_inputs(
  refs: dict[str, Any], s: dict[str, Any], part: Part, unit: jax.Array, step: int
) -> None:
  """Starts the copy of a step's inputs."""
  slot, rows = part.slot(unit, step), pl.ds(part.row, part.work.tile)

  def copy(linear: int, output: jax.Array) -> None:
    del output
    here = pl.ds((unit * UNIT + step) * weights.COLUMNS, weights.COLUMNS)
    source = _own(refs["x"], linear).at[rows, here]
    gpu.copy_gmem_to_smem(source, s["x"].at[slot], s["arrived"].at[slot])

  part.of_linear(copy)


def _fetch(refs: dict[str, Any], s: dict[str, Any], part: Part) -> None:
  """Copies a part's operands to shared memory, step by step."""

  def copy(unit: jax.Array, step: int) -> None:
    await_slot(s, part, unit, step)
    copy_weights(refs, s, part, unit, step)
    copy_inputs(refs, s, part, unit, step)

  each_step(part, copy)


def end_fetching(s: dict[str, Any], work: Work) -> None:
  """Waits for what was not waited for: a barrier may not end with an arrival."""
  program = lax.axis_index("program")
  steps = (work.start(program + 1) - work.start(program)) * UNIT
  for slot in range(work.stages):

    @pl.when(steps > slot)
    def _(slot: int = slot) -> None:
      gpu.barrier_wait(s["consumed"].at[slot])


def _sum(
  s: dict[str, Any], part: Part, group: jax.Array, unit_byte: jax.Array
) -> jax.Array:
  """Computes a warp group's sums of a part, float32 `[64 outputs, rows]`."""
  work = part.work
  mine = pl.ds(group * OUTPUTS, OUTPUTS)

  def scales_of(unit: Any) -> jax.Array:
    """Reads the scale bytes of a unit, one a thread for each row and step."""
    place = part.scale_slot(unit)
    gpu.barrier_wait(s["scales_arrived"].at[place])
    source = s["scales"].at[place, mine]
    return device.load(source, device.words_layout())

  def decode(unit: Any, step: int, scales: jax.Array) -> jax.Array:
    slot = part.slot(unit, step)
    gpu.barrier_wait(s["arrived"].at[slot])
    words = device.load(s["words"].at[slot, mine], gpu.Layout.WGMMA_8BIT)
    own = scales[:, step * weights.BLOCKS : (step + 1) * weights.BLOCKS]
    return weights.by_blocks(words, own, unit_byte, work.interpret)

  def run(acc: Any) -> jax.Array:
    def release(unit: Any, step: int) -> None:
      gpu.barrier_arrive(s["consumed"].at[part.slot(unit, step)])

    def multiply(unit: Any, step: int, values: jax.Array) -> None:
      """Starts the products of a step, and ends those of the step before.

      The weights of the next step are decoded while one step is multiplied. A wait for
      that one would be no later: ptxas moves it before what is decoded.
      """
      stage = s["stage"].at[group] if work.interpret else None
      device.multiply(acc, values, s["x"].at[part.slot(unit, step)].T, stage)
      gpu.wgmma_wait(1)
      if step:
        release(unit, step - 1)
      else:
        before = functools.partial(release, unit - 1, UNIT - 1)
        # A part's first step follows none of its own: the part before has waited for
        # its last products.
        pl.when(unit > part.first)(before)

    def unit_of(unit: Any, values: jax.Array, scales: jax.Array) -> None:
      """Multiplies the steps of a unit, given the weights of the first."""
      for step in range(UNIT):
        multiply(unit, step, values)
        if step < UNIT - 1:
          values = decode(unit, step + 1, scales)

    def whole(unit: jax.Array, now: tuple[jax.Array, jax.Array]) -> Any:
      unit_of(unit, *now)
      scales = scales_of(unit + 1)
      return decode(unit + 1, 0, scales), scales

    # Before the loop and at each end of a turn the next unit's first step is decoded,
    # so that the last unit, which has no next, stands behind the loop.
    final, scales = part.last - 1, scales_of(part.first)
    now = decode(part.first, 0, scales), scales
    unit_of(final, *lax.fori_loop(part.first, final, whole, now))
    gpu.wgmma_wait(0)
    release(final, UNIT - 1)
    # Nothing may read the sums before the products are waited for.
    return lax.optimization_barrier(acc[...])

  return pl.run_scoped(run, gpu.ACC((OUTPUTS, work.tile), jnp.float32))


def _with_earlier(
  total: jax.Array, refs: dict[str, Any], part: Part, group: jax.Array, ready: Any
) -> jax.Array:
  """Adds to a tile's last part those of earlier programs, in their order."""
  program = lax.axis_index("program")
  first = part.work.owner(part.tile * part.work.units)

  def add(other: jax.Array, total: jax.Array) -> jax.Array:
    if ready is not None:
      gpu.semaphore_wait(ready.at[other * GROUPS + group], memory_scope="gpu")
    return total + device.load(refs["parts"].at[other, group], gpu.Layout.WGMMA)

  return lax.fori_loop(jnp.minimum(first, program), program, add, total)


def compute(
  refs: dict[str, Any],
  s: dict[str, Any],
  part: Part,
  group: jax.Array,
  ready: Any,
  is_shifted: jax.Array | None = None,
) -> None:
  """Computes a part, and writes it or the tile that it ends.

  `ready` are the signals that parts were written, or None; `is_shifted`, a scalar, says
  whether rows have units that are not one, and None that this is not known.
  """
  work = part.work
  unit = refs["unit"][0][0]
  unit_byte = refs["unit_bits"][0][0]
  begin = 0
  for linear, outputs in enumerate(work.outputs[:-1], start=1):
    begin += outputs // _ACROSS * work.row_tiles
    unit = jnp.where(part.tile >= begin, refs["unit"][linear][0], unit)
    bits = refs["unit_bits"][linear][0]
    unit_byte = jnp.where(part.tile >= begin, bits, unit_byte)
  total = _sum(s, part, group, lax.shift_right_logical(unit_byte, 23))
  is_end = part.last == work.units

  @pl.when(jnp.logical_not(is_end))
  def _() -> None:
    program = lax.axis_index("program")
    refs["parts"][program, group] = total
    if ready is not None:
      gpu.semaphore_signal(ready.at[program * GROUPS + group], memory_scope="gpu")

  @pl.when(is_end)
  def _() -> None:
    y = _with_earlier(total, refs, part, group, ready) * unit

    def write(linear: int, output: jax.Array) -> None:
      rows = pl.ds(part.row, work.tile)
      source = _own(refs["row_unit"], linear).at[rows]
      row = device.load(source, gpu.Layout.WGMMA.reduce(0))
      if is_shifted is not None:
        # Where no row was shifted, nothing wrote the units of rows.
        is_its = lax.broadcast_in_dim(is_shifted, row.shape, ()) > 0
        row = jnp.where(is_its, row, 1.0)
      made = y * lax.broadcast_in_dim(row, y.shape, (1,))
      out = refs["out"][linear]
      made = gpu.layout_cast(made.astype(out.dtype), gpu.Layout.WGMMA_TRANSPOSED)
      # The results of another tile may still be on their way from this memory.
      gpu.wait_smem_to_gmem(0, wait_read_only=True)
      s["out"].at[group].T[...] = made
      gpu.commit_smem()
      across = pl.ds(output + group * OUTPUTS, OUTPUTS)
      gpu.copy_smem_to_gmem(s["out"].at[group], out.at[rows, across])

    part.of_linear(write)


def _kernel(refs: dict[str, Any], s: dict[str, Any], work: Work) -> None:
  group = lax.axis_index("group")
  # The interpreter runs a program after the other, and knows no semaphores.
  kind = gpu.SemaphoreType.REGULAR
  ready = None if work.interpret else pl.get_global(kind((work.programs * GROUPS,)))

  @pl.when(group == GROUPS)
  def _() -> None:
    # Of 65,536 registers; `products.py` counts them.
    gpu.set_max_registers(40, action="decrease")
    walk(work, functools.partial(_fetch, refs, s))
    end_fetching(s, work)

  @pl.when(group < GROUPS)
  def _() -> None:
    gpu.set_max_registers(232, action="increase")
    walk(work, lambda part: compute(refs, s, part, group, ready))
    # A program's shared memory must be there until its last results have left it.
    gpu.wait_smem_to_gmem(0)


def scratch_of(work: Work, x: Any, dtype: jax.typing.DTypeLike) -> dict[str, Any]:
  """Returns the shared memory of a program."""
  scratch = {
    "x": device.tile(work.tile, weights.COLUMNS, x.dtype, work.stages),
    "words": gpu.SMEM((work.stages, _ACROSS, _WORDS), jnp.int32),
    "scales": gpu.SMEM((work.scale_slots, _ACROSS, _SCALES), jnp.uint8),
    "out": device.tile(work.tile, OUTPUTS, dtype, GROUPS),
    # Weights and inputs of a step.
    "arrived": gpu.Barrier(num_arrivals=2, num_barriers=work.stages),
    "scales_arrived": gpu.Barrier(num_arrivals=1, num_barriers=work.scale_slots),
    "consumed": gpu.Barrier(num_arrivals=GROUPS, num_barriers=work.stages),
  }
  if work.interpret:
    scratch["stage"] = device.tile(OUTPUTS, weights.COLUMNS, x.dtype, GROUPS)
  return scratch


def obstacle(shape: tuple[int, int], outputs: int) -> str | None:
  """Returns why the kernel cannot multiply x of shape `(n, d)` by m outputs, or None.

  The device is not asked: see `device.hopper_obstacle`.
  """
  if shape[1] % COLUMNS or outputs % _ACROSS or not all(shape):
    wanted = f"widths of {COLUMNS} and outputs of {_ACROSS} each"
    return f"its stream-K form takes {wanted}, got {[*shape, outputs]}"
  return device.compile_obstacle()


def float8_products(
  xs: Sequence[jax.Array],
  tensors: Sequence[mxfp4.MXTensor],
  units: Sequence[jax.Array],
  row_units: Sequence[jax.Array],
  *,
  dtype: jax.typing.DTypeLike,
  interpret: bool = False,
) -> list[jax.Array]:
  """Multiplies E5M2 inputs by packed weights that float8 holds, in one launch.

  Args:
    xs: Inputs `[n, d]` of each linear or, if there are only one, of all: E5M2 in the
      order of `float8.in_order_of_blocks`; see `obstacle`.
    tensors: Packed weights `[m, d]`, each with an m of its own.
    units: Their scales, float32 scalars, from `mxfp4_decode.float8_range`.
    row_units: What the rows of the results are multiplied by, float32 `[n]`, for each
      of `xs`.
    dtype: Of the results, float32 or bfloat16; the sums are rounded to it once.
    interpret: Whether the kernel is interpreted.

  Returns:
    The product of each linear, `[n, m]`.
  """
  wanted, width = xs[0].shape
  outputs = [tensor.shape[0] for tensor in tensors]
  work = Work.of(wanted, outputs, width, dtype, interpret)
  # The last tile of rows ends behind the inputs.
  padded = lambda a: jnp.pad(a, ((0, work.rows - wanted), *((0, 0),) * (a.ndim - 1)))
  view = lambda a: lax.bitcast_convert_type(a, jnp.int32)
  inputs = {
    "x": [padded(x) for x in xs],
    "row_unit": [padded(unit) for unit in row_units],
    "words": [view(each.codes.reshape(len(each.codes), -1, 4)) for each in tensors],
    "scales": [each.scales for each in tensors],
    "unit": [unit.reshape(1) for unit in units],
    "unit_bits": [view(unit.reshape(1)) for unit in units],
  }

  def mxjax_float8_stream_k(*operands: Any, **scratch: Any) -> None:
    rest = iter(operands)
    refs: dict[str, Any] = {
      name: [next(rest) for _ in each] for name, each in inputs.items()
    }
    refs |= {"out": [next(rest) for _ in tensors], "parts": next(rest)}
    _kernel(refs, scratch, work)

  array = jax.ShapeDtypeStruct
  results = [array((work.rows, m), dtype) for m in outputs]
  parts = array((work.programs, GROUPS, OUTPUTS, work.tile), jnp.float32)
  call = gpu.kernel(
    mxjax_float8_stream_k,
    out_type=(*results, parts),
    scratch_types=scratch_of(work, xs[0], dtype),
    grid=(work.programs,),
    grid_names=("program",),
    num_threads=GROUPS + 1,
    thread_name="group",
    interpret=device.mode(interpret),
  )
  # The parts are memory that programs share, and of no use afterwards.
  *products, _ = call(*(each for arrays in inputs.values() for each in arrays))
  return [product[:wanted] for product in products]
