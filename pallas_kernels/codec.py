"""MXFP4 arithmetic inside kernels: the rules of `mxjax.mxfp4` on tiles in registers.

Only what a GPU lowers well: integer operations on float bits, no tables, no gathers,
no logarithms. The paper's rules only (`floor` scales, ties to the larger magnitude).
"""

import jax
import jax.numpy as jnp
from jax import lax

from mxjax import mxfp4

SIGN = 0x7FFFFFFF
NAN = 0x7FC00000
_SMALLEST_FAST = -124
"""From this exponent up no subnormal reaches a nonzero code."""


def bits(x: jax.Array) -> jax.Array:
  """The int32 bits of float32 values."""
  return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(x: jax.Array) -> jax.Array:
  """The float32 values of int32 bits."""
  return lax.bitcast_convert_type(x, jnp.float32)


def block_exponent(largest: jax.Array) -> jax.Array:
  """The shared exponent from the bits of a block's largest magnitude, int32.

  Args:
    largest: int32, nonnegative.

  Returns:
    In [-127, 125], or 128 for inf and NaN; same shape.
  """
  field = largest >> 23
  exponent = jnp.maximum(field - 129, -127)
  return jnp.where(field == 255, 128, exponent)


def _index(scaled: jax.Array, exponent: jax.Array) -> jax.Array:
  """Magnitude index 0..7 of magnitude bits in units of 2^exponent.

  From 1 up, adding half of the kept mantissa bit rounds ties up and carries into the
  exponent; below 1 the quantum is one half, so two thresholds decide.
  """
  unit = exponent << 23
  from_one = (scaled + (0x200000 - (126 << 23)) - unit) >> 22
  quarter = scaled - unit >= (125 << 23)
  three_quarters = scaled - unit >= ((126 << 23) | (1 << 22))
  below_one = quarter.astype(jnp.int32) + three_quarters.astype(jnp.int32)
  return jnp.minimum(jnp.maximum(from_one, below_one), 7)


def magnitude_index(magnitude: jax.Array, exponent: jax.Array) -> jax.Array:
  """`mxfp4.magnitude_index` on bits, with a detour for tiles that have tiny blocks.

  Args:
    magnitude: int32 bits of |x|, `[rows, 32]`.
    exponent: int32 `[rows, 1]`.

  Returns:
    int32 in 0..7, `[rows, 32]`.
  """

  def tiny() -> jax.Array:
    # An integer mantissa converts exactly, which normalizes subnormals.
    mantissa = bits(magnitude.astype(jnp.float32))
    shift = (jnp.minimum(exponent, _SMALLEST_FAST) + 149) << 23
    normal = magnitude - (exponent << 23)
    scaled = jnp.where(magnitude < (1 << 23), mantissa - shift, normal)
    return _index(scaled, jnp.zeros_like(exponent))

  def normal() -> jax.Array:
    return _index(magnitude, exponent)

  return lax.cond(jnp.min(exponent) < _SMALLEST_FAST, tiny, normal)


def encode(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Nearest codes and exponents of a tile, one block a row.

  Args:
    x: float32 `[rows, 32]`.

  Returns:
    int32 codes 0..15 `[rows, 32]` and int32 exponents `[rows, 1]`.
  """
  magnitude = bits(x) & SIGN
  exponent = block_exponent(jnp.max(magnitude, axis=1))[:, None]
  sign = (bits(x) >> 28) & 8
  return magnitude_index(magnitude, exponent) | sign, exponent


def element(codes: jax.Array) -> jax.Array:
  """float32 element values of int32 codes, by way of float16.

  A code's three low bits are the top of a float16 whose exponent is 14 too low, and
  float16 has the subnormal that the code 0.5 then is. The product with 2^14 is taken
  in float16: XLA would move a float32 factor over to the scale, where it can overflow.
  """
  half = ((codes & 7) << 9) | ((codes & 8) << 12)
  values = lax.bitcast_convert_type(half.astype(jnp.int16), jnp.float16)
  return (values * jnp.float16(16384.0)).astype(jnp.float32)


def scale(byte: jax.Array) -> jax.Array:
  """float32 2^(byte - 127) of int32 bytes; NaN for 255, subnormal for 0."""
  normal = jnp.where(byte == 0, 1 << 22, byte << 23)
  return from_bits(jnp.where(byte == mxfp4.NOT_FINITE, NAN, normal))


def scale_of(exponent: jax.Array) -> jax.Array:
  """float32 2^exponent; NaN for the not-finite mark 128."""
  return scale(exponent + mxfp4.SCALE_BIAS)


def pack(codes: jax.Array) -> jax.Array:
  """int32 codes `[rows, columns]` to uint8 `[rows, columns / 2]`, even column low."""
  rows, width = codes.shape
  pairs = codes.reshape(rows, width // 2, 2)
  weights = 1 + 15 * lax.broadcasted_iota(jnp.int32, (1, 1, 2), 2)
  return jnp.sum(pairs * weights, axis=2).astype(jnp.uint8)


def spread(scales: jax.Array, columns_each: int) -> jax.Array:
  """Repeats each of `[rows, blocks]` for the columns of its block."""
  rows, blocks = scales.shape
  wide = jnp.broadcast_to(scales[:, :, None], (rows, blocks, columns_each))
  return wide.reshape(rows, blocks * columns_each)
