"""Packed weights decoded in registers, in the layouts of matrix instructions.

A thread loads 16-bit words of four codes. In `WGMMA_8BIT` a word's four values are one
register. In `WGMMA` a register holds two values, so the columns are taken in another
order: the first pairs of all words, then the second pairs. The inputs come in the same
order: see `split`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import codec
from mxjax.pallas_kernels.mosaic import device
from mxjax.pallas_kernels.mosaic.device import gpu
from mxjax.pallas_kernels.products import float8
from mxjax.pallas_kernels.products.float8 import BLOCKS, WORDS, in_order_of_blocks

COLUMNS = BLOCKS * mxfp4.BLOCK_SIZE
"""Columns of a step: the scale bytes of its blocks are one 32-bit word."""

# A selector of `prmt` names a byte in three bits; its fourth asks for that byte's sign
# alone and is masked. 0x5140 takes bytes that begin with the signs of codes 0 to 3,
# those of even codes from the word that is shifted by 4.
FLOAT8_PTX = """{
  .reg .b32 index, value, sign;
  and.b32 index, $1, 0x7777;
  prmt.b32 value, $2, $3, index;
  shl.b32 sign, $1, 4;
  prmt.b32 sign, sign, $1, 0x5140;
  and.b32 sign, sign, 0x80808080;
  or.b32 $0, value, sign;
}"""
"""From a word and a table of eight E5M2 magnitudes, in two registers, to four E5M2."""
# The same; 0x7362 takes the signs of codes 4 to 7.
HALVES_PTX = """{
  .reg .b32 index, low, high, sign, other;
  and.b32 index, $2, 0x77777777;
  prmt.b32 low, $3, $4, index;
  shr.u32 index, index, 16;
  prmt.b32 high, $3, $4, index;
  shl.b32 sign, $2, 4;
  prmt.b32 other, sign, $2, 0x7362;
  prmt.b32 sign, sign, $2, 0x5140;
  and.b32 sign, sign, 0x80808080;
  and.b32 other, other, 0x80808080;
  or.b32 $0, low, sign;
  or.b32 $1, high, other;
}"""
"""From a word of eight codes and the same table to the E5M2 of each of its halves."""
_TABLE = (0x3E3C3800, 0x04040400), (0x46444240, 0x04040404)
"""The E5M2 magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6, and what doubling them adds."""


def pair_ptx(pair: int) -> str:
  """Returns PTX from a word and a duplicated bfloat16 scale to two of its values."""
  # As `mxfp4_decode.bfloat16_ptx`, but with the product of two bfloat16 that Hopper
  # has.
  cut = ("and.b32 half, $1, 255;", "shr.b32 half, $1, 8;")[pair]
  return f"""{{
  .reg .b32 half, value;
  {cut}
  mul.lo.u32 value, half, 0x00040040;
  and.b32 value, value, 0x01C001C0;
  mul.lo.u32 half, half, 0x01001000;
  and.b32 half, half, 0x80008000;
  or.b32 value, value, half;
  mov.b32 half, 0x7E807E80;
  mul.rn.bf16x2 value, value, half;
  mul.rn.bf16x2 $0, value, $2;
}}"""


def split(x: jax.Array) -> jax.Array:
  """Returns `[n, d]` as first and second pairs of four columns, `[2, n, d / 2]`."""
  rows, width = x.shape
  pairs = x.reshape(rows, width // 4, 2, 2)
  return pairs.transpose(2, 0, 1, 3).reshape(2, rows, width // 2)


def _codes(word: jax.Array, positions: tuple[int, ...]) -> jax.Array:
  """Returns int32 codes of some positions, `[n, positions * words]`."""
  wide = word.astype(jnp.int32)
  parts = [(wide >> (4 * position)) & 15 for position in positions]
  return jnp.stack(parts, axis=-1).reshape(word.shape[0], -1)


def float8_values(word: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
  """Looks codes up in tables, E5M2 `[n, 4 w]`; see `FLOAT8_PTX`. All int32 `[n, w]`."""
  code = _codes(word, (0, 1, 2, 3))
  low, high = (jnp.repeat(table, 4, axis=1) for table in (low, high))
  value = jnp.where((code & 4) > 0, high, low) >> (8 * (code & 3))
  byte = (value & 255) | ((code & 8) << 4)
  return lax.bitcast_convert_type(byte.astype(jnp.uint8), float8.FORM)


def pair_values(pair: int) -> Any:
  """Returns the meaning of `pair_ptx`: int16 words, int32 scales to bfloat16."""

  def meaning(word: jax.Array, scale: jax.Array) -> jax.Array:
    value = codec.element(_codes(word, (2 * pair, 2 * pair + 1)))
    unit = codec.from_bits(jnp.repeat(scale, 2, axis=1) & codec.UPPER)
    return (value * unit).astype(jnp.bfloat16)

  return meaning


def _by_block(columns: list[jax.Array]) -> jax.Array:
  """Repeats a column `[64]` of each block for the words of its block."""
  rows = columns[0].shape[0]
  wide = [lax.broadcast_in_dim(c, (rows, WORDS), (0,)) for c in columns]
  return jnp.concatenate(wide, axis=1)


def _bytes(scales: jax.Array) -> list[jax.Array]:
  shifted = (lax.shift_right_logical(scales, jnp.int32(8 * i)) for i in range(BLOCKS))
  return [byte & 255 for byte in shifted]


def as_float8(
  words: jax.Array, scales: jax.Array, unit: jax.Array, interpret: bool
) -> list[jax.Array]:
  """Decodes int16 words `[64, 32]` to E5M2 `[64, 128]`, in units of 2^(unit - 127).

  `scales` is int32 `[64]`, four bytes each. Blocks with byte 0 are zeros, and the other
  bytes must be at most 13 above and below `unit`.
  """
  tables = []
  for start, step in _TABLE:
    # One product moves the exponents of four bytes at once: within the bounds on the
    # scale bytes no byte carries into the next or reaches its sign.
    columns = [
      jnp.where(byte == 0, 0, (byte - unit) * step + start) for byte in _bytes(scales)
    ]
    tables.append(_by_block(columns))
  keywords = {"layouts": [device.words_layout()] * 3, "layout": gpu.Layout.WGMMA_8BIT}
  operands = words, *tables
  return [
    device.by_ptx(FLOAT8_PTX, float8_values, *operands, **keywords, interpret=interpret)
  ]


def _half_values(word: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
  """Is the meaning of `HALVES_PTX`: int32 `[n, 16]` and tables `[n, 4]` to E5M2."""
  tables = (jnp.repeat(table, 4, axis=1) for table in (low, high))
  parts = [word & 0xFFFF, (word >> 16) & 0xFFFF]
  words = jnp.stack(parts, axis=-1).reshape(word.shape[0], -1)
  return in_order_of_blocks(
    float8_values(words, *(jnp.repeat(table, 2, axis=1) for table in tables))
  )


def by_blocks(
  words: jax.Array, scales: jax.Array, unit: jax.Array, interpret: bool
) -> jax.Array:
  """Decodes int32 words `[64, 16]` to E5M2 `[64, 128]` as `as_float8` does, faster.

  A thread decodes whole blocks, so that it has one scale a row and reads its codes at
  once. The columns come in the order of `in_order_of_blocks`; `scales`, uint8 `[64, 4]`
  in `words_layout`, has the bytes of the four blocks of a row, and `unit` is int32.
  """
  layout = device.words_layout()
  wide: Callable[[jax.Array], jax.Array] = lambda x: x.astype(jnp.int32)
  keywords = {"layouts": [layout], "layout": layout, "interpret": interpret}
  byte = device.by_ptx("mov.b32 $0, $1;", wide, scales, **keywords)
  tables = (
    jnp.where(byte == 0, 0, (byte - unit) * step + start) for start, step in _TABLE
  )
  return device.halves_by_ptx(
    HALVES_PTX, _half_values, words, *tables, interpret=interpret
  )


def as_bfloat16(
  words: jax.Array, scales: jax.Array, unit: jax.Array, interpret: bool
) -> list[jax.Array]:
  """Decodes like `as_float8`, in units of 1, to bfloat16 pairs, each `[64, 64]`."""
  del unit
  columns = []
  for byte in _bytes(scales):
    # As bfloat16, whose subnormal 1 << 6 is 2^-127.
    scale = jnp.where(byte == 0, 1 << 6, byte << 7)
    scale = jnp.where(byte == mxfp4.NOT_FINITE, codec.NAN >> 16, scale)
    columns.append(scale * 0x10001)
  keywords = {"layouts": [device.words_layout()] * 2, "layout": gpu.Layout.WGMMA}
  operands = words, _by_block(columns)
  return [
    device.by_ptx(
      pair_ptx(p), pair_values(p), *operands, **keywords, interpret=interpret
    )
    for p in (0, 1)
  ]
