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


@compilation.jit(static_argnames="model")
def _compare(
  model: CausalLanguageModel,
  params: tuple[Params, Params],
  hidden: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """Computes KL and flips `[B, T]` of final hidden states `[B, T, d]` in chunks."""
  *shape, width = hidden[0].shape
  count = math.prod(shape)
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
  kept: list[jax.Array] | None = None,
) -> Agreement:
  """Computes KL and flips of all tokens but the first of each window.

  Tokens are int32 `[windows, length]`, with a length of at least 2; `shapes` are as in
  `perplexity.window_losses`. `kept` is for a caller that compares several models with
  one: a list that is empty at first, and then holds the hidden states of `params`,
  which later calls with the same model, `params`, tokens and shapes take from there.
  They are `[B, length - 1, d]` for each call of B windows.
  """
  outer = [streams.outer_params(model, tree) for tree in (params, quantized)]
  found = []
  rows = model_ids(model, tokens, "agreement")
  count = (shapes or device_calls.of_device()).windows(rows.shape[1])
  calls = [jnp.asarray(call) for call in device_calls.filled_calls(rows[:, :-1], count)]
  known, made = list(kept or ()), []
  for start in range(0, len(calls), CALLS_TOGETHER):
    group = calls[start : start + CALLS_TOGETHER]
    exact = known[start : start + CALLS_TOGETHER]
    if not exact:
      exact = streams.final_hiddens(model, params, group)
      made += exact if kept is not None else []
    ours = streams.final_hiddens(model, quantized, group)
    pairs = zip(exact, ours, strict=True)
    found += [execution.block_on_cpu(_compare(model, outer, each)) for each in pairs]
  if kept is not None:
    # All at once: a call that fails half-way leaves nothing behind.
    kept += made
  divergence, is_flipped = (
    np.concatenate(jax.device_get(side))[: len(rows)]
    for side in zip(*found, strict=True)
  )
  return Agreement(divergence, is_flipped)
