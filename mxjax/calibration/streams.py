"""Hidden states of the calibration set, carried through the model layer by layer.

Each sequence goes through a layer by itself (`lax.map` inside a chunk), so the bits do
not depend on how many sequences share a device call.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mxjax.calibration.calibration import CausalLanguageModel, Params
from mxjax.devices import execution
from mxjax.devices import mesh as meshes
from mxjax.numerics import mxfp4

Stream = list[jax.Array]
"""Chunks `[sequences, T, d]` in calibration order, compute dtype; on a mesh with one
sequence a device."""


@functools.partial(jax.jit, static_argnames=("model", "mesh", "sharing"))
def _embed(
  model: CausalLanguageModel,
  params: Params,
  tokens: jax.Array,
  mesh: Mesh | None,
  sharing: meshes.Sharing = meshes.CALIBRATION,
) -> jax.Array:
  return meshes.call(model.embed, mesh, params, tokens, sharing=sharing)


def start(
  model: CausalLanguageModel,
  params: Params,
  tokens: Any,
  chunk: int,
  mesh: Mesh | None = None,
) -> Stream:
  """Embeds the calibration tokens, int32 `[S, T]`, in chunks of sequences."""
  outer = meshes.shard_rows(outer_params(params), mesh)
  return [
    execution.block_on_cpu(
      _embed(model, outer, spread(tokens[first : first + chunk], mesh), mesh)
    )
    for first in range(0, len(tokens), chunk)
  ]


def spread(part: Any, mesh: Mesh | None) -> jax.Array:
  """A chunk `[sequences, ...]` as a device array of its own, on a mesh if there is one.

  A copy: the buffers of a stream are donated, those of the host must not be.
  """
  return meshes.place(part, mesh, P(meshes.AXES)) if mesh else jnp.array(part)


@functools.partial(
  jax.jit,
  static_argnames=("model", "blocked", "plain", "mesh"),
  donate_argnames="hidden",
  compiler_options=execution.FEW_TEMPORARIES,
)
def capture(
  model: CausalLanguageModel,
  layer: Params,
  hidden: jax.Array,
  blocked: tuple[str, ...],
  plain: tuple[str, ...],
  mesh: Mesh | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Runs a chunk through a float layer and keeps what its linears saw.

  Args:
    model: The model.
    layer: The float layer's params.
    hidden: `[sequences, T, d]`; its buffer is donated.
    blocked: Taps returned feature-major, float32 `[sequences, blocks, 32, T]`.
    plain: Taps returned as they are, `[sequences, T, ...]`.
    mesh: Where layer and chunk lie, if on several devices.

  Returns:
    The layer's output and the taps.
  """

  def run(layer: Params, hidden: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    def one(sequence: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
      output, taps = model.layer_with_taps(layer, sequence[None])
      kept = {t: mxfp4.to_blocks(taps[t][0].astype(jnp.float32)) for t in blocked}
      return output[0], kept | {t: taps[t][0] for t in plain}

    return jax.lax.map(one, hidden)

  return meshes.call(run, mesh, layer, hidden)


@functools.partial(jax.jit, static_argnames=("model", "mesh"))
def _layer(
  model: CausalLanguageModel, layer: Params, hidden: jax.Array, mesh: Mesh | None
) -> jax.Array:
  return meshes.call(model.layer, mesh, layer, hidden, sharing=meshes.EVALUATION)


@functools.partial(jax.jit, static_argnames=("model", "mesh"), donate_argnames="hidden")
def _advance(
  model: CausalLanguageModel,
  layer: Params,
  hidden: jax.Array,
  mesh: Mesh | None = None,
) -> jax.Array:
  def run(layer: Params, hidden: jax.Array) -> jax.Array:
    return jax.lax.map(lambda row: model.layer(layer, row[None])[0], hidden)

  return meshes.call(run, mesh, layer, hidden)


def advance(
  model: CausalLanguageModel,
  layer: Params,
  stream: Stream,
  mesh: Mesh | None = None,
) -> Stream:
  """Carries a stream through one layer; the stream's buffers are donated."""
  layer = meshes.shard_rows(layer, mesh)
  return [
    execution.block_on_cpu(_advance(model, layer, hidden, mesh)) for hidden in stream
  ]


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
  model: CausalLanguageModel,
  params: Params,
  windows: Sequence[jax.Array],
  mesh: Mesh | None = None,
) -> Stream:
  """Runs windows through all layers, reading each layer once for all of them.

  Args:
    model: The model.
    params: Its params, float or quantized, possibly on disk.
    windows: int32 `[B, T]` each; on a mesh one window for each device along `data`.
    mesh: Where windows lie, if on several devices; params are put there.

  Returns:
    Hidden states `[B, T, d]` leaving the last layer, one array a window; a window's
    bits do not depend on the others.
  """
  outer = meshes.shard_rows(outer_params(params), mesh)
  hidden = [
    execution.block_on_cpu(_embed(model, outer, tokens, mesh, meshes.EVALUATION))
    for tokens in windows
  ]
  for index in range(model.num_layers):
    layer = meshes.shard_rows(params[model.layer_name(index)], mesh)
    hidden = [
      execution.block_on_cpu(_layer(model, layer, states, mesh)) for states in hidden
    ]
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
