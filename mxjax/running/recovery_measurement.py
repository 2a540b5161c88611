"""Moments of a recovery fit: a quantized layer run beside the float trajectory."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mxjax.calibration.calibration import CausalLanguageModel, Params
from mxjax.calibration.streams import Stream
from mxjax.devices import execution
from mxjax.devices import mesh as meshes
from mxjax.methods.recovery_fits import RecoveryFit


@functools.partial(
  jax.jit,
  static_argnames=("model", "fit"),
  donate_argnames=("hidden", "moments"),
  compiler_options=execution.FEW_TEMPORARIES,
)
def _measure(
  model: CausalLanguageModel,
  fit: RecoveryFit,
  layer: Params,
  float_layer: Params,
  constants: Any,
  hidden: jax.Array,
  float_taps: dict[str, jax.Array],
  moments: Any,
  first: jax.Array,
) -> tuple[jax.Array, Any]:
  def one(moments: Any, item: Any) -> tuple[Any, jax.Array]:
    sequence, targets, index = item
    with jax.enable_x64(False):
      output, taps = model.layer_with_taps(layer, sequence[None])
    targets = jax.tree.map(lambda a: a[None], targets)
    moments = fit.measure(moments, constants, float_layer, taps, targets, index)
    return moments, output[0]

  indices = first + jnp.arange(hidden.shape[0], dtype=jnp.int32)
  moments, output = jax.lax.scan(one, moments, (hidden, float_taps, indices))
  return output, moments


@functools.partial(
  jax.jit,
  static_argnames=("model", "fit", "layout", "mesh"),
  donate_argnames=("hidden", "shares"),
)
def _measure_on_mesh(
  model: CausalLanguageModel,
  fit: RecoveryFit,
  layout: meshes.Layout,
  mesh: Mesh,
  layers: dict[str, Params],
  constants: Any,
  hidden: jax.Array,
  float_taps: dict[str, jax.Array],
  shares: list[jax.Array],
  first: jax.Array,
) -> tuple[jax.Array, list[jax.Array]]:
  def run(
    layers: dict[str, Params],
    constants: Any,
    hidden: jax.Array,
    targets: dict[str, jax.Array],
    shares: list[jax.Array],
    first: jax.Array,
  ) -> tuple[jax.Array, list[jax.Array]]:
    with jax.enable_x64(False):
      output, taps = model.layer_with_taps(layers["quantized"], hidden)
    index = first + jax.lax.axis_index(meshes.AXES)
    zeros = layout.zeros()
    new = fit.measure(zeros, constants, layers["float"], taps, targets, index)
    return output, meshes.add_in_order(shares, new)

  whole, split = P(), P(meshes.AXES)
  arrays = constants, hidden, float_taps, shares, first
  specs = whole, split, split, split, whole
  return meshes.call(run, mesh, layers, *arrays, specs=specs)


def measure(
  model: CausalLanguageModel,
  fit: RecoveryFit,
  layer: Params,
  float_layer: Params,
  stream: Stream,
  float_taps: Sequence[dict[str, jax.Array]],
  mesh: Mesh | None = None,
) -> tuple[Stream, Any]:
  """Runs a quantized layer on a stream and gathers a fit's moments.

  Must be called inside `precision.float64_scope()`; the model itself runs outside it.

  Args:
    model: The model.
    fit: The recovery fit.
    layer: The layer in the state the fit is measured on.
    float_layer: The float layer.
    stream: Hidden states entering the layer in that state; consumed.
    float_taps: The float trajectory's taps, one dict a chunk.
    mesh: Where the stream lies, if on several devices.

  Returns:
    Hidden states leaving the layer, and the moments.
  """
  sequences = sum(chunk.shape[0] for chunk in stream)
  constants, moments = fit.prepare(float_layer, float_taps[0], sequences)
  layout = None
  if mesh is None:
    step = functools.partial(_measure, model, fit, layer, float_layer, constants)
  else:
    moments, layout = meshes.share(moments, mesh)
    layers = {"quantized": layer, "float": float_layer}
    layers = meshes.shard_rows(layers, mesh)
    constants = meshes.replicate(constants, mesh)
    step = functools.partial(
      _measure_on_mesh, model, fit, layout, mesh, layers, constants
    )
  outputs, first = [], 0
  for hidden, taps in zip(stream, float_taps, strict=True):
    targets = {name: taps[name] for name in fit.float_taps}
    output, moments = execution.block_on_cpu(
      step(hidden, targets, moments, np.int32(first))
    )
    outputs.append(output)
    first += hidden.shape[0]
  if mesh is not None and layout is not None:
    moments = meshes.collect(moments, layout, mesh)
  return outputs, moments
