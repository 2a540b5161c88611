r"""Scale distillation: learns input scales of the quantized linears from predictions.

Codes, exponents and the tables of the A4 rule stay as they are. Learned are one factor
for each input channel of every quantized linear, and one for each channel that several
linears read (q, k, v; gate, up), which acts like the gain of the norm before them. Both
fold into the input maps, U = U_0 diag(f), so the result has the form and the cost of
the program's own.

.. math::
  \min_f \ \frac1n \sum_t \Bigl[ (1 - \lambda) \operatorname{KL}\bigl(
    p_{\text{float}}(\cdot \mid x_{\le t}) \,\|\, p_f(\cdot \mid x_{\le t})\bigr)
    - \lambda \log p_f(x_{t+1} \mid x_{\le t}) \Bigr]

With a `map_rate`, each block's map is also followed by I + A, with a matrix A that is
learned in the same way: U = (I + A) U_0 diag(f). It overfits where there is little
calibration text.

The forward pass is the strict model; the backward pass takes the A4 rule for the
identity. Learning the tokens that follow, by the weight lambda, takes 3 to 4 % off the
perplexity of other text and adds 3 to 6 % to its divergence. Not in the paper; see
`docs/results/hires_next.md`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import errors
from mxjax.calibration import gradients
from mxjax.calibration.calibration import (
  CausalLanguageModel,
  Params,
  replace_weights,
)
from mxjax.layers.linear import LearnedMap
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.options import Count, Fraction, Positive, Share
from mxjax.numerics import mxfp4

LABELS_BY_NAT = 2.25
"""Weight of the tokens that follow for each nat of divergence."""


def _quantized(layer: Params, model: CausalLanguageModel) -> dict[tuple[str, str], Any]:
  """Returns the quantized leaves of a layer by (sublayer, name)."""
  leaves = {path: layer[path[0]][path[1]]["weight"] for path in model.projection_taps}
  return {p: leaf for p, leaf in leaves.items() if isinstance(leaf, QuantizedLinear)}


def input_factors(
  own: Any, model: CausalLanguageModel
) -> dict[tuple[str, str], jax.Array]:
  """Returns the factors on the inputs of each linear of a layer."""
  factors = {}
  for path, steps in own["linears"].items():
    sublayer, name = path.split("/")
    shared = own["taps"].get(
      model.projection_taps[sublayer, name], jnp.zeros_like(steps)
    )
    # Learned are steps away from one, so that zeros leave the linear as it is.
    factors[sublayer, name] = (1 + steps) * (1 + shared)
  return factors


def learned_maps(layer: Params, own: Any, model: CausalLanguageModel) -> Params:
  """Returns a layer whose quantized linears have what is learned in their maps."""
  leaves, changes = _quantized(layer, model), own.get("maps", {})
  new = {
    path: LearnedMap(leaves[path], factor, changes.get("/".join(path)))
    for path, factor in input_factors(own, model).items()
  }
  return replace_weights(layer, new)


@dataclasses.dataclass(frozen=True)
class PredictionDivergence(gradients.Objective):
  """The divergence of a quantized model's predictions from the float model's."""

  def layer(self, shared: Any, own: Any, hidden: jax.Array, layer: Params) -> jax.Array:
    """Runs the strict layer with what is learned in its maps."""
    del shared
    return self.model.layer(learned_maps(layer, own, self.model), hidden)

  def loss_and_shown(
    self, shared: Any, hidden: jax.Array, outer: Params, example: gradients.Example
  ) -> tuple[jax.Array, jax.Array]:
    """Computes the mean loss, and the part KL(float || quantized) of it, over tokens.

    A sequence's last token is followed by none, so only its divergence counts.
    """
    del shared
    both: Any = _loss(self.model, hidden[0], example, outer)
    loss, divergence = both
    return loss, jax.lax.stop_gradient(divergence)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
  model: CausalLanguageModel,
  states: jax.Array,
  example: gradients.Example,
  outer: Params,
) -> tuple[jax.Array, jax.Array]:
  """Computes loss and divergence of last hidden states `[T, d]` from the teacher's."""
  return _with_gradient(model, states, example, outer)[0]


