"""One decoder layer: its targets quantized, then its recovery fitted and installed."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mxjax.calibration import streams
from mxjax.calibration.calibration import CausalLanguageModel, Params
from mxjax.calibration.float_stream import FloatStream
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.methods.program import Program
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.contract import Contract
from mxjax.running import recovery_measurement
from mxjax.running.records import linear_record


def check_params(
  model: CausalLanguageModel, params: Params, contract: Contract
) -> None:
  """Checks every target weight before any work, collecting all complaints.

  Raises:
    ValueError: A width that is not a multiple of 32, or NaN or inf in a weight; the
      message names each layer, its shape and its counts.
  """
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
      if bad := int((~np.isfinite(np.asarray(weight, np.float32))).sum()):
        complaints.append(f"{path} has {bad} NaN or inf of {weight.size} weights")
  if complaints:
    raise ValueError(
      f"quantize: every target needs a float weight, finite, with an input width that "
      f"is a multiple of {contract.block_size}; {'; '.join(complaints)}; mend the "
      "checkpoint or leave these projections out of Contract.targets."
    )


def targets(model: CausalLanguageModel, contract: Contract) -> list[tuple[str, str]]:
  """The target linears of a layer, in forward order."""
  return [path for path in model.projection_taps if path[1] in contract.targets]


def _shape_groups(
  model: CausalLanguageModel,
  layer: Params,
  program: Program,
  views: Mapping[str, LinearInputs],
  contract: Contract,
  path: str,
) -> None:
  """Runs `shape_group` for the linears on each tap, and keeps what it returns."""
  for tap, view in views.items():
    weights = {
      name: mxfp4.to_blocks(jnp.asarray(layer[block][name]["weight"], jnp.float32))
      for block, name in targets(model, contract)
      if model.projection_taps[block, name] == tap
    }
    try:
      view.group = program.shape_group(weights, view)
    except ValueError as error:
      raise ValueError(f"{path}/{tap}: {error}") from error


def quantize_layer(
  model: CausalLanguageModel,
  layer: Params,
  program: Program,
  views: Mapping[str, LinearInputs],
  learned: Mapping[str, Any],
  contract: Contract,
  path: str,
  announce: Callable[[str], None],
  *,
  probe: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Quantizes the targets of one layer; returns its new params and records."""
  new = {block: dict(layer[block]) for block in layer}
  records: dict[str, Any] = {}
  _shape_groups(model, layer, program, views, contract, path)
  for block, name in targets(model, contract):
    announce(name)
    view = views[model.projection_taps[block, name]]
    inputs = view.for_linear(name, learned.get(f"{path}/{block}/{name}"))
    weight = jnp.asarray(layer[block][name]["weight"])
    execution.trim_malloc(4 * weight.size)
    try:
      leaf = execution.block_on_cpu(program.quantize_linear(weight, inputs))
    except ValueError as error:
      raise ValueError(f"{path}/{block}/{name}: {error}") from error
    records[f"{block}/{name}"] = linear_record(weight, leaf, inputs, probe=probe)
    new[block][name] = {**layer[block][name], "weight": leaf}
  return new, records


def views(
  float_stream: FloatStream,
  model: CausalLanguageModel,
  layer: Params,
  contract: Contract,
) -> dict[str, LinearInputs]:
  """The inputs of a layer's targets by tap; linears on one tap share a view."""
  found: dict[str, LinearInputs] = {}
  for block, name in targets(model, contract):
    tap = model.projection_taps[block, name]
    if tap not in found:
      width = layer[block][name]["weight"].shape[-1]
      found[tap] = float_stream.inputs(tap, width, contract)
  return found


def recover(
  model: CausalLanguageModel,
  program: Program,
  layers: tuple[Params, Params],
  fit_streams: list[streams.Stream],
  taps: list[dict[str, jax.Array]],
  stage: Callable[[str, int], AbstractContextManager[None]],
  mesh: Mesh | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Fits and installs a layer's recovery; advances every stream of the program."""
  float_layer, parent = layers
  current, records = dict(parent), {}
  by_layer = program.recovery_by == "layer"
  for position, fit in enumerate(program.recover):
    with stage(f"{fit.name} recovery", 2 + position), precision.float64_scope():
      place = 0 if by_layer else position
      entering = fit_streams[place]
      state = fit.state(current, parent)
      leaving, moments = recovery_measurement.measure(
        model,
        fit,
        state,
        float_layer,
        streams.copy(entering) if by_layer else entering,
        taps,
        mesh,
      )
      if not by_layer:
        fit_streams[place] = leaving
      leaf, records[fit.name] = fit.solve(moments)
      current = fit.install(current, leaf)
  if by_layer and program.recover:
    fit_streams[0] = streams.advance(model, current, fit_streams[0], mesh)
  return current, records
