"""Gradients through the whole model, one decoder layer at a time.

The backward pass reruns and differentiates each layer from the hidden states entering
it. One compiled function serves all layers.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mxjax.calibration.calibration import CausalLanguageModel, Params
from mxjax.calibration.streams import outer_params
from mxjax.devices import execution
from mxjax.numerics import mxfp4

HEAD_CHUNK = 512
"""Positions whose logits are in memory at once."""
FEW_POSITIONS = 64
"""As many where there are several arrays of that size; it takes as long."""


class Example(NamedTuple):
  """Tokens of a sequence, int32 `[1, T]`, and the float model's last hidden states.

  `label_weight` is a float32 scalar for objectives that also learn the tokens.
  """

  ids: jax.Array
  teacher: jax.Array | None = None
  label_weight: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Objective:
  """A loss of learned parameters; hashable, so that it can be a static argument.

  `shared` is learned once for the model, `own` once for each layer; both are pytrees.
  """

  model: CausalLanguageModel
  rules: mxfp4.Rules

  def embed(self, shared: Any, outer: Params, ids: jax.Array) -> jax.Array:
    """Embeds int32 tokens `[1, T]` into hidden states `[1, T, d]`."""
    del shared
    return self.model.embed(outer, ids)

  def layer(self, shared: Any, own: Any, hidden: jax.Array, layer: Params) -> jax.Array:
    """Runs one layer, `[1, T, d]` to `[1, T, d]`."""
    raise NotImplementedError

  def loss(
    self, shared: Any, hidden: jax.Array, outer: Params, example: Example
  ) -> jax.Array:
    """Computes the mean loss of a sequence, a scalar."""
    raise NotImplementedError

  def loss_and_shown(self, *args: Any) -> tuple[jax.Array, jax.Array]:
    """Computes the loss, which is differentiated, and what is told of it."""
    loss = self.loss(*args)
    return loss, loss


class Gradients(NamedTuple):
  """The gradients of a loss, and what the objective tells of it; means of sequences."""

  shown: float
  shared: Any
  own: list[Any]


@execution.jit(static_argnames=("objective", "part"))
def _forward(objective: Objective, part: str, *args: Any) -> jax.Array:
  return getattr(objective, part)(*args)


@execution.jit(static_argnames=("objective", "part", "learned"))
def _backward(
  objective: Objective, part: str, learned: int, cotangent: jax.Array, *args: Any
) -> tuple[Any, ...]:
  """Differentiates a part with respect to its first `learned` arguments."""
  # The params of the layer are constants: no gradient is made for them.
  run = lambda *first: getattr(objective, part)(*first, *args[learned:])
  return jax.vjp(run, *args[:learned])[1](cotangent)


@execution.jit(static_argnames="objective")
def _loss_gradient(objective: Objective, *args: Any) -> Any:
  differentiate = jax.grad(objective.loss_and_shown, argnums=(0, 1), has_aux=True)
  return differentiate(*args)


def _add(left: Any, right: Any) -> Any:
  return right if left is None else jax.tree.map(jnp.add, left, right)


def _of_sequence(
  objective: Objective,
  outer: Params,
  layers: list[Params],
  shared: Any,
  own: list[Any],
  example: Example,
  sums: tuple[Any, list[Any]],
) -> Gradients:
  """Adds a sequence's gradients to `sums`, whose list it empties as it goes."""
  hidden = _forward(objective, "embed", shared, outer, example.ids)
  # Forward, keeping what enters each layer: nothing inside a layer is kept.
  entering = []
  for layer, learned in zip(layers, own, strict=True):
    entering.append(hidden)
    hidden = _forward(objective, "layer", shared, learned, hidden, layer)
  (total, cotangent), shown = _loss_gradient(objective, shared, hidden, outer, example)
  gradients: list[Any] = []
  # Backward: each layer runs again and is differentiated. `pop` frees what entered it.
  for layer, learned in zip(reversed(layers), reversed(own), strict=True):
    args = shared, learned, entering.pop(), layer
    more, gradient, cotangent = _backward(objective, "layer", 3, cotangent, *args)
    total = _add(total, more)
    # Added layer by layer, so that only one layer's gradients are in memory twice.
    gradients.append(_add(sums[1].pop(), gradient))
  (more,) = _backward(objective, "embed", 1, cotangent, shared, outer, example.ids)
  total = _add(sums[0], _add(total, more))
  return Gradients(float(shown), total, gradients[::-1])


def gradients(
  objective: Objective,
  params: Params,
  shared: Any,
  own: list[Any],
  examples: list[Example],
) -> Gradients:
  """Differentiates the mean loss of some sequences, one after the other.

  `params` are constants. `own` holds one pytree for each layer, all equal in structure.
  """
  model, outer = objective.model, outer_params(objective.model, params)
  layers = [params[model.layer_name(i)] for i in range(model.num_layers)]
  total = 0.0
  sums: tuple[Any, list[Any]] = None, [None] * len(own)
  for example in examples:
    one = _of_sequence(objective, outer, layers, shared, own, example, sums)
    total += one.shown
    sums = one.shared, one.own
  mean = lambda tree: jax.tree.map(lambda leaf: leaf / len(examples), tree)
  # Layer by layer, so that only one layer's sums and means are in memory at once.
  of_all, of_layers = sums
  of_layers.reverse()
  means = [mean(of_layers.pop()) for _ in own]
  return Gradients(total / len(examples), mean(of_all), means)


def chunked_mean(
  loss: Any, length: int, *arrays: jax.Array, weights: jax.Array
) -> jax.Array:
  """Computes the weighted mean of a loss over positions, one chunk at a time.

  `loss` maps chunks of the arrays, `[length, ...]` each, to losses `[chunk]`; it is
  recomputed in the backward pass. `weights` are float32 `[length]`, not all zero.
  """
  # Without it the backward pass would keep what every chunk computes, such as its
  # logits.
  of_chunk = jax.checkpoint(lambda parts: loss(*parts))
  losses = by_chunk(of_chunk, length, *arrays)
  return (losses * weights).sum() / weights.sum()


def by_chunk(run: Any, length: int, *arrays: jax.Array, most: int = HEAD_CHUNK) -> Any:
  """Maps chunks of arrays `[length, ...]`, one tuple each, and joins the results.

  A chunk has `most` positions or fewer.
  """
  chunk = min(most, length)
  # Zeros fill the last chunk, and what they give is cut off.
  padding = -length % chunk
  pad = lambda a: jnp.pad(a, ((0, padding),) + ((0, 0),) * (a.ndim - 1))
  split = lambda a: pad(a).reshape(-1, chunk, *a.shape[1:])
  joined = lambda a: a.reshape(-1, *a.shape[2:])[:length]
  return jax.tree.map(joined, jax.lax.map(run, tuple(split(a) for a in arrays)))


def batches(sequences: int, batch: int, steps: int) -> list[list[int]]:
  """Lists the sequence indices of each step, wrapping around at the end of the set."""
  size = min(batch, sequences)
  return [[(s * size + i) % sequences for i in range(size)] for s in range(steps)]
