r"""Scale distillation: learns input scales of the quantized linears from predictions.

Codes, exponents and the tables of the A4 rule stay as they are. Learned are one factor
for each input channel of every quantized linear, and one for each channel that several
linears read (q, k, v; gate, up), which acts like the gain of the norm before them. Both
fold into the input maps, U = U_0 diag(f), so the result has the form and the cost of
the program's own.

.. math::
  \min_f \ \frac1n \sum_t \operatorname{KL}\bigl(p_{\text{float}}(\cdot \mid x_{\le t})
    \,\|\, p_f(\cdot \mid x_{\le t})\bigr)

The forward pass is the strict model; the backward pass takes the A4 rule for the
identity. Not in the paper; see `docs/results/hires_next.md`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration import gradients
from mxjax.calibration.calibration import (
  CausalLanguageModel,
  Params,
  replace_weights,
)
from mxjax.layers.linear import ScaledInputs
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.options import Count, Positive, Share


def _quantized(layer: Params, model: CausalLanguageModel) -> dict[tuple[str, str], Any]:
  """Returns the quantized leaves of a layer by (block, name)."""
  leaves = {path: layer[path[0]][path[1]]["weight"] for path in model.projection_taps}
  return {p: leaf for p, leaf in leaves.items() if isinstance(leaf, QuantizedLinear)}


def _shared_taps(model: CausalLanguageModel, paths: Any) -> set[str]:
  """Returns the taps that several of the linears read."""
  read = [model.projection_taps[path] for path in paths]
  return {tap for tap in read if read.count(tap) > 1}


def _factors(own: Any, model: CausalLanguageModel) -> dict[tuple[str, str], jax.Array]:
  """Returns the factors on the inputs of each linear of a layer."""
  factors = {}
  for path, steps in own["linears"].items():
    block, name = path.split("/")
    shared = own["taps"].get(model.projection_taps[block, name], jnp.zeros_like(steps))
    factors[block, name] = (1 + steps) * (1 + shared)
  return factors


@dataclasses.dataclass(frozen=True)
class PredictionDivergence(gradients.Objective):
  """The divergence of a quantized model's predictions from the float model's."""

  def layer(self, shared: Any, own: Any, hidden: jax.Array, layer: Params) -> jax.Array:
    """Runs the strict layer with scaled inputs."""
    del shared
    leaves = _quantized(layer, self.model)
    scaled = {
      path: ScaledInputs(leaves[path], factor)
      for path, factor in _factors(own, self.model).items()
    }
    return self.model.layer(replace_weights(layer, scaled), hidden)

  def kept_features(self, layer: Params) -> int:
    """Returns the outputs of all quantized linears, which cost most to compute."""
    return sum(leaf.shape[0] for leaf in _quantized(layer, self.model).values())

  def loss(
    self, shared: Any, hidden: jax.Array, outer: Params, example: gradients.Example
  ) -> jax.Array:
    """Computes the mean over tokens of KL(float || quantized), over the vocabulary."""
    del shared
    assert example.teacher is not None
    return _divergence(self.model, hidden[0], example.teacher[0], outer)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(
  model: CausalLanguageModel, states: jax.Array, targets: jax.Array, outer: Params
) -> jax.Array:
  """Computes the mean divergence of last hidden states `[T, d]` from the teacher's."""
  return _divergence_and_gradient(model, states, targets, outer)[0]


def _divergence_and_gradient(
  model: CausalLanguageModel, states: jax.Array, targets: jax.Array, outer: Params
) -> tuple[jax.Array, jax.Array]:
  """Also computes its gradient at the states, from the same logits.

  At the student's logits it is the difference of the two distributions.
  """
  head = lambda hidden: model.logits(outer, hidden[None])[0]

  def chunk(parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    mine, pull = jax.vjp(head, parts[0])
    student, target = jax.nn.log_softmax(mine), jax.nn.log_softmax(head(parts[1]))
    likely = jnp.exp(target)
    [gradient] = pull(jnp.exp(student) - likely)
    return (likely * (target - student)).sum(-1), gradient

  losses, at_states = gradients.by_chunk(chunk, len(states), states, targets)
  return losses.mean(), at_states / len(states)


_divergence.defvjp(
  _divergence_and_gradient,
  lambda model, gradient, cotangent: (
    cotangent.astype(gradient.dtype) * gradient,
    None,
    None,
  ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleDistillation:
  """Options of scale distillation: Adam over random chunks of the calibration set.

  The rates rise over the first steps, without which they diverge, and fall to zero.

  Attributes:
    epochs: Passes over the calibration tokens.
    length: Tokens of a chunk, which is one step.
    rate: Adam's rate for the factors of a linear.
    shared_rate: Adam's rate for the factors that several linears share.
    warmup: Steps until the rates are whole.
    seed: Of the order of the chunks.
  """

  epochs: Count = 2
  length: Positive = 512
  rate: Share = 3e-3
  shared_rate: Share = 4e-3
  warmup: Count = 5
  seed: Count = 0

  def initial(self, layers: list[Params], model: CausalLanguageModel) -> list[Any]:
    """Returns zero steps for every layer: `linears` by path, `taps` by name."""
    own = []
    for layer in layers:
      leaves = _quantized(layer, model)
      zeros = {
        "/".join(path): jnp.zeros(leaf.shape[1], jnp.float32)
        for path, leaf in leaves.items()
      }
      taps = {
        model.projection_taps[path]: jnp.zeros(leaves[path].shape[1], jnp.float32)
        for path in leaves
        if model.projection_taps[path] in _shared_taps(model, leaves)
      }
      own.append({"linears": zeros, "taps": taps})
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

  def order(self, count: int) -> list[int]:
    """Returns the chunk of each step: every epoch a new permutation."""
    rng = np.random.default_rng(self.seed)
    return [int(i) for _ in range(self.epochs) for i in rng.permutation(count)]


def check(layer: Params, model: CausalLanguageModel) -> None:
  """Checks that factors can fold into the maps of a layer, before all are quantized.

  Raises:
    ValueError: A map mixes blocks; the message begins with its linear.
  """
  for (block, name), leaf in _quantized(layer, model).items():
    try:
      ScaledInputs(leaf, jnp.ones(leaf.shape[1])).installed()
    except ValueError as error:
      raise ValueError(f"{block}/{name}: {error}") from error


def install(layer: Params, own: Any, model: CausalLanguageModel) -> dict[str, Any]:
  """Folds a layer's factors into the maps of its quantized linears."""
  leaves = _quantized(layer, model)
  new = {
    path: ScaledInputs(leaves[path], factor).installed()
    for path, factor in _factors(own, model).items()
  }
  return replace_weights(layer, new)
