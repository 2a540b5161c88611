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

from mxjax.numerics import mxfp4, pytree_nodes
from mxjax.pallas_kernels import codec

FORM = jnp.float8_e5m2
LOWEST, HIGHEST = -15, 13
"""0.5 * 2^-15 is the smallest number of E5M2, and 6 * 2^13 is below the largest."""
_LEAST = -126
"""Exponent of the smallest float32 that no processor flushes to zero."""


WORDS = mxfp4.BLOCK_SIZE // 4
"""Words of a block: 16 bits with four codes, or 32 with four values in float8."""
BLOCKS = 4
"""Blocks whose columns `in_order_of_blocks` brings together."""


def in_order_of_blocks(x: jax.Array) -> jax.Array:
  """Brings the n-th words of every four blocks together, in `[..., n, d]`.

  The dtype is any; d is a multiple of 128, whose columns stay together.
  """
  parts = x.reshape(*x.shape[:-1], -1, BLOCKS, WORDS, 4)
  return parts.swapaxes(-3, -2).reshape(x.shape)


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Float8Inputs:
  """Legal A4 inputs `[n, d]`.

  Attributes:
    values: E5M2 `[n, d]`; a block outside the range is in units of its scale.
    scales: The scale bytes, uint8 `[n, d / 32]`.
    is_by_blocks: Whether the columns of `values` come in the order of
      `in_order_of_blocks` (static).
  """

  values: jax.Array
  scales: jax.Array
  is_by_blocks: bool = dataclasses.field(default=False, metadata={"static": True})

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape `(n, d)`."""
    return self.values.shape

  def decoded(self) -> jax.Array:
    """Decodes to bfloat16 `[n, d]`, exactly."""
    unit = jnp.repeat(own_unit(exponents(self.scales)), mxfp4.BLOCK_SIZE, axis=1)
    values = self.in_order().values
    return (values.astype(jnp.float32) * unit).astype(jnp.bfloat16)

  def by_blocks(self) -> "Float8Inputs":
    """Returns the inputs in the order of `in_order_of_blocks`; d is its multiple."""
    if self.is_by_blocks:
      return self
    return Float8Inputs(in_order_of_blocks(self.values), self.scales, True)

  def in_order(self) -> "Float8Inputs":
    """Returns the inputs in the order of their columns."""
    if not self.is_by_blocks:
      return self
    shape = *self.values.shape[:-1], -1, WORDS, BLOCKS, 4
    values = self.values.reshape(shape).swapaxes(-3, -2).reshape(self.values.shape)
    return Float8Inputs(values, self.scales)


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
  # An E5M2 is the upper half of a float16: adding half of its unit and cutting rounds,
  # and a carry reaches the exponent.
  return ((half + 128) >> 8).astype(jnp.uint8)


def shift_of(outside: jax.Array, top: jax.Array) -> jax.Array:
  """Returns the exponents by which rows are multiplied, int32; 0 for most rows.

  `outside` says whether a row has a block outside the range, and `top` is its largest
  exponent. The inverse of the shift is a float32 that is not subnormal.
  """
  return jnp.where(outside, HIGHEST - jnp.maximum(top, HIGHEST + _LEAST), 0)


def row_unit(shift: jax.Array, top: jax.Array) -> jax.Array:
  """Returns the inverses of the shifts, float32; NaN for rows that are not finite."""
  is_finite = top < mxfp4.NOT_FINITE - mxfp4.SCALE_BIAS
  return jnp.where(is_finite, codec.scale_of(-shift), jnp.nan)


def shifted_values(
  values: jax.Array, exponent: jax.Array, shift: jax.Array
) -> jax.Array:
  """Shifts float32 values of blocks, given the exponents of their scales."""
  # Blocks outside are in units of their scale.
  own = jnp.where(is_outside(exponent), exponent, 0) + shift
  return values * codec.scale_of(jnp.clip(own, _LEAST, mxfp4.SCALE_BIAS))
