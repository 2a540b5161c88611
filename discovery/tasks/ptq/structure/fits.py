"""Recovery fits whose sums and coefficients come from a candidate's hooks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from mxjax.discovery.tasks.ptq.candidate_codes import (
  Function,
  map_units,
  neighbours,
  require_finite,
)
from mxjax.discovery.tasks.ptq.interface import SUMS
from mxjax.layers.linear import add_bias, linear
from mxjax.methods.hires.stage3 import AttentionFit, MlpFit
from mxjax.methods.recovery import Sample
from mxjax.numerics.recovery import mlp_recovery, value_recovery

UNCORRECTED = (0.0, 0.0, 0.0, 1.0)
"""Gate shift, gate scale, up scale and the unit of the shift of an MLP as it is."""


def _solved(place: str, function: Function, sums: jax.Array) -> np.ndarray:
  """Returns the coefficients of stacked units, from their checked sums."""
  require_finite(place.replace("recover", "measure"), np.asarray(sums))
  (found,) = map_units(function, sums)
  require_finite(place, found)
  return found


@dataclasses.dataclass(frozen=True)
class HookAttentionFit(AttentionFit):
  """Attention recovery: a head's sums, `sum_`, and two coefficients from them, `fit`.

  `sum_` is the batched hook. With `is_shuffled`, the coefficients of a head come from
  the sums of its neighbour. Fits with one `sum_` are equal, because what is compiled
  depends on nothing else.
  """

  sum_: Function
  fit: Function = dataclasses.field(compare=False)
  is_shuffled: bool = dataclasses.field(default=False, compare=False)

  def prepare(self, float_layer: Any, float_taps: Any, sequences: int) -> Any:
    """Returns no constants, and zero sums for every head."""
    del float_layer, sequences
    heads = float_taps["value"].shape[-2]
    # Sums in float64 and coefficients in float32, as in the paper.
    return (), jnp.zeros((heads, *SUMS.shape), jnp.float64)

  def measure(self, moments: Any, sample: Sample) -> Any:
    """See `RecoveryFit.measure`; a unit sees one head of one sequence."""
    # From tokens by heads to heads by tokens: a head is a unit.
    of_heads = lambda taps: taps["value"][0].swapaxes(0, 1).astype(jnp.float32)
    values = of_heads(sample.taps), of_heads(sample.float_taps)
    return moments + self.sum_(*values, sample.index.astype(jnp.int32))[0]

  @override
  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    if self.is_shuffled:
      moments = neighbours("recover_value", moments)
    pairs = _solved("recover_value", self.fit, moments)
    fit = value_recovery.ValueRecovery(
      jnp.asarray(pairs[:, 0], jnp.float32), jnp.asarray(pairs[:, 1], jnp.float32)
    )
    return fit, {"scale": pairs[:, 0].tolist(), "offset": pairs[:, 1].tolist()}


@dataclasses.dataclass(frozen=True)
class HookMlpFit(MlpFit):
  """MLP recovery: a layer's sums, `sum_`, and four coefficients from them, `fit`.

  With `is_shuffled`, the coefficients of a layer come from the sums of the layer before
  it, and the first layer, whose fit nothing precedes, is not corrected. One fit serves
  one model. Fits with one `sum_` are equal, as those of heads.
  """

  sum_: Function
  fit: Function = dataclasses.field(compare=False)
  is_shuffled: bool = dataclasses.field(default=False, compare=False)
  seen: list[jax.Array] = dataclasses.field(default_factory=list, compare=False)

  def prepare(self, float_layer: Any, float_taps: Any, sequences: int) -> Any:
    """Returns no constants, and zero sums."""
    del float_layer, float_taps, sequences
    return (), jnp.zeros(SUMS.shape, jnp.float64)

  def measure(self, moments: Any, sample: Sample) -> Any:
    """See `RecoveryFit.measure`; targets are the float weights' on the same inputs."""
    taps, float_mlp = sample.taps, sample.float_layer["mlp"]
    # g* and u* of the paper: float projections of the realized input of the layer.
    targets = [
      add_bias(linear(taps["gate_up_input"], params["weight"]), params.get("bias"))
      for params in (float_mlp["gate_proj"], float_mlp["up_proj"])
    ]
    # The hook takes hidden coordinates by tokens.
    arrays = [a[0].T.astype(jnp.float32) for a in (taps["gate"], taps["up"], *targets)]
    down = float_mlp["down_proj"]["weight"].astype(jnp.float32)
    return moments + self.sum_(*arrays, down, sample.index.astype(jnp.int32))[0]

  @override
  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    theta, told = np.array(UNCORRECTED), self._told(moments)
    if told is not None:
      theta = _solved("recover_mlp", self.fit, told[None])[0]
    leaf = mlp_recovery.MlpRecovery(*(jnp.asarray(each, jnp.float32) for each in theta))
    return leaf, {"theta": theta.tolist()}

  def _told(self, moments: jax.Array) -> jax.Array | None:
    """Returns a layer's sums or, under a control, those of the layer before."""
    if not self.is_shuffled:
      return moments
    self.seen.append(moments)
    return self.seen[-2] if len(self.seen) > 1 else None
