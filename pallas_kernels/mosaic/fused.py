"""Refinement of the inputs and the product in one kernel, for few rows.

One program runs on each multiprocessor. Its memory warp group starts the copies of its
first weights at once. Meanwhile its two other groups refine blocks of the inputs, as
`refinement.py` does: pairs of blocks of all linears are dealt out over the groups of
all programs. What they refine they write to global memory in float8, in the order of
`float8.in_order_of_blocks`; then each group signals. When all have, the memory groups
bring the inputs, and the product goes on as in `stream_k.py`. So weights stream from
memory while inputs are refined, and a linear takes one launch.

A row with a block that E5M2 cannot hold is found by a flag that each group writes. Only
if one is set, which is nearly never, the groups shift the rows that need it, and
signal once more.

All programs wait for all others, so they must run at the same time: there is at most
one for each multiprocessor, and shared memory has no room for a second.

The interpreter runs one program after the other, so refinement, shift and product are
three phases of its grid. The reference is `one_code.refine_for` in split arithmetic,
then `mxfp4.decode` and a product.
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
from mxjax.pallas_kernels.mosaic import device, refinement, stream_k
from mxjax.pallas_kernels.mosaic.device import gpu
from mxjax.pallas_kernels.mosaic.stream_k import GROUPS, OUTPUTS
from mxjax.pallas_kernels.products import float8
from mxjax.pallas_kernels.refinement import tile

ROWS = refinement.ROWS
"""Most rows: one tile of the refinement."""
STAGES = 16
"""Steps of weights in flight, at most."""
_BLOCK, _BLOCKS = mxfp4.BLOCK_SIZE, refinement.BLOCKS
# 512 in all: enough for the groups of 256 programs, one a multiprocessor.
_FLAGS = 8
"""Flags in a row of 64."""
_COUNTED = 16
"""Blocks whose scales are looked at together."""


@dataclasses.dataclass(frozen=True)
class Work:
  """Static properties of a launch.

  Attributes:
    product: Those of the product.
    refined: Those of the refinement.
    rows: Rows of the inputs, without those that are appended.
    width: Columns of the inputs, a multiple of 512.
    linears: Linears of these inputs.
  """

  product: stream_k.Work
  refined: refinement.Work
  rows: int
  width: int
  linears: int

  @property
  def interpret(self) -> bool:
    """Returns whether the kernel is interpreted."""
    return self.product.interpret

  @property
  def blocks(self) -> int:
    """Returns the number of blocks of a row."""
    return self.width // _BLOCK

  @property
  def pairs(self) -> int:
    """Returns the number of pairs of blocks of a row."""
    return self.blocks // _BLOCKS

  def item(self, place: Any, step: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the linear and the pair of a step of the group at a place of all."""
    item = place + step * GROUPS * self.product.programs
    return lax.div(item, self.pairs), lax.rem(item, self.pairs)

  def count(self, place: Any) -> jax.Array:
    """Returns the number of items of the group at a place of all."""
    items, all_places = self.linears * self.pairs, GROUPS * self.product.programs
    return lax.div(jnp.maximum(items - place + all_places - 1, 0), all_places)


def _vector(axis: int = 0) -> Any:
  """Returns the layout of rows (axis 1 is reduced) or of columns."""
  return gpu.Layout.WGMMA.reduce(axis)


def _all(value: int) -> jax.Array:
  """Returns int32 `[64]` of one value, in registers as rows have."""
  return gpu.layout_cast(jnp.full((ROWS,), value, jnp.int32), _vector(1))


def _rows() -> jax.Array:
  return gpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_vector(1))


def _places(work: Work, linear: jax.Array, block: jax.Array) -> jax.Array:
  """Returns where the values of a block go, int32 `[64, 32]`; -1 behind the rows."""
  iota = functools.partial(gpu.broadcasted_iota, jnp.int32, (ROWS, _BLOCK))
  row, column = (iota(axis, layout=gpu.Layout.WGMMA) for axis in (0, 1))
  group, own = lax.div(block, float8.BLOCKS), lax.rem(block, float8.BLOCKS)
  # The order of `float8.in_order_of_blocks`: the n-th words, of four columns, of the
  # four blocks of a group lie side by side.
  inside = (column >> 2) * (4 * float8.BLOCKS) + (column & 3) + 4 * own
  first = linear * (ROWS * work.width) + group * (float8.BLOCKS * _BLOCK)
  place = first + row * work.width + inside
  return jnp.where(row < work.rows, place, -1)


