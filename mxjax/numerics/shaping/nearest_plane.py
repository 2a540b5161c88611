r"""Nearest-plane rounding of weights, last block first, and the transform of WUSH.

With `R` the upper Cholesky factor of the damped Hessian, the loss of a decoded weight
`c` is `||R (w - c)||^2`. Babai's nearest plane proceeds from the last coordinate to the
first, which is GPTQ on reversed columns. Each block can have its own basis `c = T' z`,
chosen from a target that contains the errors of all later blocks. WUSH's basis is

.. math::
  T_b = H_{32}\, \operatorname{Diag}(\sqrt{s})\, V^\top R_b^{-\top}, \qquad
  R_b (w_b + \ldots) = V \operatorname{Diag}(s) U^\top \sqrt{m}

Both operands are then flat and equally large. All steps are float64. Products and
factorizations are separate functions because of rule 2 of `mxjax.devices.execution`.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.precision import HIGHEST
from mxjax.numerics.realization import gptq
from mxjax.numerics.shaping import input_maps

SPECTRUM_DAMPING = 0.01
"""Damping added to the singular values, in units of their mean."""

Basis = Literal["wush", "wus", "hadamard", "identity"]


class Target(NamedTuple):
  """The target that the codes of a block must reproduce.

  `value` is R_b,: times the residual, `[32, rows]`; `gram` is value value' and `factor`
  R_bb, upper triangular, both `[32, 32]`.
  """

  value: jax.Array
  gram: jax.Array
  factor: jax.Array


class Plane(NamedTuple):
  """The basis of a block and its lattice.

  `transform` is T, `[32, 32]`, in float64 but representable in the stored dtype;
  `rotation`, `upper` and `inverse` are Q, R and R^-1 of R_bb T' = Q R.
  """

  transform: jax.Array
  rotation: jax.Array
  upper: jax.Array
  inverse: jax.Array


@compilation.jit()
def upper_cholesky(hessian: jax.Array, damping: jax.Array) -> jax.Array:
  """Computes R with R'R = H + damping mean(diag H) I; NaN if that is not definite.

  `hessian` is X'X / n, float64 `[d, d]`; R is upper triangular.
  """
  precision.require_float64("nearest_plane.upper_cholesky", hessian)
  size = hessian.shape[-1]
  mean = jnp.trace(hessian) / size
  # An all-zero Hessian has no curvature, so every choice is equally good.
  shift = jnp.where(mean > 0, damping * mean, 1)
  return jnp.linalg.cholesky(hessian + shift * jnp.eye(size)).mT


@compilation.jit()
def target(factor: jax.Array, residual: jax.Array, block: jax.Array) -> Target:
  """Computes the target of a block, compensated for all later blocks.

  `factor` is R, float64 `[d, d]`; `residual` holds weights not yet rounded and the
  errors of rounded ones, `[d, rows]`; `block` is the block's index, int32.
  """
  size = mxfp4.BLOCK_SIZE
  rows = jax.lax.dynamic_slice_in_dim(factor, block * size, size)
  value = jnp.einsum("ij,jm->im", rows, residual, precision=HIGHEST)
  return Target(
    value=value,
    gram=jnp.einsum("im,jm->ij", value, value, precision=HIGHEST),
    factor=jax.lax.dynamic_slice_in_dim(rows, block * size, size, axis=1),
  )


def _joint_basis(gram: jax.Array, factor: jax.Array, rows: int) -> jax.Array:
  """Computes Diag(sqrt s) V' R_b^-T, singular values in falling order."""
  # Singular vectors by the Gram matrix, which is 32 x 32 whatever the rows are, but
  # squares the condition number: it takes float64. Rounding may leave eigenvalues below
  # zero.
  eigenvalues, eigenvectors = jnp.linalg.eigh(gram)
  spectrum = jnp.sqrt(jnp.maximum(eigenvalues[::-1], 0.0) / rows)
  # Directions that no weight has would else be scaled to nothing, and T be singular.
  spectrum = spectrum + SPECTRUM_DAMPING * spectrum.mean()
  # A block of zero weights has no spectrum: any basis decodes to zero.
  spectrum = jnp.where(spectrum[0] > 0, spectrum, 1.0)
  scaled = eigenvectors[:, ::-1] * jnp.sqrt(spectrum)[None, :]
  # (R_b^-1 V Diag(sqrt s))' without an inverse.
  return jax.lax.linalg.triangular_solve(factor, scaled, left_side=True, lower=False).mT


