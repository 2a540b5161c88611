"""MXFP4 arithmetic inside kernels: the rules of `mxfp4.py` on register tiles.

The code uses only what a GPU lowers well: integer operations on float bits, no tables,
gathers or logarithms. It supports only the paper's rules (`floor` scales, ties to the
larger magnitude).
"""

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import mxfp4

SIGN = -(1 << 31)
"""The sign bit of a float32."""
UPPER = -(1 << 16)
"""Mask of the upper half of a float32, a bfloat16."""
UPPER_HALF = 0x7FFF0000
"""The same mask without the sign."""
NAN = 0x7FC00000
# A quarter of 2^-124 is 2^-126, the smallest normal float32, and below a quarter of the
# scale a value rounds to zero.
_SMALLEST_FAST = -124
"""From this exponent up no subnormal reaches a nonzero code."""


def bits(x: jax.Array) -> jax.Array:
  """Returns the int32 bits of float32 values."""
  return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(x: jax.Array) -> jax.Array:
  """Returns the float32 values of int32 bits."""
  return lax.bitcast_convert_type(x, jnp.float32)


def block_exponent(largest: jax.Array, *, rounds_up: bool = False) -> jax.Array:
  """Returns the shared exponent from the int32 bits of a block's largest magnitude.

  The result is int32 in [-127, 125], or to 126 if exponents round up as under the scale
  rule `even`, or 128 for inf and NaN.
  """
  field = largest >> 23
  # From mantissa 1.75 up, the carry reaches the exponent.
  rounded = (largest + (1 << 21)) >> 23 if rounds_up else field
  # The largest E2M1 value, 6, is 1.5 * 2^2, so its exponent lies 2 above that of the
  # scale: 129 is the bias 127 and 2. Byte 0 stands for -127, the least.
  exponent = jnp.maximum(rounded - 129, -127)
  return jnp.where(field == 255, 128, exponent)


def nearest_index(size: jax.Array) -> jax.Array:
  """Returns the index 0..7 of the legal value nearest to a size, at most 6.

  From 1 up, the legal values are 2^22 apart in float32 bits, so adding half of that
  rounds ties up and carries into the exponent. Below 1, adding 1.25 as a float makes
  the legal values 2^22 apart as well. Each number is too low where the other applies.

  `size` is nonnegative float32. The result is exact below 8 for at most 8 significant
  bits; with more bits, a sum may round up to a tie.
  """
  # 1.0 is 254 << 22 in bits and stands for index 0: a sum with 1.25 puts zero half a
  # step above it. From 1 up two steps are added, because 1 has the index 2.
  below_one = bits(size + 1.25)
  from_one = bits(size) + ((1 << 21) + (2 << 22))
  largest = jnp.maximum(below_one, from_one)
  # Beyond 6 a value saturates.
  return (jnp.minimum(largest, (254 + 7) << 22) >> 22) - 254


def magnitude_index(
  magnitude: jax.Array, exponent: jax.Array, *, has_subnormals: bool
) -> jax.Array:
  """Computes `mxfp4.magnitude_index` from bits, int32 in 0..7, `[rows, 32]`.

  No boundary between two codes has more than three significant bits, so the upper half
  of the bits, a bfloat16 rounded toward zero, is sufficient. `magnitude` is int32 bits
  of |x|, `[rows, 32]`; `exponent` is int32 `[rows, 1]`. `has_subnormals` is false where
  XLA on a CPU flushes subnormals: tiny blocks are encoded with integers there.
  """
  magnitude &= UPPER_HALF

  def tiny() -> jax.Array:
    # Converting an integer mantissa is exact and normalizes subnormals.
    mantissa = bits(magnitude.astype(jnp.float32))
    # A subnormal is its mantissa times 2^-149. Rows of larger exponents encode their
    # subnormals to zero by this shift, too, while 149 + 128 would run into the sign.
    shift = (jnp.minimum(exponent, _SMALLEST_FAST) + 149) << 23
    normal = magnitude - (exponent << 23)
    scaled = jnp.where(magnitude < (1 << 23), mantissa - shift, normal)
    # The bits of zero, and of what is far below the scale, have turned negative.
    return nearest_index(from_bits(jnp.maximum(scaled, 0)))

  def normal() -> jax.Array:
    return nearest_index(from_bits(magnitude) * inverse_scale_of(exponent))

  if has_subnormals:
    return normal()
  return lax.cond(jnp.min(exponent) < _SMALLEST_FAST, tiny, normal)


