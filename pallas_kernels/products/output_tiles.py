"""Output tiles of linears whose products share a launch, numbered one after another."""

from typing import Any

import jax
import jax.numpy as jnp


class OutputTiles:
  """What a launch's static properties say of its tiles; a base of dataclasses.

  Attributes:
    tile: A program's tile, with its number of `outputs`.
    outputs: Rows of each linear's weight.
  """

  tile: Any
  outputs: tuple[int, ...]

  def tiles(self, linear: int) -> int:
    """Returns the number of output tiles of one linear."""
    return -(-self.outputs[linear] // self.tile.outputs)

  def first(self, linear: int) -> int:
    """Returns the index of the linear's first tile among those of all linears."""
    return sum(map(self.tiles, range(linear)))

  def linear_of(self, index: jax.Array) -> Any:
    """Returns whose tile it is, int32; 0 if there is one linear only."""
    later = range(1, len(self.outputs))
    return sum((index >= self.first(i)).astype(jnp.int32) for i in later)

  def own(self, linear: int, index: Any) -> jax.Array:
    """Returns the index among the linear's tiles.

    Programs of other linears do not use it, but it must be valid.
    """
    return jnp.clip(index - self.first(linear), 0, self.tiles(linear) - 1)
