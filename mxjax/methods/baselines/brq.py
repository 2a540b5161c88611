"""BRQ: a normalized Sylvester-Hadamard on every block of 32 inputs, then GPTQ.

The original draws random signs and shares rotations. The paper's port fixes the block
transform but leaves signs, sharing and the generator open; both are options here, with
no signs by default.
"""

import dataclasses

import jax
import jax.numpy as jnp

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.methods.gptq import Gptq
from mxjax.numerics import mxfp4
from mxjax.numerics.shaping import input_maps
from mxjax.numerics.shaping.input_maps import InputMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockRotation(Gptq):
  """A block Hadamard + GPTQ.

  Attributes:
    sizes: Hadamard sizes in order of preference; the first that divides the width is
      used and recorded.
    signs: Seed of random signs before the Hadamard, or None for no signs.
    shared: Whether all blocks have the same signs.
  """

  name: str = "brq"
  sizes: tuple[int, ...] = (mxfp4.BLOCK_SIZE,)
  signs: int | None = None
  shared: bool = True

  def shape(self, weight: jax.Array, inputs: LinearInputs) -> InputMap | None:
    """See `Program.shape`."""
    width = weight.shape[0] * mxfp4.BLOCK_SIZE
    size = next((size for size in self.sizes if width % size == 0), None)
    if size is None:
      raise ValueError(
        f"{self.name}: no Hadamard of {self.sizes} divides the width {width}; add "
        f"{mxfp4.BLOCK_SIZE} to sizes."
      )
    inputs.record["hadamard_size"] = size
    return input_maps.Hadamard(size, self._signs(width, size))

  def _signs(self, width: int, size: int) -> jax.Array | None:
    if self.signs is None:
      return None
    drawn = size if self.shared else width
    signs = jax.random.rademacher(jax.random.key(self.signs), (drawn,), jnp.int8)
    return jnp.tile(signs, width // drawn)


BRQ = BlockRotation()
