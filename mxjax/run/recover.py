"""Stage III of a layer: each recovery fit is measured, solved and installed in turn."""

from collections.abc import Sequence
from typing import Any

import jax

from mxjax.calibration.calibration import CausalLanguageModel, Params
from mxjax.calibration.streams import Chunks
from mxjax.devices.totals import Totals
from mxjax.methods.recovery import RecoveryFit, Sample
from mxjax.run.setup import Setup


def measure(
  setup: Setup,
  fit: RecoveryFit,
  layer: Params,
  float_layer: Params,
  hidden: Chunks,
  float_taps: Sequence[dict[str, jax.Array]],
) -> tuple[Any, Chunks]:
  """Moves hidden states through a quantized layer, and measures a fit on the way.

  Must be called inside `precision.float64_scope()`; the model itself runs outside it.

  Paper: Eq. conditional-stage.

  Args:
    setup: The run's setup.
    fit: The recovery fit.
    layer: The quantized layer in the state that the fit is measured on.
    float_layer: The float layer.
    hidden: What enters the layer in that state, chunks `[sequences, T, d]`; donated.
    float_taps: What the fit takes from the float trajectory, a dict for each chunk.

  Returns:
    The fit's moments over all sequences, and what leaves the layer.
  """
  placement = setup.placement
  constants, moments = fit.prepare(float_layer, float_taps[0], setup.calib.count)
  totals = Totals(moments, placement)
  layers = placement.shard_rows({"quantized": layer, "float": float_layer})
  constants = placement.replicate(constants)
  leaving = [
    totals.add(
      _measure_sequence,
      {name: taps[name] for name in fit.float_taps},
      constants,
      static=(setup.model, fit),
      params=layers,
      consumed=chunk,
    )
    for chunk, taps in zip(hidden, float_taps, strict=True)
  ]
  return totals.value(), leaving


def _measure_sequence(
  moments: Any,
  sequence: tuple[jax.Array, dict[str, jax.Array]],
  index: jax.Array,
  static: tuple[CausalLanguageModel, RecoveryFit],
  layers: dict[str, Params],
  constants: Any,
) -> tuple[Any, jax.Array]:
  """Runs one sequence through the layer and adds it to the moments; see `Step`."""
  model, fit = static
  hidden, float_taps = sequence
  with jax.enable_x64(False):
    output, taps = model.layer_with_taps(layers["quantized"], hidden[None])
  targets = jax.tree.map(lambda a: a[None], float_taps)
  sample = Sample(constants, layers["float"], taps, targets, index)
  return fit.measure(moments, sample), output[0]