def _own_items(
  work: Work, group: jax.Array, take: Callable[[jax.Array, jax.Array], None]
) -> None:
  """Runs with the linear and the pair of every item of this group."""
  place = lax.axis_index("program") + group * work.product.programs

  def run(step: jax.Array, carry: None) -> None:
    take(*work.item(place, step))
    return carry

  if work.linears * work.pairs <= GROUPS * work.product.programs:
    # Outside of a loop nothing is kept in registers for its next turn.
    first = jnp.int32(0)
    pl.when(work.count(place) > 0)(lambda: run(first, None))
  else:
    lax.fori_loop(0, work.count(place), run, None)


def _of_linear(linear: jax.Array, count: int, run: Callable[[int], None]) -> None:
  for index in range(count):
    if count == 1:
      run(index)
    else:
      pl.when(linear == index)(functools.partial(run, index))


def _flag(work: Work, group: jax.Array) -> jax.Array:
  """Returns where this group's flag is: at the first row's thread, -1 elsewhere."""
  place = lax.axis_index("program") * GROUPS + group
  return jnp.where(_rows() == 0, place, -1)


def _refine(
  refs: dict[str, Any], s: dict[str, Any], work: Work, group: jax.Array
) -> None:
  """Refines this group's items, and says whether one has a row outside the range."""
  keywords = {"interpret": work.interpret}
  own = {name: s["refined"][name].at[group] for name in s["refined"]}
  flag, arrived = _flag(work, group), s["inputs_arrived"].at[group]
  write = functools.partial(device.put, refs["flags"], layout=_vector(1), **keywords)
  write(flag, _all(0))
  # Its barrier: no thread may set the flag before it is cleared.
  gpu.commit_smem()

  def item(linear: jax.Array, pair: jax.Array) -> None:
    for block in range(_BLOCKS):
      columns = pl.ds((pair * _BLOCKS + block) * _BLOCK, _BLOCK)
      there = own["x"].at[block, pl.ds(0, work.product.tile)]
      gpu.copy_gmem_to_smem(refs["raw"].at[:, columns], there, arrived)

    def prepare(index: int) -> None:
      given = {name: refs[name][index] for name in ("matrix", "gram", "cross")}
      refinement.prepare(given, own, work.refined, pair)

    _of_linear(linear, work.linears, prepare)
    gpu.commit_smem()
    gpu.barrier_wait(arrived)
    for block in range(_BLOCKS):
      made = refinement.realize(own["x"].at[block], block, own, work.refined)
      values, byte = refinement.outputs(*made, work.refined)
      index = pair * _BLOCKS + block
      is_out = float8.is_outside(made[1]) & (_rows() < work.rows)
      place = lax.axis_index("program") * GROUPS + group
      write(jnp.where(is_out, place, -1), _all(1))
      place = _places(work, linear, index)
      device.put(refs["refined"], place, values, layout=gpu.Layout.WGMMA, **keywords)
      place = (linear * ROWS + _rows()) * work.blocks + index
      place = jnp.where(_rows() < work.rows, place, -1)
      device.put(refs["bytes"], place, byte, layout=_vector(1), **keywords)
    # No thread reads the tables any more when the next are written.
    gpu.commit_smem()

  _own_items(work, group, item)
  device.fence(**keywords)


def _is_shifted(
  refs: dict[str, Any], s: dict[str, Any], work: Work, group: jax.Array
) -> jax.Array:
  """Returns whether any flag is set, int32, in every thread of the group."""
  count = work.product.programs * GROUPS
  iota = functools.partial(gpu.broadcasted_iota, jnp.int32, (ROWS, _FLAGS))
  row, column = (iota(axis, layout=gpu.Layout.WGMMA) for axis in (0, 1))
  flags = device.load(refs["flags"], gpu.Layout.WGMMA)
  # Nothing writes the flags of programs that there are not.
  flags = jnp.where(row * _FLAGS + column < count, flags, 0)
  of_row, cell = jnp.max(flags, axis=1), s["cell"]
  keywords = {"layout": _vector(1), "interpret": work.interpret}
  if work.interpret:
    return jnp.max(of_row)
  # A thread knows the flags of its own rows alone; the cell tells all threads of the
  # group. It is cleared before any of them sets it.
  device.put(cell, jnp.where(_rows() == 0, group, -1), _all(0), **keywords)
  gpu.commit_smem()
  device.put(cell, jnp.where(of_row > 0, group, -1), _all(1), **keywords)
  gpu.commit_smem()
  return cell[group]


