r"""The interaction correction of Stage I: from anchor errors to K, G and T.

One strict encoding of both operands in the reference chart shows which pairs of
coordinates the rounding errors couple. The pairs on which both folds and both operands
agree become K, a small matrix with a zero diagonal.

Paper: Eq. hires-anchor-statistics to Eq. bidir-reconstruct, Eq. hires-transform. The
code computes both orderings of a pair at once: for any of the matrices `Z`, the
reciprocal coordinate is the symmetric part `(Z + Z^T) / sqrt 2` and the directed one is
the antisymmetric part `(Z - Z^T) / sqrt 2`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.numerics import mxfp4, precision, projections, pytree_nodes
from mxjax.numerics.block_batches import map_block_batches
from mxjax.numerics.shaping import input_maps

RADIUS = 1 / 8
"""Bound on the joint Euclidean norm of a block's coefficients, hence on ||K||_2."""
CURVATURE_MARGIN = 2.0**-8
FLOOR = 2.0**-30
"""Both are literal in Eq. bidir-curvature. With the floor, a pair of coordinates that
no input or no weight uses has a quotient of zero and not 0 / 0."""


@pytree_nodes.register
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
  """A pair quantity in reciprocal (symmetric) and directed (antisymmetric) modes."""

  reciprocal: jax.Array
  directed: jax.Array


class PairSolution(NamedTuple):
  """The pairwise solution, `[blocks, 32, 32]` matrices over (i, j).

  In the paper's letters: p-bar, delta, q-hat (at least one), q-bar (`[blocks]`), z, v
  and K.
  """

  mean: PairModes
  threshold: PairModes
  relative_curvature: jax.Array
  mean_curvature: jax.Array
  unprojected: PairModes
  projected: PairModes
  interaction: jax.Array


@compilation.jit(static_argnames="rules")
def rotated_error_moment(
  blocks: jax.Array, chart: jax.Array, rules: mxfp4.Rules = mxfp4.PAPER_RULES
) -> jax.Array:
  """Sums (Q(y) - y) y^T over columns, for y = chart x, in float64 `[blocks, 32, 32]`.

  `blocks` is float32 `[blocks, 32, n]`; `chart`, float32 `[blocks, 32, 32]`, maps to
  anchor coordinates, in which the result is still rotated.
  """

  def moment(blocks: jax.Array, chart: jax.Array) -> jax.Array:
    mapped = input_maps.BlockDense(chart).apply(blocks)
    # Rounded in float32, as a quantized model rounds, and summed in float64.
    error = mxfp4.round_blocks(mapped, rules) - mapped
    wide = error.astype(jnp.float64), mapped.astype(jnp.float64)
    return jnp.einsum("bin,bjn->bij", *wide, precision=precision.HIGHEST)

  return map_block_batches(moment, blocks, chart)


def unrotate(moment: jax.Array) -> jax.Array:
  """Transforms moments `[..., 32, 32]` back through the Hadamard: R_H M R_H."""
  # Errors and signals were both multiplied by R_H, which is its own inverse: one factor
  # on each side takes both back.
  rotation = input_maps.hadamard(mxfp4.BLOCK_SIZE, moment.dtype)
  return jnp.einsum(
    "ij,...jk,kl->...il", rotation, moment, rotation, precision=precision.HIGHEST
  )


def _modes(z: jax.Array) -> PairModes:
  root = math.sqrt(2.0)
  return PairModes((z + z.mT) / root, (z - z.mT) / root)


def _off_diagonal(matrix: jax.Array) -> jax.Array:
  size = matrix.shape[-1]
  keep = 1.0 - jnp.eye(size, dtype=matrix.dtype)
  return matrix * keep.reshape((1,) * (matrix.ndim - 2) + keep.shape)


def _by_mode(function: Callable[..., jax.Array], *quantities: PairModes) -> PairModes:
  """Applies a function to the reciprocal modes and to the directed modes."""
  return PairModes(*map(function, *quantities))


def _threshold(
  folds: tuple[PairModes, PairModes], mean: PairModes, a: PairModes, b: PairModes
) -> PairModes:
  """Computes delta, the disagreement of folds and operands (Eq. bidir-threshold).

  A directed coordinate also shrinks by its excess over the reciprocal one.
  """
  # What only one fold shows is an accident of its data.
  of_folds = lambda first, second: 0.5 * jnp.abs(first - second)
  # Zero where both operands ask for the same sign, else the smaller of the two.
  of_operands = lambda x, y: 0.5 * (jnp.abs(x) + jnp.abs(y) - jnp.abs(x + y))
  both = lambda first, second, x, y: of_folds(first, second) + of_operands(x, y)
  disagreement = _by_mode(both, *folds, a, b)
  excess = jnp.abs(mean.directed) - jnp.abs(mean.reciprocal)
  directed = disagreement.directed + jnp.maximum(excess, 0.0)
  return disagreement._replace(directed=directed)


