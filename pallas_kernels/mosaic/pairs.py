"""Two bfloat16 in a register: rounding to legal values and packing, by PTX.

Functions work on `[64, 32]` elements in the layout `WGMMA`, two to a register, or on
int32 words of two, `[64, 16]`. Each PTX has its meaning in plain JAX beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import codec
from mxjax.pallas_kernels.mosaic import device
from mxjax.pallas_kernels.mosaic.device import gpu

_BLOCK = mxfp4.BLOCK_SIZE

UPPER_PTX = "prmt.b32 $0, $1, $2, 0x7632;"
"""From two float32 to their upper halves, two bfloat16."""

NEAREST_PTX = """{
  .reg .b32 size, other;
  and.b32 size, $1, 0x7FF87FF8;
  mul.rn.bf16x2 size, size, $2;
  mov.b32 other, 0x00800080;
  mul.rn.bf16x2 size, size, other;
  mov.b32 other, 0x00200020;
  add.u16x2 size, size, other;
  mov.b32 other, 0x01FF01FF;
  min.u16x2 size, size, other;
  and.b32 size, size, 0x01C001C0;
  mov.b32 other, 0x7E807E80;
  mul.rn.bf16x2 size, size, other;
  and.b32 other, $1, 0x80008000;
  or.b32 $0, size, other;
}"""
"""From two bfloat16 and the duplicated 2^-e to their nearest values, two bfloat16. The
bits are those of `mxfp4_encode.pair_ptx`; a product with 2^126 makes them values."""

CODES_PTX = """{
  .reg .b32 size, other;
  mov.b32 other, 0x00800080;
  mul.rn.bf16x2 size, $1, other;
  and.b32 size, size, 0x01C001C0;
  shr.b32 other, $1, 6;
  and.b32 other, other, 0x02000200;
  or.b32 size, size, other;
  mul.lo.u32 size, size, 4097;
  shr.b32 $0, size, 18;
}"""
"""From two legal bfloat16 values to a byte of two codes."""


def run(ptx: str, meaning: Any, layout: Any, *operands: Any, interpret: bool) -> Any:
  """Runs PTX on `[64, 32]` elements and, after them, words of two: `[64, 16]`."""
  is_whole = [operand.shape[1] == _BLOCK for operand in operands]
  words = device.words_layout()
  layouts = [gpu.Layout.WGMMA if whole else words for whole in is_whole]
  how = {"layouts": layouts, "layout": layout, "interpret": interpret}
  return device.by_ptx(ptx, meaning, *operands, **how)


def halves(word: jax.Array) -> jax.Array:
  """Returns float32 `[n, 2 m]` of the two bfloat16 in int32 words `[n, m]`."""
  pair = jnp.stack([word << 16, word & codec.UPPER], axis=-1)
  return codec.from_bits(pair.reshape(word.shape[0], -1))


def upper_words(x: jax.Array) -> jax.Array:
  """Returns the upper halves of float32 `[n, 32]`, two to an int32 word."""
  bits = lax.shift_right_logical(codec.bits(x), jnp.int32(16))
  even, odd = jnp.moveaxis(bits.reshape(x.shape[0], -1, 2), -1, 0)
  return even | (odd << 16)


def nearest_values(word: jax.Array, factor: jax.Array) -> jax.Array:
  """Encodes pairs of bfloat16 to legal values, bfloat16 `[n, 32]`; see `NEAREST_PTX`.

  `word` and `factor`, the duplicated bits of 2^-e, are int32 `[n, 16]`. A zero keeps
  the sign of what was rounded to it.
  """
  x = halves(word)
  exponent = mxfp4.SCALE_BIAS - jnp.repeat((factor >> 7) & 255, 2, axis=1)
  bits = codec.bits(x) & codec.UPPER_HALF
  index = codec.magnitude_index(bits, exponent, has_subnormals=False)
  return codec.copy_sign(codec.magnitude(index), x).astype(jnp.bfloat16)


def packed_codes(values: jax.Array) -> jax.Array:
  """Returns bytes of two codes, uint8 `[n, 16]`, of legal bfloat16 `[n, 32]`."""
  wide = values.astype(jnp.float32)
  return codec.pack(codec.code_of(wide, wide))
