"""The forward pass of a model, one decoder layer at a time.

During calibration `lax.map` runs each sequence of a chunk separately, so the bits do
not depend on the chunk size.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.calibration.calibration import (
  CausalLanguageModel,
  Params,
  replace_weights,
)
from mxjax.devices import execution
from mxjax.devices.placement import (
  CALIBRATION,
  EVALUATION,
  ONE_DEVICE,
  Placement,
  Sharing,
)
from mxjax.errors import FloatingPointRefusal
from mxjax.layers.linear import Perturbed
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import float_bits, mxfp4

Chunks = list[jax.Array]
"""Hidden states `[sequences, T, d]` in calibration order, compute dtype; on a mesh
each chunk has one sequence a device. A model of another kind may use any pytree."""


def outer_params(model: CausalLanguageModel, params: Params) -> dict[str, Any]:
  """Returns the params outside the model's layers: embedding, final norm, head."""
  layers = {model.layer_name(index) for index in range(model.num_layers)}
  # `items()` would read every layer of params on disk.
  return {key: params[key] for key in params if key not in layers}


def _one(sequence: Any) -> Any:
  """Makes a batch of one sequence; `_only` takes it out again."""
  return jax.tree.map(lambda a: a[None], sequence)


def _only(batch: Any) -> Any:
  return jax.tree.map(lambda a: a[0], batch)


@execution.jit(static_argnames=("model", "placement", "sharing"))
def _embed(
  model: CausalLanguageModel,
  params: Params,
  tokens: jax.Array,
  placement: Placement,
  sharing: Sharing = CALIBRATION,
) -> jax.Array:
  return placement.call(model.embed, params, tokens, sharing=sharing)


def embed(
  model: CausalLanguageModel,
  params: Params,
  tokens: Any,
  chunk: int,
  placement: Placement = ONE_DEVICE,
) -> Chunks:
  """Embeds calibration tokens, int32 `[S, T]` or what the model takes, in chunks."""
  outer = placement.shard_rows(outer_params(model, params))
  starts = range(0, jax.tree.leaves(tokens)[0].shape[0], chunk)
  cut = lambda first: jax.tree.map(lambda a: a[first : first + chunk], tokens)
  put = lambda part: jax.tree.map(placement.put_sequences, part)
  return [_embed(model, outer, put(cut(first)), placement) for first in starts]


