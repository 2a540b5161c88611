"""Recovery fits whose sums and coefficients come from a candidate's hooks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.discovery.tasks.ptq.candidate_codes import (
  Function,
  map_units,
  require_finite,
)
from mxjax.discovery.tasks.ptq.interface import SUMS
from mxjax.layers.linear import add_bias, linear
from mxjax.methods.recovery_fits import AttentionFit, MlpFit, Sample
from mxjax.numerics.recovery import mlp_recovery, value_recovery


def _solved(place: str, function: Function, sums: jax.Array) -> np.ndarray:
  """Returns the coefficients of stacked units, from their checked sums."""
  require_finite(place.replace("recover", "measure"), np.asarray(sums))
  (found,) = map_units(function, sums)
  require_finite(place, found)
  return found


@dataclasses.dataclass(frozen=True)
class HookAttentionFit(AttentionFit):
  """Attention recovery: a head's sums, `sum_`, and two coefficients from them, `fit`.

  `sum_` is the batched hook.
  """

  sum_: Function
  fit: Function

  def prepare(self, float_layer: Any, float_taps: Any, sequences: int) -> Any:
    """Returns no constants, and zero sums for every head."""
    del float_layer, sequences
    heads = float_taps["value"].shape[-2]
    return (), jnp.zeros((heads, *SUMS.shape), jnp.float64)

  def measure(self, moments: Any, sample: Sample) -> Any:
    """See `RecoveryFit.measure`; a unit sees one head of one sequence."""
    of_heads = lambda taps: taps["value"][0].swapaxes(0, 1).astype(jnp.float32)
    values = of_heads(sample.taps), of_heads(sample.float_taps)
    return moments + self.sum_(*values, sample.index.astype(jnp.int32))[0]

  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    """See `RecoveryFit.solve`."""
    pairs = _solved("recover_value", self.fit, moments)
    fit = value_recovery.ValueRecovery(
      jnp.asarray(pairs[:, 0], jnp.float32), jnp.asarray(pairs[:, 1], jnp.float32)
    )
    return fit, {"scale": pairs[:, 0].tolist(), "offset": pairs[:, 1].tolist()}


@dataclasses.dataclass(frozen=True)
class HookMlpFit(MlpFit):
  """MLP recovery: a layer's sums, `sum_`, and four coefficients from them, `fit`."""

  sum_: Function
  fit: Function

  def prepare(self, float_layer: Any, float_taps: Any, sequences: int) -> Any:
    """Returns no constants, and zero sums."""
    del float_layer, float_taps, sequences
    return (), jnp.zeros(SUMS.shape, jnp.float64)

  def measure(self, moments: Any, sample: Sample) -> Any:
    """See `RecoveryFit.measure`; targets are the float weights' on the same inputs."""
    taps, float_mlp = sample.taps, sample.float_layer["mlp"]
    targets = [
      add_bias(linear(taps["gate_up_input"], params["weight"]), params.get("bias"))
      for params in (float_mlp["gate_proj"], float_mlp["up_proj"])
    ]
    arrays = [a[0].T.astype(jnp.float32) for a in (taps["gate"], taps["up"], *targets)]
    down = float_mlp["down_proj"]["weight"].astype(jnp.float32)
    return moments + self.sum_(*arrays, down, sample.index.astype(jnp.int32))[0]

  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    """See `RecoveryFit.solve`."""
    theta = _solved("recover_mlp", self.fit, moments[None])[0]
    leaf = mlp_recovery.MlpRecovery(*(jnp.asarray(each, jnp.float32) for each in theta))
    return leaf, {"theta": theta.tolist()}
