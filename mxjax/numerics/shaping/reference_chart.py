r"""Reference coordinates of Stage I.

Paper: Eq. hires-reference-chart and Eq. hires-spectral-cap. `geometric_chart` is not in
the paper.
"""

import math

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.numerics import lapack, precision, projections
from mxjax.numerics.block_batches import map_block_batches

RIDGE, RIDGE_FLOOR = 0.01, 2.0**-30
"""lambda_A and lambda_B: in units of the mean diagonal, and the absolute part."""
MAX_CONDITION = 8.0
"""The bound kappa of the spectral cap."""


@compilation.jit()
def block_moment(blocks: jax.Array) -> jax.Array:
  """Sums x x^T over columns of each block, float64 `[blocks, 32, 32]`.

  `blocks` is `[blocks, 32, n]`, feature-major, float32 or float64.
  """

  def moment(blocks: jax.Array) -> jax.Array:
    wide = blocks.astype(jnp.float64)
    return jnp.einsum("bin,bjn->bij", wide, wide, precision=precision.HIGHEST)

  return map_block_batches(moment, blocks)


def normalize_determinant(matrix: jax.Array) -> jax.Array:
  """Computes DN(M) = M / det(M)^(1/q) of positive definite matrices, `[..., q, q]`."""
  # The logarithm, because the product of 32 small eigenvalues can be below what float64
  # holds. The sign is known: the matrix is positive definite.
  log_volume = jnp.linalg.slogdet(matrix)[1]
  scale = jnp.exp(-log_volume / matrix.shape[-1])
  return matrix * scale[..., None, None]


def spectral_cap(
  log_eigenvalues: jax.Array, eigenvectors: jax.Array, max_condition: float
) -> jax.Array:
  r"""Caps the condition number of a positive definite matrix at unit volume.

  .. math::
    \operatorname{Cap}_\kappa(S) = U \operatorname{Diag}\!\left[\exp\!\left(
      \Pi_{\mathbf 1^\top z = 0,\ \|z\|_\infty \le \frac12 \log\kappa}
      (\log\lambda)\right)\right] U^\top

  The matrix, `[..., q, q]`, is given by its decomposition; the result has determinant 1
  and a condition number of at most `max_condition`. Paper: Eq. hires-spectral-cap.
  """
  # Clipping the eigenvalues would bound their ratio as well, but change the volume, and
  # with it the overall scale that a determinant of one leaves out.
  log_spectrum = projections.project_zero_sum_box(
    log_eigenvalues, bound=0.5 * math.log(max_condition)
  )
  return (eigenvectors * jnp.exp(log_spectrum)[..., None, :]) @ eigenvectors.mT


def ridge(moment: jax.Array) -> jax.Array:
  """Adds lambda I with lambda = .01 tr(M)/q + 2^-30 to moments `[..., q, q]`."""
  # The relative part bounds the condition number by 1 + 32 / .01, whatever the data.
  # The absolute part makes a block that is all zeros invertible.
  size = moment.shape[-1]
  weight = RIDGE * jnp.trace(moment, axis1=-2, axis2=-1) / size + RIDGE_FLOOR
  identity = jnp.eye(size, dtype=moment.dtype)
  return moment + weight[..., None, None] * identity.reshape(
    (1,) * (moment.ndim - 2) + identity.shape
  )


@compilation.jit(static_argnames="max_condition")
def reference_chart(
  activation_moment: jax.Array,
  weight_moment: jax.Array,
  max_condition: float = MAX_CONDITION,
) -> jax.Array:
  r"""Computes the reference chart P_ref of each block, symmetric with determinant 1.

  .. math::
    M_0 = \tfrac12 [\operatorname{DN}(A) + \operatorname{DN}(B^{-1})], \qquad
    P_{ref} = \operatorname{Cap}_8(M_0^{-1/2})

  The power -1/2 and the cap act on the same eigenvalues, so one decomposition serves
  both. Operands and result are float64 (else TypeError) `[blocks, 32, 32]`: A = X^T X /
  n, B = W^T W / m. Paper: Eq. hires-reference-chart.
  """
  precision.require_float64("reference_chart", activation_moment, weight_moment)
  # Expanding a direction of the activations contracts it in the weights, so the inverse
  # of B stands beside A; at unit volume neither operand's units decide the mean.
  first = normalize_determinant(ridge(activation_moment))
  inverse = jnp.linalg.inv(lapack.after(ridge(weight_moment), first))
  middle = 0.5 * (first + normalize_determinant(inverse))
  # An inverse is symmetric only up to rounding, and eigh would read one triangle.
  eigenvalues, eigenvectors = jnp.linalg.eigh(0.5 * (middle + middle.mT))
  return spectral_cap(-0.5 * jnp.log(eigenvalues), eigenvectors, max_condition)


@compilation.jit(static_argnames="max_condition")
def geometric_chart(
  activation_moment: jax.Array,
  weight_moment: jax.Array,
  max_condition: float = MAX_CONDITION,
) -> jax.Array:
  r"""Computes the geometric chart C of each block, symmetric with determinant 1.

  .. math::
    C^\top C = A^{-1} \# B = L^{-\top} (L^\top B L)^{1/2} L^{-1}, \qquad A = L L^\top

  The geometric mean minimizes tr(C A C') tr(C^-T B C^-1), the product of what a scale
  for each block spends on activations and on weights. Where A and B^-1 differ little,
  P_ref is close to it; under outliers it is not. Operands and result are as those of
  `reference_chart`.
  """
  precision.require_float64("geometric_chart", activation_moment, weight_moment)
  # With A = L L', the mean A^-1 # B has a form with the root of a symmetric matrix
  # alone.
  lower = jnp.linalg.cholesky(ridge(activation_moment))
  weights = lapack.after(ridge(weight_moment), lower)
  inner = lower.mT @ weights @ lower
  values, vectors = jnp.linalg.eigh(0.5 * (inner + inner.mT))
  root = (vectors * jnp.sqrt(values)[..., None, :]) @ vectors.mT
  inverse = jnp.linalg.inv(lapack.after(lower, root))
  mean = inverse.mT @ root @ inverse
  # C is the symmetric root of the mean, so its logarithmic spectrum is half of the
  # mean's.
  eigenvalues, eigenvectors = jnp.linalg.eigh(0.5 * (mean + mean.mT))
  return spectral_cap(0.5 * jnp.log(eigenvalues), eigenvectors, max_condition)