def encode(x: jax.Array, *, has_subnormals: bool) -> tuple[jax.Array, jax.Array]:
  """Encodes a tile float32 `[rows, 32]`, one block per row; see `magnitude_index`.

  Returns int32 indices 0..7 `[rows, 32]` and int32 exponents `[rows, 1]`.
  """
  # The upper half contains the exponent, so it also yields the block's exponent.
  magnitude = bits(x) & UPPER_HALF
  exponent = block_exponent(jnp.max(magnitude, axis=1))[:, None]
  index = magnitude_index(magnitude, exponent, has_subnormals=has_subnormals)
  return index, exponent


def with_sign(index: jax.Array, x: jax.Array) -> jax.Array:
  """Returns int32 codes 0..15 from magnitude indices and the signs of float32 x."""
  return index | ((bits(x) >> 28) & 8)


def code_of(value: jax.Array) -> jax.Array:
  """Returns int32 codes of legal float32 values, zeros of both signs included."""
  return with_sign(nearest_index(jnp.abs(value)), value)


def copy_sign(magnitude: jax.Array, x: jax.Array) -> jax.Array:
  """Returns nonnegative float32 magnitudes with the signs of float32 x."""
  return from_bits(bits(magnitude) | (bits(x) & SIGN))


def element(codes: jax.Array) -> jax.Array:
  """Returns float32 element values of int32 codes, by way of float16.

  A code's three low bits are the top of a float16 whose exponent is 14 too low; the
  code for 0.5 becomes a float16 subnormal. The product with 2^14 is taken in float16,
  because XLA would move a float32 factor to the scale, where it can overflow.
  """
  return _from_half(((codes & 7) << 9) | ((codes & 8) << 12))


def magnitude(index: jax.Array) -> jax.Array:
  """Returns float32 magnitudes of int32 indices 0..7."""
  return _from_half(index << 9)


def _from_half(half: jax.Array) -> jax.Array:
  values = lax.bitcast_convert_type(half.astype(jnp.int16), jnp.float16)
  return (values * jnp.float16(16384.0)).astype(jnp.float32)


def scale(byte: jax.Array) -> jax.Array:
  """Returns float32 2^(byte - 127) of int32 bytes; NaN for 255, subnormal for 0."""
  normal = jnp.where(byte == 0, 1 << 22, byte << 23)
  return from_bits(jnp.where(byte == mxfp4.NOT_FINITE, NAN, normal))


def inverse_scale_of(exponent: jax.Array) -> jax.Array:
  """Returns float32 2^-exponent; 0 for the non-finite mark 128."""
  return from_bits((mxfp4.SCALE_BIAS - jnp.minimum(exponent, 127)) << 23)


def scale_of(exponent: jax.Array) -> jax.Array:
  """Returns float32 2^exponent; NaN for the non-finite mark 128."""
  return scale(exponent + mxfp4.SCALE_BIAS)


def pack(codes: jax.Array) -> jax.Array:
  """Packs int32 codes `[n, d]` to uint8 `[n, d / 2]`, even column low."""
  rows, width = codes.shape
  pairs = codes.reshape(rows, width // 2, 2)
  # A sum with the weights 1 and 16, because Triton cannot take every second column of
  # an array in registers.
  weights = 1 + 15 * lax.broadcasted_iota(jnp.int32, (1, 1, 2), 2)
  return jnp.sum(pairs * weights, axis=2).astype(jnp.uint8)


def spread(scales: jax.Array, columns_each: int) -> jax.Array:
  """Repeats each scale of `[rows, blocks]` for the columns of its block."""
  rows, blocks = scales.shape
  wide = jnp.broadcast_to(scales[:, :, None], (rows, blocks, columns_each))
  return wide.reshape(rows, blocks * columns_each)
