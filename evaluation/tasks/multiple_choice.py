"""Accuracy on multiple-choice tasks, by the log-likelihoods of the choices."""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mxjax.calibration.calibration import CausalLanguageModel, Params
from mxjax.errors import ValueRefusal
from mxjax.evaluation.tasks.likelihoods import Request, Score, score
from mxjax.evaluation.tasks.tasks import Item, Task
from mxjax.models.tokenizer import Tokenizer, encode_prompt


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
  """Splits the ids of context + continuation where the context's own ids end.

  Trailing spaces of the context move to the continuation, because most vocabularies
  join a space with the word after it. An empty context becomes the tokenizer's prefix,
  or else EOS.

  Raises:
    ValueError: The continuation has no token of its own, or an empty context can be
      replaced by neither.
  """
  bare = context.rstrip(" \t\n\r\f\v")
  context, continuation = bare, context[len(bare) :] + continuation
  # As one text, because the ids of two halves need not be those of the whole.
  whole = encode_prompt(tokenizer, context + continuation)
  before = encode_prompt(tokenizer, context)
  if not len(before) and tokenizer.eos_id is not None:
    before = np.asarray([tokenizer.eos_id], np.int32)
    whole = np.concatenate([before, whole])
  if not len(before) or len(whole) <= len(before):
    raise ValueRefusal(
      "encode_pair",
      expected="a continuation of at least one token after a context",
      got=f"{continuation!r} after {context!r}",
      mend="both must have text",
    )
  return Request(whole[: len(before)], whole[len(before) :])


def _fingerprint(requests: Sequence[Request]) -> str:
  """Returns the SHA-256 (hex) of the exact ids of all requests."""
  digest = hashlib.sha256()
  for context, continuation in requests:
    # The ids alone would not tell where a context ends.
    digest.update(f"{len(context)},{len(continuation)};".encode())
    digest.update(np.concatenate([context, continuation], dtype=np.int32).tobytes())
  return digest.hexdigest()


def evaluate(
  model: CausalLanguageModel,
  params: Params,
  tokenizer: Tokenizer,
  task: Task,
  items: Sequence[Item],
  *,
  max_length: int,
  on_progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Measures the accuracy of a model on items of a task.

  Returns:
    A JSON-ready summary (`accuracy` in the task's own metric, `acc`, `acc_norm`,
    `standard_error`, `items` and `official_items`, `token_sha256`, `seconds`), and one
    JSON-ready row per item with every log-likelihood and decision.
  """
  start = time.perf_counter()
  requests = [
    encode_pair(tokenizer, context, continuation)
    for item in items
    for context, continuation in zip(item.contexts, item.continuations, strict=True)
  ]
  options = {"max_length": max_length, "on_progress": on_progress}
  # In the order of the requests: each item takes one for each of its choices.
  scores = iter(score(model, params, requests, **options))
  rows = [_decide(item, [next(scores) for _ in item.choices]) for item in items]
  acc, acc_norm = (
    float(np.mean([row[kind] == row["gold"] for row in rows]))
    for kind in ("prediction", "prediction_norm")
  )
  accuracy = acc_norm if task.is_normalized else acc
  return {
    "task": task.name,
    "metric": "acc_norm" if task.is_normalized else "acc",
    "accuracy": accuracy,
    "acc": acc,
    "acc_norm": acc_norm,
    "standard_error": (accuracy * (1 - accuracy) / max(1, len(rows) - 1)) ** 0.5,
    "items": len(rows),
    "official_items": task.items,
    "token_sha256": _fingerprint(requests),
    "seconds": time.perf_counter() - start,
  }, rows


def _decide(item: Item, scores: Sequence[Score]) -> dict[str, Any]:
  """Decides one item; the first of equal choices wins, as in numpy."""
  likelihoods = np.asarray([s.log_likelihood for s in scores], np.float64)
  lengths = np.asarray([float(len(choice)) for choice in item.choices])
  return {
    "id": item.id,
    "gold": item.gold,
    "log_likelihoods": likelihoods.tolist(),
    "is_greedy": [s.is_greedy for s in scores],
    "prediction": int(likelihoods.argmax()),
    "prediction_norm": int((likelihoods / lengths).argmax()),
  }
