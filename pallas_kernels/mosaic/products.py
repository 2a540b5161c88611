"""Products of inputs and packed weights in Mosaic GPU: persistent, warp-specialized.

One program on each multiprocessor walks over output tiles. A memory warp group keeps
`STAGES` steps of 128 columns in flight by TMA. Two compute warp groups have 64 outputs
each: they decode a step's weights to registers while the products of the step before
run, with inputs from shared memory.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import codec, lowering
from mxjax.pallas_kernels.mosaic import device, weights
from mxjax.pallas_kernels.mosaic.device import gpu

OUTPUTS, GROUPS, COLUMNS, STAGES = 64, 2, 128, 4
ROWS = 64
"""Fewest rows; with fewer, most of a tile would be empty."""
_ACROSS = OUTPUTS * GROUPS
_WORDS = COLUMNS // 4


@dataclasses.dataclass(frozen=True)
class _Work:
  """Static properties of a launch; `decode` is a function of `weights.py`."""

  tile: int
  rows: int
  outputs: int
  steps: int
  planes: int
  decode: Callable[..., list[jax.Array]]
  interpret: bool

  @property
  def row_tiles(self) -> int:
    return -(-self.rows // self.tile)

  @property
  def count(self) -> int:
    """Returns the number of output tiles."""
    return self.row_tiles * (self.outputs // _ACROSS)


class _Place:
  """An output tile: its rows, its outputs, and the slots of its steps."""

  def __init__(self, info: Any, work: _Work) -> None:
    tile = info.index[0]
    # The last tile overlaps the one before, and both write the same.
    first = lax.rem(tile, work.row_tiles) * work.tile
    self.rows = pl.ds(jnp.minimum(first, work.rows - work.tile), work.tile)
    self.first = lax.div(tile, work.row_tiles) * _ACROSS
    self._step = info.local_index * work.steps

  def step(self, k: Any) -> jax.Array:
    """Returns how many steps the program took before step k."""
    return self._step + k

  def slot(self, k: Any) -> jax.Array:
    """Returns which stage step k uses."""
    return lax.rem(self.step(k), STAGES)


def _fetch(refs: dict[str, Any], s: dict[str, Any], place: _Place, work: _Work) -> None:
  """Copies a tile's operands to shared memory, step by step."""
  across = pl.ds(place.first, _ACROSS)
  size = COLUMNS // work.planes

  def fetch(k: jax.Array, carry: None) -> None:
    slot = place.slot(k)

    # The first steps find their slots free.
    @pl.when(place.step(k) >= STAGES)
    def _() -> None:
      gpu.barrier_wait(s["consumed"].at[slot])

    copy = functools.partial(gpu.copy_gmem_to_smem, barrier=s["arrived"].at[slot])
    for plane in range(work.planes):
      here = plane, place.rows, pl.ds(k * size, size)
      copy(refs["x"].at[here], s["x"].at[slot, plane])
    copy(refs["words"].at[across, pl.ds(k * _WORDS, _WORDS)], s["words"].at[slot])
    return carry

  lax.fori_loop(0, work.steps, fetch, None)


