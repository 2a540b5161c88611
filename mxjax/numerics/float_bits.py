"""Bit-level access to the exponents and magnitudes of floats, and powers of two."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax import compilation


class FloatFormat(NamedTuple):
  """An IEEE format: integer type for its bits, mantissa width and exponent bias."""

  integer: type
  mantissa_bits: int
  bias: int


_FORMATS = {
  np.dtype(np.float32): FloatFormat(np.int32, 23, 127),
  np.dtype(np.float64): FloatFormat(np.int64, 52, 1023),
}


def float_format(x: jax.Array) -> FloatFormat:
  """Returns the format of a float32 or float64 array."""
  return _FORMATS[np.dtype(x.dtype)]


def bits(x: jax.Array) -> jax.Array:
  """Returns the bits of a float array as int32 or int64."""
  return lax.bitcast_convert_type(x, float_format(x).integer)


def magnitude_bits(x: jax.Array) -> jax.Array:
  """Returns the bits of |x|: integers ordered like the magnitudes."""
  integer = float_format(x).integer
  # All bits but the sign. inf and NaN come after every finite number in this order.
  return bits(x) & integer(np.iinfo(integer).max)


def power_of_two(exponent: jax.Array) -> jax.Array:
  """Builds float32 2^exponent from int32 in [-127, 128]; 128 gives NaN.

  2^-127 is subnormal, and a backend may flush a product with it to zero. Values below
  2^-124 can then vanish in arithmetic, but never in a payload, because `decode` is
  exact.
  """
  # From bits, because `jnp.exp2` misses most integer powers in the last bit on XLA:CPU.
  field = (exponent.astype(jnp.int32) + 127) << 23
  # An exponent field of zero has no implicit one: half of 2^-126 is its highest
  # mantissa bit.
  subnormal = jnp.where(exponent == -127, jnp.int32(1 << 22), field)
  # 128 marks a block with inf or NaN (`mxfp4.block_exponent`): all of it becomes NaN.
  return lax.bitcast_convert_type(
    jnp.where(exponent > 127, jnp.int32(0x7FC00000), subnormal), jnp.float32
  )


@compilation.jit()
def count_not_finite(array: jax.Array) -> jax.Array:
  """Counts NaN and inf where an array lies, without a copy on the host; int32."""
  return (~jnp.isfinite(array)).sum(dtype=jnp.int32)
