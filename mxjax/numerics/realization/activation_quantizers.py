"""The dynamic A4 rules: what a quantized linear makes of its mapped inputs."""

import dataclasses

import jax
import jax.numpy as jnp

from mxjax.numerics import mxfp4
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.realization import one_code


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nearest:
  """Dynamic A4 by the nearest code."""

  def round(self, blocks: jax.Array, rules: mxfp4.Rules) -> jax.Array:
    """Decoded A4 of mapped inputs `[blocks, 32, n]`, float32."""
    return mxfp4.round_blocks(blocks, rules)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneCode:
  """Dynamic A4 with one-code refinement (Eq. hires-code-score).

  Attributes:
    gram: G_Q, its upper triangle row by row, `[blocks, 528]`, float32, or bfloat16
      after `pack_for_inference`.
    cross: K_Q, `[blocks, 32, 32]`, likewise.
  """

  gram: jax.Array
  cross: jax.Array

  def round(
    self,
    blocks: jax.Array,
    rules: mxfp4.Rules,
    *,
    matrix: jax.Array | None = None,
    implementation: Implementation | None = None,
  ) -> jax.Array:
    """Decoded A4 of mapped inputs `[blocks, 32, n]`, or of inputs that `matrix` maps.

    See `code_refinement.refined_blocks`.
    """
    return one_code.refined_blocks(
      blocks, *self.tables(), rules, matrix=matrix, implementation=implementation
    )

  def tables(self) -> tuple[jax.Array, jax.Array]:
    """G_Q and K_Q as float32 `[blocks, 32, 32]`."""
    gram = one_code.unpack_symmetric(self.gram).astype(jnp.float32)
    return gram, self.cross.astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Clipped:
  """Dynamic A4 by the nearest code of values clipped to shares of the block's range.

  Attributes:
    low: Share of the block's smallest value that is kept, float32 `[blocks]`.
    high: Share of its largest value, float32 `[blocks]`.
  """

  low: jax.Array
  high: jax.Array

  def round(self, blocks: jax.Array, rules: mxfp4.Rules) -> jax.Array:
    """Decoded A4 of mapped inputs `[blocks, 32, n]`, float32."""
    return mxfp4.round_blocks(clip_blocks(blocks, self.low, self.high), rules)


def clip_blocks(blocks: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
  """Clips blocks `[blocks, 32, n]` to shares of their own smallest and largest value.

  Args:
    blocks: Values, any float dtype.
    low: Share of the smallest value, `[blocks]` or `[blocks, n]`.
    high: Share of the largest value, same shape.
  """
  share = lambda part: part[:, None, None] if part.ndim == 1 else part[:, None, :]
  smallest = share(low) * blocks.min(-2, keepdims=True)
  largest = share(high) * blocks.max(-2, keepdims=True)
  return jnp.clip(blocks, smallest, largest)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unrounded:
  """Inputs as they are: what A4 costs is measured against it. Not a legal A4 rule."""

  def round(self, blocks: jax.Array, rules: mxfp4.Rules) -> jax.Array:
    """The mapped inputs themselves, float32 `[blocks, 32, n]`."""
    del rules
    return blocks


Rounding = Nearest | OneCode | Clipped | Unrounded