def _total(
  refs: dict[str, Any],
  s: dict[str, Any],
  place: _Place,
  group: jax.Array,
  work: _Work,
) -> jax.Array:
  """Computes a warp group's part of a tile, float32 `[64 outputs, rows]`."""
  mine = pl.ds(place.first + group * OUTPUTS, OUTPUTS)

  def decode(k: Any) -> list[jax.Array]:
    column = gpu.Layout.WGMMA.reduce(1)
    scales = gpu.load(refs["scales"].at[mine, k], layout=column, optimized=False)
    gpu.barrier_wait(s["arrived"].at[place.slot(k)])
    here = s["words"].at[place.slot(k), pl.ds(group * OUTPUTS, OUTPUTS)]
    words = gpu.load(here, layout=device.words_layout(), optimized=False)
    return work.decode(words, scales, refs["unit_byte"][0], work.interpret)

  def run(acc: Any) -> jax.Array:
    def multiply(k: Any, parts: list[jax.Array]) -> None:
      stage = s["stage"].at[group] if work.interpret else None
      for plane, part in enumerate(parts):
        device.multiply(acc, part, s["x"].at[place.slot(k), plane].T, stage)

    def finish(k: Any) -> None:
      gpu.wgmma_wait(0)
      gpu.barrier_arrive(s["consumed"].at[place.slot(k)])

    def step(k: Any, parts: list[jax.Array]) -> list[jax.Array]:
      """Multiplies step k while the weights of the next are decoded."""
      multiply(k, parts)
      following = decode(k + 1)
      finish(k)
      return following

    def two(half: jax.Array, parts: list[jax.Array]) -> list[jax.Array]:
      # Two steps have registers of their own. In a loop over single steps, what is
      # decoded would replace what is being multiplied, and ptxas would wait.
      return step(2 * half + 1, step(2 * half, parts))

    # The loop takes pairs of steps; the last step, which decodes no other, and an odd
    # one before it are left.
    left = 1 + (work.steps - 1) % 2
    parts = lax.fori_loop(0, (work.steps - left) // 2, two, decode(0))
    for k in range(work.steps - left, work.steps - 1):
      parts = step(k, parts)
    multiply(work.steps - 1, parts)
    finish(work.steps - 1)
    # Nothing may read the sums before the products are waited for.
    return lax.optimization_barrier(acc[...])

  return pl.run_scoped(run, gpu.ACC((OUTPUTS, work.tile), jnp.float32))


def _kernel(refs: dict[str, Any], s: dict[str, Any], work: _Work) -> None:
  group = lax.axis_index("group")

  @gpu.nd_loop((work.count,), collective_axes="program")
  def _(info: Any) -> None:
    place = _Place(info, work)

    @pl.when(group == GROUPS)
    def _() -> None:
      # Copies need few registers. 40 for this group of 128 threads and 232 for the two
      # others are 64,512 of a multiprocessor's 65,536.
      gpu.set_max_registers(40, action="decrease")
      _fetch(refs, s, place, work)

    @pl.when(group < GROUPS)
    def _() -> None:
      gpu.set_max_registers(232, action="increase")
      y = _total(refs, s, place, group, work) * refs["unit"][0]
      y = gpu.layout_cast(y.astype(refs["out"].dtype), gpu.Layout.WGMMA_TRANSPOSED)
      # The results of the tile before may still be on their way from this memory.
      gpu.wait_smem_to_gmem(0, wait_read_only=True)
      s["out"].at[group].T[...] = y
      gpu.commit_smem()
      mine = pl.ds(place.first + group * OUTPUTS, OUTPUTS)
      gpu.copy_smem_to_gmem(s["out"].at[group], refs["out"].at[place.rows, mine])

  # A program's shared memory must be there until its last results have left it.
  gpu.wait_smem_to_gmem(0)

  @pl.when(group == GROUPS)
  def _() -> None:
    # A barrier may not end with an arrival that nothing waited for.
    program, programs = lax.axis_index("program"), lax.axis_size("program")
    tiles = lax.div(work.count - program + programs - 1, programs)
    for slot in range(STAGES):

      @pl.when(tiles * work.steps > slot)
      def _(slot: int = slot) -> None:
        gpu.barrier_wait(s["consumed"].at[slot])


def _scratch(work: _Work, x: Any, dtype: jax.typing.DTypeLike) -> dict[str, Any]:
  """Returns the shared memory of a program."""
  size = COLUMNS // work.planes
  scratch = {
    "x": device.tile(work.tile, size, x.dtype, STAGES, work.planes),
    "words": device.tile(_ACROSS, _WORDS, jnp.int16, STAGES),
    "out": device.tile(work.tile, OUTPUTS, dtype, GROUPS),
    "arrived": gpu.Barrier(num_arrivals=work.planes + 1, num_barriers=STAGES),
    "consumed": gpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
  }
  if work.interpret:
    scratch["stage"] = device.tile(OUTPUTS, size, x.dtype, GROUPS)
  return scratch


def obstacle(shape: tuple[int, int], outputs: int) -> str | None:
  """Returns why the kernels cannot multiply x of shape `(n, d)` by m outputs, or None.

  The device is not asked: see `device.hopper_obstacle`.
  """
  rows, width = shape
  if rows < ROWS or width % COLUMNS or outputs % _ACROSS:
    wanted = f"{ROWS} rows or more, widths of {COLUMNS} and outputs of {_ACROSS} each"
    return f"its Mosaic form takes {wanted}, got {[rows, width, outputs]}"
  return device.obstacle()


def _launch(
  name: str,
  x: jax.Array,
  weight: mxfp4.MXTensor,
  unit: jax.Array,
  *,
  decode: Callable[..., list[jax.Array]],
  dtype: jax.typing.DTypeLike,
  interpret: bool,
) -> jax.Array:
  """Runs the kernel on x `[planes, n, d / planes]`; `unit` multiplies the result."""
  wanted, x = x.shape[1], device.in_eights(x)
  planes, rows, _ = x.shape
  outputs, width = weight.shape
  # Half of the registers of a compute group hold the sums of a tile of 256 rows.
  largest = 256 // planes if jnp.dtype(dtype).itemsize == 2 else 128
  # At most the rows, so that the last tile can overlap the one before.
  tile = min(largest, 1 << (rows.bit_length() - 1))
  shape = tile, rows, outputs, width // COLUMNS
  work = _Work(*shape, planes, decode, interpret)
  # Four codes are a 16-bit word, and the scale bytes of a step's four blocks one of 32
  # bits.
  view = lambda a, kind, n: lax.bitcast_convert_type(a.reshape(outputs, -1, n), kind)
  inputs = {
    "x": x,
    "words": view(weight.codes, jnp.int16, 2),
    "scales": view(weight.scales, jnp.int32, 4),
    "unit": unit.reshape(1),
    "unit_byte": (codec.bits(unit) >> 23).reshape(1),
  }
  names = [*inputs, "out"]

  def body(*refs: Any, **scratch: Any) -> None:
    _kernel(dict(zip(names, refs, strict=True)), scratch, work)

  # The compiled kernel bears the function's name.
  body.__name__ = name
  call = gpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((rows, outputs), dtype),
    scratch_types=_scratch(work, x, dtype),
    grid=(min(lowering.multiprocessors(), work.count),),
    grid_names=("program",),
    num_threads=GROUPS + 1,
    thread_name="group",
    interpret=device.mode(interpret),
  )
  return call(*inputs.values())[:wanted]


