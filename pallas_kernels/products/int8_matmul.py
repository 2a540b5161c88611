"""Products of a few rows with packed weights, in integers that are exact.

The kernel computes `y = x W^T` block by block: a sum of 32 products of integers
(`int8.py`), times the two scales, which are powers of two, and a float32 sum over the
blocks, whose order is all that differs from the reference. Reading the weights should
limit such a product, and what it costs to decode them to bfloat16 does. Here a thread
takes a block: a byte permutation looks four codes up in a table of eight magnitudes,
and gives zero where a code is negative, because its selector's fourth bit asks for the
sign of a table's byte. With the codes' signs turned it finds the negative ones, and the
difference of two sums of products is the block's.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import mxfp4
from mxjax.numerics.precision import rounded
from mxjax.pallas_kernels import codec, lowering
from mxjax.pallas_kernels.products.int8 import UNIT, Int8Inputs
from mxjax.pallas_kernels.products.output_tiles import OutputTiles

WORDS = mxfp4.BLOCK_SIZE // 8
"""32-bit words of a block's codes; its integers take twice as many."""
_TABLE = 0x03020100, 0x0C080604
"""Twice the magnitudes of the codes 0 to 7, a byte each."""
_NEVER = 0x7F7F7F7F
"""No word of inputs: integers are at most 12."""