def _shift(refs: dict[str, Any], work: Work, group: jax.Array) -> None:
  """Shifts the rows of this group's items that have a block outside the range."""
  keywords = {"interpret": work.interpret}
  layout = gpu.Layout.WGMMA
  by_row = refinement.by_row

  def item(linear: jax.Array, pair: jax.Array) -> None:
    bytes_, x = refs["bytes"], refs["refined"]

    def look(step: jax.Array, carry: Any) -> Any:
      some = bytes_.at[linear, :, pl.ds(step * _COUNTED, _COUNTED)]
      exponent = device.load(some, layout).astype(jnp.int32) - mxfp4.SCALE_BIAS
      outside = jnp.where(float8.is_outside(exponent), 1, 0)
      found = jnp.max(outside, axis=1), jnp.max(exponent, axis=1)
      return tuple(map(jnp.maximum, carry, found))

    none = _all(0)
    steps = work.blocks // _COUNTED
    outside, top = lax.fori_loop(0, steps, look, (none, none - mxfp4.SCALE_BIAS))
    shift = float8.shift_of(outside > 0, top)
    is_mine = (outside > 0) & (_rows() < work.rows)
    for block in range(_BLOCKS):
      index = pair * _BLOCKS + block
      place = (linear * ROWS + _rows()) * work.blocks + index
      place = jnp.where(_rows() < work.rows, place, 0)
      byte = device.take_bytes(bytes_, place, layout=_vector(1), **keywords)
      place = _places(work, linear, index)
      # What is read must be there; what comes of a place below 0 is not written.
      held = jnp.maximum(place, 0)
      value = device.take_bytes(x, held, layout=layout, **keywords)
      exponent = by_row(byte - mxfp4.SCALE_BIAS)
      moved = float8.shifted_values(value, exponent, by_row(shift))
      place = jnp.where(by_row(jnp.where(is_mine, 1, 0)) > 0, place, -1)
      device.put(x, place, moved.astype(float8.FORM), layout=layout, **keywords)

    # One group has the first pair of a linear and writes for all.
    @pl.when(pair == 0)
    def _() -> None:
      place = jnp.where(_rows() < work.rows, linear * ROWS + _rows(), -1)
      unit = float8.row_unit(shift, top)
      device.put(refs["units"], place, unit, layout=_vector(1), **keywords)

  _own_items(work, group, item)
  device.fence(**keywords)


