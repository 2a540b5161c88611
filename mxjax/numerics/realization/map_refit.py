r"""Least-squares refit of a linear's block maps to weights that are already rounded.

Rounding leaves `D = W - W^` in the installed coordinates. The one-code rule pulls a
block towards what its own weights miss; but GPTQ puts errors into later blocks on
purpose, so what a block can make up for is the part of the whole error that its inputs
predict. A matrix A_b behind the map of each block makes up for it,

.. math::
  \min_A \ E \Bigl\| \sum_b \hat W_b A_b x_b - W x \Bigr\|^2 ,

which one block solves with all others known, in sweeps over the blocks:

.. math::
  A_b \leftarrow A_b + (\hat W_b^\top \hat W_b)^{-1} \hat W_b^\top
    \bigl[ (W - \hat W A) H \bigr]_b H_{bb}^{-1} .

`A_b` multiplies into the map, so codes, payload and cost stay as they were. What the
inputs still predict afterwards is the rule's K_Q. Not in the paper.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.numerics import mxfp4
from mxjax.numerics.precision import HIGHEST

DAMPING = 0.01
"""Added to both moments, in units of their mean diagonal."""
SWEEPS = 2


class MapCorrection(NamedTuple):
  """Matrices of each block, `[blocks, 32, 32]`.

  Attributes:
    correction: A, which multiplies mapped inputs from the left.
    cross: K_Q: W^' times the error that inputs of the block still predict.
  """

  correction: jax.Array
  cross: jax.Array


@compilation.jit()
def own_moments(hessian: jax.Array) -> jax.Array:
  """Returns the diagonal blocks of a Hessian `[d, d]`, as `[blocks, 32, 32]`."""
  size = mxfp4.BLOCK_SIZE
  blocks = hessian.shape[0] // size
  return jnp.einsum("bibj->bij", hessian.reshape(blocks, size, blocks, size))


@compilation.jit()
def damped_inverses(moments: jax.Array) -> jax.Array:
  """Inverts moments `[blocks, 32, 32]` with damping; a zero moment gives I."""
  size = moments.shape[-1]
  mean = jnp.trace(moments, axis1=-2, axis2=-1)[:, None, None] / size
  shift = jnp.where(mean > 0, DAMPING * mean, 1)
  identity = jnp.eye(size, dtype=moments.dtype)[None]
  return jnp.linalg.inv(moments + shift * identity)


@compilation.jit()
def refit(
  weight: jax.Array,
  decoded: jax.Array,
  hessian: jax.Array,
  weight_inverses: jax.Array,
  input_inverses: jax.Array,
) -> MapCorrection:
  """Sweeps over the blocks, from A = I.

  Args:
    weight: Folded weights `[blocks, 32, rows]`, float32 or float64.
    decoded: The decoded W4 weights, of that shape and dtype.
    hessian: X'X / n in the coordinates of the map, `[d, d]` with d = 32 * blocks.
    weight_inverses: `damped_inverses` of W^'W^ of each block.
    input_inverses: `damped_inverses` of `own_moments`.
  """
  blocks, size, rows = weight.shape
  product = lambda text, *operands: jnp.einsum(text, *operands, precision=HIGHEST)

  def step(
    carry: tuple[jax.Array, jax.Array], block: jax.Array
  ) -> tuple[tuple[jax.Array, jax.Array], None]:
    correction, pulled = carry
    mine = jax.lax.dynamic_slice_in_dim(pulled, block * size, size)
    # W^_b' [(W - W^ A) H]_b H_bb^-1, of the rows of H that are this block's.
    predicted = product("im,jm,jk->ik", decoded[block], mine, input_inverses[block])
    change = product("ij,jk->ik", weight_inverses[block], predicted)
    columns = jax.lax.dynamic_slice_in_dim(hessian, block * size, size, axis=1)
    pulled -= product("di,ji,jm->dm", columns, change, decoded[block])
    return (correction.at[block].add(change), pulled), None

  error = (weight - decoded).reshape(-1, rows)
  # `pulled` is H (W - W^ A)', kept up to date: a block then reads 32 of its rows, where
  # computing the error anew would read all weights for every block.
  identity = jnp.broadcast_to(jnp.eye(size, dtype=weight.dtype), (blocks, size, size))
  # The sweeps end to end, so that one scan has them all.
  order = jnp.tile(jnp.arange(blocks, dtype=jnp.int32), SWEEPS)
  start = identity, product("de,em->dm", hessian, error)
  (correction, pulled), _ = jax.lax.scan(step, start, order)
  left = pulled.reshape(weight.shape)
  cross = product("bim,bjm,bjk->bik", decoded, left, input_inverses)
  return MapCorrection(correction, cross)


@compilation.jit()
def effective(decoded: jax.Array, correction: jax.Array) -> jax.Array:
  """Computes the weights `A' W^` that inputs see before A, `[blocks, 32, rows]`."""
  return jnp.einsum("bij,bim->bjm", correction, decoded, precision=HIGHEST)
