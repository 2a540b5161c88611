"""Local errors on the float model's inputs: of layers, and of the one-code rule.

Nothing propagates from layer to layer. Every linear and every layer is measured on
sequences that no statistic was fitted on.
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
from mxjax.errors import ValueRefusal
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.program import fold
from mxjax.numerics import mxfp4, precision
from mxjax.run.record import LOCAL_OBJECTIVES, local_objectives


def _rule_sums(
  x: jax.Array, leaf: QuantizedLinear, folded: jax.Array
) -> dict[str, jax.Array]:
  """Sums the objectives of the leaf's rule and of nearest rounding, and its edits."""
  rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
  blocks = mxfp4.to_blocks(rows)
  mapped = blocks if leaf.input_map is None else leaf.input_map.apply(blocks)
  nearest = mxfp4.round_blocks(mapped, leaf.rules)
  operand = leaf.rounding.round(mapped, leaf.rules)
  # Feature-major, as the folded weights are: `[blocks, 32, outputs]`.
  decoded = mxfp4.decode(leaf.weight, jnp.float32).T.reshape(folded.shape)
  ours, plain = (
    local_objectives(mapped, rounded, folded, decoded) for rounded in (operand, nearest)
  )
  # The 32 values of a block lie on the second-last axis.
  edited = (operand != nearest).any(-2)
  elements = jnp.float32(len(rows) * folded.shape[-1])
  sums = {name: a / elements for name, a in zip(LOCAL_OBJECTIVES, ours, strict=True)}
  for name, a in zip(LOCAL_OBJECTIVES, plain, strict=True):
    sums[f"{name}_nearest"] = a / elements
  return sums | {
    "edits": edited.sum(dtype=jnp.float32),
    "blocks": jnp.float32(edited.size),
  }


@compilation.jit(static_argnames="model")
def _layer_sums(
  model: CausalLanguageModel,
  layers: tuple[Params, Params],
  folded: Mapping[str, jax.Array],
  hidden: jax.Array,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
  """Runs both layers on one sequence `[1, T, d]`; sums over linears."""
  exact, quantized = layers
  output, taps = model.layer_with_taps(exact, hidden)
  ours = model.layer(quantized, hidden)
  error = jnp.square(ours.astype(jnp.float32) - output.astype(jnp.float32)).mean()
  found = [
    _rule_sums(taps[tap], quantized[block][name]["weight"], folded[f"{block}/{name}"])
    for (block, name), tap in model.projection_taps.items()
    if f"{block}/{name}" in folded
  ]
  return output, error, jax.tree.map(lambda *parts: jnp.stack(parts).sum(), *found)


def _folded(
  model: CausalLanguageModel, exact: Params, quantized: Params
) -> dict[str, jax.Array]:
  """Returns the folded float weights of all quantized linears of a layer."""
  result: dict[str, jax.Array] = {}
  for block, name in model.projection_taps:
    leaf = quantized[block][name]["weight"]
    if isinstance(leaf, QuantizedLinear):
      weight = exact[block][name]["weight"].astype(jnp.float32)
      # By the scope and the function of a build, whose bits these weights then have.
      with precision.float64_scope():
        blocks = mxfp4.to_blocks(weight)
        result[f"{block}/{name}"] = execution.block_on_cpu(fold(blocks, leaf.input_map))
  return result


def local_errors(
  model: CausalLanguageModel, params: Params, quantized: Params, tokens: Any
) -> dict[str, float]:
  """Measures the layers and the activation rule of a quantized model.

  `tokens` are int32 `[sequences, T]`. The hidden states of all sequences are kept, in
  the compute dtype, and each layer runs on one sequence at a time.

  Paper: Tables encoding-boundary (lower panel), onecode-local and onecode-edits.

  Returns:
    `layer_mse`, the mean squared error of a layer's output per element, averaged over
    layers; `local_sensitivity` and `local_mismatch`, the one-code objectives per output
    element, averaged over linears, over those of nearest rounding; `codes_per_block`
    and `edited_elements`, the share of blocks and of A4 elements that the rule edits;
    `sequences` and `length`.

  Raises:
    ValueError: No linear is quantized.
  """
  ids = model_ids(model, tokens, "local_errors")
  outer = streams.outer_params(model, params)
  hidden = [np.asarray(model.embed(outer, jnp.asarray(row[None]))) for row in ids]
  errors: list[float] = []
  sums: dict[str, float] = {}
  for index in range(model.num_layers):
    name = model.layer_name(index)
    layers = params[name], quantized[name]
    folded = _folded(model, *layers)
    if not folded:
      raise ValueRefusal(
        "local_errors",
        expected=f"quantized linears in {name}",
        got="none",
        mend="give the params that `quantize` returned",
      )
    for row, state in enumerate(hidden):
      output, error, found = execution.block_on_cpu(
        _layer_sums(model, layers, folded, jnp.asarray(state))
      )
      hidden[row] = np.asarray(output)
      errors.append(float(error))
      for key, value in found.items():
        sums[key] = sums.get(key, 0.0) + float(value)
  edited = sums["edits"] / sums["blocks"]
  return {
    "layer_mse": float(np.mean(errors)),
    **{name: sums[name] / sums[f"{name}_nearest"] for name in LOCAL_OBJECTIVES},
    "codes_per_block": edited,
    # Paper: Eq. hires-code-score edits one of the 32 elements of a block, or none.
    "edited_elements": edited / mxfp4.BLOCK_SIZE,
    "sequences": len(ids),
    "length": ids.shape[1],
  }
