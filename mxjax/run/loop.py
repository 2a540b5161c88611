"""Runs Algorithm 1, one decoder layer at a time.

Every method is a `Program` whose hooks fill in its lines.

Paper: Algorithm hiresmx.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
from mxjax.run.compiling import compile_together
from mxjax.run.progress import Report
from mxjax.run.record import linear_record
from mxjax.run.recover import recover
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
    if index == 0:
      # Later layers find what is compiled here; on a CPU nothing happens.
      compile_together(setup, captured, groups, float_layer)
    for sublayer, linear in setup.targets:
      report.linear(linear)
      # In forward order; each linear sees inputs of the float layer, so that none
      # depends on how another was quantized.
      weight = jnp.asarray(float_layer[sublayer][linear]["weight"])
      execution.trim_malloc(4 * weight.size)
      group = groups[setup.model.projection_taps[sublayer, linear]]
      with errors.within(f"{name}/{sublayer}/{linear}"):
        inputs = captured.inputs(sublayer, linear, group)
        made = program.quantize_linear(weight, inputs)
        hook_results.check_linear(program, made, weight, setup.contract.rules)
        leaf, hook_record = _under_contract(made.leaf, setup.contract), made.record
      leaves[sublayer, linear] = execution.block_on_cpu(leaf)
      path = f"{sublayer}/{linear}"
      linears[path] = linear_record(
        weight, leaf, inputs, hook_record, probe=setup.probe
      )
    # Waited for on a GPU as well, so that the work counts for this stage of the clock.
    parent = jax.block_until_ready(replace_weights(float_layer, leaves))
    # Each process has solved for itself, and another kind of machine may round
    # otherwise.
    processes.check_same(f"the codes of {name}", parent, setup.placement.mesh)

  # Free the layer's largest arrays, inputs and Hessians, before recovery.
  del inputs, leaves, groups
  captured.release_inputs()

  # Fit and install attention recovery; remeasure, fit and install MLP recovery.
  quantized, recovery = recover(
    setup, trajectories, captured, float_layer, parent, report.stage
  )
  # Refused at the first layer rather than when all of them are quantized.
  if program.tune:
    scale_distillation.check(quantized, setup.model, program.tune)
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
  # Whatever rule the method learned, the contract leaves inputs as they are.
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
