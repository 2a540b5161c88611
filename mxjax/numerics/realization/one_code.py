r"""One-code refinement of dynamic A4: change at most one element of each block.

With float weights `W` and decoded weights `W^`, both in the installed coordinates, the
output error of rounding a block `x` to `q` is `||W^ q - W x||^2`. Changing coordinate i
of the nearest vector `q_0` to the legal value c changes this error by exactly

.. math::
  \Delta(i,c) = 2\delta_{ic}\,[G_Q d_0 - K_Q x]_i + \delta_{ic}^2\,[G_Q]_{ii}, \qquad
  \delta_{ic} = c - [q_0]_i

The refinement takes the best negative change; ties go to the lowest coordinate, then
the lowest code. Paper: Eq. hires-code-score and Discrete Realization (Appendix).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.numerics import implementations, jax_export, mxfp4
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.native import refinement
from mxjax.numerics.precision import HIGHEST, block_products


class Refined(NamedTuple):
  """Refined blocks, feature-major.

  Attributes:
    elements: Element values in units of the scale, float32 `[blocks, 32, n]`.
    exponent: int32 `[blocks, n]`.
    nearest: The nearest element values, before the change.
    score: Smallest Delta of each block, float32 `[blocks, n]`; changed where negative.
    nearest_objective: ||W^ q_0 - W x||^2 - ||(W^ - W) x||^2 at the nearest vector,
      float32 `[blocks, n]`; adding a negative score gives the refined objective.
  """

  elements: jax.Array
  exponent: jax.Array
  nearest: jax.Array
  score: jax.Array
  nearest_objective: jax.Array


@compilation.jit(inline=True)
def gram_of(decoded: jax.Array) -> jax.Array:
  """Computes G_Q = W^'W^ of each block of decoded W4 weights; see `tables`."""
  # Full precision: the score subtracts numbers of the same size, and TF32's 10 bits
  # would decide by their rounding.
  return jnp.einsum("bim,bjm->bij", decoded, decoded, precision=HIGHEST)