def _curvature(c: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Computes q-bar `[blocks]` and the sum over folds `[blocks, 32, 32]`."""
  floor = FLOOR * h.mean(-1) * c.mean(-1)
  curvature = (2.0 + CURVATURE_MARGIN) * h[..., :, None] * c[..., None, :]
  curvature = curvature + floor[..., None, None]
  # The mean is over both folds and all ordered pairs of different coordinates (A19).
  size = c.shape[-1]
  entries = 2 * size * (size - 1)
  return _off_diagonal(curvature).sum((0, -2, -1)) / entries, curvature.sum(0)


@compilation.jit()
def solve_pairs(anchor: AnchorStatistics) -> PairSolution:
  r"""Solves for the interaction K of all pairs of coordinates in one pass.

  Paper: Eq. bidir-first-order, bidir-curvature, bidir-threshold, bidir-soft,
  bidir-reconstruct. `interaction` has a zero diagonal and spectral norm at most 1/8.
  """
  precision.require_float64("local_interaction.solve_pairs", anchor.activation_cross)
  c = jnp.diagonal(anchor.activation, axis1=-2, axis2=-1)
  h = jnp.diagonal(anchor.weight, axis1=-2, axis2=-1)
  # An error in one operand is multiplied by the other, so each counts by the other's
  # energy. K maps the activations; the weights get its inverse, I - K to first order,
  # hence the sign of b.
  a = h[..., :, None] * anchor.activation_cross
  b = -c[..., None, :] * anchor.weight_cross
  p_first, p_second = _modes(a[0] + b[0]), _modes(a[1] + b[1])
  p_mean = _by_mode(lambda x, y: 0.5 * (x + y), p_first, p_second)
  means = _modes(a.mean(0)), _modes(b.mean(0))
  threshold = _threshold((p_first, p_second), p_mean, *means)

  # Eq. bidir-curvature and Eq. bidir-soft. `q_pair` is summed over the folds, so it and
  # its transpose have the four terms of q-hat.
  q_mean, q_pair = _curvature(c, h)
  denominator = (q_mean + FLOOR)[..., None, None]
  q_hat = 1.0 + (q_pair + q_pair.mT) / (4.0 * denominator)
  scale = denominator * jnp.sqrt(q_hat)
  shrink = lambda p, t: projections.soft_threshold(p / scale, t / scale)
  z = _by_mode(lambda p, t: _off_diagonal(shrink(p, t)), p_mean, threshold)
  # One ball for all coefficients: q-hat is at least one, so ||K||_2 <= ||K||_F <= ||v||
  # and I + K is invertible, without a decomposition.
  # Each unordered pair occurs twice in the matrices, hence the root of two.
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
    # Both K_ij and K_ji: the directed mode changes its sign with the order of the pair.
    interaction=(v.reciprocal + v.directed) / jnp.sqrt(2.0 * q_hat),
  )


def correction(interaction: jax.Array) -> jax.Array:
  """Computes G = |det G_0|^(-1/q) G_0 with G_0 = I + K, `[..., q, q]`."""
  size = interaction.shape[-1]
  identity = jnp.eye(size, dtype=interaction.dtype)
  shifted = interaction + identity.reshape(
    (1,) * (interaction.ndim - 2) + identity.shape
  )
  # The determinant is positive because ||K||_2 is below one: its sign is not needed.
  log_volume = jnp.linalg.slogdet(shifted)[1]
  return shifted * jnp.exp(-log_volume / size)[..., None, None]


@compilation.jit()
def shaping_transform(chart: jax.Array, interaction: jax.Array) -> jax.Array:
  """Computes T = R_H G P_ref, float64 `[blocks, 32, 32]` (Eq. hires-transform)."""
  precision.require_float64("local_interaction.shaping_transform", chart, interaction)
  rotation = input_maps.hadamard(chart.shape[-1], chart.dtype)
  return jnp.einsum("ij,...jk->...ik", rotation, correction(interaction) @ chart)
