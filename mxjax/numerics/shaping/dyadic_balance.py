r"""Weight-activation balance: the diagonal D = Diag(2^u) of Stage I.

Paper: Eq. bilateral-risk, Eq. serb-proposal and Eq. serb-realized-loss. Nothing here
forms an `[n, m]` output: with `E = X^ - X` and `F = W^ - W` the numerator of J_b is

.. math::
  \operatorname{tr}(\hat W'\hat W\,E'E) + 2\operatorname{tr}(\hat W'F\,E'X)
    + \operatorname{tr}(F'F\,X'X)

a sum of error terms only, so no large outputs cancel.
"""

import functools
import itertools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.numerics import mxfp4, precision, projections
from mxjax.numerics.block_batches import map_block_batches, map_listed_blocks
from mxjax.numerics.realization import gptq, one_code

SUBGROUPS = 8
"""Four-coordinate subgroups of a block, each with one scale."""
SUBGROUP_SIZE = mxfp4.BLOCK_SIZE // SUBGROUPS
BOUND = 1 / 8
"""Largest |u|, and the factor on the centered log ratio (both literal, A26)."""
RISK_FLOOR = 2.0**-12
"""Added to both risks, in units of the block's median: the logarithm of a subgroup's
ratio stays finite where one operand has next to no risk."""
STEPS = (1.0, 0.5, 0.0)
"""The trials: full step, half step, identity."""
LOSS_FLOOR = 2.0**-1022
"""The smallest normal float64: a block without signal has the loss 0 and not 0 / 0."""


class Trial(NamedTuple):
  """Encoded weights of one balance trial, used to measure activations.

  `gram` and `cross` are G_Q and K_Q of the block-local GPTQ weights, float32 `[blocks,
  32, 32]`; `weight_term` is tr(F'F X'X) of the scaled operands, float64 `[blocks]`.
  """

  gram: jax.Array
  cross: jax.Array
  weight_term: jax.Array


def subgroup_shape(blocks: int) -> tuple[int, int, int, int]:
  """Returns the shape of the diagonal 4 x 4 tiles of `[blocks, 32, 32]` moments."""
  return blocks, SUBGROUPS, SUBGROUP_SIZE, SUBGROUP_SIZE


def subgroup_tiles(matrix: jax.Array) -> jax.Array:
  """Extracts the diagonal tiles `[blocks, 8, 4, 4]` of `[blocks, 32, 32]`."""
  # As [blocks, row group, row, column group, column]; the repeated g takes the
  # diagonal.
  tiles = matrix.reshape(-1, SUBGROUPS, SUBGROUP_SIZE, SUBGROUPS, SUBGROUP_SIZE)
  return jnp.einsum("bgigj->bgij", tiles)


@compilation.jit()
def subgroup_moments(blocks: jax.Array) -> jax.Array:
  """Sums x_g x_g^T over columns within subgroups, which suffices for the risks.

  `blocks` is `[blocks, 32, n]`, float32 or float64; the result is float64
  `[blocks, 8, 4, 4]`. Paper: Eq. bilateral-risk.
  """
  width, shape = SUBGROUP_SIZE, subgroup_shape(blocks.shape[0])
  wide = blocks.astype(jnp.float64).reshape(*shape[:-1], -1)
  # Ten elementwise sums, because 4 x 4 is too small for a matrix product to pay off.
  pairs = itertools.combinations_with_replacement(range(width), 2)
  sums = {(i, j): (wide[:, :, i] * wide[:, :, j]).sum(-1) for i, j in pairs}
  rows = [[sums[min(i, j), max(i, j)] for j in range(width)] for i in range(width)]
  return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)


