"""Runs stage III of a layer: each fit is measured, solved and installed in turn.

`replay_layer` does for a layer that a killed run has finished what the next one needs.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from mxjax.calibration.calibration import (
  CausalLanguageModel,
  Params,
  replace_weights,
)
from mxjax.calibration.streams import Chunks
from mxjax.devices.totals import Totals
from mxjax.errors import ValueRefusal
from mxjax.methods import hook_results
from mxjax.methods.recovery import RecoveryFit, Sample
from mxjax.numerics import precision
from mxjax.run import rounding_alone
from mxjax.run.capture import Captured, Trajectories
from mxjax.run.setup import Setup


def recover(
  setup: Setup,
  trajectories: Trajectories,
  captured: Captured,
  float_layer: Params,
  parent: Params,
  stage: Callable[[str], AbstractContextManager[None]],
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Fits and installs each recovery in order, and moves its trajectory past the layer.

  Each fit has hidden states of its own, those of the model with all earlier fits
  installed and no later ones: one pass over the layers does what one for each fit
  would. `parent` is the layer without any fit. Returns the layer with all of them, and
  the record of each by its name.

  Paper: Eq. conditional-stage.
  """
  quantized, recovery = dict(parent), {}
  for number, fit in enumerate(setup.program.recover):
    with stage(f"{fit.name} recovery"), precision.float64_scope():
      moments, trajectories.fits[number] = measure(
        setup,
        fit,
        # By default it has all earlier fits and no later ones, as Eq. conditional-stage
        # wants it; a fit may ask for another state.
        fit.state(quantized, parent, float_layer),
        float_layer,
        trajectories.fits[number],
        captured.taps,
      )
      solved = fit.solve(moments)
      hook_results.check_recovery(fit, solved)
      coefficients, recovery[fit.name] = solved
      quantized = fit.install(quantized, coefficients)
  return quantized, recovery


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
  alone = {}
  if placement.mesh is None:
    alone = rounding_alone.linears_alone(layer, setup.targets)
    layer = rounding_alone.without_rules(layer, alone)
  layers = placement.shard_rows({"quantized": layer, "float": float_layer})
  constants = placement.replicate(constants)
  leaving = []
  for chunk, taps in zip(hidden, float_taps, strict=True):
    rounded = (
      rounding_alone.rounded_inputs(setup.model, layer, alone, chunk) if alone else {}
    )
    output = totals.add(
      _measure_sequence,
      ({name: taps[name] for name in fit.float_taps}, rounded),
      constants,
      static=(setup.model, fit),
      params=layers,
      # Donated: what leaves the layer has the size of what enters it.
      consumed=chunk,
    )
    leaving.append(output)
  return totals.value(), leaving


def _measure_sequence(
  moments: Any,
  sequence: tuple[jax.Array, tuple[dict[str, jax.Array], rounding_alone.Values]],
  index: jax.Array,
  static: tuple[CausalLanguageModel, RecoveryFit],
  layers: dict[str, Params],
  constants: Any,
) -> tuple[Any, jax.Array]:
  """Runs one sequence through the layer and adds it to the moments; see `Step`."""
  model, fit = static
  hidden, (float_taps, rounded) = sequence
  with jax.enable_x64(False):
    layer = rounding_alone.with_values(layers["quantized"], rounded)
    # A batch of one, as everywhere in calibration: so no bit depends on the chunk size.
    output, taps = model.layer_with_taps(layer, hidden[None])
  targets = jax.tree.map(lambda a: a[None], float_taps)
  sample = Sample(constants, layers["float"], taps, targets, index)
  return fit.measure(moments, sample), output[0]


def replay_layer(setup: Setup, trajectories: Trajectories, layer: Params) -> None:
  """Moves the trajectories past a layer that a killed run has finished.

  The float layer runs, and so does the finished one for each recovery fit, by the same
  compiled functions as in `quantize_layer` and on the same values. So what enters the
  next layer has the same bits, at the cost of these passes: no linear is quantized.

  Raises:
    ValueError: The fits find another recovery than the layer has, so that the layers to
      come would not get the bits of a run that nothing happened to.
  """
  index = trajectories.index
  name, float_layer = setup.layers[index], setup.params[setup.layers[index]]
  captured = Captured(setup, trajectories, float_layer, for_linears=False)
  # No linear is quantized, so that of the taps only those of the fits are kept.
  captured.release_inputs()
  leaves = {path: layer[path[0]][path[1]]["weight"] for path in setup.targets}
  parent = replace_weights(float_layer, leaves)
  again, _ = recover(
    setup,
    trajectories,
    captured,
    float_layer,
    parent,
    lambda label: contextlib.nullcontext(),
  )
  # What the fits installed is all that is not the parent's.
  known = {id(leaf) for leaf in jax.tree.leaves(parent)}
  found, kept = jax.tree.leaves(again), jax.tree.leaves(dict(layer))
  # By bytes, because 0 and -0 are equal and NaN is not equal to itself.
  is_same = len(found) == len(kept) and all(
    id(a) in known or np.asarray(a).tobytes() == np.asarray(b).tobytes()
    for a, b in zip(found, kept, strict=True)
  )
  if not is_same:
    raise ValueRefusal(
      f"run folder: {name}",
      expected="a replay to find the recovery that the layer was finished with",
      got="another, so this machine does not repeat its own bits",
      mend="start again with another --out and --save-every 1, which replays nothing",
    )
  trajectories.leave(captured)
