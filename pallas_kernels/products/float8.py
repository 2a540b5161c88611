"""W4A4 inputs in float8, in the form that the library's float8 product reads.

E5M2 reaches from 2^-16 to 57344, so it holds every block whose exponent lies in
`LOWEST..HIGHEST` without an extra scale. A block outside that range is written in units
of its own scale, and its scale byte tells the consumer so: nothing is lost. Blocks with
the scale byte 0, 2^-127, count as zeros: an encoder gives that byte to zero blocks, and
no float32 sum with another block preserves such small values.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import codec

FORM = jnp.float8_e5m2
LOWEST, HIGHEST = -15, 13
"""0.5 * 2^-15 is the smallest number of E5M2, and 6 * 2^13 is below the largest."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Float8Inputs:
  """Legal A4 inputs `[n, d]`.

  Attributes:
    values: E5M2 `[n, d]`; a block outside the range is in units of its scale.
    scales: The scale bytes, uint8 `[n, d / 32]`.
  """

  values: jax.Array
  scales: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape `(n, d)`."""
    return self.values.shape

  def decoded(self) -> jax.Array:
    """Decodes to bfloat16 `[n, d]`, exactly."""
    unit = jnp.repeat(own_unit(exponents(self.scales)), mxfp4.BLOCK_SIZE, axis=1)
    return (self.values.astype(jnp.float32) * unit).astype(jnp.bfloat16)


def exponents(scales: jax.Array) -> jax.Array:
  """Returns int32 exponents of scale bytes."""
  return scales.astype(jnp.int32) - mxfp4.SCALE_BIAS


def is_outside(exponent: jax.Array) -> jax.Array:
  """Returns whether blocks of int32 exponents exceed the range of E5M2."""
  is_small = (exponent < LOWEST) & (exponent != -mxfp4.SCALE_BIAS)
  return is_small | (exponent > HIGHEST)


def own_unit(exponent: jax.Array) -> jax.Array:
  """Returns the unit of a block's float8 values, float32."""
  return jnp.where(is_outside(exponent), codec.scale_of(exponent), 1.0)


def of_values(values: jax.Array, exponent: jax.Array) -> jax.Array:
  """Converts float32 values in units of their scale to E5M2, given exponents."""
  factor = jnp.where(is_outside(exponent), 1.0, codec.scale_of(exponent))
  return (values * factor).astype(FORM)


def of_tensor(tensor: mxfp4.MXTensor) -> Float8Inputs:
  """Converts packed inputs `[n, d]`."""
  elements = codec.element(mxfp4.unpack(tensor.codes).astype(jnp.int32))
  exponent = jnp.repeat(exponents(tensor.scales), mxfp4.BLOCK_SIZE, axis=1)
  return Float8Inputs(of_values(elements, exponent), tensor.scales)


def from_byte(byte: jax.Array) -> jax.Array:
  """Decodes E5M2 bits, int16, to float32: they are the upper half of a float16."""
  return lax.bitcast_convert_type(byte << 8, jnp.float16).astype(jnp.float32)


def to_byte(values: jax.Array) -> jax.Array:
  """Encodes float32 values as E5M2 bits, uint8, to nearest with ties to the larger.

  Values of at most two significant bits are exact from 2^-15 up.
  """
  half = lax.bitcast_convert_type(values.astype(jnp.float16), jnp.int16)
  return ((half + 128) >> 8).astype(jnp.uint8)
