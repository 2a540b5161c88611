"""BRQ and MR-GPTQ: a normalized Sylvester-Hadamard on groups of inputs, then GPTQ.

BRQ rotates every block of 32. The original draws random signs and shares rotations; the
paper's port leaves signs, sharing and the generator open. Both are options here, with
no signs by default.

MR-GPTQ gives every linear a block Hadamard of one size (128 on the original's command
line, 32 in its inference package) and takes all scales from the transformed weights
before any compensation. Our contract keeps transform, static scales and natural order
but uses its own codec and ties; scale search is off, the original's default. The size
is an assumption: 128, or where that does not divide the width the larger of 64 and 32.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from typing_extensions import override

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.errors import ValueRefusal
from mxjax.methods.gptq import Gptq
from mxjax.methods.options import Positive
from mxjax.methods.program import Shaping
from mxjax.numerics import mxfp4
from mxjax.numerics.shaping import input_maps


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
  sizes: tuple[Positive, ...] = (mxfp4.BLOCK_SIZE,)
  signs: int | None = None
  shared: bool = True

  def _size(self, width: int) -> int | None:
    """Returns the size that is used for inputs of a width."""
    return next((size for size in self.sizes if width % size == 0), None)

  @override
  def stored_map(self, blocks: int) -> input_maps.Hadamard:
    width = blocks * mxfp4.BLOCK_SIZE
    signs: Any = None
    if self.signs is not None:
      signs = jax.ShapeDtypeStruct((width,), jnp.int8)
    return input_maps.Hadamard(self._size(width) or mxfp4.BLOCK_SIZE, signs)

  @override
  def shape(self, weight: jax.Array, inputs: LinearInputs) -> Shaping:
    del inputs
    width = weight.shape[0] * mxfp4.BLOCK_SIZE
    if (size := self._size(width)) is None:
      raise ValueRefusal(
        self.name,
        expected=f"a Hadamard size that divides the width {width}",
        got=f"sizes {self.sizes}",
        mend=f"add {mxfp4.BLOCK_SIZE} to sizes",
      )
    record = {"hadamard_size": size}
    if self.signs is None:
      return Shaping(input_maps.Hadamard(size), record)
    # Shared signs are those of one group, repeated.
    drawn = size if self.shared else width
    signs = jax.random.rademacher(jax.random.key(self.signs), (drawn,), jnp.int8)
    signed = input_maps.Hadamard(size, jnp.tile(signs, width // drawn))
    return Shaping(signed, record)


BRQ = BlockRotation()
MR_GPTQ = BlockRotation(name="mr-gptq", sizes=(128, 64, 32), scales="static")
