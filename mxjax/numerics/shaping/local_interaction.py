r"""The interaction correction of Stage I: anchor errors to K, G and T.

One strict encoding of both operands in the reference chart shows which pairs of
coordinates its errors couple. The pairs that both folds and both operands agree on
become a small zero-diagonal matrix K.

Paper: Eq. hires-anchor-statistics to Eq. bidir-reconstruct, Eq. hires-transform.
Everything here works on both orderings of a pair at once: with `Z` any of the
matrices, the reciprocal coordinate is the symmetric part `(Z + Z^T) / sqrt 2` and the
directed one the antisymmetric part `(Z - Z^T) / sqrt 2`.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mxjax.numerics import mxfp4, precision, projections
from mxjax.numerics.block_batches import map_block_batches
from mxjax.numerics.shaping import input_maps

RADIUS = 1 / 8
"""Bound on the joint Euclidean norm of a block's coefficients, hence on ||K||_2."""
CURVATURE_MARGIN = 2.0**-8
FLOOR = 2.0**-30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AnchorStatistics:
  """Moments of the anchor encoding by fold, float64 `[2, blocks, 32, 32]`.

  Attributes:
    activation: C = Y^T Y / n.
    weight: C_W = V^T V / m.
    activation_cross: K_X = E_X^T Y / n.
    weight_cross: K_W = V^T E_W / m.
  """

  activation: jax.Array
  weight: jax.Array
  activation_cross: jax.Array
  weight_cross: jax.Array


class PairModes(NamedTuple):
  """A quantity of pairs: reciprocal (symmetric) and directed (antisymmetric)."""

  reciprocal: jax.Array
  directed: jax.Array


class PairSolution(NamedTuple):
  """What the pairwise solver found, `[blocks, 32, 32]` matrices over (i, j).

  Attributes:
    mean: The averaged first-order term p-bar, in both modes.
    threshold: delta, in both modes.
    relative_curvature: q-hat, at least one.
    mean_curvature: q-bar, `[blocks]`.
    unprojected: z, in both modes.
    projected: v, in both modes.
    interaction: K.
  """

  mean: PairModes
  threshold: PairModes
  relative_curvature: jax.Array
  mean_curvature: jax.Array
  unprojected: PairModes
  projected: PairModes
  interaction: jax.Array


@functools.partial(jax.jit, static_argnames="rules")
def rotated_error_moment(
  blocks: jax.Array, chart: jax.Array, rules: mxfp4.Rules = mxfp4.PAPER_RULES
) -> jax.Array:
  """Sum over columns of (Q(y) - y) y^T for y = chart x, in float64.

  Args:
    blocks: `[blocks, 32, n]`, float32, feature-major.
    chart: The transform to anchor coordinates, float32 `[blocks, 32, 32]`.
    rules: Codec rules.

  Returns:
    float64 `[blocks, 32, 32]`, still in the rotated coordinates.
  """

  def moment(blocks: jax.Array, chart: jax.Array) -> jax.Array:
    mapped = input_maps.BlockDense(chart).apply(blocks)
    error = mxfp4.round_blocks(mapped, rules) - mapped
    wide = error.astype(jnp.float64), mapped.astype(jnp.float64)
    return jnp.einsum("bin,bjn->bij", *wide, precision=precision.HIGHEST)

  return map_block_batches(moment, blocks, chart)


def unrotate(moment: jax.Array) -> jax.Array:
  """R_H M R_H: takes moments `[..., 32, 32]` back through the Hadamard."""
  rotation = input_maps.hadamard(mxfp4.BLOCK_SIZE, moment.dtype)
  return jnp.einsum(
    "ij,...jk,kl->...il", rotation, moment, rotation, precision=precision.HIGHEST
  )


def _modes(z: jax.Array) -> PairModes:
  root = math.sqrt(2.0)
  return PairModes((z + z.mT) / root, (z - z.mT) / root)


def _fold_disagreement(first: jax.Array, second: jax.Array) -> jax.Array:
  return 0.5 * jnp.abs(first - second)


def _attribution_disagreement(a: jax.Array, b: jax.Array) -> jax.Array:
  return 0.5 * (jnp.abs(a) + jnp.abs(b) - jnp.abs(a + b))


