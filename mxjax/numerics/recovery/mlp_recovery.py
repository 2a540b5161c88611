r"""MLP recovery: three scalars for each gated MLP.

Paper: Eq. hires-mlp-update, Eq. jolt-design, Eq. jolt-cell-solve and Eq. jolt-aggregate
(Appendix, Structural Recovery).
"""

import dataclasses

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.numerics import precision, pytree_nodes
from mxjax.numerics.block_batches import map_block_batches
from mxjax.numerics.jax_export import register_dataclass

CELL_RESIDUES = 8
"""Sequence residue classes of the calibration cells: sequence index modulo 8."""
CELL_QUARTERS = 4
"""Parts of a sequence that form separate cells; 512 tokens each for 2,048 tokens."""
L1_BOUND = 1 / 8
"""Bound on |alpha| + |beta| + |eta|."""


@register_dataclass
@dataclasses.dataclass(frozen=True)
class MlpRecovery:
  """The correction of one gated MLP, as float32 scalars.

  Attributes:
    gate_shift: alpha, in units of `gate_deviation`.
    gate_scale: beta.
    up_scale: eta.
    gate_deviation: sigma_g, in units of the gate output.
  """

  gate_shift: jax.Array
  gate_scale: jax.Array
  up_scale: jax.Array
  gate_deviation: jax.Array


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class GateMoments:
  """Count, sum and sum of squares of gate outputs, as float64 scalars."""

  count: jax.Array
  value: jax.Array
  square: jax.Array


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class CellMoments:
  """Weighted normal equations of calibration cells, float64.

  The design has the *unscaled* shift column `phi'(g) u`, because sigma_g is known only
  after the whole pass.

  Attributes:
    count: Scalar pairs in each cell, `[cells]`.
    gram: Sums of `omega D'D`, `[cells, 3, 3]`.
    target: Sums of `omega D'e`, `[cells, 3]`.
    product_square: Sums of `omega m^2`, `[cells]`.
    error_square: Sums of `omega e^2`, `[cells]`; used only by `linearized_errors`.
  """

  count: jax.Array
  gram: jax.Array
  target: jax.Array
  product_square: jax.Array
  error_square: jax.Array


@compilation.jit()
def column_weights(down_weight: jax.Array) -> jax.Array:
  r"""Computes coordinate weights omega from the float down projection `[out, hidden]`.

  Returns float64 `[hidden]`: the relative energy of each column, clipped to [1/4, 4]
  and then scaled to mean one.
  """
  energy = jnp.square(down_weight.astype(jnp.float64)).sum(0)
  precision.require_float64("mlp_recovery.column_weights", energy)
  # No coordinate counts more than 16 times another; and a down projection of zeros has
  # equal weights, by the floor of the mean.
  clipped = jnp.clip(energy / (energy.mean() + 2.0**-20), 0.25, 4.0)
  return clipped / clipped.mean()


def gate_moments(gate: jax.Array) -> GateMoments:
  """Sums gate outputs and their squares over all axes, in float64."""
  g = gate.astype(jnp.float64)
  precision.require_float64("mlp_recovery.gate_moments", g)
  return GateMoments(jnp.asarray(g.size, jnp.float64), g.sum(), (g * g).sum())


@compilation.jit()
def gate_deviation(sums: GateMoments) -> jax.Array:
  r"""Returns the regularized standard deviation sigma_g of the gate, float64 scalar.

  .. math::
    \sigma_g = \sqrt{[E[g^2] - E[g]^2]_+ + 2^{-12} E[g^2] + 2^{-20}}
  """
  mean, square = sums.value / sums.count, sums.square / sums.count
  # The difference of two sums may round below zero. The two floors keep sigma above
  # zero for a gate that is constant or zero.
  variance = jnp.maximum(square - mean * mean, 0.0)
  return jnp.sqrt(variance + 2.0**-12 * square + 2.0**-20)


def _row_moments(*arrays: jax.Array) -> dict[tuple[int, int], jax.Array]:
  """Sums products of two columns over tokens, float64 `[hidden, cells]` each.

  The columns are the three of the design, with the unscaled shift, and the error.
  """
  g, u, g_star, u_star = (a.astype(jnp.float64) for a in arrays)
  sigmoid = jax.nn.sigmoid(g)
  # phi', the slope of SiLU, and the columns of Eq. jolt-design.
  slope = sigmoid + g * sigmoid * (1.0 - sigmoid)
  product = g * sigmoid * u
  error = g_star * jax.nn.sigmoid(g_star) * u_star - product
  columns = (slope * u, g * slope * u, product, error)
  return {
    (i, j): (columns[i] * columns[j]).sum(-1) for i in range(4) for j in range(i, 4)
  }


def cell_moments(
  gate: jax.Array,
  up: jax.Array,
  gate_target: jax.Array,
  up_target: jax.Array,
  weights: jax.Array,
) -> CellMoments:
  """Computes the sums of every cell; those of several calls add up leaf by leaf.

  Gate and up outputs of the quantized model and of the float weights on the same inputs
  are `[hidden, cells, tokens]`; `weights` is omega, float64 `[hidden]`.
  """
  arrays = gate, up, gate_target, up_target
  by_row = map_block_batches(_row_moments, *arrays)
  precision.require_float64("mlp_recovery.cell_moments", weights, *by_row.values())
  # omega does not depend on the token, so it is applied after the sum over tokens.
  sums = {pair: jnp.einsum("hc,h->c", sum_, weights) for pair, sum_ in by_row.items()}
  gram = [[sums[min(i, j), max(i, j)] for j in range(3)] for i in range(3)]
  return CellMoments(
    count=jnp.full(gate.shape[1], gate[:, 0].size, jnp.float64),
    gram=jnp.stack([jnp.stack(row, -1) for row in gram], -2),
    target=jnp.stack([sums[i, 3] for i in range(3)], -1),
    product_square=sums[2, 2],
    error_square=sums[3, 3],
  )


