"""Log-likelihoods of continuations, batched by length, under strict A4, uncached."""

import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration import streams
from mxjax.calibration.calibration import CausalLanguageModel, Params
from mxjax.devices import execution
from mxjax.evaluation.tasks.tasks import Item, Task
from mxjax.models.tokenizer import Tokenizer

LENGTH_STEP = 32
"""Lengths are padded to a multiple of this, so that few shapes are compiled."""
BATCH_TOKENS = 1024
"""Tokens per device call, padding included."""
GROUP = 32
"""Batches run through a layer while it is resident."""


class Request(NamedTuple):
  """A continuation to score; int32 ids, at least one of each."""

  context: np.ndarray
  continuation: np.ndarray


class Score(NamedTuple):
  """Sum of a continuation's log-likelihoods, nats; whether each token is likeliest."""

  log_likelihood: float
  is_greedy: bool


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
  """Splits the ids of context + continuation where the context's own ids end.

  Trailing spaces of the context move to the continuation, because most vocabularies
  join a space with the word after it. An empty context becomes BOS, or else EOS.

  Raises:
    ValueError: The continuation has no token of its own, or an empty context can be
      replaced by neither.
  """
  bare = context.rstrip(" \t\n\r\f\v")
  context, continuation = bare, context[len(bare) :] + continuation
  prefix = np.asarray(tokenizer.prefix_ids, np.int32)
  whole = np.concatenate([prefix, tokenizer.encode(context + continuation)])
  before = np.concatenate([prefix, tokenizer.encode(context)])
  if not len(before) and tokenizer.eos_id is not None:
    before = np.asarray([tokenizer.eos_id], np.int32)
    whole = np.concatenate([before, whole])
  if not len(before) or len(whole) <= len(before):
    raise ValueError(
      f"encode_pair: expected a continuation of at least one token after a context, "
      f"got {continuation!r} after {context!r}; both must have text."
    )
  return Request(whole[: len(before)], whole[len(before) :])


@functools.partial(jax.jit, static_argnames="model")
def _score_rows(
  model: CausalLanguageModel,
  params: Params,
  hidden: jax.Array,
  positions: jax.Array,
  targets: jax.Array,
  is_scored: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns log-likelihoods and greediness, `[B]` each, one row's logits at a time."""

  def row(item: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    states, where, ids, mask = item
    logits = model.logits(params, states[where][None])[0]
    wanted = jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0]
    scores = wanted - jax.nn.logsumexp(logits, axis=-1)
    total = jnp.where(mask, scores, 0.0).sum()
    return total, jnp.where(mask, logits.argmax(-1) == ids, True).all()

  return jax.lax.map(row, (hidden, positions, targets, is_scored))


class _Batch(NamedTuple):
  """Requests of similar length, padded to one shape.

  `members` are their indices in the list of requests (in the last batch fewer than
  rows); `tokens` is int32 `[B, T]`. `scored` says where each target is predicted, what
  it is, and whether it is one (no padding), `[B, C]` each.
  """

  members: list[int]
  tokens: np.ndarray
  scored: tuple[np.ndarray, np.ndarray, np.ndarray]


def _inputs(request: Request, longest: int) -> np.ndarray:
  """Returns all ids but the last; beyond `longest`, the oldest are cut."""
  return np.concatenate([request.context, request.continuation])[:-1][-longest:]


def _batches(requests: Sequence[Request], longest: int) -> Iterator[_Batch]:
  """Sorts requests by padded length and cuts them into batches of equal shape."""
  by_length: dict[int, list[int]] = {}
  for index, request in enumerate(requests):
    if len(request.continuation) > longest:
      raise ValueError(
        f"multiple_choice: a continuation of {len(request.continuation)} tokens does "
        f"not fit into the model's {longest} positions; use a model with more."
      )
    size = len(_inputs(request, longest))
    by_length.setdefault(-(-size // LENGTH_STEP) * LENGTH_STEP, []).append(index)
  for length, members in sorted(by_length.items()):
    rows = max(1, BATCH_TOKENS // length)
    for start in range(0, len(members), rows):
      yield _fill(requests, members[start : start + rows], (rows, length), longest)


def _fill(
  requests: Sequence[Request], members: list[int], shape: tuple[int, int], longest: int
) -> _Batch:
  """Pads on the right, where no scored token attends."""
  widest = max(len(requests[member].continuation) for member in members)
  columns = 1 << (widest - 1).bit_length()
  tokens = np.zeros(shape, np.int32)
  positions, targets = np.zeros((2, shape[0], columns), np.int32)
  is_scored = np.zeros(targets.shape, bool)
  for row, member in enumerate(members):
    inputs, wanted = _inputs(requests[member], longest), requests[member].continuation
    tokens[row, : len(inputs)] = inputs
    scored = np.s_[row, : len(wanted)]
    positions[scored] = np.arange(len(inputs) - len(wanted), len(inputs))
    targets[scored], is_scored[scored] = wanted, True
  return _Batch(members, tokens, (positions, targets, is_scored))


def score(
  model: CausalLanguageModel,
  params: Params,
  requests: Sequence[Request],
  *,
  max_length: int,
  on_progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
  """Scores continuations in the order of the requests; params may be on disk.

  The oldest tokens of requests beyond `max_length` are cut. `on_progress` is called
  repeatedly with (done, requests).

  Raises:
    ValueError: A continuation alone is longer than `max_length`.
  """
  outer = streams.outer_params(model, params)
  batches = list(_batches(requests, max_length))
  scores: dict[int, Score] = {}
  for start in range(0, len(batches), GROUP):
    group = batches[start : start + GROUP]
    tokens = [jnp.asarray(batch.tokens) for batch in group]
    hiddens = streams.final_hiddens(model, params, tokens)
    for batch, hidden in zip(group, hiddens, strict=True):
      totals, greedy = execution.block_on_cpu(
        _score_rows(model, outer, hidden, *batch.scored)
      )
      for row, member in enumerate(batch.members):
        scores[member] = Score(float(totals[row]), bool(greedy[row]))
    if on_progress:
      on_progress(len(scores), len(requests))
  return [scores[index] for index in range(len(requests))]


def _fingerprint(requests: Sequence[Request]) -> str:
  """Returns the SHA-256 (hex) of the exact ids of all requests."""
  digest = hashlib.sha256()
  for context, continuation in requests:
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