def _kernel(refs: dict[str, Any], s: dict[str, Any], work: Work) -> None:
  group, count = lax.axis_index("group"), work.product.programs * GROUPS
  kind = gpu.SemaphoreType.REGULAR
  phase = lax.axis_index("phase") if work.interpret else None
  signals = ready = None
  if not work.interpret:
    # One counter for the refinement and one for shifted rows; and for each group the
    # signal of `stream_k.py`, that it wrote its part.
    signals, ready = pl.get_global(kind((2,))), pl.get_global(kind((count,)))

  def during(number: int, run: Callable[[], None]) -> None:
    """Runs in a phase of the interpreter's grid, or now."""
    run() if phase is None else pl.when(phase == number)(run)

  def signal(number: int) -> None:
    if signals is not None:
      gpu.semaphore_signal(signals.at[number], memory_scope="gpu")

  def wait(number: int) -> None:
    if signals is not None:
      # All groups wait for the same counter, so none may take from it.
      keywords = {"decrement": False, "memory_scope": "gpu"}
      gpu.semaphore_wait(signals.at[number], count, **keywords)
      device.fence(interpret=False)

  @pl.when(group == GROUPS)
  def _() -> None:
    gpu.set_max_registers(40, action="decrease")

    def early(part: stream_k.Part) -> None:
      def copy(unit: jax.Array, step: int) -> None:
        # The first steps find their slots free, and weights do not wait for inputs:
        # they are on their way while those are refined.
        @pl.when(part.step(unit, step) < work.product.stages)
        def _() -> None:
          stream_k.copy_weights(refs, s, part, unit, step)

      stream_k.each_step(part, copy)

    def late(part: stream_k.Part) -> None:
      def copy(unit: jax.Array, step: int) -> None:
        stream_k.await_slot(s, part, unit, step)

        @pl.when(part.step(unit, step) >= work.product.stages)
        def _() -> None:
          stream_k.copy_weights(refs, s, part, unit, step)

        stream_k.copy_inputs(refs, s, part, unit, step)

      stream_k.each_step(part, copy)

    def fetch() -> None:
      stream_k.walk(work.product, early)
      # The interpreter's phases have waited.
      if not work.interpret:
        wait(0)
        pl.when(_is_shifted(refs, s, work, group) > 0)(lambda: wait(1))
      stream_k.walk(work.product, late)
      stream_k.end_fetching(s, work.product)

    during(2, fetch)

  @pl.when(group < GROUPS)
  def _() -> None:
    gpu.set_max_registers(232, action="increase")

    def of_groups(run: Callable[[jax.Array], None]) -> None:
      """Runs for this group; interpreted, one does all, as a write is of an array."""
      if not work.interpret:
        run(group)
        return

      @pl.when(group == 0)
      def _() -> None:
        for each in range(GROUPS):
          run(jnp.int32(each))

    def refine() -> None:
      of_groups(functools.partial(_refine, refs, s, work))
      signal(0)
      wait(0)

    def shift() -> None:
      @pl.when(_is_shifted(refs, s, work, group) > 0)
      def _() -> None:
        of_groups(functools.partial(_shift, refs, work))
        signal(1)
        wait(1)

    def multiply() -> None:
      shifted = _is_shifted(refs, s, work, group)
      stream_k.walk(
        work.product,
        lambda part: stream_k.compute(refs, s, part, group, ready, shifted),
      )
      gpu.wait_smem_to_gmem(0)

    during(0, refine)
    during(1, shift)
    during(2, multiply)


def obstacle(shape: tuple[int, int], outputs: int) -> str | None:
  """Returns why the kernel cannot multiply x `(n, d)` by m outputs, or None."""
  if shape[0] > ROWS:
    return f"its fused form takes at most {ROWS} rows, got {shape[0]}"
  return device.obstacle() or stream_k.obstacle(shape, outputs)


def work_of(
  x: Any,
  outputs: Sequence[int],
  rule: tuple[bool, bool, bool, int, bool],
  dtype: jax.typing.DTypeLike,
  interpret: bool = False,
) -> Work:
  """Divides the work of inputs `[n, d]` and weights of so many outputs.

  `rule` says whether there are a map, G and K, how many codes change, and whether
  exponents round up. `dtype` is that of the results.
  """
  rows, width = x.shape
  refined = refinement.Work(ROWS, 1, *rule, "float8", interpret)
  # The inputs of a pair, and the terms of three tables, in bfloat16; then curvatures.
  tables = ROWS * _BLOCK * 2 * (_BLOCKS + 3 * refinement.TERMS)
  reserved = GROUPS * (tables + _BLOCKS * 3 * _BLOCK * 4) + 64
  product = stream_k.Work.of(
    rows, outputs, width, dtype, interpret, most=STAGES, reserved=reserved
  )
  work = Work(product, refined, rows, width, len(outputs))
  # Every group has a flag of its own.
  assert product.programs * GROUPS <= ROWS * _FLAGS
  return work


def _scratch(work: Work, dtype: jax.typing.DTypeLike) -> dict[str, Any]:
  """Returns the shared memory of a program."""
  like = jax.ShapeDtypeStruct((1, 1), float8.FORM)
  scratch = stream_k.scratch_of(work.product, like, dtype)
  three = device.tile(ROWS, refinement.TERMS * _BLOCK, jnp.bfloat16, GROUPS, swizzle=64)
  scratch["refined"] = refined = {
    "x": device.tile(ROWS, _BLOCK, jnp.bfloat16, GROUPS, _BLOCKS)
  }
  if work.refined.has_map:
    refined["map"] = three
  if work.refined.has_gram:
    refined |= {"gram": three, "mismatch": three}
    refined["curvature"] = gpu.SMEM((GROUPS, _BLOCKS, 3, _BLOCK), jnp.float32)
  if work.interpret:
    refined["stage"] = three
  scratch["cell"] = gpu.SMEM((GROUPS + 1,), jnp.int32)
  scratch["inputs_arrived"] = gpu.Barrier(num_arrivals=_BLOCKS, num_barriers=GROUPS)
  return scratch