@dataclasses.dataclass(frozen=True)
class Tile:
  """Outputs of a program and blocks of a step, powers of two, and launch parameters.

  `splits` programs share the columns of one output tile; `ahead` loads a step's
  weights while the one before it is processed.
  """

  outputs: int = 32
  blocks: int = 16
  splits: int = 1
  warps: int = 4
  ahead: bool = False

  @classmethod
  def of(cls, outputs: Sequence[int], width: int) -> "Tile":
    """Returns the tile for weights `[outputs, width]` that share a launch."""
    tiles = sum(-(-m // cls.outputs) for m in outputs)
    steps = -(-width // (cls.blocks * mxfp4.BLOCK_SIZE))
    return cls(splits=lowering.shares(tiles, steps, at_once=8))

  @classmethod
  def undivided(cls, outputs: Sequence[int], width: int) -> "Tile":
    """Returns a tile for the same linears of which no two programs share the columns.

    Twice the threads take many columns of few outputs, as many values each as by `of`.
    The sums end within the program, which may then add to them.
    """
    tile = cls.of(outputs, width)
    if tile.splits == 1:
      return tile
    blocks = min(128, 1 << (width // mxfp4.BLOCK_SIZE - 1).bit_length())
    return cls(2 * cls.outputs * cls.blocks // blocks, blocks, warps=2 * cls.warps)


@dataclasses.dataclass(frozen=True)
class _Work(OutputTiles):
  """Static properties of a launch."""

  tile: Tile
  rows: int
  width: int
  outputs: tuple[int, ...]
  interpret: bool
  dtype: jax.typing.DTypeLike = jnp.float32

  @property
  def steps(self) -> int:
    """Returns the number of steps over the columns, of all programs of a tile."""
    return -(-self.width // (self.tile.blocks * mxfp4.BLOCK_SIZE))

  def exist(self, step: jax.Array, of_a_block: int) -> jax.Array | None:
    """Returns which of a step's words of all blocks exist; None if all do."""
    count, blocks = self.tile.blocks * of_a_block, self.width // mxfp4.BLOCK_SIZE
    if blocks % self.tile.blocks == 0:
      return None
    return step * count + lax.iota(jnp.int32, count) < blocks * of_a_block


def block_ptx() -> str:
  """Returns PTX from the words of a block's codes, then of its integers, to the sum.

  The last operand is the lower half of the table. A constant, or whatever is the same
  for all threads, the compiler would copy to another register for every look-up.
  """
  low, high = f"${1 + 3 * WORDS}", f"{_TABLE[1]:#010x}"
  lines = [".reg .b32 code, other, bytes, plus, minus;"]
  lines += ["mov.b32 plus, 0;", "mov.b32 minus, 0;"]
  for word in range(WORDS):
    source = f"${1 + word}"
    lines += [f"xor.b32 other, {source}, 0x88888888;"]
    for half in range(2):
      x = f"${1 + WORDS + 2 * word + half}"
      code = source if half == 0 else "code"
      if half:
        lines += [f"shr.u32 code, {source}, 16;", "shr.u32 other, other, 16;"]
      for total, selector in (("plus", code), ("minus", "other")):
        lines += [f"prmt.b32 bytes, {low}, {high}, {selector};"]
        lines += [f"dp4a.s32.s32 {total}, bytes, {x}, {total};"]
  lines += ["sub.s32 $0, plus, minus;"]
  return "{\n  " + "\n  ".join(lines) + "\n}"


def scale_ptx() -> str:
  """Returns PTX from scale bytes to the bits of float32 2^(byte - 127), NaN for 255."""
  # 0x00400000 is 2^-127, for the byte 0. Adding zero times the scale makes NaN of
  # infinity, the byte 255, and changes no other.
  return """{
  .reg .b32 value;
  .reg .f32 scale;
  shl.b32 value, $1, 23;
  max.s32 value, value, 0x00400000;
  mov.b32 scale, value;
  fma.rn.f32 scale, scale, 0f00000000, scale;
  mov.b32 $0, scale;
}"""


def scales(byte: jax.Array, *, interpret: bool) -> jax.Array:
  """Returns float32 2^(byte - 127) of any integer bytes; see `scale_ptx`."""
  meaning = lambda byte: codec.bits(codec.scale(byte))
  wide = byte.astype(jnp.int32)
  return codec.from_bits(
    lowering.by_ptx(scale_ptx(), meaning, wide, interpret=interpret)
  )


def _meaning(*words: jax.Array) -> jax.Array:
  """Computes what `block_ptx` does."""
  total = jnp.zeros_like(words[0])
  for place in range(mxfp4.BLOCK_SIZE):
    code = lax.shift_right_logical(words[place // 8], jnp.int32(4 * (place % 8))) & 15
    x = words[WORDS + place // 4] << (24 - 8 * (place % 4))
    # Shifts to the left and back extend the sign of a byte.
    total += (codec.element(code) / UNIT).astype(jnp.int32) * (x >> 24)
  return total


def _words(packed: jax.Array, count: int) -> list[jax.Array]:
  """Splits the last axis, blocks of `count` words, into each word of all blocks."""
  parts = [packed]
  while count > 1:
    # Only an axis of two can be split: a place's lowest bit first.
    pairs = [part.reshape(*part.shape[:-1], -1, 2) for part in parts]
    split = [lax.split(pair, (1, 1), axis=pair.ndim - 1) for pair in pairs]
    parts = [lax.squeeze(each[bit], (-1,)) for bit in (0, 1) for each in split]
    count //= 2
  return parts


def _kernel(operands: Any, *out_refs: Any, work: _Work) -> None:
  index, split = lowering.program_id(0), lowering.program_id(1)
  branch = lambda i: functools.partial(
    _output_tile, *operands[i], out_refs[i], (index, split), i, work
  )
  branches = list(map(branch, range(len(work.outputs))))
  lowering.switch(work.linear_of(index), branches)


def _output_tile(
  x_refs: tuple[Any, Any],
  codes_ref: Any,
  scales_ref: Any,
  onto_ref: Any,
  out_ref: Any,
  place: tuple[jax.Array, jax.Array],
  linear: int,
  work: _Work,
) -> None:
  """Computes and stores one tile of one linear's output, or a split's share of it."""
  tile, keywords = work.tile, {"interpret": work.interpret}
  index, split = place[0] - work.first(linear), place[1]
  mine = lowering.tail_mask(work.outputs[linear], tile.outputs, index)
  steps = -(-work.steps // tile.splits)

  def columns(step: jax.Array, of_a_block: int) -> tuple[Any, jax.Array | None]:
    count = tile.blocks * of_a_block
    return lowering.columns(step * count, count), work.exist(step, of_a_block)

  def of_weight(ref: Any, step: jax.Array, of_a_block: int) -> jax.Array:
    here, exist = columns(step, of_a_block)
    return lowering.load(ref.at[:, here], mine, exist)

  def of_input(ref: Any, row: int, step: jax.Array, of_a_block: int) -> jax.Array:
    here, exist = columns(step, of_a_block)
    return lowering.load(ref.at[jnp.int32(row), here], exist)

  def fetch(step: jax.Array) -> tuple[jax.Array, jax.Array]:
    step = split * steps + step
    return of_weight(codes_ref, step, WORDS), of_weight(scales_ref, step, 1)

  def add(
    step: jax.Array, carry: tuple[Any, list[jax.Array]]
  ) -> tuple[Any, list[jax.Array]]:
    loaded, totals = carry
    if tile.ahead:
      # The last step loads its own weights again, which are in the cache.
      following = fetch(jnp.minimum(step + 1, steps - 1))
    else:
      following, loaded = loaded, fetch(step)
    step = split * steps + step
    codes = _words(loaded[0], WORDS)
    scale = scales(loaded[1], **keywords)
    added = []
    for row, total in enumerate(totals):
      values = _words(of_input(x_refs[0], row, step, 2 * WORDS), 2 * WORDS)
      wide = [jnp.broadcast_to(value[None, :], scale.shape) for value in values]
      sums = lowering.by_ptx(block_ptx(), _meaning, *codes, *wide, table, **keywords)
      unit = scales(of_input(x_refs[1], row, step, 1), **keywords)
      # One scale after the other: their product may lie outside of float32.
      added.append(total + sums.astype(jnp.float32) * scale * unit[None, :])
    return following, added

  read = _words(of_input(x_refs[0], 0, jnp.int32(0), 2 * WORDS), 2 * WORDS)[0]
  # The lower half of the table, by a condition that the compiler cannot know.
  low = jnp.where(read == _NEVER, 0, _TABLE[0])
  table = jnp.broadcast_to(low[None, :], (tile.outputs, tile.blocks))
  zeros = jnp.zeros((tile.outputs, tile.blocks), jnp.float32)
  first = fetch(jnp.int32(0)) if tile.ahead else None
  _, totals = lax.fori_loop(0, steps, add, (first, [zeros] * work.rows))
  for row, total in enumerate(totals):
    # Integers of both operands count halves.
    y = UNIT * UNIT * jnp.sum(total, axis=1)
    here = jnp.int32(row)
    if onto_ref is not None:
      # What is added is what would have been written.
      y = _rounded(y, work).astype(jnp.float32)
      y += lowering.load(onto_ref.at[here, :], mine).astype(jnp.float32)
    lowering.store(out_ref.at[here, :], y.astype(out_ref.dtype), mine)


def _rounded(y: jax.Array, work: _Work) -> jax.Array:
  """Rounds sums to the results' dtype, which a compiler would leave out on a CPU."""
  narrow = y.astype(work.dtype)
  return rounded(narrow) if work.interpret else narrow


def _operands(
  x: Int8Inputs, weight: mxfp4.MXTensor, onto: jax.Array | None
) -> tuple[Any, jax.Array, jax.Array, jax.Array | None]:
  """Returns one linear's parts of x, words of the weight, its scales, and `onto`."""
  view = lambda a: lax.bitcast_convert_type(a.reshape(len(a), -1, 4), jnp.int32)
  return (view(x.values), x.scales), view(weight.codes), weight.scales, onto


def _specs(linear: int, adds: bool, work: _Work) -> tuple[Any, lowering.BlockSpec]:
  """Returns block specs of `_operands` and of the output."""
  tile, spec = work.tile, lowering.BlockSpec
  blocks = work.steps * tile.blocks
  sizes = lambda *words: [blocks * count for count in words]
  x = tuple(spec((work.rows, n), lambda i, j: (0, 0)) for n in sizes(2 * WORDS, 1))
  here = functools.partial(work.own, linear)
  weight = tuple(
    spec((tile.outputs, n), lambda i, j: (here(i), 0)) for n in sizes(WORDS, 1)
  )
  out = spec((None, work.rows, tile.outputs), lambda i, j: (j, 0, here(i)))
  onto = spec((work.rows, tile.outputs), lambda i, j: (0, here(i))) if adds else None
  return (x, *weight, onto), out


def launch(
  inputs: Sequence[Int8Inputs],
  weights: Sequence[mxfp4.MXTensor],
  *,
  dtype: jax.typing.DTypeLike = jnp.float32,
  tile: Tile | None = None,
  onto: Sequence[jax.Array] | None = None,
  interpret: bool = False,
) -> list[jax.Array]:
  """Runs the kernel on each x `[n, d]` and W `[m, d]`; returns `[n, m]` for each.

  All x have one shape; the number of outputs may differ. `onto` has for each what its
  result, rounded to `dtype`, is added to, `[n, m]` in `dtype`; the tile must then be
  undivided.
  """
  (rows, width), outputs = inputs[0].shape, tuple(w.shape[0] for w in weights)
  tile = Tile.of(outputs, width) if tile is None else tile
  assert onto is None or tile.splits == 1
  added = onto or [None] * len(outputs)
  work = _Work(tile, rows, width, outputs, interpret, dtype)
  specs = [_specs(i, onto is not None, work) for i in range(len(outputs))]
  # Partial sums stay in float32 and are rounded once, after they are added.
  partial_dtype = dtype if tile.splits == 1 else jnp.float32
  partials = lowering.launch(
    functools.partial(_kernel, work=work),
    tuple(map(_operands, inputs, weights, added)),
    name="mxfp4_int8_matmul",
    grid=(work.first(len(outputs)), tile.splits),
    in_specs=[tuple(operands for operands, _ in specs)],
    out_specs=[out for _, out in specs],
    out_shape=[
      jax.ShapeDtypeStruct((tile.splits, rows, m), partial_dtype) for m in outputs
    ],
    warps=tile.warps,
    interpret=interpret,
  )
  if tile.splits == 1:
    return [y[0] for y in partials]
  return [y.sum(0).astype(dtype) for y in partials]
