"""The balance D of Stage I, measured on a linear's calibration inputs.

Paper: Appendix "Algorithm Details", dyadic balance. Risks of nearest codes give a
proposal, three trials of it are encoded, and J_b of each decides.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.methods.gptq import reconstruct
from mxjax.numerics import mxfp4
from mxjax.numerics.block_batches import map_block_batches
from mxjax.numerics.realization import one_code
from mxjax.numerics.shaping import dyadic_balance, input_maps, reference_chart

BalanceBy = Literal["block", "layer"]


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
  """Trials measured together: D T, float32 `[trials, blocks, 32, 32]`, and weights."""

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
  return scales, (gram * mapped_moment).sum((-2, -1))


@execution.jit()
def _mapped_moment(moment: jax.Array, transform: jax.Array) -> jax.Array:
  return transform @ moment @ transform.mT


@execution.jit()
def _trial_of(
  scaled: jax.Array, decoded: jax.Array, mapped_moment: jax.Array, scale: jax.Array
) -> dyadic_balance.Trial:
  gram, cross = one_code.tables(scaled, decoded)
  error = (decoded - scaled).astype(jnp.float64)
  moment = dyadic_balance.rescaled_moment(mapped_moment, scale)
  term = (reference_chart.block_moment(error) * moment).sum((-2, -1))
  return dyadic_balance.Trial(gram, cross, term)


def _layer_trial(
  folded: jax.Array,
  mapped_moment: jax.Array,
  transform: jax.Array,
  scale: jax.Array,
  inputs: LinearInputs,
) -> dyadic_balance.Trial:
  """Quantizes one trial of the whole linear: GPTQ with its own Hessian (A11b)."""
  scaled = (folded / dyadic_balance.diagonal(scale)[..., None]).astype(jnp.float32)
  installed = dyadic_balance.scaled_transform(transform, scale)
  input_map = input_maps.BlockDense(installed.astype(jnp.float32))
  result = execution.block_on_cpu(reconstruct(scaled, inputs, input_map))
  return _trial_of(scaled, result.decoded, mapped_moment, scale)


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
  floored = np.maximum(np.asarray(signal), dyadic_balance.LOSS_FLOOR)

  def losses(batch: _TrialBatch, objective: jax.Array) -> np.ndarray:
    terms = np.asarray(batch.weights.weight_term)
    return (np.asarray(objective) / inputs.tokens + terms) / floored

  sums = inputs.reduce(_trial_step, starts[0], *ends.tables())
  of_full, of_identity = losses(ends, sums)
  is_refused = ~(of_full <= of_identity)
  order = np.argsort(~is_refused, kind="stable").astype(np.int32)
  count = is_refused.sum(dtype=np.int32)
  sums = inputs.reduce(_listed_step, starts[1], order, count, *half.tables())
  of_half = np.where(is_refused, losses(half, sums)[0], np.nan)
  return np.stack([of_full, of_half, of_identity])


@jax.jit
def _installed(
  full_scales: jax.Array, losses: jax.Array, transform: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes D T of the accepted steps and returns it with the steps."""
  steps = dyadic_balance.accept(losses)
  accepted = full_scales * steps[:, None]
  return dyadic_balance.scaled_transform(transform, accepted), steps


def balanced(
  weight: jax.Array,
  inputs: LinearInputs,
  moment: jax.Array,
  transform: jax.Array,
  balance_by: BalanceBy = "block",
) -> jax.Array:
  """Balances each block: D T with the largest step of D that does not raise J_b.

  Paper: Eq. serb-proposal and Eq. serb-realized-loss.

  `weight` is raw, float32 `[blocks, 32, out_features]`; `moment` (X'X / n), `transform`
  (T) and the result are float64 `[blocks, 32, 32]`. Trials quantize each `block` alone
  or the whole linear, `layer` (A11). `inputs.record` gets `balance_steps` and
  `balance_losses`: J_b of the full step, the half step (None if not needed) and
  identity.
  """
  blocks = inputs.blocks
  start, *starts = execution.float64_zeros(
    dyadic_balance.subgroup_shape(blocks), (2, blocks), (blocks,)
  )
  errors = inputs.reduce(_error_step, start, transform.astype(jnp.float32))
  tokens = np.float64(inputs.tokens)
  mapped_moment = _mapped_moment(moment, transform)
  folded, *tables = _weight_side(weight, transform, inputs.rules)
  scales, signal = _propose(*tables, mapped_moment, errors, tokens)

  def trial(scale: jax.Array) -> dyadic_balance.Trial:
    if balance_by == "layer":
      return _layer_trial(folded, mapped_moment, transform, scale, inputs)
    with execution.one_lapack_thread():
      upper = execution.block_on_cpu(dyadic_balance.trial_factor(mapped_moment, scale))
    return execution.block_on_cpu(
      dyadic_balance.prepare_trial(folded, mapped_moment, scale, upper, inputs.rules)
    )

  ends, half = _arranged(transform, scales, tuple(trial(scale) for scale in scales))
  losses = _measure(ends, half, signal, inputs, starts)
  installed, steps = _installed(scales[0], losses, transform)
  inputs.record["balance_steps"] = steps.tolist()
  inputs.record["balance_losses"] = [
    [None if math.isnan(loss) else loss for loss in row] for row in losses.tolist()
  ]
  return installed
