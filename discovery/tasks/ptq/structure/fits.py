"""Recovery fits whose coefficients come from a candidate's hooks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.discovery.tasks.ptq.candidate_codes import (
  Function,
  map_units,
  require_finite,
)
from mxjax.methods.recovery_fits import AttentionFit, MlpFit
from mxjax.numerics.recovery import mlp_recovery, value_recovery

MLP_CELLS = mlp_recovery.CELL_RESIDUES * mlp_recovery.CELL_QUARTERS


@dataclasses.dataclass(frozen=True)
class HookAttentionFit(AttentionFit):
  """Attention recovery with two coefficients per head from a hook."""

  function: Function

  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    """See `RecoveryFit.solve`."""
    stats = {
      field.name: getattr(moments, field.name) for field in dataclasses.fields(moments)
    }
    (pairs,) = map_units(self.function, stats)
    require_finite("recover_value", pairs)
    fit = value_recovery.ValueRecovery(
      jnp.asarray(pairs[:, 0], jnp.float32), jnp.asarray(pairs[:, 1], jnp.float32)
    )
    return fit, {"scale": pairs[:, 0].tolist(), "offset": pairs[:, 1].tolist()}


@dataclasses.dataclass(frozen=True)
class HookMlpFit(MlpFit):
  """MLP recovery with three scalars per layer from a hook."""

  function: Function

  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    """See `RecoveryFit.solve`."""
    gate_sums, by_cell = moments
    cells = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), by_cell)
    deviation = mlp_recovery.gate_deviation(gate_sums)
    gram, target = mlp_recovery.normal_equations(cells, deviation)
    if gram.shape[0] != MLP_CELLS:
      raise ValueError(f"ptq: expected {MLP_CELLS} cells, got {gram.shape[0]}.")
    stats = {"gram": gram[None], "target": target[None], "count": cells.count[None]}
    (theta,) = map_units(self.function, stats)
    require_finite("recover_mlp", theta)
    theta = theta[0]
    leaf = mlp_recovery.MlpRecovery(
      *(jnp.asarray(value, jnp.float32) for value in (*theta, deviation))
    )
    return leaf, {"theta": theta.tolist()}
