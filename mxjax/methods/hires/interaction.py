"""The local interaction K of a linear: the anchor pass, and the solve on its moments.

Paper: Eq. hires-anchor-cross and Eq. hires-anchor-statistics; `local_interaction` of
the numerics has the solve. Without K nothing here runs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.numerics import mxfp4
from mxjax.numerics.shaping import local_interaction


class _Anchor(NamedTuple):
  """Constants of the anchor pass; `[blocks, 32, 32]`, with a leading axis of folds.

  `chart` is P_ref, float64; `rotated` is R_H P_ref, float32, which maps native to
  anchor coordinates; the weight folds are C_W and K_W by fold, float64.
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
    crosses.append(local_interaction.unrotate(error).mT / max(part.shape[-1], 1))
  return jnp.stack(crosses)


@execution.jit()
def _weight_folds(weight_moments: jax.Array, rotated_inverse: jax.Array) -> jax.Array:
  """Computes C_W by fold: the raw moments in the reference chart."""
  mapped = rotated_inverse[None] @ weight_moments @ rotated_inverse.mT[None]
  return local_interaction.unrotate(mapped)


def _anchor_step(
  carry: jax.Array, blocks: jax.Array, index: jax.Array, rules: mxfp4.Rules, to: Any
) -> jax.Array:
  """Adds a sequence's rotated error-signal moment to its fold (parity, A6)."""
  moment = local_interaction.rotated_error_moment(blocks, to, rules)
  return carry.at[index % 2].add(moment)


@execution.jit()
def _pairs(
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


def fitted(
  weight: jax.Array,
  inputs: LinearInputs,
  weight_moments: jax.Array,
  chart: jax.Array,
  rotated: jax.Array,
  rotated_inverse: jax.Array,
) -> jax.Array:
  """Fits K of every block, float64 `[blocks, 32, 32]`, in a pass over the inputs.

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
  counts = np.maximum(np.asarray(inputs.fold_tokens, np.float64), 1.0)
  return _pairs(anchor, inputs.fold_moments(), errors, counts)