@compilation.jit()
def bilateral_risks(
  activation_moment: jax.Array,
  activation_error: jax.Array,
  weight_gram: jax.Array,
  weight_error: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Computes r_A = tr(G_W C_E) and r_W = tr(G_E C_X) of each subgroup, `[blocks, 8]`.

  C_X = X'X / n and G_W = W'W are float64 `[blocks, 32, 32]`; the errors are the
  diagonal tiles of C_E = E_X'E_X / n and G_E = E_W'E_W, float64 `[blocks, 8, 4, 4]`.
  Paper: Eq. bilateral-risk.
  """
  # tr(P Q) is the sum over elements of P times Q', so no product is formed.
  traces = lambda matrix, tiles: (subgroup_tiles(matrix) * tiles.mT).sum((-2, -1))
  activation_risk = traces(weight_gram, activation_error)
  return activation_risk, traces(activation_moment, weight_error)


@compilation.jit(static_argnames="median")
def propose(
  activation_risk: jax.Array,
  weight_risk: jax.Array,
  *,
  median: Literal["middle", "lower"] = "middle",
) -> jax.Array:
  """Proposes the log2 scales u of each block, by 80 bisection steps.

  The risks r_A and r_W are float64 `[blocks, 8]`. A block with a regularized risk that
  is not positive proposes zero (reading A10). `median` is `middle`, the mean of the two
  middle values, or `lower`, the lower one (reading A8). Returns u, float64
  `[blocks, 8]`, with zero sum and |u| <= 1/8; positive entries expand the activation
  coordinate. Paper: Eq. serb-proposal.
  """
  precision.require_float64("dyadic_balance.propose", activation_risk, weight_risk)
  # The regularizer eps_b: 2^-12 of the median over the block's subgroups.
  ordered = jnp.sort(activation_risk + weight_risk, axis=-1)
  upper = SUBGROUPS // 2
  middle = ordered[:, upper - 1]
  if median == "middle":
    middle = 0.5 * (middle + ordered[:, upper])
  floor = RISK_FLOOR * middle[:, None]
  left, right = activation_risk + floor, weight_risk + floor
  # One subgroup without risk is enough: the ratios of a block are centered together.
  positive = ((left > 0) & (right > 0)).all(-1, keepdims=True)
  ratio = jnp.where(positive, left, 1.0) / jnp.where(positive, right, 1.0)
  log_ratio = jnp.log2(ratio)
  centered = log_ratio - log_ratio.mean(-1, keepdims=True)
  # Here 1/8 is both the factor of the logarithm and the bound of the result (A26).
  step = projections.project_zero_sum_box_bisection(BOUND * centered, BOUND)
  return jnp.where(positive, step, 0.0)


def diagonal(log2_scale: jax.Array) -> jax.Array:
  """Returns D's diagonal 2^u, `[..., blocks, 32]`: each scale for four coordinates."""
  # u is no integer, so no power of two is missed here. The last bit does not matter: D
  # is part of the stored map, by whose inverse the weights are folded.
  return jnp.repeat(jnp.exp2(log2_scale), SUBGROUP_SIZE, axis=-1)


def scaled_transform(transform: jax.Array, log2_scale: jax.Array) -> jax.Array:
  """Computes D T for T `[blocks, 32, 32]` and scales `[..., blocks, 8]`."""
  trials = (1,) * (log2_scale.ndim - 2)
  return diagonal(log2_scale)[..., None] * transform.reshape(trials + transform.shape)


def rescaled_moment(moment: jax.Array, log2_scale: jax.Array) -> jax.Array:
  """Computes D M D of moments `[blocks, 32, 32]` for scales `[blocks, 8]`."""
  scale = diagonal(log2_scale)
  return moment * scale[..., :, None] * scale[..., None, :]


@compilation.jit()
def trial_factor(moment: jax.Array, log2_scale: jax.Array) -> jax.Array:
  """Factors every block of a trial for GPTQ, float32 `[blocks, 32, 32]`.

  `moment` is X'X / n before rescaling, float64; `log2_scale` is the trial's u, float64
  `[blocks, 8]`. This function is separate from `prepare_trial` because of rule 2 of
  `mxjax.devices.execution`.
  """
  return gptq.factor(rescaled_moment(moment, log2_scale).astype(jnp.float32)).upper


@compilation.jit(static_argnames="rules")
def prepare_trial(
  weight: jax.Array,
  activation_moment: jax.Array,
  log2_scale: jax.Array,
  upper: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
) -> Trial:
  """Encodes the weights of one trial by GPTQ of each block alone (reading A11).

  `weight` is Stage-I transformed weights before rescaling, float64 `[blocks, 32, m]`;
  `upper` is the result of `trial_factor` for the same moment and scales.
  """
  # D multiplies inputs, so weights are divided by it. In float32, as Stage II
  # reconstructs.
  scaled = (weight / diagonal(log2_scale)[..., None]).astype(jnp.float32)
  moment = rescaled_moment(activation_moment, log2_scale)
  result = gptq.reconstruct_local(scaled, upper, rules)
  gram, cross = one_code.tables(scaled, result.decoded)
  error = (result.decoded - scaled).astype(jnp.float64)
  error_gram = jnp.einsum("bim,bjm->bij", error, error)
  return Trial(gram, cross, (error_gram * moment).sum((-2, -1)))


def _objective(rules: mxfp4.Rules, *operands: jax.Array) -> jax.Array:
  """Computes `trial_objective` of one trial, float64 `[blocks]`."""
  blocks, transform, gram, cross = operands
  objective = one_code.refined_objective(blocks, gram, cross, rules, matrix=transform)
  return objective.astype(jnp.float64).sum(-1)


@compilation.jit(static_argnames="rules")
def trial_objective(
  blocks: jax.Array,
  transforms: jax.Array,
  grams: jax.Array,
  crosses: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
) -> jax.Array:
  """Computes the activation-dependent part of J_b's numerator, summed over columns.

  This is `tr(W^'W^ E'E) + 2 tr(W^'F E'X)` for the refined codes, which the refinement
  computes per token, so no error moments are formed.

  `blocks` is raw inputs, float32 `[blocks, 32, n]`; `transforms` (D T), `grams` and
  `crosses` are float32 `[trials, blocks, 32, 32]`. Returns float64 `[trials, blocks]`.
  Paper: Eq. serb-realized-loss.
  """

  # Sequential: when unrolled, XLA:CPU interleaves the trials and takes twice as long.
  def group(blocks: jax.Array, *tables: jax.Array) -> jax.Array:
    trials = tuple(table.swapaxes(0, 1) for table in tables)
    one = lambda trial: _objective(rules, blocks, *trial)
    return jax.lax.map(one, trials).T

  # Blocks come first to be cut into batches, and trials come first to be looped over.
  by_block = (table.swapaxes(0, 1) for table in (transforms, grams, crosses))
  return map_block_batches(group, blocks, *by_block).T


@compilation.jit(static_argnames="rules")
def listed_objective(
  blocks: jax.Array,
  order: jax.Array,
  count: jax.Array,
  transform: jax.Array,
  gram: jax.Array,
  cross: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
) -> jax.Array:
  """Computes `trial_objective` of one trial for selected blocks only.

  `order` lists all blocks, int32 `[blocks]`, with the `count` selected ones first; the
  other arguments are as there, without the axis of trials. Returns float64 `[blocks]`,
  where only entries of selected blocks are meaningful. Paper: Eq. serb-realized-loss.
  """
  objective = functools.partial(_objective, rules)
  return map_listed_blocks(objective, order, count, blocks, transform, gram, cross)


def accept(losses: jax.Array) -> jax.Array:
  """Picks the largest step of each block whose loss does not exceed identity's.

  `losses` is J_b, `[3, blocks]`, in the order of `STEPS`. Returns 1, 0.5 or 0,
  `[blocks]`.
  """
  # "Does not exceed", so that a proposal that changes nothing counts as the full step.
  # The half step is NaN, which compares false, where the full step decided already.
  full, half, identity = losses
  rest = jnp.where(half <= identity, 0.5, jnp.zeros_like(full))
  return jnp.where(full <= identity, 1.0, rest)
