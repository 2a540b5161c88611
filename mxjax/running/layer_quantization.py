"""Stages I and II of Algorithm 1: quantizes the target linears of one layer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration import fisher, streams
from mxjax.calibration.calibration import (
  CausalLanguageModel,
  Params,
  replace_weights,
  targets,
)
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.methods.program import Program
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import Contract
from mxjax.running.linear_probe import linear_record


def _check_targets(model: CausalLanguageModel, contract: Contract) -> None:
  """Checks that the model has every projection that the contract names, and one."""
  names = list(dict.fromkeys(name for _, name in model.projection_taps))
  missing = [name for name in contract.targets if name not in names]
  if missing or not contract.targets or not model.num_layers:
    raise ValueError(
      f"quantize: expected each of Contract.targets ({', '.join(contract.targets)}) "
      f"among the projections of the model's {model.num_layers} layers "
      f"({', '.join(names) or 'none'}), got no {', '.join(missing) or 'target'}; pass "
      "contract=mxjax.Contract(targets=...) with the projections to quantize."
    )


def check_params(
  model: CausalLanguageModel, params: Params, contract: Contract
) -> None:
  """Checks every target weight before any work and reports all problems at once.

  Raises:
    ValueError: A target names no projection of the model, targets are quantized
      already, or their widths or values are unfit.
  """
  _check_targets(model, contract)
  complaints = []
  for index in range(model.num_layers):
    layer = params[model.layer_name(index)]
    for block, name in targets(model, contract):
      weight = layer[block][name]["weight"]
      path = f"{model.layer_name(index)}/{block}/{name}"
      if not isinstance(weight, (jax.Array, np.ndarray)):
        complaints.append(f"{path} is already quantized")
        continue
      if weight.shape[-1] % contract.block_size:
        complaints.append(f"{path} has input width {weight.shape[-1]}")
      if bad := int(streams.count_not_finite(weight)):
        complaints.append(f"{path} has {bad} NaN or inf of {weight.size} weights")
  if complaints:
    raise ValueError(
      f"quantize: every target needs a float weight, finite, with an input width that "
      f"is a multiple of {contract.block_size}; {'; '.join(complaints)}; mend the "
      "checkpoint or leave these projections out of Contract.targets."
    )


def _shape_groups(
  model: CausalLanguageModel,
  layer: Params,
  program: Program,
  views: Mapping[str, LinearInputs],
  contract: Contract,
  path: str,
) -> None:
  """Runs `shape_group` on each tap and stores the result for its linears."""
  for tap, view in views.items():
    weights = {
      name: mxfp4.weight_blocks(layer[block][name]["weight"])
      for block, name in targets(model, contract)
      if model.projection_taps[block, name] == tap
    }
    try:
      view.group = program.shape_group(weights, view)
    except ValueError as error:
      raise ValueError(f"{path}/{tap}: {error}") from error


def quantize_layer(
  model: CausalLanguageModel,
  path: str,
  layer: Params,
  program: Program,
  views: Mapping[str, LinearInputs],
  learned: Mapping[str, Any],
  contract: Contract,
  announce: Callable[[str], None],
  *,
  gradients: Sequence[Mapping[str, jax.Array]] = (),
  probe: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Quantizes the targets of one layer.

  `views` are the inputs of its targets by tap, `learned` is keyed by path, and
  `announce` gets each linear's name before it is quantized. With `probe`, linears are
  measured for their records. `gradients` are those at the targets' outputs by name, a
  dict for each chunk, if the program needs them.

  Returns:
    The layer's params with `QuantizedLinear` leaves, and a record for each target.

  Raises:
    ValueError: A linear cannot be quantized; the message begins with its path.
  """
  leaves, records = {}, {}
  _shape_groups(model, layer, program, views, contract, path)
  for block, name in targets(model, contract):
    announce(name)
    view = views[model.projection_taps[block, name]]
    inputs = view.for_linear(
      name,
      learned.get(f"{path}/{block}/{name}"),
      [chunk[name] for chunk in gradients],
    )
    weight = jnp.asarray(layer[block][name]["weight"])
    execution.trim_malloc(4 * weight.size)
    try:
      if program.weighting == "fisher":
        inputs = fisher.weighted(inputs)
      leaf = execution.block_on_cpu(program.quantize_linear(weight, inputs))
    except ValueError as error:
      raise ValueError(f"{path}/{block}/{name}: {error}") from error
    records[f"{block}/{name}"] = linear_record(weight, leaf, inputs, probe=probe)
    leaves[block, name] = leaf
  return replace_weights(layer, leaves), records
