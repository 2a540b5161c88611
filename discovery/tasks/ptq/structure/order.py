"""Free permutations: hidden channels of an MLP, and channels inside value heads.

The float model computes the same function in any order of these channels, at no cost;
the order decides which inputs of `down_proj` and `o_proj` share a scale. A program
gives every channel a key and trusted code sorts, so the result is a permutation.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration import streams
from mxjax.discovery.core.task import Artifacts, ContractError
from mxjax.discovery.tasks.ptq.candidate_codes import Function, require_finite
from mxjax.discovery.tasks.ptq.payload import Operands, Place
from mxjax.discovery.tasks.ptq.structure.interventions import Behaviour
from mxjax.numerics import precision

PARTS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
  "mlp": ("mlp", "down_proj", ("gate_proj", "up_proj")),
  "values": ("self_attn", "o_proj", ("v_proj",)),
}
"""For each part: its block, the linear that reads the channels, those that write."""
# Of the order under the control `permute`, which is one for all programs.
SEED = 32


def _shape(model: Any, part: str) -> tuple[int, int, int]:
  """Returns groups, readers of each, and channels: an order stays inside a group."""
  config = model.config
  if part == "mlp":
    return 1, 1, config.intermediate_size
  heads = config.num_kv_heads
  return heads, config.num_heads // heads, config.head_dim


@functools.partial(jax.jit, static_argnames="model")
def _advance(
  model: Any, layer: Any, hidden: jax.Array
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
  hidden, taps = model.layer_with_taps(layer, hidden)
  seen = {}
  for part, (block, reader, _) in PARTS.items():
    size = jnp.abs(taps[model.projection_taps[block, reader]].astype(jnp.float32))
    seen[part] = {"square": jnp.square(size).mean((0, 1)), "peak": size.max((0, 1))}
  return hidden, seen


def measure_channels(
  model: Any, params: Mapping[str, Any], tokens: np.ndarray
) -> list[dict[str, dict[str, np.ndarray]]]:
  """Measures every channel of the float model, float64 `[groups, channels]`.

  Returns the arrays of the hook `arrange` by layer, part and name.
  """
  hidden = model.embed(
    streams.outer_params(model, params), jnp.asarray(tokens, jnp.int32)
  )
  layers = []
  for index in range(model.num_layers):
    layer = params[model.layer_name(index)]
    hidden, seen = jax.block_until_ready(_advance(model, layer, hidden))
    layers.append({part: _stats(model, layer, part, seen[part]) for part in PARTS})
  return layers


def _stats(model: Any, layer: Any, part: str, seen: Any) -> dict[str, np.ndarray]:
  block, reader, writers = PARTS[part]
  groups, readers, channels = shape = _shape(model, part)
  energy = lambda name, axis: np.square(
    np.asarray(layer[block][name]["weight"], np.float64)
  ).mean(axis)
  grouped = lambda array: np.asarray(array, np.float64).reshape(shape)
  return {
    "index": np.tile(np.arange(channels, dtype=np.float64), (groups, 1)),
    "square": grouped(seen["square"]).mean(1),
    "peak": grouped(seen["peak"]).max(1),
    "reader": grouped(energy(reader, 0)).mean(1),
    "writer": energy(writers[-1], 1).reshape(groups, channels),
  }


@functools.partial(jax.jit, static_argnames="function")
def _keys(function: Function, channels: Mapping[str, jax.Array]) -> jax.Array:
  return function(channels)[0]


def choose(
  model: Any,
  channels: list[dict[str, dict[str, np.ndarray]]],
  behaviour: Callable[[int, str], Behaviour],
  artifacts: Artifacts,
) -> Operands:
  """Returns the order of every part that a program or a control arranges.

  An order is int32 `[groups, channels]`: the channel that comes to each place.

  Raises:
    ContractError: A key is not finite.
  """
  orders = {}
  for layer, of_layer in enumerate(channels):
    for part, (block, _, _) in PARTS.items():
      now, stats = behaviour(layer, block), of_layer[part]
      if part == now.permuted:
        shape = stats["index"].shape
        keys = np.random.default_rng([SEED, layer]).random(shape)
      elif now.plan["arrange"] in (part, "both"):
        function = artifacts.batched(now.hooks["arrange"])
        with precision.float64_scope():
          flat = {name: array.reshape(-1) for name, array in stats.items()}
          keys = np.asarray(_keys(function, flat)).reshape(stats["index"].shape)
        require_finite("arrange", keys)
      else:
        continue
      # Stable, so that channels with equal keys stay in their order.
      order = np.argsort(keys, axis=1, kind="stable").astype(np.int32)
      orders[Place(layer, block, "order")] = {part: order}
  return orders


def arranged(
  params: Mapping[str, Any], model: Any, operands: Operands
) -> dict[str, Any]:
  """Returns float params with their channels in the orders among the operands.

  Raises:
    ContractError: An order is not a permutation inside every group.
  """
  result = dict(params)
  for place, arrays in operands.items():
    if place.leaf == "order":
      name = model.layer_name(place.layer)
      for part, order in arrays.items():
        result[name] = _arranged_layer(model, result[name], part, np.asarray(order))
  return result


def _arranged_layer(
  model: Any, layer: Mapping[str, Any], part: str, order: np.ndarray
) -> dict[str, Any]:
  block, reader, writers = PARTS[part]
  groups, readers, channels = _shape(model, part)
  expected = np.tile(np.arange(channels), (groups, 1))
  if order.shape != expected.shape or (np.sort(order, axis=1) != expected).any():
    raise ContractError(
      f"arrange: expected a permutation of {channels} channels in each of {groups} "
      f"groups of {block}, got an array of shape {order.shape} that is none."
    )
  # Writers have the channels of all groups in a row. A reader has them once for every
  # query head of the group, each time in the same order.
  rows = order + channels * np.arange(groups)[:, None]
  heads = np.arange(groups * readers).reshape(groups, readers, 1)
  columns = (order[:, None] + channels * heads).reshape(-1)
  linears = dict(layer[block])
  for name in writers:
    linears[name] = {k: array[rows.reshape(-1)] for k, array in linears[name].items()}
  linears[reader] = {
    **linears[reader],
    "weight": linears[reader]["weight"][:, columns],
  }
  return {**layer, block: linears}
