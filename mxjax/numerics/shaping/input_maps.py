"""Input maps: invertible, structured changes of a linear's input coordinates.

A map T acts as `x T^T` on inputs and `W T^{-1}` on weights, so `x W^T` is unchanged
(Eq. hires-transform). To add a map, subclass `InputMap` and decorate it with
`@register`; the rest of the library never checks which class a map is.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from typing_extensions import override

from mxjax import compilation
from mxjax.errors import NotImplementedRefusal, ValueRefusal
from mxjax.numerics import mxfp4
from mxjax.numerics.jax_export import register_dataclass
from mxjax.numerics.precision import HIGHEST, block_products
from mxjax.numerics.shaping import orthogonal

MAPS: dict[str, type] = {}
"""Every registered map, by its name in checkpoints."""

Map = TypeVar("Map")


def register(cls: type[Map]) -> type[Map]:
  """Registers a dataclass as a pytree and as an input map that checkpoints may hold."""
  if MAPS.setdefault(cls.__name__, cls) is not cls:
    raise ValueRefusal(
      "input_maps.register",
      expected="a name that no map has",
      got=f"{cls.__name__}, which names {MAPS[cls.__name__]}",
      mend="give the new map another name",
    )
  return register_dataclass(cls)


class InputMap:
  """Interface of input maps, on arrays of any float dtype."""

  def apply(self, blocks: jax.Array) -> jax.Array:
    """Maps inputs `[blocks, 32, n]`, feature-major, to the new coordinates."""
    raise NotImplementedRefusal(type(self).__name__, "its own apply", got="none")

  def fold(self, blocks: jax.Array) -> jax.Array:
    """Maps weights `[blocks, 32, m]`, feature-major, by the inverse transpose."""
    raise NotImplementedRefusal(type(self).__name__, "its own fold", got="none")

  def conjugate(self, hessian: jax.Array) -> jax.Array:
    """Maps a second moment `[d, d]` of inputs to T H T^T."""
    raise NotImplementedRefusal(type(self).__name__, "its own conjugate", got="none")

  def block_matrices(self) -> jax.Array | None:
    """Returns the map as one matrix per block, for kernels that apply it.

    The result is `[blocks, 32, 32]`, or `[1, 32, 32]` for all blocks, in any float
    dtype; None if the map mixes blocks or is faster in structured form.
    """
    return None

  def dense_blocks(self) -> jax.Array | None:
    """Returns the map like `block_matrices`, even if it is faster in another form."""
    return self.block_matrices()

  @property
  def hadamard_size(self) -> int | None:
    """Group size of a plain Hadamard transform, which runtimes support; else None."""
    return None


def hadamard(size: int, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
  """Returns R_H, the normalized, symmetric Sylvester-Hadamard matrix `[size, size]`."""
  if size < 1 or size & (size - 1):
    raise ValueRefusal(
      "input_maps.hadamard",
      expected="a size that is a power of two",
      got=size,
      mend="use 32, 64 or 128",
    )
  return jnp.asarray(orthogonal.hadamard_any(size), dtype)


@register
@dataclasses.dataclass(frozen=True)
class BlockDense(InputMap):
  """One dense 32 x 32 matrix for each physical block: U = D T of HiRes.

  `matrix` is `[blocks, 32, 32]`, float32 at run time.
  """

  matrix: jax.Array

  @override
  def apply(self, blocks: jax.Array) -> jax.Array:
    return block_products(self.matrix.astype(blocks.dtype), blocks)

  def fold(self, blocks: jax.Array) -> jax.Array:
    """Multiplies by the explicit inverse, which is small and computed once."""
    # The blocks hold W', and (W T^-1)' is T^-T W'.
    inverse = jnp.linalg.inv(self.matrix.astype(blocks.dtype).mT)
    return jnp.einsum("bij,bjm->bim", inverse, blocks, precision=HIGHEST)

  @override
  def conjugate(self, hessian: jax.Array) -> jax.Array:
    blocks = self.matrix.shape[0]
    matrix = self.matrix.astype(hessian.dtype)
    # As [row block, row, column block, column]: T acts on the rows, then T' on the
    # columns.
    tiles = hessian.reshape(blocks, mxfp4.BLOCK_SIZE, blocks, mxfp4.BLOCK_SIZE)
    left = jnp.einsum("aij,ajbk->aibk", matrix, tiles, precision=HIGHEST)
    both = jnp.einsum("aibk,blk->aibl", left, matrix, precision=HIGHEST)
    return both.reshape(hessian.shape)

  @override
  def block_matrices(self) -> jax.Array:
    return self.matrix


def dense_like(blocks: int, dtype: jax.typing.DTypeLike = jnp.float32) -> BlockDense:
  """Returns a map of one matrix for each block, with shape and dtype but no values."""
  size = mxfp4.BLOCK_SIZE
  matrix: Any = jax.ShapeDtypeStruct((blocks, size, size), dtype)
  return BlockDense(matrix)


def scaled(input_map: InputMap | None, factor: jax.Array) -> BlockDense:
  """Returns the map that scales inputs by `factor`, `[d]`, and then applies another.

  The result keeps the dtype of that map.

  Raises:
    ValueError: The map is not one matrix for each block, or for all of them.
  """
  size = mxfp4.BLOCK_SIZE
  matrix = jnp.eye(size)[None] if input_map is None else input_map.dense_blocks()
  if matrix is None:
    raise ValueRefusal(
      "input_maps.scaled",
      expected="a map of single blocks",
      got=f"{type(input_map).__name__}, which mixes blocks",
      mend="leave out +tune, because scales cannot be folded into it",
    )
  # Inputs are scaled before the map, so the factor multiplies its columns. The product
  # is rounded once to a narrower dtype.
  scaled_matrix = matrix.astype(jnp.float32) * factor.reshape(-1, 1, size)
  return BlockDense(scaled_matrix.astype(matrix.dtype))


@compilation.jit()
def followed(input_map: InputMap | None, matrix: jax.Array) -> BlockDense:
  """Returns the map that applies another and then a matrix, `[blocks, 32, 32]`.

  The result has the dtype of the matrix.

  Raises:
    ValueError: The map is not one matrix for each block, or for all of them.
  """
  if input_map is None:
    return BlockDense(matrix)
  first = input_map.dense_blocks()
  if first is None:
    raise ValueRefusal(
      "input_maps.followed",
      expected="a map of single blocks",
      got=f"{type(input_map).__name__}, which mixes blocks",
      mend="do not refit it",
    )
  return BlockDense(block_products(matrix, first.astype(matrix.dtype)))


@register
@dataclasses.dataclass(frozen=True)
class Hadamard(InputMap):
  """A normalized Sylvester-Hadamard transform on consecutive groups of features.

  Attributes:
    size: Features in a group, a power of two that divides the width (static).
    signs: Sign of every feature, applied before the transform, int8 `[d]`, or None.
  """

  size: int = dataclasses.field(default=32, metadata={"static": True})
  signs: jax.Array | None = None

  def _signed(self, rows: jax.Array) -> jax.Array:
    if self.signs is None:
      return rows
    signs = self.signs.astype(rows.dtype)
    return rows * signs.reshape((-1,) + (1,) * (rows.ndim - 1))

  @override
  def apply(self, blocks: jax.Array) -> jax.Array:
    # A group may span several blocks, so the blocks are joined and cut anew.
    rows = self._signed(blocks.reshape(-1, blocks.shape[-1]))
    groups = rows.reshape(-1, self.size, blocks.shape[-1])
    matrix = hadamard(self.size, blocks.dtype)
    mapped = jnp.einsum("ij,bjn->bin", matrix, groups, precision=HIGHEST)
    return mapped.reshape(blocks.shape)

  def fold(self, blocks: jax.Array) -> jax.Array:
    """Applies the map, because it is orthogonal."""
    return self.apply(blocks)

  @override
  def conjugate(self, hessian: jax.Array) -> jax.Array:
    width = hessian.shape[0]
    matrix = hadamard(self.size, hessian.dtype)
    # Rows, then columns: a Hessian is its own transpose.
    signed = self._signed(self._signed(hessian).T)
    tiles = signed.reshape(width // self.size, self.size, width // self.size, -1)
    both = jnp.einsum("ij,ajbk,lk->aibl", matrix, tiles, matrix, precision=HIGHEST)
    return both.reshape(hessian.shape)

  @override
  def block_matrices(self) -> jax.Array | None:
    is_block = self.hadamard_size == mxfp4.BLOCK_SIZE
    return hadamard(self.size)[None] if is_block else None

  @property
  @override
  def hadamard_size(self) -> int | None:
    return self.size if self.signs is None else None


@register
@dataclasses.dataclass(frozen=True)
class Kronecker(InputMap):
  """P_i = B_i (x) A for every block: a shared 8 x 8 and a private 4 x 4 factor.

  Inputs become `x P`, so T = P^T. Feature p of a block is (p // 8, p % 8).

  Attributes:
    shared: A, `[8, 8]`, invertible.
    private: B, `[blocks, 4, 4]`, invertible.
  """

  shared: jax.Array
  private: jax.Array

  def _mix(self, shared: jax.Array, private: jax.Array, blocks: jax.Array) -> jax.Array:
    """Multiplies every block in its 4 x 8 arrangement: `private^T X shared`."""
    count, columns = private.shape[0], blocks.shape[-1]
    tiles = blocks.reshape(count, private.shape[-1], shared.shape[0], columns)
    # Two products, the small one first; a single einsum would build the 32 x 32 matrix.
    tiles = jnp.einsum("bki,bkjn->bijn", private, tiles, precision=HIGHEST)
    tiles = jnp.einsum("lj,biln->bijn", shared, tiles, precision=HIGHEST)
    return tiles.reshape(blocks.shape)

  @override
  def apply(self, blocks: jax.Array) -> jax.Array:
    dtype = blocks.dtype
    return self._mix(self.shared.astype(dtype), self.private.astype(dtype), blocks)

  def fold(self, blocks: jax.Array) -> jax.Array:
    """Applies P^-T, the Kronecker product of the inverse transposes."""
    inverse = lambda factor: jnp.linalg.inv(factor.astype(blocks.dtype)).mT
    return self._mix(inverse(self.shared), inverse(self.private), blocks)

  def dense(self, dtype: jax.typing.DTypeLike = jnp.float32) -> BlockDense:
    """Returns the same map as dense blocks, T = P^T."""
    private, shared = self.private.astype(dtype), self.shared.astype(dtype)
    # P[(k, l), (i, j)] is B[k, i] A[l, j]; its transpose has the new coordinate (i, j)
    # first.
    product = jnp.einsum("bki,lj->bijkl", private, shared)
    return BlockDense(product.reshape(-1, mxfp4.BLOCK_SIZE, mxfp4.BLOCK_SIZE))

  @override
  def dense_blocks(self) -> jax.Array:
    return self.dense().matrix

  @override
  def conjugate(self, hessian: jax.Array) -> jax.Array:
    return self.dense(hessian.dtype).conjugate(hessian)


@register
@dataclasses.dataclass(frozen=True)
class TwoLevel(InputMap):
  """A rotation across blocks, then one inside every block: x -> R_inter^T X R_intra.

  Attributes:
    inter: R_inter, orthogonal, `[blocks, blocks]`; the same for all 32 positions.
    intra: R_intra, orthogonal, `[32, 32]`; the same for all blocks.
  """

  inter: jax.Array
  intra: jax.Array

  @override
  def apply(self, blocks: jax.Array) -> jax.Array:
    inter, intra = self.inter.astype(blocks.dtype), self.intra.astype(blocks.dtype)
    mixed = jnp.einsum("ab,akn->bkn", inter, blocks, precision=HIGHEST)
    return jnp.einsum("kj,bkn->bjn", intra, mixed, precision=HIGHEST)

  def fold(self, blocks: jax.Array) -> jax.Array:
    """Uses explicit inverses, because the stored factors are rounded."""
    inverse = lambda factor: jnp.linalg.inv(factor.astype(blocks.dtype)).mT
    return TwoLevel(inverse(self.inter), inverse(self.intra)).apply(blocks)

  def conjugate(self, hessian: jax.Array) -> jax.Array:
    """Applies T to the rows, then to the columns."""
    width = hessian.shape[0]
    shape = (-1, mxfp4.BLOCK_SIZE, width)
    rows = self.apply(hessian.reshape(shape)).reshape(width, width)
    return self.apply(rows.T.reshape(shape)).reshape(width, width).T
