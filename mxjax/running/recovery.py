"""Stage III of a layer: measures, solves and installs each recovery fit in turn."""

from collections.abc import Sequence
from typing import Any

import jax

from mxjax.calibration.activations import Activations
from mxjax.calibration.calibration import CausalLanguageModel, Params
from mxjax.methods.recovery_fits import RecoveryFit, Sample
from mxjax.numerics import precision
from mxjax.running.progress import LayerStages
from mxjax.running.trajectories import Trajectories


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


def measure(
  fit: RecoveryFit,
  layer: Params,
  float_layer: Params,
  activations: Activations,
  float_taps: Sequence[dict[str, jax.Array]],
) -> Any:
  """Moves a trajectory through a quantized layer and returns a fit's moments.

  Must be called inside `precision.float64_scope()`; the model itself runs outside it.
  `layer` and `activations` are in the state that the fit is measured on; `float_taps`
  come from the float trajectory, one dict for each chunk.
  """
  sequences = len(activations.calib.tokens)
  constants, moments = fit.prepare(float_layer, float_taps[0], sequences)
  return activations.advance_with_totals(
    _measure_sequence,
    moments,
    {"quantized": layer, "float": float_layer},
    [{name: chunk[name] for name in fit.float_taps} for chunk in float_taps],
    constants,
    (activations.calib.model, fit),
  )


def recover(
  trajectories: Trajectories, float_layer: Params, parent: Params, stages: LayerStages
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Fits and installs a layer's recovery, and advances the trajectories of the fits.

  `trajectories` are before the layer, and the float one has observed it; `parent` is
  the quantized layer without recovery. Returns the layer's params and records by fit.
  """
  program = trajectories.program
  current, records = dict(parent), {}
  by_layer = program.recovery_by == "layer"
  for position, fit in enumerate(program.recover):
    with stages.stage(f"{fit.name} recovery", 2 + position), precision.float64_scope():
      # By layer, every fit is measured on what the finished layers before it put out.
      fits = trajectories.fits
      entering = fits[0].copy() if by_layer else fits[position]
      state = fit.state(current, parent)
      taps = trajectories.float_model.taps
      moments = measure(fit, state, float_layer, entering, taps)
      leaf, records[fit.name] = fit.solve(moments)
      current = fit.install(current, leaf)
  if by_layer and program.recover:
    trajectories.fits[0].advance(current)
  return current, records
