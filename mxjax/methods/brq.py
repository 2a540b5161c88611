"""BRQ: a normalized Sylvester-Hadamard on every block of 32 inputs, then GPTQ.

The original draws random signs and shares rotations; the paper's port fixes the block
transform and leaves both unresolved, and so does this one.
"""

import dataclasses

import jax

from mxjax import input_maps, mxfp4
from mxjax.linear_inputs import LinearInputs
from mxjax.methods.gptq import Gptq


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockRotation(Gptq):
  """Hadamard-32 + GPTQ.

  Attributes:
    size: Features that one Hadamard mixes.
  """

  name: str = "brq"
  size: int = mxfp4.BLOCK_SIZE

  def shape(
    self, weight: jax.Array, inputs: LinearInputs
  ) -> input_maps.InputMap | None:
    """See `Program.shape`."""
    del inputs
    width = weight.shape[0] * mxfp4.BLOCK_SIZE
    if width % self.size:
      raise ValueError(
        f"brq: a Hadamard of {self.size} does not divide the width {width}; use "
        f"size={mxfp4.BLOCK_SIZE}."
      )
    return input_maps.Hadamard(self.size)


BRQ = BlockRotation()
