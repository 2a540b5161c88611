"""Operator error: the output error of each linear on the float model's inputs.

Errors do not propagate from layer to layer and rounding chaos plays no role, so
operator error separates methods that the perplexity of a small model cannot.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.calibration import streams
from mxjax.calibration.calibration import CausalLanguageModel, Params, model_ids
from mxjax.devices import execution
from mxjax.layers.linear import linear
from mxjax.layers.quantized_linear import QuantizedLinear


@compilation.jit(static_argnames="model")
def _layer_errors(
  model: CausalLanguageModel,
  layer: Params,
  leaves: Mapping[str, QuantizedLinear],
  hidden: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  output, taps = model.layer_with_taps(layer, hidden)
  errors = {}
  for (block, name), tap in model.projection_taps.items():
    path = f"{block}/{name}"
    if path not in leaves:
      continue
    x = taps[tap].astype(jnp.float32)
    exact = linear(x, layer[block][name]["weight"])
    error = linear(x, leaves[path]) - exact
    errors[path] = jnp.square(error).sum() / jnp.square(exact).sum()
  return output, errors


def operator_errors(
  model: CausalLanguageModel, params: Params, quantized: Params, tokens: Any
) -> dict[str, float]:
  """Computes ||y_q - y||^2 / ||y||^2 of every quantized linear.

  The inputs are those of the float model on int32 tokens `[B, T]`. Keys are paths such
  as `layers_0/mlp/up_proj`.
  """
  tokens = jnp.asarray(model_ids(model, tokens, "operator_errors"))
  hidden = model.embed(streams.outer_params(model, params), tokens)
  result: dict[str, float] = {}
  for index in range(model.num_layers):
    name = model.layer_name(index)
    layer = quantized[name]
    leaves = {
      f"{block}/{part}": layer[block][part]["weight"]
      for block, part in model.projection_taps
      if isinstance(layer[block][part]["weight"], QuantizedLinear)
    }
    hidden, errors = execution.block_on_cpu(
      _layer_errors(model, params[name], leaves, hidden)
    )
    result |= {f"{name}/{path}": float(e) for path, e in errors.items()}
  return result


def operator_error(
  model: CausalLanguageModel, params: Params, quantized: Params, tokens: Any
) -> float:
  """Averages `operator_errors` over all quantized linears; NaN if there are none."""
  errors = list(operator_errors(model, params, quantized, tokens).values())
  return float(np.mean(errors)) if errors else float("nan")
