"""Input maps: invertible, structured changes of a linear's input coordinates.

A map T acts as `x T^T` on inputs and `W T^{-1}` on weights, so `x W^T` is unchanged
(Eq. hires-transform). Every map offers `apply`, `fold` and `conjugate`.
"""

import dataclasses
import functools
import math
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import mxfp4
from mxjax.precision import HIGHEST


class InputMap(Protocol):
  """What the pipeline and the runtime need of a map, on arrays of any float dtype."""

  def apply(self, blocks: jax.Array) -> jax.Array:
    """Maps inputs `[blocks, 32, n]`, feature-major, to the new coordinates."""
    ...

  def fold(self, blocks: jax.Array) -> jax.Array:
    """Maps weights `[blocks, 32, m]`, feature-major, by the inverse transpose."""
    ...

  def conjugate(self, hessian: jax.Array) -> jax.Array:
    """Maps a second moment `[d, d]` of inputs: T H T^T."""
    ...


@functools.cache
def _sylvester(size: int) -> np.ndarray:
  if size < 1 or size & (size - 1):
    raise ValueError(
      f"input_maps.hadamard: size must be a power of two, got {size}; use 32, 64 or "
      "128."
    )
  matrix = np.ones((1, 1))
  while len(matrix) < size:
    matrix = np.block([[matrix, matrix], [matrix, -matrix]])
  return matrix / math.sqrt(size)


def hadamard(size: int, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
  """The normalized Sylvester-Hadamard matrix `[size, size]`, symmetric, R_H."""
  return jnp.asarray(_sylvester(size), dtype)


def _batched(matrices: jax.Array, blocks: jax.Array) -> jax.Array:
  return jnp.einsum("bij,bjn->bin", matrices, blocks, precision=HIGHEST)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockDense:
  """One dense 32 x 32 matrix for each physical block: U = D T of HiRes.

  Attributes:
    matrix: `[blocks, 32, 32]`, float32 at run time.
  """

  matrix: jax.Array

  def apply(self, blocks: jax.Array) -> jax.Array:
    """See `InputMap.apply`."""
    return _batched(self.matrix.astype(blocks.dtype), blocks)

  def fold(self, blocks: jax.Array) -> jax.Array:
    """See `InputMap.fold`: solves with the transpose, column by column."""
    transposed = self.matrix.astype(blocks.dtype).mT
    return jnp.linalg.solve(transposed, blocks)

  def conjugate(self, hessian: jax.Array) -> jax.Array:
    """See `InputMap.conjugate`."""
    blocks = self.matrix.shape[0]
    matrix = self.matrix.astype(hessian.dtype)
    tiles = hessian.reshape(blocks, mxfp4.BLOCK_SIZE, blocks, mxfp4.BLOCK_SIZE)
    left = jnp.einsum("aij,ajbk->aibk", matrix, tiles, precision=HIGHEST)
    both = jnp.einsum("aibk,blk->aibl", left, matrix, precision=HIGHEST)
    return both.reshape(hessian.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hadamard:
  """A normalized Sylvester-Hadamard transform on consecutive groups of features.

  Attributes:
    size: Features in a group, a power of two that divides the width (static).
  """

  size: int = dataclasses.field(default=32, metadata={"static": True})

  def apply(self, blocks: jax.Array) -> jax.Array:
    """See `InputMap.apply`."""
    groups = blocks.reshape(-1, self.size, blocks.shape[-1])
    matrix = hadamard(self.size, blocks.dtype)
    mapped = jnp.einsum("ij,bjn->bin", matrix, groups, precision=HIGHEST)
    return mapped.reshape(blocks.shape)

  def fold(self, blocks: jax.Array) -> jax.Array:
    """See `InputMap.fold`: the map is orthogonal, so folding is applying."""
    return self.apply(blocks)

  def conjugate(self, hessian: jax.Array) -> jax.Array:
    """See `InputMap.conjugate`."""
    width = hessian.shape[0]
    matrix = hadamard(self.size, hessian.dtype)
    tiles = hessian.reshape(width // self.size, self.size, width // self.size, -1)
    both = jnp.einsum("ij,ajbk,lk->aibl", matrix, tiles, matrix, precision=HIGHEST)
    return both.reshape(hessian.shape)