@compilation.jit()
def tables(weight: jax.Array, decoded: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Computes G_Q = W^'W^ and K_Q = W^'(W - W^) of each block, `[blocks, 32, 32]`.

  `weight` is the float weights in the installed coordinates and `decoded` the decoded
  W4 weights, both `[blocks, 32, rows]`; the results have their dtype.
  """
  gram = gram_of(decoded)
  cross = jnp.einsum("bim,bjm->bij", decoded, weight - decoded, precision=HIGHEST)
  return gram, cross


RIDGE = 0.01
"""Damping of a block's moment, as a share of its mean diagonal; that of GPTQ."""


@compilation.jit()
def expected_cross(
  weight: jax.Array, decoded: jax.Array, hessian: jax.Array
) -> jax.Array:
  r"""Computes the second table for the weight error of the whole linear.

  Given the inputs x_b of one block, the best linear guess of the output error that
  rounding all weights makes is M_b x_b, with H = E[x x'] and D_c = W_c - W^_c:

  .. math::
    M_b = \Bigl(\sum_c D_c H_{cb}\Bigr) H_{bb}^{-1}, \qquad K_b = \hat W_b^\top M_b

  The term c = b alone gives K_Q of `tables`. Where errors of later blocks make up for
  those of earlier ones, as GPTQ has it, the other terms take back a part of it. H_bb is
  damped by `RIDGE`. `weight` and `decoded` are float32 `[blocks, 32, rows]` and
  `hessian` float32 `[32 blocks, 32 blocks]`, all in the installed coordinates; the
  result is float32 `[blocks, 32, 32]`. A block without inputs has a table of zeros.
  """
  blocks, size, rows = weight.shape
  error = (weight - decoded).reshape(blocks * size, rows)
  # As [blocks, 32, rows]: E[x_b y] for the output error y of the weights.
  moved = jnp.matmul(hessian, error, precision=HIGHEST).reshape(weight.shape)
  tiles = hessian.reshape(blocks, size, blocks, size)
  # Two index arrays with a slice between them put their axis first: H_bb by block.
  own = tiles[jnp.arange(blocks), :, jnp.arange(blocks)]
  mean = jnp.trace(own, axis1=1, axis2=2) / size
  shift = jnp.where(mean > 0, RIDGE * mean, jnp.float32(1))
  damped = own + shift[:, None, None] * jnp.eye(size, dtype=own.dtype)[None]
  guess = jnp.linalg.solve(damped, moved)
  return jnp.einsum("bim,bjm->bij", decoded, guess, precision=HIGHEST)


PACKED = mxfp4.BLOCK_SIZE * (mxfp4.BLOCK_SIZE + 1) // 2
"""Values of a symmetric table of a block, packed."""


def pack_symmetric(gram: jax.Array) -> jax.Array:
  """Packs the upper triangle row by row: `[..., 32, 32]` to `[..., 528]`."""
  rows, columns = np.triu_indices(gram.shape[-1])
  return gram[..., rows, columns]


def unpack_symmetric(packed: jax.Array) -> jax.Array:
  """Unpacks the result of `pack_symmetric` by mirroring."""
  size = mxfp4.BLOCK_SIZE
  rows, columns = np.triu_indices(size)
  index = np.zeros((size, size), np.int32)
  index[rows, columns] = np.arange(len(rows))
  # Below the diagonal the index is zero, so its mirror image is the larger.
  index = np.maximum(index, index.T)
  return packed[..., index]


def _rounded_product(x: jax.Array, y: jax.Array) -> jax.Array:
  """Multiplies and rounds, with no sum fused into the product.

  XLA:CPU contracts a * b + c to a fused multiply-add, whose unrounded product would
  break exact ties differently from other backends; the select prevents that.
  """
  product = x * y
  return jnp.where(product == product, product, jnp.nan)


def code_score(delta: jax.Array, slope: jax.Array, curvature: jax.Array) -> jax.Array:
  """Computes Delta(i, c) = 2 delta slope + delta^2 curvature.

  XLA and the CPU kernels agree on it to the bit; the GPU kernel takes Horner's form.
  """
  linear = _rounded_product(2.0 * delta, slope)
  return linear + _rounded_product(delta * delta, curvature)


def _grid_neighbours(target: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the E2M1 values around each target: toward zero, and away from it."""
  size = jnp.abs(target)
  step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0)).astype(target.dtype)
  per_step = jnp.where(size < 2, 2.0, jnp.where(size < 4, 1.0, 0.5))
  inner = jnp.floor(size * per_step.astype(target.dtype)) * step
  outer = inner + step
  # The select is several times faster than jnp.minimum on XLA:CPU.
  inner, outer = (jnp.where(v < 6, v, jnp.asarray(6, v.dtype)) for v in (inner, outer))
  # A newly chosen zero is +0, code 0.
  signed_inner = jnp.where(inner == 0, inner, jnp.copysign(inner, target))
  return signed_inner, jnp.copysign(outer, target)


def best_code(
  nearest: jax.Array, scale: jax.Array, slope: jax.Array, curvature: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the lowest score and its legal value for each coordinate.

  Delta is a parabola in the value, so its minimum over the grid is next to its vertex
  `nearest - slope / (scale curvature)`: two scores decide what fifteen would. At a tie
  the value toward zero wins because it has the lower code.

  `nearest` is element values `[..., 32, n]` in units of the scale 2^e, `slope` is
  [G_Q d_0 - K_Q x]_i and `curvature` is [G_Q]_ii. A nonnegative score means no change.
  """
  vertex = nearest - slope / (curvature * scale)
  # A coordinate without curvature has no slope either: 0 / 0 would be NaN.
  inner, outer = _grid_neighbours(jnp.where(slope == 0, nearest, vertex))
  inner_score, outer_score = (
    code_score((value - nearest) * scale, slope, curvature) for value in (inner, outer)
  )
  is_better = outer_score < inner_score
  score = jnp.where(is_better, outer_score, inner_score)
  return score, jnp.where(is_better, outer, inner)


def best_change(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Finds the change with the lowest score, the first coordinate in case of ties.

  `scores` is `[blocks, 32, n]`. Returns the lowest, `[blocks, n]`, and where it is
  taken, which is nowhere in a block without a negative score.
  """
  score = scores.min(-2)
  coordinate = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 2)
  ties = jnp.where(scores == score[..., None, :], coordinate, mxfp4.BLOCK_SIZE)
  is_best = coordinate == ties.min(-2, keepdims=True)
  return score, is_best & (score < 0)[..., None, :]


@compilation.jit(static_argnames="rules")
def refine(
  x: jax.Array,
  gram: jax.Array,
  cross: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
) -> Refined:
  """Encodes and refines activations `[blocks, 32, n]` in the installed coordinates.

  `x`, `gram` (G_Q) and `cross` (K_Q) are float32, the tables `[blocks, 32, 32]`.
  """
  exponent = mxfp4.block_exponent(x, rules)
  scale = mxfp4.scale_of(exponent)[..., None, :].astype(x.dtype)
  index = mxfp4.magnitude_index(x, exponent[..., None, :], rules)
  nearest = jnp.copysign(mxfp4.magnitude(index).astype(x.dtype), x)
  difference = nearest * scale - x
  pulled = block_products(gram, difference)
  mismatch = block_products(cross, x)
  curvature = jnp.diagonal(gram, axis1=-2, axis2=-1)[..., None]
  slope = pulled - mismatch
  scores, values = best_code(nearest, scale, slope, curvature)
  score, accept = best_change(scores)
  return Refined(
    elements=jnp.where(accept, values, nearest),
    exponent=exponent,
    nearest=nearest,
    score=score,
    # d'G d - 2 d'K x, because the slope has K x once already.
    nearest_objective=(difference * (slope - mismatch)).sum(-2),
  )


def refined_blocks(
  x: jax.Array,
  gram: jax.Array,
  cross: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  matrix: jax.Array | None = None,
  implementation: Implementation | None = None,
  decodes: bool = True,
) -> jax.Array:
  """Encodes, refines and decodes activations: the dynamic A4 rule of HiRes.

  Paper: Eq. hires-code-score. `x`, `gram` and `cross` are as for `refine`, but
  `matrix`, float32 `[blocks, 32, 32]`, maps each block first; None if x is already in
  the installed coordinates. `implementation` is `native` or `xla`, with the same bits;
  None selects `native` on a CPU where it can run. Returns float32 in the shape of `x`;
  see `refined_objective` for what it returns unless it `decodes`.
  """
  obstacle = refinement.obstacle(x)
  if rules != mxfp4.PAPER_RULES:
    obstacle = f"it knows the paper's rules only, got {rules}"
  place = "one_code.refined_blocks"
  tables = (gram, cross) if matrix is None else (gram, cross, matrix)
  if implementations.choose(place, implementation, native=obstacle) == "native":
    kernel = refinement.refined
    return jax_export.kernel_or_reference(
      kernel, reference, x, *tables, decodes=decodes
    )
  return reference(x, *tables, rules=rules, decodes=decodes)


def reference(
  x: jax.Array,
  gram: jax.Array,
  cross: jax.Array,
  matrix: jax.Array | None = None,
  *,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  decodes: bool,
) -> jax.Array:
  """Defines `refined_blocks`, in XLA operations."""
  mapped = x if matrix is None else block_products(matrix, x)
  result = refine(mapped, gram, cross, rules)
  if not decodes:
    gain = jnp.where(result.score < 0, result.score, jnp.float32(0))
    return result.nearest_objective + gain
  scale = mxfp4.scale_of(result.exponent)[..., None, :].astype(x.dtype)
  return result.elements * scale


refined_objective = functools.partial(refined_blocks, decodes=False)
"""Computes ||W^ q - W x||^2 - ||(W^ - W) x||^2 at the refined vector q of each block.

Returns float32 `[blocks, n]`. `native` sums over coordinates in another order than
`xla`. Paper: the activation-dependent part of Eq. serb-realized-loss.
"""
