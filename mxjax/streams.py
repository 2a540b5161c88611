"""Hidden states of the calibration set, carried through the model layer by layer.

Each sequence goes through a layer by itself (`lax.map` inside a chunk), so the bits do
not depend on how many sequences share a device call.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import execution, mxfp4
from mxjax.calibration import CausalLanguageModel, Params
from mxjax.recovery import RecoveryFit

Stream = list[jax.Array]
"""Chunks `[sequences, T, d]` in calibration order, compute dtype."""


@functools.partial(jax.jit, static_argnames="model")
def _embed(model: CausalLanguageModel, params: Params, tokens: jax.Array) -> jax.Array:
  return model.embed(params, tokens)


def start(
  model: CausalLanguageModel, params: Params, tokens: Any, chunk: int
) -> Stream:
  """Embeds the calibration tokens, int32 `[S, T]`, in chunks of sequences."""
  return [
    execution.finish(
      _embed(model, outer_params(params), jnp.asarray(tokens[first : first + chunk]))
    )
    for first in range(0, len(tokens), chunk)
  ]


@functools.partial(
  jax.jit, static_argnames=("model", "blocked", "plain"), donate_argnames="hidden"
)
def capture(
  model: CausalLanguageModel,
  layer: Params,
  hidden: jax.Array,
  blocked: tuple[str, ...],
  plain: tuple[str, ...],
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Runs a chunk through a float layer and keeps what its linears saw.

  Args:
    model: The model.
    layer: The float layer's params.
    hidden: `[sequences, T, d]`; its buffer is donated.
    blocked: Taps returned feature-major, float32 `[sequences, blocks, 32, T]`.
    plain: Taps returned as they are, `[sequences, T, ...]`.

  Returns:
    The layer's output and the taps.
  """

  def one(sequence: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    output, taps = model.layer_with_taps(layer, sequence[None])
    kept = {t: mxfp4.to_blocks(taps[t][0].astype(jnp.float32)) for t in blocked}
    return output[0], kept | {t: taps[t][0] for t in plain}

  return jax.lax.map(one, hidden)


@functools.partial(
  jax.jit, static_argnames=("model", "fit"), donate_argnames=("hidden", "moments")
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


def measure(
  model: CausalLanguageModel,
  fit: RecoveryFit,
  layer: Params,
  float_layer: Params,
  stream: Stream,
  float_taps: Sequence[dict[str, jax.Array]],
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

  Returns:
    Hidden states leaving the layer, and the moments.
  """
  sequences = sum(chunk.shape[0] for chunk in stream)
  constants, moments = fit.prepare(float_layer, float_taps[0], sequences)
  outputs, first = [], 0
  for hidden, taps in zip(stream, float_taps, strict=True):
    targets = {name: taps[name] for name in fit.float_taps}
    output, moments = execution.finish(
      _measure(
        model,
        fit,
        layer,
        float_layer,
        constants,
        hidden,
        targets,
        moments,
        jnp.int32(first),
      )
    )
    outputs.append(output)
    first += hidden.shape[0]
  return outputs, moments


@functools.partial(jax.jit, static_argnames="model")
def _layer(model: CausalLanguageModel, layer: Params, hidden: jax.Array) -> jax.Array:
  return model.layer(layer, hidden)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="hidden")
def _advance(model: CausalLanguageModel, layer: Params, hidden: jax.Array) -> jax.Array:
  return jax.lax.map(lambda row: model.layer(layer, row[None])[0], hidden)


def advance(model: CausalLanguageModel, layer: Params, stream: Stream) -> Stream:
  """Carries a stream through one layer; the stream's buffers are donated."""
  return [execution.finish(_advance(model, layer, hidden)) for hidden in stream]


def check_finite(stream: Stream, place: str) -> None:
  """Raises where a stream leaving `place` has NaN or inf.

  Raises:
    FloatingPointError: With the counts.
  """
  bad = sum(int((~jnp.isfinite(chunk)).sum()) for chunk in stream)
  if bad:
    total = sum(chunk.size for chunk in stream)
    raise FloatingPointError(
      f"quantize: {bad} of {total} hidden values leaving {place} are NaN or inf on the "
      "calibration tokens; the float model itself overflows there, so check its "
      "weights and its compute dtype."
    )


def copy(stream: Stream) -> Stream:
  """A stream with buffers of its own, for a call that donates them."""
  return [jnp.array(hidden, copy=True) for hidden in stream]


def final_hiddens(
  model: CausalLanguageModel, params: Params, windows: Sequence[jax.Array]
) -> Stream:
  """Runs windows through all layers, reading each layer once for all of them.

  Args:
    model: The model.
    params: Its params, float or quantized, possibly on disk.
    windows: int32 `[B, T]` each.

  Returns:
    Hidden states `[B, T, d]` leaving the last layer, one array a window; a window's
    bits do not depend on the others.
  """
  outer = outer_params(params)
  hidden = [execution.finish(_embed(model, outer, tokens)) for tokens in windows]
  for index in range(model.num_layers):
    layer = params[model.layer_name(index)]
    hidden = [execution.finish(_layer(model, layer, states)) for states in hidden]
  return hidden


def final_hidden(
  model: CausalLanguageModel, params: Params, tokens: jax.Array
) -> jax.Array:
  """`final_hiddens` of one window, int32 `[B, T]`: `[B, T, d]`."""
  return final_hiddens(model, params, [tokens])[0]


def outer_params(params: Params) -> dict[str, Any]:
  """The params outside the decoder layers: embedding, final norm, head."""
  # Not `items()`: of params on disk that would read every layer.
  return {k: params[k] for k in params if not k.startswith("layers_")}