def float8_product(
  x: jax.Array,
  weight: mxfp4.MXTensor,
  unit: jax.Array,
  *,
  dtype: jax.typing.DTypeLike,
  interpret: bool = False,
) -> jax.Array:
  """Multiplies E5M2 x `[n, d]` by a packed weight `[m, d]` that float8 holds.

  `unit` is the weight's scale, from `mxfp4_decode.float8_range`. A weight in E4M3 by
  that scale is exact in E5M2 too, whose table needs no subnormals.
  """
  keywords = {"decode": weights.as_float8, "dtype": dtype, "interpret": interpret}
  return _launch("mxjax_float8_product", x[None], weight, unit, **keywords)


def packed_product(
  x: jax.Array | mxfp4.MXTensor,
  weight: mxfp4.MXTensor,
  *,
  dtype: jax.typing.DTypeLike,
  interpret: bool = False,
) -> jax.Array:
  """Multiplies bfloat16 or packed x `[n, d]` by a packed weight `[m, d]`.

  XLA decodes packed x.
  """
  if isinstance(x, mxfp4.MXTensor):
    x = mxfp4.decode(x, jnp.bfloat16)
  keywords = {"decode": weights.as_bfloat16, "dtype": dtype, "interpret": interpret}
  one = jnp.float32(1)
  return _launch("mxjax_packed_product", weights.split(x), weight, one, **keywords)
