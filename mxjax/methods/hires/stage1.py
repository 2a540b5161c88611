"""Stage I of HiRes: geometric shaping, which finds the map D T of every block.

Paper: Section HiRes, "Geometric Shaping", with Appendix "Algorithm Details". In the
order of `shape`: the reference chart P_ref; the interaction K, from the errors of an
encoding pass in its coordinates; T = R_H G P_ref with G = I + K at unit volume; and the
balance D of three encoded trials. Moments and what is solved from them are float64.
What is encoded on the way, in the anchor pass and the trials, is float32, as in a
quantized model; so is the installed map by default.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.calibration import fisher
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.methods.program import Shaping
from mxjax.numerics import mxfp4
from mxjax.numerics.block_batches import map_block_batches
from mxjax.numerics.shaping import (
  dyadic_balance,
  input_maps,
  local_interaction,
  reference_chart,
)

Chart = Callable[..., jax.Array]
"""`(moment, weight_moment, *, max_condition)` to the chart of every block."""


def shape(
  weight: jax.Array,
  inputs: LinearInputs,
  *,
  use_interaction: bool = True,
  use_balance: bool = True,
  chart: Chart = reference_chart.reference_chart,
  max_condition: float = reference_chart.MAX_CONDITION,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> Shaping:
  """Finds the map U = D T of a linear, a dense matrix for each block of 32 inputs.

  Paper: Eq. hires-reference-chart, Eq. hires-transform, Eq. serb-realized-loss.

  Args:
    weight: Raw weights, feature-major, float32 `[blocks, 32, out_features]`.
    inputs: The linear's calibration inputs.
    use_interaction: Whether K is fitted; G = I without it.
    use_balance: Whether D is tried; D = I without it.
    chart: The reference chart, or another function of both moments.
    max_condition: The chart's largest condition number, 8 in the paper.
    dtype: Of the installed map. It is rounded before weights are folded by its inverse,
      so a narrower map preserves the function, too.

  Returns:
    The map, `dtype` `[blocks, 32, 32]`, and its record: the spectral norm of each
    block's K, and for the balance the accepted steps with J_b of the trials.
  """
  # In the paper's order, because each step is measured in the coordinates that the one
  # before has made: K in those of P_ref, the risks of D in those of T.
  record: dict[str, Any] = {}
  moment, folds = inputs.moment(), weight_moments(weight)
  # In several jitted steps by rule 2 of `mxjax.devices.execution`.
  charts = execution.call_in_batches(
    functools.partial(_charts, chart=chart, max_condition=float(max_condition)),
    moment,
    output_moment(weight, inputs, folds),
  )
  interaction = jnp.zeros_like(moment)
  if use_interaction:
    interaction = fit_interaction(weight, inputs, folds, *charts)
  transform = execution.call_in_batches(
    local_interaction.shaping_transform, charts[0], interaction
  )
  norms = execution.call_in_batches(spectral_norm, interaction)
  record["interaction_spectral_norm"] = norms.tolist()
  if use_balance:
    transform, of_balance = balance(weight, inputs, moment, transform)
    record |= of_balance
  return Shaping(input_maps.BlockDense(transform.astype(dtype)), record)


# The reference chart.


@execution.jit()
def weight_moments(weight: jax.Array) -> jax.Array:
  """Computes W'W / m of even and odd rows (A7), float64 `[2, blocks, 32, 32]`."""
  parts = [weight[..., fold::2] for fold in (0, 1)]
  return jnp.stack(
    [reference_chart.block_moment(p) / max(p.shape[-1], 1) for p in parts]
  )


