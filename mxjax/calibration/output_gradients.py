r"""Gradients of the float model's own log-likelihood at the outputs of its layers.

Labels are drawn from the model's own predictions, so second moments of these gradients
are those of the Fisher information. One forward and one backward pass cover the first
half of every sequence, one decoder layer at a time; the loss is a sum over its tokens.

.. math::
  g_t = \partial\, \bigl[-\sum_s \log p(y_s \mid x_{\le s})\bigr] / \partial\, h_t,
  \qquad y_s \sim p(\cdot \mid x_{\le s})
"""

import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.calibration import gradients, streams
from mxjax.calibration.calibration import (
  Calibration,
  CausalLanguageModel,
  Params,
)
from mxjax.calibration.streams import Chunks
from mxjax.devices import execution
from mxjax.devices.placement import ONE_DEVICE, Placement
from mxjax.storage.atomic_io import read_checked, write_checked

LABEL_SEED = 0
STORED = jnp.bfloat16
"""What gradients are kept in: token weights and moments need no more bits."""
GROUP = 256
"""Words whose probabilities are summed before one of them is drawn."""


def differentiated(length: int) -> int:
  """Returns how many tokens of a sequence are differentiated: the first half of them.

  Attention over half the tokens takes a quarter of the time.
  """
  return -(-length // 2)


def draw_labels(keys: jax.Array, likely: jax.Array) -> jax.Array:
  """Draws a word of each row of probabilities `[n, words]`; int32 `[n]`.

  One uniform number of each row's key is looked up in the sums of groups of words, and
  then in those of one group: random numbers for all words take as long as the logits.
  """
  # Sums of groups: `ends` are their cumulative ends, the last one the sum of all.
  rows, words = likely.shape
  grouped = jnp.pad(likely, ((0, 0), (0, -words % GROUP))).reshape(rows, -1, GROUP)
  ends = jnp.cumsum(grouped.sum(-1), -1)
  uniform = jax.vmap(lambda key: jax.random.uniform(key, dtype=likely.dtype))(keys)
  sought = (uniform * ends[:, -1])[:, None]
  # Rounding may leave nothing above what is sought.
  first = lambda sums, above: jnp.minimum((sums <= above).sum(-1), sums.shape[-1] - 1)
  # Then the word inside the group, sought behind the sum of the groups before it.
  group = first(ends, sought)
  one = jnp.take_along_axis(grouped, group[:, None, None], 1)[:, 0]
  before = jnp.take_along_axis(ends, group[:, None], 1) - one.sum(-1, keepdims=True)
  word = first(jnp.cumsum(one, -1), sought - before)
  # The last group is filled up by zeros, which are no words.
  return jnp.minimum(group * GROUP + word, words - 1).astype(jnp.int32)


@compilation.jit(static_argnames=("model", "placement"))
def _of_final_hidden(
  model: CausalLanguageModel,
  outer: Params,
  hidden: jax.Array,
  indices: jax.Array,
  placement: Placement,
) -> jax.Array:
  """Differentiates the loss of sampled labels by hidden states `[S, T, d]`."""

  def one(outer: Params, states: jax.Array, index: jax.Array) -> jax.Array:
    # By sequence and position, so that neither chunk size nor mesh changes a label.
    key = jax.random.fold_in(jax.random.key(LABEL_SEED), index)
    length = states.shape[0]
    positions = jnp.arange(length, dtype=jnp.int32)

    def chunk(parts: tuple[jax.Array, jax.Array]) -> jax.Array:
      head = lambda states: model.logits(outer, states[None])[0]
      logits, pull = jax.vjp(head, parts[0])
      likely = jax.nn.softmax(logits)
      keys = jax.vmap(lambda position: jax.random.fold_in(key, position))(parts[1])
      labels = draw_labels(keys, likely)
      # The gradient at the logits; differentiating would compute them once more.
      rows = jnp.arange(len(labels), dtype=jnp.int32)
      [gradient] = pull(likely.at[rows, labels].add(-1))
      return gradient

    most = gradients.FEW_POSITIONS
    return gradients.by_chunk(chunk, length, states, positions, most=most)

  def run(outer: Params, hidden: jax.Array, indices: jax.Array) -> jax.Array:
    return jax.lax.map(lambda item: one(outer, *item), (hidden, indices))

  return placement.call(run, outer, hidden, indices)


@compilation.jit(static_argnames=("model", "placement"))
def _through_layer(
  model: CausalLanguageModel,
  layer: Params,
  hidden: jax.Array,
  cotangent: jax.Array,
  placement: Placement,
) -> jax.Array:
  """Takes gradients at a layer's output, `[S, T, d]`, to its input."""

  def run(layer: Params, hidden: jax.Array, cotangent: jax.Array) -> jax.Array:
    def one(item: tuple[jax.Array, jax.Array]) -> jax.Array:
      states, gradient = item
      _, back = jax.vjp(lambda rows: model.layer(layer, rows), states[None])
      return back(gradient[None])[0][0]

    return jax.lax.map(one, (hidden, cotangent))

  return placement.call(run, layer, hidden, cotangent)


class OutputGradients:
  """The gradients at the output of every layer, in memory or in files of a folder."""

  def __init__(self, folder: pathlib.Path | None = None) -> None:
    """Uses a folder, created on the first write, or memory."""
    self._folder = folder
    self._memory: dict[str, Chunks] = {}

  def _file(self, name: str) -> pathlib.Path:
    assert self._folder is not None
    return self._folder / f"{name}.safetensors"

  def _put(self, name: str, chunks: Chunks) -> None:
    if self._folder is None:
      self._memory[name] = chunks
      return
    arrays = {f"{part:06d}": chunk for part, chunk in enumerate(chunks)}
    write_checked(self._file(name), arrays)

  def _get(self, name: str) -> Chunks:
    if self._folder is None:
      return self._memory[name]
    arrays = read_checked(self._file(name))
    return [jnp.asarray(arrays[part]) for part in sorted(arrays)]

  def _remove(self, name: str) -> None:
    if self._folder is None:
      del self._memory[name]
    else:
      self._file(name).unlink()

  def leaving(self, index: int) -> Chunks:
    """Returns the gradients at the output of a layer, chunks of `[sequences, n, d]`.

    They are bfloat16, which halves what is kept; n is `differentiated`.
    """
    return self._get(f"leaving-{index}")

  def release(self, index: int) -> None:
    """Frees the gradients at the output of a layer."""
    self._remove(f"leaving-{index}")

  def is_complete(self, layers: int, chunks: list[tuple[int, int]]) -> bool:
    """Whether the folder has all layers' gradients, in chunks of these extents."""
    return (
      self._folder is not None
      and all(self._file(f"leaving-{index}").is_file() for index in range(layers))
      # Another chunk size would pair these gradients with other sequences.
      and [part.shape[:2] for part in self.leaving(0)] == chunks
      # Releases before this dtype may have filled a shared store.
      and self.leaving(0)[0].dtype == STORED
    )

  def compute(
    self,
    params: Params,
    calib: Calibration,
    *,
    chunk: int = 1,
    placement: Placement = ONE_DEVICE,
    announce: Callable[[int, int], None] = lambda step, steps: None,
  ) -> "OutputGradients":
    """Runs the float model forward and backward and keeps the gradients.

    Until a layer is differentiated, the hidden states entering it are kept in the same
    place. What is in the folder already is used. `announce` gets the number of layers
    that were passed, forward or backward, and that of all.
    """
    model, wait = calib.model, execution.block_on_cpu
    count = model.num_layers
    tokens = calib.tokens[:, : differentiated(calib.tokens.shape[1])]
    cut = [tokens[first : first + chunk] for first in range(0, len(tokens), chunk)]
    if self.is_complete(count, [part.shape for part in cut]):
      return self
    hidden = streams.embed(model, params, tokens, chunk, placement)
    for index in range(count):
      announce(index, 2 * count)
      # Copies, because `advance` donates the buffers.
      self._put(f"entering-{index}", [jnp.array(part, copy=True) for part in hidden])
      hidden = streams.advance(
        model, params[model.layer_name(index)], hidden, placement
      )
    # The head: labels are drawn and the gradient at the last hidden states is taken.
    outer = placement.shard_rows(streams.outer_params(model, params))
    gradient = []
    for part in hidden:
      first = chunk * len(gradient)
      places = jnp.arange(first, first + part.shape[0], dtype=jnp.int32)
      arrays = outer, part, placement.put_sequences(places)
      gradient.append(wait(_of_final_hidden(model, *arrays, placement)))
    # Back from the last layer; what entered a layer is freed once it is passed.
    for index in reversed(range(count)):
      announce(2 * count - 1 - index, 2 * count)
      self._put(f"leaving-{index}", [part.astype(STORED) for part in gradient])
      # Nobody asks for the gradient at the embedding.
      if index:
        layer = placement.shard_rows(params[model.layer_name(index)])
        gradient = [
          wait(_through_layer(model, layer, states, part, placement))
          for states, part in zip(self._get(f"entering-{index}"), gradient, strict=True)
        ]
      self._remove(f"entering-{index}")
    return self
