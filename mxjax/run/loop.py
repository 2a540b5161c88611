"""Algorithm 1, one decoder layer at a time.

Paper: Algorithm hiresmx. Every method is a `Program` whose hooks fill in its lines.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mxjax import errors
from mxjax.calibration.calibration import Params, replace_weights
from mxjax.devices import execution, processes
from mxjax.methods import scale_distillation
from mxjax.numerics import mxfp4, precision
from mxjax.run.capture import Captured, Trajectories
from mxjax.run.progress import Report
from mxjax.run.record import linear_record
from mxjax.run.recover import measure
from mxjax.run.setup import Setup


class FinishedLayer(NamedTuple):
  """A quantized layer: its key in the params, its params, and its record."""

  name: str
  params: dict[str, Any]
  record: dict[str, Any]


def quantize_layer(
  setup: Setup, trajectories: Trajectories, report: Report
) -> FinishedLayer:
  """Quantizes the layer that the trajectories enter, and moves them past it.

  Raises:
    ValueError: A linear cannot be quantized; the message begins with its path.
    FloatingPointError: What leaves the float layer is not finite.
  """
  index, program = trajectories.index, setup.program
  name = setup.layers[index]
  float_layer = setup.params[name]
  largest = max(leaf.size for leaf in jax.tree.leaves(float_layer))
  report.begin_layer(index, 4 * largest)

  # Run the float layer on the calibration set, and capture what its linears read.
  with report.stage("calibration"):
    captured = Captured(setup, trajectories, float_layer)

  # Construct and fold T and D; realize legal W4 with GPTQ; install dynamic A4. All of
  # it is `quantize_linear`, which calls the program's stages I and II; `groups` are
  # what some methods learn once for all linears that read the same inputs.
  leaves, linears = {}, {}
  with report.stage("quantization"), precision.float64_scope():
    groups = _shape_groups(setup, captured, float_layer, name)
    for block, linear in setup.targets:
      report.within(linear)
      weight = jnp.asarray(float_layer[block][linear]["weight"])
      execution.trim_malloc(4 * weight.size)
      group = groups[setup.model.projection_taps[block, linear]]
      with errors.within(f"{name}/{block}/{linear}"):
        inputs = captured.inputs(block, linear, group)
        leaf, told = program.quantize_linear(weight, inputs)
      leaves[block, linear] = execution.block_on_cpu(leaf)
      path = f"{block}/{linear}"
      linears[path] = linear_record(weight, leaf, inputs, told, probe=setup.probe)
    parent = jax.block_until_ready(replace_weights(float_layer, leaves))
    processes.check_same(f"the codes of {name}", parent, setup.placement.mesh)

  # Free the layer's largest arrays, inputs and Hessians, before recovery.
  del inputs, leaves, groups
  captured.release_inputs()

  # Fit and install attention recovery; remeasure, fit and install MLP recovery. Each
  # fit has hidden states of its own, those of the model with all earlier fits installed
  # and no later ones: one pass over the layers does what one for each fit would.
  quantized, recovery = dict(parent), {}
  for place, fit in enumerate(program.recover):
    with report.stage(f"{fit.name} recovery"), precision.float64_scope():
      moments, trajectories.fits[place] = measure(
        setup,
        fit,
        fit.state(quantized, parent),
        float_layer,
        trajectories.fits[place],
        captured.taps,
      )
      coefficients, recovery[fit.name] = fit.solve(moments)
      quantized = fit.install(quantized, coefficients)

  if program.tune:
    scale_distillation.check(quantized, setup.model)
  trajectories.leave(captured)
  record = {"name": name, "linears": linears, "recovery": recovery}
  return FinishedLayer(name, quantized, record)


def _shape_groups(
  setup: Setup, captured: Captured, layer: Params, name: str
) -> dict[str, Any]:
  """Runs `shape_group` for the linears of each tap; returns the results by tap."""
  groups = {}
  for tap, view in captured.views.items():
    weights = {
      linear: mxfp4.weight_blocks(layer[block][linear]["weight"])
      for block, linear in setup.targets
      if setup.model.projection_taps[block, linear] == tap
    }
    with errors.within(f"{name}/{tap}"):
      groups[tap] = setup.program.shape_group(weights, view)
  return groups
