"""Gradients through the whole model, one decoder layer at a time.

Forward, the hidden states entering each layer are kept; backward, each layer is run
again and differentiated. One compiled function serves all layers and memory holds one
layer's activations, whatever the depth.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from mxjax.calibration.calibration import CausalLanguageModel, Params
from mxjax.calibration.streams import outer_params
from mxjax.devices import execution

HEAD_CHUNK = 512
"""Positions whose logits exist at once."""


class Objective(Protocol):
  """A loss of what is learned; hashable, so that it can be a static argument.

  `shared` is learned once for the model, `own` once for each layer; both are pytrees.
  """

  def embed(
    self, model: CausalLanguageModel, shared: Any, outer: Params, ids: jax.Array
  ) -> jax.Array:
    """Hidden states `[1, T, d]` of tokens int32 `[1, T]`."""
    ...

  def layer(
    self,
    model: CausalLanguageModel,
    shared: Any,
    own: Any,
    layer: Params,
    hidden: jax.Array,
  ) -> jax.Array:
    """One layer, `[1, T, d]` to `[1, T, d]`."""
    ...

  def loss(
    self,
    model: CausalLanguageModel,
    shared: Any,
    outer: Params,
    hidden: jax.Array,
    ids: jax.Array,
    teacher: jax.Array | None,
  ) -> jax.Array:
    """The mean loss of a sequence, a scalar."""
    ...


class Gradients(NamedTuple):
  """A loss and its gradients.

  Attributes:
    loss: Mean over sequences.
    shared: The shape of `shared`.
    own: One pytree for each layer.
  """

  loss: float
  shared: Any
  own: list[Any]


@functools.partial(jax.jit, static_argnames=("objective", "model"))
def _embed(
  objective: Objective, model: Any, shared: Any, outer: Params, ids: jax.Array
) -> jax.Array:
  return objective.embed(model, shared, outer, ids)


@functools.partial(jax.jit, static_argnames=("objective", "model"))
def _layer(
  objective: Objective,
  model: Any,
  shared: Any,
  own: Any,
  layer: Params,
  hidden: jax.Array,
) -> jax.Array:
  return objective.layer(model, shared, own, layer, hidden)


@functools.partial(jax.jit, static_argnames=("objective", "model"))
def _loss_gradient(
  objective: Objective,
  model: Any,
  shared: Any,
  outer: Params,
  hidden: jax.Array,
  ids: jax.Array,
  teacher: jax.Array | None,
) -> tuple[jax.Array, tuple[Any, jax.Array]]:
  def loss(shared: Any, hidden: jax.Array) -> jax.Array:
    return objective.loss(model, shared, outer, hidden, ids, teacher)

  return jax.value_and_grad(loss, argnums=(0, 1))(shared, hidden)


@functools.partial(jax.jit, static_argnames=("objective", "model"))
def _layer_gradient(
  objective: Objective,
  model: Any,
  shared: Any,
  own: Any,
  layer: Params,
  hidden: jax.Array,
  cotangent: jax.Array,
) -> tuple[Any, Any, jax.Array]:
  run = lambda shared, own, hidden: objective.layer(model, shared, own, layer, hidden)
  return jax.vjp(run, shared, own, hidden)[1](cotangent)


@functools.partial(jax.jit, static_argnames=("objective", "model"))
def _embed_gradient(
  objective: Objective,
  model: Any,
  shared: Any,
  outer: Params,
  ids: jax.Array,
  cotangent: jax.Array,
) -> Any:
  run = lambda shared: objective.embed(model, shared, outer, ids)
  return jax.vjp(run, shared)[1](cotangent)[0]


def _add(left: Any, right: Any) -> Any:
  return jax.tree.map(jnp.add, left, right)


def gradients(
  objective: Objective,
  model: CausalLanguageModel,
  params: Params,
  shared: Any,
  own: list[Any],
  sequences: list[jax.Array],
  teachers: list[jax.Array] | None = None,
) -> Gradients:
  """The mean loss of some sequences and its gradients.

  Args:
    objective: The loss.
    model: The model.
    params: Its float params, which are constants.
    shared: What is learned once.
    own: What is learned for each layer, equal in structure.
    sequences: Tokens, int32 `[1, T]` each; one after the other is run.
    teachers: The float model's last hidden states of each, `[1, T, d]`, or None.

  Returns:
    The loss and the gradients, averaged over sequences.
  """
  outer = outer_params(params)
  layers = [params[model.layer_name(i)] for i in range(model.num_layers)]
  total, shared_sum, own_sum = 0.0, None, None
  for position, ids in enumerate(sequences):
    hidden = execution.block_on_cpu(_embed(objective, model, shared, outer, ids))
    entering = []
    for layer, learned in zip(layers, own, strict=True):
      entering.append(hidden)
      hidden = execution.block_on_cpu(
        _layer(objective, model, shared, learned, layer, hidden)
      )
    teacher = teachers[position] if teachers else None
    loss, (shared_here, cotangent) = execution.block_on_cpu(
      _loss_gradient(objective, model, shared, outer, hidden, ids, teacher)
    )
    own_here: list[Any] = []
    for layer, learned, before in zip(
      reversed(layers), reversed(own), reversed(entering), strict=True
    ):
      more, gradient, cotangent = execution.block_on_cpu(
        _layer_gradient(objective, model, shared, learned, layer, before, cotangent)
      )
      shared_here = _add(shared_here, more)
      own_here.append(gradient)
    shared_here = _add(
      shared_here, _embed_gradient(objective, model, shared, outer, ids, cotangent)
    )
    own_here.reverse()
    total += float(loss)
    shared_sum = shared_here if shared_sum is None else _add(shared_sum, shared_here)
    own_sum = own_here if own_sum is None else _add(own_sum, own_here)
  mean = lambda tree: jax.tree.map(lambda leaf: leaf / len(sequences), tree)
  return Gradients(total / len(sequences), mean(shared_sum), mean(own_sum))


def chunked_mean(
  loss: Any, length: int, *arrays: jax.Array, weights: jax.Array
) -> jax.Array:
  """The weighted mean of a loss over positions, a chunk of positions at a time.

  Args:
    loss: Maps chunks of the arrays to losses `[chunk]`; run again backward.
    length: Positions.
    *arrays: `[length, ...]` each.
    weights: float32 `[length]`, not all zero.

  Returns:
    A scalar.
  """
  chunk = min(HEAD_CHUNK, length)
  padding = -length % chunk
  pad = lambda a: jnp.pad(a, ((0, padding),) + ((0, 0),) * (a.ndim - 1))
  split = lambda a: pad(a).reshape(-1, chunk, *a.shape[1:])
  losses = jax.lax.map(
    jax.checkpoint(lambda parts: loss(*parts)), tuple(split(a) for a in arrays)
  )
  return (losses.reshape(-1)[:length] * weights).sum() / weights.sum()


def batches(sequences: int, batch: int, steps: int) -> list[list[int]]:
  """Sequences of each step in turn, beginning again at the end of the set."""
  size = min(batch, sequences)
  return [[(s * size + i) % sequences for i in range(size)] for s in range(steps)]