def normal_equations(
  sums: CellMoments, deviation: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes G_c `[cells, 3, 3]` and z_c `[cells, 3]`, float64 means over scalar pairs.

  `deviation`, sigma_g, scales the shift column here. Paper: Eq. jolt-cell-solve.
  """
  one = jnp.ones_like(deviation)
  scale = jnp.stack([deviation, one, one])
  gram = sums.gram * scale[None, :, None] * scale[None, None, :]
  target = sums.target * scale[None, :]
  return gram / sums.count[:, None, None], target / sums.count[:, None]


@compilation.jit()
def solve_cells(sums: CellMoments, deviation: jax.Array) -> jax.Array:
  r"""Solves the weighted ridge regression of every cell.

  .. math::
    \theta_c = (G_c + \lambda_c I)^{-1} z_c, \qquad
    \lambda_c = 2^{-8} \operatorname{tr}(G_c)/3
      + 2^{-20} E_c[\omega m^2] + 2^{-30}

  Paper: Eq. jolt-cell-solve. `deviation` is sigma_g, a float64 scalar. Returns theta_c,
  float64 `[cells, 3]`, in the order (alpha, beta, eta).
  """
  precision.require_float64("mlp_recovery.solve_cells", sums.gram, deviation)
  gram, target = normal_equations(sums, deviation)
  ridge = (
    2.0**-8 * jnp.trace(gram, axis1=-2, axis2=-1) / 3.0
    + 2.0**-20 * sums.product_square / sums.count
    + 2.0**-30
  )
  system = gram + ridge[:, None, None] * jnp.eye(3, dtype=gram.dtype)[None]
  return jnp.linalg.solve(system, target[..., None])[..., 0]


@compilation.jit()
def aggregate(cell_estimates: jax.Array) -> jax.Array:
  r"""Combines the cell estimates theta_c by robust shrinkage and bounds the result.

  .. math::
    \tilde\theta = \operatorname{sign}(\mu)\,[|\mu| - d/\sqrt{32}]_+, \qquad
    \theta = \tilde\theta \min(1, \tfrac{1/8}{\|\tilde\theta\|_1 + 2^{-20}})

  Paper: Eq. jolt-aggregate. Both medians are the lower middle order statistic.
  `cell_estimates` is float64 `[cells, 3]`, theta is float64 `[3]`.
  """
  precision.require_float64("mlp_recovery.aggregate", cell_estimates)
  cells = cell_estimates.shape[0]
  median = lambda x: jnp.sort(x, axis=0)[(cells - 1) // 2]
  center = median(cell_estimates)
  # 1.4826 makes the median deviation of normal estimates their standard deviation. Over
  # the root of their number it is the error of the center, below which a center is no
  # evidence.
  spread = 1.4826 * median(jnp.abs(cell_estimates - center[None]))
  # The paper's root of 32 is of its number of cells; fewer than eight sequences have
  # fewer.
  shrunk = jnp.sign(center) * jnp.maximum(jnp.abs(center) - spread / cells**0.5, 0.0)
  return shrunk * jnp.minimum(1.0, L1_BOUND / (jnp.abs(shrunk).sum() + 2.0**-20))


@compilation.jit()
def linearized_errors(
  sums: CellMoments, deviation: jax.Array, theta: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes the product's weighted relative squared error before and after correction.

  The error after correction with `theta`, float64 `[3]`, is a first-order prediction.
  Both are float64 scalars relative to E[omega m^2], means over cells; if all products
  are zero, absolute.
  """
  gram, target = normal_equations(sums, deviation)
  before = sums.error_square / sums.count
  change = jnp.einsum("i,cij,j->c", theta, gram, theta)
  after = before - 2.0 * jnp.einsum("ci,i->c", target, theta) + change
  energy = (sums.product_square / sums.count).sum()
  total = jnp.where(energy > 0, energy, 1.0)
  return before.sum() / total, after.sum() / total


def apply(gate: jax.Array, up: jax.Array, recovery: MlpRecovery) -> jax.Array:
  r"""Computes the corrected gated product of `[..., hidden]` arrays in float32.

  .. math::
    \bar m = \operatorname{SiLU}((1+\beta) g + \alpha\sigma_g) \odot (1+\eta) u

  Paper: Eq. hires-mlp-update. The result has the shape and dtype of `gate`.
  """
  # Feature-major for the reason given in `elementwise.gated_product`.
  g, u = (a.astype(jnp.float32).reshape(-1, a.shape[-1]).T for a in (gate, up))
  shift = recovery.gate_shift * recovery.gate_deviation
  silu = jax.nn.silu((1.0 + recovery.gate_scale) * g + shift)
  product = silu * ((1.0 + recovery.up_scale) * u)
  return product.T.reshape(gate.shape).astype(gate.dtype)
