"""Vectors of E4M3 floats that share one power-of-two scale, for a key-value cache.

E4M3 (E4M3FN of the OCP 8-bit floating point specification) has four exponent bits of
bias 7, three mantissa bits, no infinity, and 448 as its largest value. The scale of a
vector is the least power of two at which its largest absolute value is at most 448, so
no element saturates.

Why a power of two, and not the largest value over 448: E4M3 has the same relative
precision at every normal exponent, so the finer scale gains little unless the largest
value, which it makes exact, dominates. On Gaussian vectors of 64 its root-mean-square
error is 0.0251, and 0.0266 here, which `tests/mxjax/numerics/test_e4m3.py` measures;
`benchmarks/results/e4m3_cache.json` has those of models. With powers of two, the
division is exact and each element is rounded once; decoded values are exact in
bfloat16; a product by the scale has the same bits before a sum and after it; and a
scale is one byte, E8M0 as in MXFP4, instead of four.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import float_bits, pytree_nodes

MAX = 448.0
"""The largest E4M3 value: 1.75 x 2^8."""
_MANTISSA_BITS = 3
_DROPPED = 23 - _MANTISSA_BITS
_ABOVE_MAX = (1 << 23) - 1 - (0b110 << _DROPPED)
"""Added to the bits of a float32, it carries into the exponent if the mantissa exceeds
that of `MAX`, 1.75."""
_NAN = 255
"""The scale of a vector that is not finite; E8M0's NaN."""


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class ScaledE4M3:
  """Vectors along the last axis as E4M3 codes with a scale each; made by `encode`.

  A code c of scale byte b is the value E4M3(c) x 2^(b - 127); byte 255 makes a whole
  vector NaN.

  Attributes:
    codes: uint8 `[..., n]`, the bits of E4M3 floats.
    scales: uint8 `[...]`, E8M0 bytes.
  """

  codes: jax.Array
  scales: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the values, `[..., n]`."""
    return self.codes.shape

  def decode(self, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the values `[..., n]` in `dtype`, float32 or bfloat16, exactly.

    There are two exceptions: a backend that flushes subnormal numbers, as XLA's CPU
    does, may return zero for values below 2^-126, and 2^128 is infinity.
    """
    wide = lax.bitcast_convert_type(self.codes, jnp.float8_e4m3fn).astype(jnp.float32)
    factors = float_bits.power_of_two(self.scales.astype(jnp.int32) - 127)
    return (wide * factors[..., None]).astype(dtype)


def encode(x: jax.Array) -> ScaledE4M3:
  """Rounds vectors along the last axis to the nearest E4M3, ties to even.

  Every element is within 2^-4 of its own size of the result, or within 2^-10 scales if
  that is more. Zero keeps its sign. A vector that holds NaN or infinity becomes NaN as
  a whole. Elements within 1/32 of 2^128 become infinity.

  Exception: a backend that flushes subnormal numbers, as XLA's CPU does, makes a zero
  of the same sign of elements below 2^-126.

  The rounding is written in integers: XLA may leave out a conversion to a narrow float
  and back, and converts by way of float16 on some backends.

  Args:
    x: float32 or bfloat16 `[..., n]`, n at least 1.

  Returns:
    Codes `[..., n]` and one scale for each vector, `[...]`.
  """
  wide = x.astype(jnp.float32)
  largest = jnp.max(float_bits.magnitude_bits(wide), axis=-1)
  # 448 is 1.75 x 2^8. Neither a scale nor its inverse is subnormal.
  scales = jnp.clip(((largest + _ABOVE_MAX) >> 23) - 8, 1, 254)
  scaled = wide * float_bits.power_of_two(127 - scales)[..., None]
  magnitude = float_bits.magnitude_bits(scaled)
  # To the nearest, ties to even; the exponent's bias goes from 127 to 7.
  is_odd = (magnitude >> _DROPPED) & 1
  half = (1 << (_DROPPED - 1)) - 1
  normal = ((magnitude + half + is_odd) >> _DROPPED) - (120 << _MANTISSA_BITS)
  # Below 2^-6 values are multiples of 2^-9, and the code counts them.
  small = jnp.abs(scaled)
  subnormal = jnp.round(small * 2.0**9).astype(jnp.int32)
  # What rounds up to 8 has the code 8, that of 2^-6, so the two branches meet.
  code = jnp.where(small < 2.0**-6, subnormal, normal)
  # By the sign bit, so that -0.0 keeps it.
  code |= jnp.where(float_bits.bits(wide) < 0, 0x80, 0)
  is_finite = largest < 0x7F800000
  # 0x7F is NaN in E4M3FN.
  code = jnp.where(is_finite[..., None], code, 0x7F)
  scales = jnp.where(is_finite, scales, _NAN)
  return ScaledE4M3(code.astype(jnp.uint8), scales.astype(jnp.uint8))
