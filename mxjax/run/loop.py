"""Runs Algorithm 1, one decoder layer at a time.

`quantize_layer` is the algorithm, and every method is a `Program` whose hooks fill in
its lines. `replay_layer` does for a layer that a killed run finished what the next
layer needs of it.

Paper: Algorithm hiresmx.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import errors
from mxjax.calibration.calibration import Params, replace_weights
from mxjax.devices import execution, processes
from mxjax.errors import ValueRefusal
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods import hook_results, scale_distillation
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.contract import Contract
from mxjax.numerics.realization.activation_quantizers import Unrounded
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
    for sublayer, linear in setup.targets:
      report.linear(linear)
      weight = jnp.asarray(float_layer[sublayer][linear]["weight"])
      execution.trim_malloc(4 * weight.size)
      group = groups[setup.model.projection_taps[sublayer, linear]]
      with errors.within(f"{name}/{sublayer}/{linear}"):
        inputs = captured.inputs(sublayer, linear, group)
        made = program.quantize_linear(weight, inputs)
        hook_results.check_linear(program, made, weight, setup.contract.rules)
        leaf, told = _under_contract(made.leaf, setup.contract), made.record
      leaves[sublayer, linear] = execution.block_on_cpu(leaf)
      path = f"{sublayer}/{linear}"
      linears[path] = linear_record(weight, leaf, inputs, told, probe=setup.probe)
    parent = jax.block_until_ready(replace_weights(float_layer, leaves))
    processes.check_same(f"the codes of {name}", parent, setup.placement.mesh)

  # Free the layer's largest arrays, inputs and Hessians, before recovery.
  del inputs, leaves, groups
  captured.release_inputs()

  # Fit and install attention recovery; remeasure, fit and install MLP recovery.
  quantized, recovery = _recover(
    setup, trajectories, captured, float_layer, parent, report.stage
  )
  if program.tune:
    scale_distillation.check(quantized, setup.model)
  trajectories.leave(captured)
  record = {"name": name, "linears": linears, "recovery": recovery}
  return FinishedLayer(name, quantized, record)


def _under_contract(leaf: QuantizedLinear, contract: Contract) -> QuantizedLinear:
  """Returns a linear that treats its inputs as the contract says.

  It happens here and not in the methods, so that no weight-only model can have the
  paper's contract, whoever wrote its method.

  Raises:
    ValueError: The contract rounds inputs and the linear's rule does not.
  """
  if contract.activations == "float":
    return dataclasses.replace(leaf, rounding=Unrounded())
  if not leaf.rounding.is_legal:
    raise ValueRefusal(
      "quantize",
      expected="a rule that rounds inputs to legal A4",
      got=type(leaf.rounding).__name__,
      mend="give the program activations='float', which marks its results",
    )
  return leaf


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
  captured.release_inputs()
  leaves = {path: layer[path[0]][path[1]]["weight"] for path in setup.targets}
  parent = replace_weights(float_layer, leaves)
  again, _ = _recover(
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


def _recover(
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
        fit.state(quantized, parent),
        float_layer,
        trajectories.fits[number],
        captured.taps,
      )
      solved = fit.solve(moments)
      hook_results.check_recovery(fit, solved)
      coefficients, recovery[fit.name] = solved
      quantized = fit.install(quantized, coefficients)
  return quantized, recovery


def _shape_groups(
  setup: Setup, captured: Captured, layer: Params, name: str
) -> dict[str, Any]:
  """Runs `shape_group` for the linears of each tap; returns the results by tap."""
  groups = {}
  for tap, view in captured.views.items():
    weights = {
      linear: mxfp4.weight_blocks(layer[sublayer][linear]["weight"])
      for sublayer, linear in setup.targets
      if setup.model.projection_taps[sublayer, linear] == tap
    }
    with errors.within(f"{name}/{tap}"):
      groups[tap] = setup.program.shape_group(weights, view)
  return groups