def products(
  x: jax.Array,
  tables: Sequence[tile.Tables],
  tensors: Sequence[mxfp4.MXTensor],
  units: Sequence[jax.Array],
  *,
  dtype: jax.typing.DTypeLike,
  interpret: bool = False,
) -> list[jax.Array]:
  """Refines bfloat16 inputs for each linear, and multiplies them, in one launch.

  Args:
    x: Inputs `[n, d]` of all linears, bfloat16; see `obstacle`.
    tables: Of the map and A4 rule of each linear, of one structure.
    tensors: Packed weights `[m, d]`, each with an m of its own.
    units: Their scales, float32 scalars, from `mxfp4_decode.float8_range`.
    dtype: Of the results, float32 or bfloat16; the sums are rounded to it once.
    interpret: Whether the kernel is interpreted.

  Returns:
    The product of each linear, `[n, m]`.
  """
  rows, width = x.shape
  outputs = [tensor.shape[0] for tensor in tensors]
  first = tables[0]
  there = (table is not None for table in (first.matrix, first.gram, first.cross))
  rule = *there, first.changes, first.rounds_up
  work = work_of(x, outputs, rule, dtype, interpret)
  product, refined = work.product, work.refined
  view = lambda a: lax.bitcast_convert_type(a, jnp.int32)
  given = [refinement.inputs(each, width, refined) for each in tables]
  inputs = {
    "raw": [jnp.pad(x, ((0, product.rows - rows), (0, 0)))],
    **{name: [each[name] for each in given] for name in given[0]},
    "words": [view(each.codes.reshape(len(each.codes), -1, 4)) for each in tensors],
    "scales": [each.scales for each in tensors],
    "unit": [unit.reshape(1) for unit in units],
    "unit_bits": [view(unit.reshape(1)) for unit in units],
  }
  array, count = jax.ShapeDtypeStruct, len(tensors)
  # Only the products are wanted: the rest is memory that programs share.
  made = {
    "out": [array((product.rows, m), dtype) for m in outputs],
    "parts": [array((product.programs, GROUPS, OUTPUTS, product.tile), jnp.float32)],
    "refined": [array((count, ROWS, width), float8.FORM)],
    "bytes": [array((count, ROWS, work.blocks), jnp.uint8)],
    "units": [array((count, ROWS), jnp.float32)],
    "flags": [array((ROWS, _FLAGS), jnp.int32)],
  }

  def mxjax_fused_float8(*operands: Any, **scratch: Any) -> None:
    rest = iter(operands)
    refs: dict[str, Any] = {
      name: [next(rest) for _ in each] for name, each in (inputs | made).items()
    }
    whole = "raw", "parts", "refined", "bytes", "units", "flags"
    refs |= {name: refs[name][0] for name in whole}
    # Under these names `stream_k.py` looks for inputs and the units of their rows.
    for name, source in (("x", "refined"), ("row_unit", "units")):
      refs[name] = [refs[source].at[linear] for linear in range(count)]
    none: list[Any] = [None] * count
    # A table that the rule does not have is None for each linear.
    refs = dict.fromkeys(("matrix", "gram", "cross"), none) | refs
    _kernel(refs, scratch, work)

  phases = {"grid": (product.programs,), "grid_names": ("program",)}
  if interpret:
    phases = {"grid": (3, product.programs), "grid_names": ("phase", "program")}
  call = gpu.kernel(
    mxjax_fused_float8,
    out_type=tuple(each for arrays in made.values() for each in arrays),
    scratch_types=_scratch(work, dtype),
    num_threads=GROUPS + 1,
    thread_name="group",
    interpret=device.mode(interpret),
    **phases,
  )
  results = call(*(each for arrays in inputs.values() for each in arrays))
  return [product[:rows] for product in results[:count]]