def _off_diagonal(matrix: jax.Array) -> jax.Array:
  size = matrix.shape[-1]
  keep = 1.0 - jnp.eye(size, dtype=matrix.dtype)
  return matrix * keep.reshape((1,) * (matrix.ndim - 2) + keep.shape)


@jax.jit
def solve_pairs(anchor: AnchorStatistics) -> PairSolution:
  r"""The pairwise construction in one pass.

  Paper: Eq. bidir-first-order, bidir-curvature, bidir-threshold, bidir-soft,
  bidir-reconstruct.

  Args:
    anchor: Fold statistics, float64.

  Returns:
    The solution; `interaction` has a zero diagonal and spectral norm at most 1/8.

  Raises:
    TypeError: A statistic is not float64.
  """
  precision.require_float64("interaction.solve_pairs", anchor.activation_cross)
  c = jnp.diagonal(anchor.activation, axis1=-2, axis2=-1)
  h = jnp.diagonal(anchor.weight, axis1=-2, axis2=-1)
  a = h[..., :, None] * anchor.activation_cross
  b = -c[..., None, :] * anchor.weight_cross
  floor = FLOOR * h.mean(-1) * c.mean(-1)
  curvature = (2.0 + CURVATURE_MARGIN) * h[..., :, None] * c[..., None, :]
  curvature = curvature + floor[..., None, None]

  a_mean, b_mean = _modes(a.mean(0)), _modes(b.mean(0))
  p_first, p_second = _modes(a[0] + b[0]), _modes(a[1] + b[1])
  p_mean = PairModes(*(0.5 * (x + y) for x, y in zip(p_first, p_second, strict=True)))
  excess = jnp.abs(p_mean.directed) - jnp.abs(p_mean.reciprocal)
  carrier = PairModes(jnp.zeros_like(excess), jnp.maximum(excess, 0.0))
  threshold = PairModes(
    *(
      _fold_disagreement(first, second) + _attribution_disagreement(x, y) + extra
      for first, second, x, y, extra in zip(
        p_first, p_second, a_mean, b_mean, carrier, strict=True
      )
    )
  )

  size = c.shape[-1]
  off_diagonal_entries = 2 * size * (size - 1)
  q_mean = _off_diagonal(curvature).sum((0, -2, -1)) / off_diagonal_entries
  denominator = (q_mean + FLOOR)[..., None, None]
  q_pair = curvature.sum(0)
  q_hat = 1.0 + (q_pair + q_pair.mT) / (4.0 * denominator)
  scale = denominator * jnp.sqrt(q_hat)
  z = PairModes(
    *(
      _off_diagonal(projections.soft_threshold(p / scale, t / scale))
      for p, t in zip(p_mean, threshold, strict=True)
    )
  )
  # Each unordered pair stands twice in the matrices, hence the root of two.
  both = jnp.stack(z, axis=-3)
  projected = projections.project_ball(both, RADIUS * math.sqrt(2.0), axes=(-3, -2, -1))
  v = PairModes(projected[..., 0, :, :], projected[..., 1, :, :])
  return PairSolution(
    mean=p_mean,
    threshold=threshold,
    relative_curvature=q_hat,
    mean_curvature=q_mean,
    unprojected=z,
    projected=v,
    interaction=(v.reciprocal + v.directed) / jnp.sqrt(2.0 * q_hat),
  )


def correction(interaction: jax.Array) -> jax.Array:
  """G = |det G_0|^(-1/q) G_0 with G_0 = I + K, `[..., q, q]`."""
  size = interaction.shape[-1]
  identity = jnp.eye(size, dtype=interaction.dtype)
  shifted = interaction + identity.reshape(
    (1,) * (interaction.ndim - 2) + identity.shape
  )
  log_volume = jnp.linalg.slogdet(shifted)[1]
  return shifted * jnp.exp(-log_volume / size)[..., None, None]


@jax.jit
def shaping_transform(chart: jax.Array, interaction: jax.Array) -> jax.Array:
  """T = R_H G P_ref, float64 `[blocks, 32, 32]` (Eq. hires-transform)."""
  precision.require_float64("interaction.shaping_transform", chart, interaction)
  rotation = input_maps.hadamard(chart.shape[-1], chart.dtype)
  return jnp.einsum("ij,...jk->...ik", rotation, correction(interaction) @ chart)
