"""W4A4 inputs as integers, for products of a few rows.

Twice an E2M1 value is an integer of at most 12, so a product of two is one of at most
144 and the sum over a block of 32 is exact in any integer of 16 bits.
"""

import dataclasses

import jax
import jax.numpy as jnp

from mxjax.numerics import mxfp4, pytree_nodes
from mxjax.pallas_kernels import codec

UNIT = 0.5
"""What an integer counts, in units of its block's scale."""


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Int8Inputs:
  """Legal A4 inputs `[n, d]`.

  Attributes:
    values: int8 `[n, d]`, in halves of the block's scale.
    scales: The scale bytes, uint8 `[n, d / 32]`.
  """

  values: jax.Array
  scales: jax.Array

  @property
  def shape(self) -> tuple[int, int]:
    """Shape `(n, d)`."""
    rows, width = self.values.shape
    return rows, width

  def decoded(self) -> jax.Array:
    """Decodes to bfloat16 `[n, d]`, exactly."""
    scale = codec.scale(self.scales.astype(jnp.int32))
    wide = jnp.repeat(scale, mxfp4.BLOCK_SIZE, axis=1)
    # Half of a value of the smallest scale would be a subnormal.
    return (UNIT * self.values.astype(jnp.float32) * wide).astype(jnp.bfloat16)


def of_values(values: jax.Array) -> jax.Array:
  """Converts float32 values in units of their scale to int8."""
  return (values / UNIT).astype(jnp.int8)


def of_tensor(tensor: mxfp4.MXTensor) -> Int8Inputs:
  """Converts packed inputs `[n, d]`."""
  elements = codec.element(mxfp4.unpack(tensor.codes).astype(jnp.int32))
  return Int8Inputs(of_values(elements), tensor.scales)