@compilation.jit(static_argnames=("rows", "basis", "dtype"))
def plane(
  gram: jax.Array,
  factor: jax.Array,
  rows: int,
  basis: Basis = "wush",
  dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> Plane:
  """Computes the basis of a block and the lattice it spans, in float64.

  `gram` and `factor` are those of `Target`, and `rows` is m. `basis` is `wush`; `wus`,
  without the Hadamard; `hadamard`, alone; or `identity`. T is rounded to `dtype`,
  because the same T is applied to inputs online.
  """
  precision.require_float64("nearest_plane.plane", gram, factor)
  rotation = input_maps.hadamard(mxfp4.BLOCK_SIZE, jnp.float64)
  transform = jnp.eye(mxfp4.BLOCK_SIZE) if basis == "identity" else rotation
  if basis in ("wus", "wush"):
    joint = _joint_basis(gram, factor, rows)
    transform = rotation @ joint if basis == "wush" else joint
  # Before the lattice is made of it: codes are then exact for the map that runs.
  transform = transform.astype(dtype).astype(jnp.float64)
  # R may have negative diagonal entries: the sign is in Q as well, and the quotient by
  # a pivot has none of it.
  orthogonal, upper = jnp.linalg.qr(factor @ transform.mT)
  identity = jnp.eye(mxfp4.BLOCK_SIZE)
  inverse = jax.lax.linalg.triangular_solve(upper, identity, left_side=True)
  return Plane(transform, orthogonal, upper, inverse)


@compilation.jit(static_argnames="rules", donate_argnames="residual")
def round_block(
  residual: jax.Array,
  value: jax.Array,
  lattice: Plane,
  block: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
) -> tuple[jax.Array, gptq.Reconstruction]:
  """Rounds a block from its last coordinate to its first.

  The exact coordinates `z` determine the exponent once; it stays frozen. `residual`,
  `[d, rows]`, is donated; `value` is `Target.value`, `lattice` the block's plane and
  `block` its index, int32. Returns the residual with the block's error in place of its
  weights, and the rounded block in its basis, without the axis of blocks.
  """
  rotated = jnp.einsum("ji,jm->im", lattice.rotation, value, precision=HIGHEST)
  exact = jnp.einsum("ij,jm->im", lattice.inverse, rotated, precision=HIGHEST)
  exponent = mxfp4.block_exponent(exact, rules)
  scale = mxfp4.scale_of(exponent).astype(jnp.float64)

  def coordinate(step: jax.Array, state: Any) -> Any:
    rotated, codes, decoded = state
    i = mxfp4.BLOCK_SIZE - 1 - step
    # R is upper triangular, so what is taken off changes no coordinate that is already
    # rounded.
    column = jax.lax.dynamic_index_in_dim(lattice.upper, i, axis=1, keepdims=False)
    goal = jax.lax.dynamic_index_in_dim(rotated, i, keepdims=False) / column[i]
    code, rounded = gptq.round_value(goal, exponent, scale, rules)
    put = lambda array, new: jax.lax.dynamic_update_index_in_dim(array, new, i, 0)
    rotated -= column[:, None] * rounded[None, :]
    return rotated, put(codes, code), put(decoded, rounded)

  codes = jnp.zeros(value.shape, jnp.uint8)
  state = (rotated, codes, jnp.zeros_like(value))
  _, codes, decoded = jax.lax.fori_loop(0, mxfp4.BLOCK_SIZE, coordinate, state)
  native = jnp.einsum("ji,jm->im", lattice.transform, decoded, precision=HIGHEST)
  start = block * mxfp4.BLOCK_SIZE
  weights = jax.lax.dynamic_slice_in_dim(residual, start, mxfp4.BLOCK_SIZE)
  residual = jax.lax.dynamic_update_slice_in_dim(residual, weights - native, start, 0)
  return residual, gptq.Reconstruction(codes, exponent, decoded)
