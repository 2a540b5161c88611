"""Two bfloat16 in a register: rounding to legal values and packing, by PTX.

Each PTX has its meaning in plain JAX beside it, on 16-bit halves of any order or on
int32 words of two, the even column's half lower. A factor is the bits of 2^-e, e the
exponent of the block.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import codec

SIZE_PTX = "and.b32 $0, $1, 0x7FFF7FFF;"
"""From two bfloat16 to their magnitudes."""
UPPER_PTX = "prmt.b32 $0, $1, $2, 0x7632;"
"""From two float32 to their upper halves, two bfloat16."""

_ROUNDED = """
  .reg .b32 size, other;
  and.b32 size, $1, 0x7FF87FF8;
  mul.rn.bf16x2 size, size, $2;
  mov.b32 other, 0x00800080;
  mul.rn.bf16x2 size, size, other;
  mov.b32 other, 0x00200020;
  add.u16x2 size, size, other;
  mov.b32 other, 0x01FF01FF;
  min.u16x2 size, size, other;
  and.b32 size, size, 0x01C001C0;"""
"""From two bfloat16 and the duplicated factor to their magnitudes' codes at bit 6.

With an additional factor of 2^-126, the legal values below 1 fall on subnormals and all
legal values are 2^6 apart in the bits, so adding half of that and truncating rounds
ties up. Four mantissa bits are as decisive as seven and keep the products exact where
it matters."""
_JOINED = """
  shr.b32 other, $1, 6;
  and.b32 other, other, 0x02000200;
  or.b32 size, size, other;
  mul.lo.u32 size, size, 4097;
  shr.b32 $0, size, 18;"""
"""From two codes at bit 6 to a byte: the signs go above the three magnitude bits, and a
product with 2^12 + 1 joins the codes."""

CODES_PTX = f"{{{_ROUNDED}{_JOINED}\n}}"
"""From two bfloat16 and the duplicated factor to a byte of their nearest codes."""

NEAREST_PTX = f"""{{{_ROUNDED}
  mov.b32 other, 0x7E807E80;
  mul.rn.bf16x2 size, size, other;
  and.b32 other, $1, 0x80008000;
  or.b32 $0, size, other;
}}"""
"""From two bfloat16 and the duplicated factor to their nearest values, two bfloat16: a
product with 2^126 makes values of codes at bit 6."""

PACKED_PTX = f"""{{
  .reg .b32 size, other;
  mov.b32 other, 0x00800080;
  mul.rn.bf16x2 size, $1, other;
  and.b32 size, size, 0x01C001C0;{_JOINED}
}}"""
"""From two legal bfloat16 values to a byte of two codes."""


def upper(x: jax.Array) -> jax.Array:
  """Returns the upper halves of float32, int16."""
  return lax.shift_right_logical(codec.bits(x), jnp.int32(16)).astype(jnp.int16)


def halves(word: jax.Array) -> jax.Array:
  """Returns the halves of words `[n, m]`, int16 `[n, 2 m]`."""
  pair = jnp.stack([word, word >> 16], axis=-1)
  return pair.reshape(word.shape[0], -1).astype(jnp.int16)


def largest(word: jax.Array) -> jax.Array:
  """Returns the bits of each row's largest magnitude, as float32, int32 `[n]`.

  The upper half of a word decides, whatever is in the lower half.
  """
  size = word & 0x7FFF7FFF
  return jnp.maximum(jnp.max(size, axis=1), jnp.max(size << 16, axis=1))


def factor_words(exponent: jax.Array) -> jax.Array:
  """Returns the duplicated factor of exponents, in words."""
  bits = codec.bits(codec.inverse_scale_of(exponent))
  return lax.shift_right_logical(bits, jnp.int32(16)) * 0x10001


def nearest(half: jax.Array, factor: jax.Array) -> jax.Array:
  """Rounds bfloat16 to legal values, in units of the scale; see `NEAREST_PTX`.

  Both are int16 bits. A zero keeps the sign of what was rounded to it.
  """
  index, x = _nearest_index(half, factor)
  return codec.copy_sign(codec.magnitude(index), x).astype(jnp.bfloat16)


def _nearest_index(half: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the index of the nearest magnitude, and the float32 that was rounded."""
  x = codec.from_bits(half.astype(jnp.int32) << 16)
  exponent = mxfp4.SCALE_BIAS - ((factor.astype(jnp.int32) >> 7) & 255)
  size = codec.bits(x) & codec.UPPER_HALF
  return codec.magnitude_index(size, exponent, has_subnormals=False), x


def nearest_values(word: jax.Array, factor: jax.Array) -> jax.Array:
  """Rounds like `nearest`, from words `[n, 16]` to bfloat16 `[n, 32]`."""
  return nearest(halves(word), halves(factor))


def nearest_codes(word: jax.Array, factor: jax.Array) -> jax.Array:
  """Encodes words `[n, 16]` to bytes, int32 `[n, 16]`; see `CODES_PTX`."""
  code = codec.with_sign(*_nearest_index(halves(word), halves(factor)))
  return _joined(code)


def packed_codes(values: jax.Array) -> jax.Array:
  """Returns bytes of two codes, uint8 `[n, 16]`, of legal bfloat16 `[n, 32]`."""
  return _joined(codec.code_of(values.astype(jnp.float32))).astype(jnp.uint8)


def _joined(codes: jax.Array) -> jax.Array:
  even, odd = jnp.moveaxis(codes.reshape(codes.shape[0], -1, 2), -1, 0)
  return even | (odd << 4)
