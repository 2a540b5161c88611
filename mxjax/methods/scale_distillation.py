r"""Scale distillation: learns input scales of the quantized linears from predictions.

Exponents stay as they are, and so do the tables of the A4 rule unless codes are learned
(`code_rate`). Learned are one factor
for each input channel of every quantized linear, and one for each channel that several
linears read (q, k, v; gate, up), which acts like the gain of the norm before them. Both
fold into the input maps, U = U_0 diag(f), so the result has the form and the cost of
the program's own.

.. math::
  \min_f \ \frac1n \sum_t \Bigl[ (1 - \lambda) \operatorname{KL}\bigl(
    p_{\text{float}}(\cdot \mid x_{\le t}) \,\|\, p_f(\cdot \mid x_{\le t})\bigr)
    - \lambda \log p_f(x_{t+1} \mid x_{\le t}) \Bigr]

With a `map_rate`, each block's map is also followed by I + A, with a matrix A that is
learned in the same way: U = (I + A) U_0 diag(f). With a `code_rate`, a number is
learned for each weight, which is added to its element before that is rounded again, at
the scale that its block has. Both overfit where there is little calibration text.

The forward pass is the strict model; the backward pass takes the A4 rule, and the
rounding of the weights, for the identity. Learning the tokens that follow, by the
weight lambda, takes 3 to 4 % off the perplexity of other text and adds 3 to 6 % to its
divergence. Not in the paper; see `docs/results/hires_next.md`.
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
from mxjax.errors import ValueRefusal
from mxjax.layers.linear import LearnedLinear
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.options import Count, Fraction, Positive, Share
from mxjax.numerics import mxfp4

LABELS_BY_NAT = 2.25
"""Weight of the tokens that follow for each nat of divergence."""
NEAREST_CODE = 0.25
"""The least that an element has to move until it is rounded to another code, in units
of the block's scale: half of the distance of the smallest two."""


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


def learned_layer(layer: Params, own: Any, model: CausalLanguageModel) -> Params:
  """Returns a layer whose quantized linears have what is learned of them."""
  leaves, new = _quantized(layer, model), {}
  for path, factor in input_factors(own, model).items():
    change, moves = (
      own.get(part, {}).get("/".join(path)) for part in ("maps", "codes")
    )
    new[path] = LearnedLinear(leaves[path], factor, change, moves)
  return replace_weights(layer, new)


@dataclasses.dataclass(frozen=True)
class PredictionDivergence(gradients.Objective):
  """The divergence of a quantized model's predictions from the float model's."""

  def layer(self, shared: Any, own: Any, hidden: jax.Array, layer: Params) -> jax.Array:
    """Runs the strict layer with what is learned in its maps and codes."""
    del shared
    return self.model.layer(learned_layer(layer, own, self.model), hidden)

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
      if it is not 0. It takes 512 bytes of memory for each input of each linear.
    code_rate: Adam's rate for the weights' codes, in units of the scale of a block.
      They are learned beside the factors if it is not 0. In all steps together an
      element moves by about half of their number times this rate at most, and has to
      move by .25 until its code is another. Beside it set `label_weight` to 0: by codes
      the model learns the text itself from labels, away from the float model. It takes
      16 bytes of memory for each weight. A run folder keeps 12 for each, and needs 24
      while it is written.
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
  code_rate: Share = 0.0
  warmup: Count = 5
  label_weight: Fraction = 0.45
  seed: Count = 0

  def initial(self, layers: list[Params], model: CausalLanguageModel) -> list[Any]:
    """Returns zero steps for every layer: `linears` by path, `taps` by name.

    With a `map_rate` also `maps` by path, and with a `code_rate` `codes`.
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
      if self.code_rate:
        own[-1]["codes"] = {
          "/".join(path): jnp.zeros(leaf.shape, jnp.float32)
          for path, leaf in leaves.items()
        }
    return own

  def learned_numbers(self, weights: int, inputs: int) -> int:
    """Counts what is learned of maps and codes; factors are left out, being few.

    `weights` are those of all linears, and `inputs` the sum of their input widths.
    """
    numbers = weights if self.code_rate else 0
    return numbers + (mxfp4.BLOCK_SIZE * inputs if self.map_rate else 0)

  def rate_at(self, rate: float, step: Any, steps: int) -> Any:
    """Returns Adam's rate in a step of so many, which are counted from 0."""
    # Without the 1 the first step would change nothing.
    rise = jnp.minimum(1, (step + 1) / max(self.warmup, 1))
    return rate * rise * (1 - step / steps)

  def check_reach(self, tokens: np.ndarray, name: str) -> None:
    """Checks that codes which are learned can change, on tokens `[S, T]`.

    Raises:
      ValueError: Steps of these rates, added up, are shorter than the way to any code.
    """
    if not self.code_rate:
      return
    rows, length = tokens.shape
    steps = len(self.order(rows * -(-length // self.length)))
    rates = self.rate_at(self.code_rate, np.arange(steps, dtype=np.float32), steps)
    if (reach := float(np.sum(rates))) < NEAREST_CODE:
      raise ValueRefusal(
        f"code_rate of the tuning of {name}",
        expected=f"a rate by which steps move codes by {NEAREST_CODE} or more of the "
        "scale of a block, because the next code is not nearer",
        got=f"about {reach:.2g} in {steps} steps of {self.code_rate:g}",
        mend="raise the rate, or take more steps, by `steps`, `epochs` or more tokens",
      )

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


def check(
  layer: Params, model: CausalLanguageModel, options: ScaleDistillation
) -> None:
  """Checks that a layer can learn what is asked for, before all are quantized.

  Raises:
    ValueError: A map mixes blocks; or codes are to be learned beside a table K_Q. The
      place begins with the linear.
  """
  for (sublayer, name), leaf in _quantized(layer, model).items():
    with errors.within(f"{sublayer}/{name}"):
      tables = leaf.rounding.tables()
      if options.code_rate and tables and tables[1] is not None and tables[1].any():
        raise ValueRefusal(
          "code_rate",
          expected="a rule of activations by G_Q alone, which follows the codes",
          got="one by K_Q as well, which is of the codes before",
          mend="choose a method without K_Q, such as hires-rotated, or, for hires, "
          "rounding=sensitivity",
        )
      LearnedLinear(leaf, jnp.ones(leaf.shape[1])).installed()


def install(layer: Params, own: Any, model: CausalLanguageModel) -> dict[str, Any]:
  """Folds what a layer has learned into its quantized linears."""
  learned = learned_layer(layer, own, model)
  new = {
    path: learned[path[0]][path[1]]["weight"].installed()
    for path in _quantized(layer, model)
  }
  return replace_weights(layer, new)


def changed_codes(before: Params, after: Params, model: CausalLanguageModel) -> float:
  """Returns the share of a layer's codes that differ."""
  layers = [_quantized(layer, model) for layer in (before, after)]
  differ, count = 0, 0
  for path, leaf in layers[0].items():
    codes = [mxfp4.unpack(of[path].weight.codes) for of in layers]
    differ += int((codes[0] != codes[1]).sum())
    count += leaf.weight.codes.size * 2
  return differ / max(count, 1)