def _with_gradient(
  model: CausalLanguageModel,
  states: jax.Array,
  example: gradients.Example,
  outer: Params,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
  """Also computes the loss's gradient at the states, from the same logits.

  At the student's logits it is the difference of the student's distribution from the
  one that it is to learn: the float model's, mixed with the token that follows.
  """
  assert example.teacher is not None and example.label_weight is not None
  head = lambda hidden: model.logits(outer, hidden[None])[0]
  count = len(states)
  # The roll below gives the last token the first one as its label: weight zero.
  weights = jnp.full(count, example.label_weight).at[-1].set(0)

  def chunk(parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    own, float_states, labels, weight = parts
    # Logits of a chunk: those of all positions are never in memory.
    mine, pull = jax.vjp(head, own)
    student, target = jax.nn.log_softmax(mine), jax.nn.log_softmax(head(float_states))
    likely, weight = jnp.exp(target), weight.astype(target.dtype)[:, None]
    # By comparison: a scatter would write the probabilities to memory once more.
    words = jnp.arange(mine.shape[-1], dtype=labels.dtype)
    is_next = words[None] == labels[:, None]
    wanted = (1 - weight) * likely + jnp.where(is_next, weight, 0)
    [gradient] = pull(jnp.exp(student) - wanted)
    divergence = (likely * (target - student)).sum(-1)
    surprise = -jnp.where(is_next, student, 0).sum(-1)
    loss = divergence + weight[:, 0] * (surprise - divergence)
    return loss, divergence, gradient

  arrays = states, example.teacher[0], jnp.roll(example.ids[0], -1), weights
  losses, divergences, at_states = gradients.by_chunk(
    chunk, count, *arrays, most=gradients.FEW_POSITIONS
  )
  return (losses.mean(), divergences.mean()), at_states / count


_loss.defvjp(
  _with_gradient,
  lambda model, gradient, cotangents: (
    # The second output is shown and not differentiated, see `loss_and_shown`.
    cotangents[0].astype(gradient.dtype) * gradient,
    None,
    None,
  ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleDistillation:
  """Options of scale distillation: Adam over random chunks of the calibration set.

  The rates rise over the first steps, without which they diverge, and fall to zero.

  A step moves a factor by about its rate, however small the gradient is, and the
  gradient is that of a rule taken for the identity. A step for each chunk of much text
  took two small models further from the float one than 64 steps, each by the mean over
  several chunks.

  Attributes:
    epochs: Passes over the calibration tokens.
    length: Tokens of a chunk.
    steps: The most steps. With more chunks than that in all passes, a step takes
      several; their numbers differ by one at most.
    rate: Adam's rate for the factors of a linear.
    shared_rate: Adam's rate for the factors that several linears share.
    map_rate: Adam's rate for whole maps of blocks, which are learned beside the factors
      if it is not 0. It takes about 640 bytes of memory for each input of each linear,
      which `mxjax plan` does not count.
    warmup: Steps until the rates are whole.
    label_weight: The most that the tokens that follow weigh beside the divergence.
      They weigh `LABELS_BY_NAT` of its mean over the steps so far where that is less.
    seed: Of the order of the chunks.
  """

  epochs: Count = 2
  length: Positive = 512
  steps: Positive = 64
  rate: Share = 3e-3
  shared_rate: Share = 4e-3
  map_rate: Share = 0.0
  warmup: Count = 5
  label_weight: Fraction = 0.45
  seed: Count = 0

  def initial(self, layers: list[Params], model: CausalLanguageModel) -> list[Any]:
    """Returns zero steps for every layer: `linears` by path, `taps` by name.

    With a `map_rate` also `maps`, by path.
    """
    own = []
    for layer in layers:
      leaves = _quantized(layer, model)
      zeros = {
        "/".join(path): jnp.zeros(leaf.shape[1], jnp.float32)
        for path, leaf in leaves.items()
      }
      read = [model.projection_taps[path] for path in leaves]
      # A factor of a tap is for what several linears read.
      taps = {
        tap: jnp.zeros(leaf.shape[1], jnp.float32)
        for tap, leaf in zip(read, leaves.values(), strict=True)
        if read.count(tap) > 1
      }
      own.append({"linears": zeros, "taps": taps})
      if self.map_rate:
        size = mxfp4.BLOCK_SIZE
        own[-1]["maps"] = {
          path: jnp.zeros((len(steps) // size, size, size), jnp.float32)
          for path, steps in zeros.items()
        }
    return own

  def chunks(self, tokens: np.ndarray) -> list[jax.Array]:
    """Cuts calibration tokens `[S, T]` into equal chunks `[1, <= length]`.

    A row gives as few chunks as `length` allows; what their number does not divide is
    left out at its end.
    """
    parts = -(-tokens.shape[1] // self.length)
    size = tokens.shape[1] // parts
    rows = tokens[:, : parts * size].reshape(-1, 1, size)
    return [jnp.asarray(row) for row in rows]

  def weight_of_labels(self, divergences: Sequence[float]) -> float:
    """Returns the lambda of the next step, after steps of these divergences.

    The nearer the quantized model is already, the more the labels' noise would add to
    its divergence.
    """
    so_far = float(np.mean(divergences)) if divergences else 0.0
    return min(self.label_weight, LABELS_BY_NAT * so_far)

  def order(self, count: int) -> list[list[int]]:
    """Returns the chunks of each step: every epoch a new permutation of all."""
    rng = np.random.default_rng(self.seed)
    chunks = [int(i) for _ in range(self.epochs) for i in rng.permutation(count)]
    # Neighbours share a step, and the numbers of two steps differ by one at most.
    bounds = np.linspace(0, len(chunks), min(self.steps, len(chunks)) + 1).astype(int)
    return [chunks[start:end] for start, end in itertools.pairwise(bounds)]


def check(layer: Params, model: CausalLanguageModel) -> None:
  """Checks that factors can fold into the maps of a layer, before all are quantized.

  Raises:
    ValueError: A map mixes blocks; the place begins with its linear.
  """
  for (sublayer, name), leaf in _quantized(layer, model).items():
    with errors.within(f"{sublayer}/{name}"):
      LearnedMap(leaf, jnp.ones(leaf.shape[1])).installed()


def install(layer: Params, own: Any, model: CausalLanguageModel) -> dict[str, Any]:
  """Folds what a layer has learned into the maps of its quantized linears."""
  learned = learned_maps(layer, own, model)
  new = {
    path: learned[path[0]][path[1]]["weight"].installed()
    for path in _quantized(layer, model)
  }
  return replace_weights(layer, new)