@compilation.jit(
  static_argnames=("model", "blocked", "plain", "placement"),
  donate_argnames="hidden",
  compiler_options=execution.FEW_TEMPORARIES,
)
def capture(
  model: CausalLanguageModel,
  layer: Params,
  hidden: jax.Array,
  blocked: tuple[str, ...],
  plain: tuple[str, ...],
  placement: Placement = ONE_DEVICE,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Runs a chunk through a float layer and returns its output and taps.

  `hidden`, `[sequences, T, d]`, is donated. `blocked` taps are returned feature-major,
  `[sequences, blocks, 32, T]`; `plain` taps unchanged, `[sequences, T, ...]`; all in
  the dtype of the computation.
  """

  def run(layer: Params, hidden: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    def one(sequence: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
      output, taps = model.layer_with_taps(layer, _one(sequence))
      # Feature-major at once: all reductions of linears read blocks in this order.
      kept = {t: mxfp4.to_blocks(taps[t][0]) for t in blocked}
      kept |= {t: taps[t][0] for t in plain}
      return _only(output), kept

    return jax.lax.map(one, hidden)

  return placement.call(run, layer, hidden)


@execution.jit(
  static_argnames=("model", "targets", "placement"),
  compiler_options=execution.FEW_TEMPORARIES,
)
def linear_gradients(
  model: CausalLanguageModel,
  layer: Params,
  hidden: jax.Array,
  cotangent: jax.Array,
  targets: tuple[tuple[str, str, int], ...],
  placement: Placement = ONE_DEVICE,
) -> dict[str, jax.Array]:
  """Takes gradients at a layer's output to the outputs of its linears.

  `cotangent`, `[sequences, n, d]`, belongs to the first n tokens of `hidden`,
  `[sequences, T, d]`; `targets` are (sublayer, name, out_features). Returns the
  gradient of each by its name, `[sequences, n, out_features]`, in the dtype of
  `cotangent`.
  """

  def run(
    layer: Params, hidden: jax.Array, cotangent: jax.Array
  ) -> dict[str, jax.Array]:
    def one(item: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
      states, gradient = item

      def perturbed(steps: dict[str, jax.Array]) -> jax.Array:
        leaves = {
          (sublayer, name): Perturbed(layer[sublayer][name]["weight"], steps[name])
          for sublayer, name, _ in targets
        }
        return model.layer(replace_weights(layer, leaves), states[None])

      # At steps of zero nothing moves, and the gradient at a step is that at the output
      # of its linear.
      zeros = {
        name: jnp.zeros((states.shape[0], out_features), states.dtype)
        for _, name, out_features in targets
      }
      [found] = jax.vjp(perturbed, zeros)[1](gradient[None].astype(states.dtype))
      return {name: each.astype(gradient.dtype) for name, each in found.items()}

    # Attention is causal: the tokens behind the first n change nothing at these.
    return jax.lax.map(one, (hidden[:, : cotangent.shape[1]], cotangent))

  return placement.call(run, layer, hidden, cotangent)


@execution.jit(
  static_argnames=("model", "placement"),
  donate_argnames="hidden",
  compiler_options=execution.FEW_TEMPORARIES,
)
def _advance(
  model: CausalLanguageModel, layer: Params, hidden: jax.Array, placement: Placement
) -> jax.Array:
  def run(layer: Params, hidden: jax.Array) -> jax.Array:
    return jax.lax.map(lambda row: _only(model.layer(layer, _one(row))), hidden)

  return placement.call(run, layer, hidden)


def advance(
  model: CausalLanguageModel,
  layer: Params,
  hidden: Chunks,
  placement: Placement = ONE_DEVICE,
) -> Chunks:
  """Runs hidden states through one layer; their buffers are donated."""
  layer = placement.shard_rows(layer)
  return [_advance(model, layer, chunk, placement) for chunk in hidden]


def check_finite(hidden: Chunks, place: str) -> None:
  """Raises FloatingPointError if hidden states leaving `place` are not finite."""
  # Arguments of a layer that are no floats, such as masks, are always finite.
  leaves = [
    leaf for leaf in jax.tree.leaves(hidden) if jnp.issubdtype(leaf.dtype, jnp.floating)
  ]
  bad = sum(int(float_bits.count_not_finite(leaf)) for leaf in leaves)
  if bad:
    total = sum(leaf.size for leaf in leaves)
    raise FloatingPointRefusal(
      f"quantize: {place}",
      expected="finite hidden values leaving it on the calibration tokens",
      got=f"{bad} of {total} that are NaN or inf",
      mend="the float model itself overflows there, so check its weights and its "
      "compute dtype",
    )


@execution.jit(static_argnames=("model", "placement"))
def _layer(
  model: CausalLanguageModel,
  layer: Params,
  hidden: jax.Array,
  placement: Placement,
  *tree: Any,
) -> jax.Array:
  return placement.call(model.layer, layer, hidden, *tree, sharing=EVALUATION)


def _runs_alone(layer: Params) -> bool:
  """Whether a linear of the layer has an A4 rule that is a program of its own."""
  is_linear = lambda node: isinstance(node, QuantizedLinear)
  nodes = jax.tree.leaves(layer, is_leaf=is_linear)
  return any(is_linear(node) and node.rounding.runs_alone for node in nodes)


def _layer_by_operations(
  model: CausalLanguageModel,
  layer: Params,
  hidden: jax.Array,
  placement: Placement,
  *tree: Any,
) -> jax.Array:
  """Runs a layer as `_layer` does, but compiles each operation by itself."""
  del placement
  return execution.block_on_cpu(model.layer(layer, hidden, *tree))


def final_hiddens(
  model: CausalLanguageModel,
  params: Params,
  windows: Sequence[jax.Array],
  placement: Placement = ONE_DEVICE,
  trees: Sequence[Any] | None = None,
) -> Chunks:
  """Runs windows through all layers, reading each layer once for all of them.

  Each window is int32 `[B, T]`, on a mesh with one window for each device along `data`.
  `params` are float or quantized, possibly on disk. Returns hidden states `[B, T, d]`
  leaving the last layer; the bits of a window do not depend on the others. `trees` say
  for each window where its sequences branch; `CausalLM.layer` takes them.
  """
  outer = placement.shard_rows(outer_params(model, params))
  hidden = [_embed(model, outer, tokens, placement, EVALUATION) for tokens in windows]
  branches = [(tree,) for tree in trees] if trees else [()] * len(hidden)
  for index in range(model.num_layers):
    layer = placement.shard_rows(params[model.layer_name(index)])
    # Within the program of a layer, a candidate's rule would be compiled anew for every
    # linear.
    run = _layer_by_operations if _runs_alone(layer) and not placement.mesh else _layer
    hidden = [
      run(model, layer, states, placement, *tree)
      for states, tree in zip(hidden, branches, strict=True)
    ]
  return hidden
