"""Agreement of quantized and float predictions: KL divergence and flips per token."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.calibration import streams
from mxjax.calibration.calibration import CausalLanguageModel, Params, model_ids
from mxjax.devices import execution
from mxjax.errors import ValueRefusal
from mxjax.evaluation import device_calls
from mxjax.evaluation.device_calls import CallShapes
from mxjax.evaluation.measures.perplexity import CALLS_TOGETHER

HEAD_CHUNK = 256
"""Tokens whose logits exist at once, in both models: bounds memory."""


class Agreement(NamedTuple):
  """Predictions of two models compared on the same tokens.

  `divergence` is KL(float || quantized) in nats, float32 `[windows, length - 1]`;
  `is_flipped` (bool, same shape) tells whether the most likely token differs.
  """

  divergence: np.ndarray
  is_flipped: np.ndarray

  def to_dict(self) -> dict[str, Any]:
    """Returns mean, median, 99th percentile and maximum of KL, and the flip rate."""
    kl = np.asarray(self.divergence, np.float64)
    return {
      "predictions": int(kl.size),
      "kl_mean": float(kl.mean()),
      "kl_median": float(np.median(kl)),
      "kl_p99": float(np.quantile(kl, 0.99)),
      "kl_max": float(kl.max()),
      "flips": float(self.is_flipped.mean()),
    }


class KeptStates:
  """The exact model's hidden states on one text, for comparisons of several with it.

  Empty at first. The first `agreement` that is given it fills it, and later ones with
  the same model, params, tokens and shapes of calls take the states from it. Params are
  the same if their arrays are the same objects: values are not compared.

  Attributes:
    states: `[B, length - 1, d]` for each call of B windows; empty until it is filled.
  """

  def __init__(self) -> None:
    """Starts empty."""
    self.states: list[jax.Array] = []
    self._of: dict[str, Any] = {}

  def of(
    self, model: CausalLanguageModel, params: Params, tokens: np.ndarray, count: int
  ) -> list[jax.Array]:
    """Returns the states of these tokens in calls of `count`, or none if it is empty.

    Raises:
      ValueError: It was filled by another model or params, on other tokens or in other
        calls.
    """
    if not self._of:
      return []
    leaves, known = jax.tree.leaves(params), self._of["params"]
    is_same = {
      "model": model == self._of["model"],
      "params": len(leaves) == len(known)
      and all(ours is theirs for ours, theirs in zip(leaves, known, strict=True)),
      "tokens": np.array_equal(tokens, self._of["tokens"]),
      "windows of a call": count == self._of["count"],
    }
    if others := [name for name, same in is_same.items() if not same]:
      raise ValueRefusal(
        "agreement: kept",
        expected="an empty KeptStates, or one of the same model, params, tokens and "
        "shapes",
        got=f"one that was filled with other {' and '.join(others)}",
        mend="pass a new KeptStates() for each model and text",
      )
    return self.states

  def fill(
    self,
    model: CausalLanguageModel,
    params: Params,
    tokens: np.ndarray,
    count: int,
    states: list[jax.Array],
  ) -> None:
    """Keeps the states of all calls, and of what they are."""
    self.states = states
    # The arrays themselves, so that no later one has the address of one that is gone.
    self._of = {
      "model": model,
      "params": jax.tree.leaves(params),
      "tokens": tokens.copy(),
      "count": count,
    }


@compilation.jit(static_argnames="model")
def _compare(
  model: CausalLanguageModel,
  params: tuple[Params, Params],
  hidden: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """Computes KL and flips `[B, T]` of final hidden states `[B, T, d]` in chunks."""
  *shape, width = hidden[0].shape
  count = math.prod(shape)
  # Zeros fill up the last chunk, and `by_window` cuts off what comes of them.
  padding = -count % HEAD_CHUNK
  chunks = tuple(
    jnp.pad(h.reshape(count, width), ((0, padding), (0, 0))).reshape(
      -1, HEAD_CHUNK, width
    )
    for h in hidden
  )

  def chunk(states: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    exact, ours = (
      jax.nn.log_softmax(model.logits(p, s[None])[0], axis=-1)
      for p, s in zip(params, states, strict=True)
    )
    divergence = (jnp.exp(exact) * (exact - ours)).sum(-1)
    return divergence, exact.argmax(-1) != ours.argmax(-1)

  divergence, is_flipped = jax.lax.map(chunk, chunks)
  by_window = lambda each: each.ravel()[:count].reshape(shape)
  return by_window(divergence), by_window(is_flipped)


def agreement(
  model: CausalLanguageModel,
  params: Params,
  quantized: Params,
  tokens: Any,
  *,
  shapes: CallShapes | None = None,
  kept: KeptStates | None = None,
) -> Agreement:
  """Computes KL and flips of all tokens but the first of each window.

  Tokens are int32 `[windows, length]`, with a length of at least 2; `shapes` are as in
  `perplexity.window_losses`. `kept` is for a caller that compares several models with
  one: it computes the hidden states of `params` once.

  Raises:
    ValueError: `kept` was filled by another model or other params, on other tokens or
      with other shapes.
  """
  outer = [streams.outer_params(model, tree) for tree in (params, quantized)]
  found = []
  rows = model_ids(model, tokens, "agreement")
  count = (shapes or device_calls.of_device()).windows(rows.shape[1])
  # What the last token predicts is not in the window.
  calls = [jnp.asarray(call) for call in device_calls.filled_calls(rows[:, :-1], count)]
  known = kept.of(model, params, rows, count) if kept is not None else []
  made = []
  for start in range(0, len(calls), CALLS_TOGETHER):
    group = calls[start : start + CALLS_TOGETHER]
    exact = known[start : start + CALLS_TOGETHER]
    if not exact:
      exact = streams.final_hiddens(model, params, group)
      made += exact if kept is not None else []
    ours = streams.final_hiddens(model, quantized, group)
    pairs = zip(exact, ours, strict=True)
    found += [execution.block_on_cpu(_compare(model, outer, each)) for each in pairs]
  if kept is not None and not known:
    # All at once: a call that fails half-way leaves nothing behind.
    kept.fill(model, params, rows, count, made)
  divergence, is_flipped = (
    # Without the copies that fill up the last call.
    np.concatenate(jax.device_get(side))[: len(rows)]
    for side in zip(*found, strict=True)
  )
  return Agreement(divergence, is_flipped)