def output_moment(
  weight: jax.Array, inputs: LinearInputs, folds: jax.Array
) -> jax.Array:
  """Returns W'W / m over all rows, or W'B W / m where tokens have Fisher weights."""
  if inputs.token_weights is not None:
    return fisher.output_moment(weight, inputs)
  # On the host: a compiled sum of products may contract and round once less.
  rows = weight.shape[-1]
  even, odd = np.asarray(folds)
  # And placed as it is: `jnp.asarray` compiles two programs for each shape.
  return jax.device_put((even * (rows - rows // 2) + odd * (rows // 2)) / rows)


@compilation.jit(static_argnames=("chart", "max_condition"))
def _charts(
  moment: jax.Array, weight_moment: jax.Array, *, chart: Chart, max_condition: float
) -> tuple[jax.Array, ...]:
  """Computes P_ref, R_H P_ref and R_H P_ref^-T, float64 `[blocks, 32, 32]`.

  No result is converted in here: with that, this program hung on two busy cores.
  """
  reference = chart(moment, weight_moment, max_condition=max_condition)
  rotation = input_maps.hadamard(mxfp4.BLOCK_SIZE, jnp.float64)[None]
  return reference, rotation @ reference, rotation @ jnp.linalg.inv(reference).mT


@compilation.jit()
def spectral_norm(matrices: jax.Array) -> jax.Array:
  """Computes the largest singular value of each matrix, `[..., q, q]` to `[...]`."""
  return jnp.linalg.svd(matrices, compute_uv=False)[..., 0]


# The interaction K.


class _Anchor(NamedTuple):
  """Constants of the anchor pass.

  `chart` is P_ref, float64 `[blocks, 32, 32]`; `rotated` is R_H P_ref, float32, which
  maps native to anchor coordinates. `weight_folds` and `weight_cross_folds` are C_W and
  K_W of both folds, float64 `[2, blocks, 32, 32]`.
  """

  chart: jax.Array
  rotated: jax.Array
  weight_folds: jax.Array
  weight_cross_folds: jax.Array


@execution.jit(static_argnames="rules")
def _weight_crosses(
  weight: jax.Array, rotated_inverse: jax.Array, rules: mxfp4.Rules
) -> jax.Array:
  """Computes K_W of even and odd rows, float64 `[2, blocks, 32, 32]`."""
  crosses = []
  for fold in (0, 1):
    part = weight[..., fold::2]
    error = local_interaction.rotated_error_moment(
      part, rotated_inverse.astype(jnp.float32), rules
    )
    # The sums are E_W' V, and K_W is V' E_W. A weight of one row has no odd rows, hence
    # the 1.
    crosses.append(local_interaction.unrotate(error).mT / max(part.shape[-1], 1))
  return jnp.stack(crosses)


@execution.jit()
def _weight_folds(weight_moments: jax.Array, rotated_inverse: jax.Array) -> jax.Array:
  """Computes C_W by fold: the raw moments in the reference chart."""
  # R_H P^-T M P^-1 R_H, of which `unrotate` leaves P^-T M P^-1.
  mapped = rotated_inverse[None] @ weight_moments @ rotated_inverse.mT[None]
  return local_interaction.unrotate(mapped)


def _anchor_step(
  carry: jax.Array, blocks: jax.Array, index: jax.Array, rules: mxfp4.Rules, to: Any
) -> jax.Array:
  """Adds a sequence's rotated error-signal moment to its fold (parity, A6)."""
  moment = local_interaction.rotated_error_moment(blocks, to, rules)
  return carry.at[index % 2].add(moment)


@execution.jit()
def _solve_interaction(
  anchor: _Anchor, activation_folds: jax.Array, errors: jax.Array, counts: jax.Array
) -> jax.Array:
  """Solves K of every block."""
  chart = anchor.chart
  crosses = local_interaction.unrotate(errors / counts[:, None, None, None])
  statistics = local_interaction.AnchorStatistics(
    activation=chart[None] @ activation_folds @ chart.mT[None],
    weight=anchor.weight_folds,
    activation_cross=crosses,
    weight_cross=anchor.weight_cross_folds,
  )
  return local_interaction.solve_pairs(statistics).interaction


def fit_interaction(
  weight: jax.Array,
  inputs: LinearInputs,
  weight_moments: jax.Array,
  chart: jax.Array,
  rotated: jax.Array,
  rotated_inverse: jax.Array,
) -> jax.Array:
  """Fits K of every block, float64 `[blocks, 32, 32]`, in a pass over the inputs.

  Paper: Eq. hires-anchor-cross and Eq. hires-anchor-statistics; `local_interaction` of
  the numerics has the solve.

  `weight` is raw, float32 `[blocks, 32, out_features]`, and `weight_moments` are
  W'W / m of its even and odd rows, float64 `[2, blocks, 32, 32]`. `chart` is P_ref,
  `rotated` R_H P_ref, and `rotated_inverse` R_H P_ref^-T, all float64.
  """
  anchor = _Anchor(
    chart,
    rotated.astype(jnp.float32),
    _weight_folds(weight_moments, rotated_inverse),
    _weight_crosses(weight, rotated_inverse, inputs.rules),
  )
  (start,) = execution.float64_zeros((2, *chart.shape))
  errors = inputs.reduce(_anchor_step, start, anchor.rotated)
  # One calibration sequence leaves the odd fold empty: zero, and not 0 / 0.
  counts = np.maximum(np.asarray(inputs.fold_tokens, np.float64), 1.0)
  return _solve_interaction(anchor, inputs.fold_moments(), errors, counts)


# The balance D.


def _error_step(
  carry: jax.Array, blocks: jax.Array, _: jax.Array, rules: mxfp4.Rules, transform: Any
) -> jax.Array:
  """Adds a sequence's nearest-code error moments in the coordinates of T."""

  def moments(blocks: jax.Array, transform: jax.Array) -> jax.Array:
    mapped = input_maps.BlockDense(transform).apply(blocks)
    error = mxfp4.round_blocks(mapped, rules) - mapped
    return dyadic_balance.subgroup_moments(error)

  return carry + map_block_batches(moments, blocks, transform)


def _trial_step(
  carry: jax.Array, blocks: jax.Array, _: jax.Array, rules: mxfp4.Rules, *tables: Any
) -> jax.Array:
  """Adds a sequence's part of J_b's numerator for every trial."""
  return carry + dyadic_balance.trial_objective(blocks, *tables, rules)


def _listed_step(
  carry: jax.Array, blocks: jax.Array, _: jax.Array, rules: mxfp4.Rules, *tables: Any
) -> jax.Array:
  """Adds a sequence's part for a single trial; the first tables list its blocks."""
  order, count, *of_trials = tables
  of_trial = [table[0] for table in of_trials]
  return carry + dyadic_balance.listed_objective(blocks, order, count, *of_trial, rules)


class _TrialBatch(NamedTuple):
  """Holds trials that are measured together, with the weights as each has them.

  `transforms` are their maps D T, float32 `[trials, blocks, 32, 32]`.
  """

  transforms: jax.Array
  weights: dyadic_balance.Trial

  def tables(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    return self.transforms, self.weights.gram, self.weights.cross


@execution.jit(static_argnames="rules")
def _weight_side(
  weight: jax.Array, transform: jax.Array, rules: mxfp4.Rules
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Folds a weight in float64, and computes what the proposal reads of it.

  Returns the folded weight, its W'W, and the tiles of the nearest codes' E_W'E_W.
  """
  folded = input_maps.BlockDense(transform).fold(weight.astype(jnp.float64))
  # What is encoded is float32, as it will be in Stage II.
  narrow = folded.astype(jnp.float32)
  error = mxfp4.round_blocks(narrow, rules) - narrow
  gram, tiles = (
    reference_chart.block_moment(folded),
    dyadic_balance.subgroup_moments(error),
  )
  return folded, gram, tiles


@execution.jit()
def _propose(
  gram: jax.Array,
  weight_error: jax.Array,
  mapped_moment: jax.Array,
  error_sums: jax.Array,
  tokens: jax.Array,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
  """Computes u of the three trials, float64 `[blocks, 8]`, and ||X W'||^2 / n.

  They come from the risks of nearest codes (A5).
  """
  risks = dyadic_balance.bilateral_risks(
    mapped_moment, error_sums / tokens, gram, weight_error
  )
  proposal = dyadic_balance.propose(*risks)
  scales = tuple(step * proposal for step in dyadic_balance.STEPS)
  # ||X W'||^2 / n is tr(W'W X'X) / n, so no product of the operands is formed.
  return scales, (gram * mapped_moment).sum((-2, -1))


@execution.jit()
def _mapped_moment(moment: jax.Array, transform: jax.Array) -> jax.Array:
  return transform @ moment @ transform.mT


@execution.jit()
def _arranged(
  transform: jax.Array,
  scales: tuple[jax.Array, ...],
  trials: tuple[dyadic_balance.Trial, ...],
) -> tuple[_TrialBatch, _TrialBatch]:
  """Batches full step and identity, which every block needs, and the half step."""

  def batch(*places: int) -> _TrialBatch:
    batch_scales = jnp.stack([scales[place] for place in places])
    weights = [trials[place] for place in places]
    return _TrialBatch(
      dyadic_balance.scaled_transform(transform, batch_scales).astype(jnp.float32),
      jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights),
    )

  return batch(0, 2), batch(1)


def _measure(
  ends: _TrialBatch,
  half: _TrialBatch,
  signal: jax.Array,
  inputs: LinearInputs,
  starts: Sequence[jax.Array],
) -> np.ndarray:
  """Measures J_b of full step, half step and identity, float64 `[3, blocks]`.

  `ends` are the full step and identity. The half step is measured only where the full
  step is refused, and is NaN elsewhere: measuring is most of a trial's cost.
  `starts` are zeros for the sums of two trials and of one, float64 `[2, blocks]` and
  `[blocks]`.
  """
  # The denominator of Eq. serb-realized-loss.
  floored = np.maximum(np.asarray(signal), dyadic_balance.LOSS_FLOOR)

  def losses(batch: _TrialBatch, objective: jax.Array) -> np.ndarray:
    terms = np.asarray(batch.weights.weight_term)
    # All of it by token: `terms` and the signal come from X'X / n.
    return (np.asarray(objective) / inputs.tokens + terms) / floored

  sums = inputs.reduce(_trial_step, starts[0], *ends.tables())
  of_full, of_identity = losses(ends, sums)
  # Not a plain "greater": a loss of NaN is refused as well, as in `accept`.
  is_refused = ~(of_full <= of_identity)
  # Refused blocks come first: the step then reads a prefix of one list of a fixed
  # length, and no program is compiled for every number of them.
  order = np.argsort(~is_refused, kind="stable").astype(np.int32)
  count = is_refused.sum(dtype=np.int32)
  sums = inputs.reduce(_listed_step, starts[1], order, count, *half.tables())
  of_half = np.where(is_refused, losses(half, sums)[0], np.nan)
  return np.stack([of_full, of_half, of_identity])


@compilation.jit()
def _installed(
  full_scales: jax.Array, losses: jax.Array, transform: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes D T of the accepted steps and returns it with the steps."""
  steps = dyadic_balance.accept(losses)
  accepted = full_scales * steps[:, None]
  return dyadic_balance.scaled_transform(transform, accepted), steps


def balance(
  weight: jax.Array,
  inputs: LinearInputs,
  moment: jax.Array,
  transform: jax.Array,
) -> tuple[jax.Array, Mapping[str, Any]]:
  """Balances each block: D T with the largest step of D that does not raise J_b.

  Paper: Eq. serb-proposal and Eq. serb-realized-loss.

  Risks of nearest codes give a proposal, three trials of it are encoded block by block
  (reading A11), and J_b of each decides. `weight` is raw, float32
  `[blocks, 32, out_features]`; `moment` (X'X / n), `transform` (T) and the result are
  float64 `[blocks, 32, 32]`. Also returns a record: `balance_steps`, and
  `balance_losses`, J_b of the full step, the half step (None if not needed) and
  identity.
  """
  # What nearest codes cost either operand in the coordinates of T: the risks.
  blocks = inputs.blocks
  start, *starts = execution.float64_zeros(
    dyadic_balance.subgroup_shape(blocks), (2, blocks), (blocks,)
  )
  errors = inputs.reduce(_error_step, start, transform.astype(jnp.float32))
  tokens = np.float64(inputs.tokens)
  mapped_moment = _mapped_moment(moment, transform)
  with execution.one_lapack_thread():
    folded, *tables = _weight_side(weight, transform, inputs.rules)
  # The proposal, and the weights of its three trials.
  scales, signal = _propose(*tables, mapped_moment, errors, tokens)

  def trial(scale: jax.Array) -> dyadic_balance.Trial:
    with execution.one_lapack_thread():
      # The factor in a call of its own, by rule 2 of `mxjax.devices.execution`.
      upper = execution.block_on_cpu(dyadic_balance.trial_factor(mapped_moment, scale))
    return execution.block_on_cpu(
      dyadic_balance.prepare_trial(folded, mapped_moment, scale, upper, inputs.rules)
    )

  ends, half = _arranged(transform, scales, tuple(trial(scale) for scale in scales))
  # J_b of the trials decides, block by block.
  losses = _measure(ends, half, signal, inputs, starts)
  installed, steps = _installed(scales[0], losses, transform)
  return installed, {
    "balance_steps": steps.tolist(),
    "balance_losses": [
      [None if math.isnan(loss) else loss for loss in row] for row in losses.tolist()
    ],
  }
