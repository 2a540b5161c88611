"""Log-likelihoods of continuations, each shared prefix run once, under strict A4.

Requests are sorted by their ids and packed into rows of one length as trees (see
`functional.Tree`): what a request has in common with the one before, such as the prompt
of an item's choices, is in the row once. Activations are rounded per token and block
and a token attends to its ancestors alone, so a score depends on nothing else in its
row; only the order of float32 sums differs from that of a sequence alone. Under strict
4-bit activations even that can move a rounded input, and with it the score.

Models of your own, whose `layer` takes no tree, run one request a row: none is shared.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration import streams
from mxjax.calibration.calibration import CausalLanguageModel, Params
from mxjax.devices import execution
from mxjax.models.functional import Tree
from mxjax.models.transformer import CausalLM

ROW = 256
"""Most tokens of a row; if one request has more, twice, four times, ... as many."""
LENGTH_STEP = 32
"""Lengths are padded to a multiple of this, so that few shapes are compiled."""
BATCH_TOKENS = 1024
"""Tokens per device call, padding included."""
GROUP = 32
"""Batches run through a layer while it is resident."""
HEAD_CHUNK = 128
"""Tokens predicted per call of the output head."""


class Request(NamedTuple):
  """A continuation to score; int32 ids, at least one of each."""

  context: np.ndarray
  continuation: np.ndarray

  def inputs(self, longest: int) -> np.ndarray:
    """Returns all ids but the last; beyond `longest`, the oldest are cut."""
    return np.concatenate([self.context, self.continuation])[:-1][-longest:]


class Score(NamedTuple):
  """Sum of a continuation's log-likelihoods, nats; whether each token is likeliest."""

  log_likelihood: float
  is_greedy: bool


class _Row:
  """A row that is being filled with requests in the order of their ids."""

  def __init__(self, length: int) -> None:
    self.tokens, self.positions = np.zeros((2, length), np.int32)
    # Padding sees itself alone and is seen by nothing.
    self.ends = np.arange(1, length + 1, dtype=np.int32)
    self.size = 0
    self.predictors: dict[int, np.ndarray] = {}
    self._ids = self._path = np.zeros(0, np.int32)

  def add(self, member: int, ids: np.ndarray, predicted: int) -> bool:
    """Adds a request, of whose ids the last `predicted` predict; False if too long.

    The prefix in common with the request before is not added again.
    """
    both = min(len(ids), len(self._ids))
    differs = np.flatnonzero(ids[:both] != self._ids[:both])
    common = int(differs[0]) if differs.size else both
    stop = self.size + len(ids) - common
    if stop > len(self.tokens):
      return False
    own = np.arange(self.size, stop, dtype=np.int32)
    self._path = np.concatenate([self._path[:common], own])
    self.tokens[own], self.positions[own] = ids[common:], np.arange(common, len(ids))
    # Of the tokens before, only those of the path have these as descendants.
    self.ends[self._path] = stop
    self._ids, self.size = ids, stop
    self.predictors[member] = self._path[len(ids) - predicted :]
    return True


@dataclasses.dataclass(frozen=True)
class _Batch:
  """Rows of one length, int32 `[B, T]`, and what they predict.

  `predictors` are, by request, the indices in the flat batch of the tokens that predict
  its continuation.
  """

  tokens: np.ndarray
  tree: Tree
  predictors: dict[int, np.ndarray]

  @classmethod
  def of(cls, rows: Sequence[_Row]) -> "_Batch":
    """Stacks rows, without columns that are padding in all of them."""
    width = -(-max(row.size for row in rows) // LENGTH_STEP) * LENGTH_STEP
    stack = lambda name: np.stack([getattr(row, name)[:width] for row in rows])
    predictors = {
      member: index * width + path
      for index, row in enumerate(rows)
      for member, path in row.predictors.items()
    }
    return cls(stack("tokens"), Tree(stack("positions"), stack("ends")), predictors)


def _rows(
  requests: Sequence[Request], longest: int, is_shared: bool
) -> dict[int, list[_Row]]:
  """Packs requests into rows, by the length of the rows; one a row if not shared."""
  inputs = [request.inputs(longest) for request in requests]
  # The prefix in common with any request before is that with the one just before.
  order = sorted(range(len(requests)), key=lambda member: inputs[member].tolist())
  rows: dict[int, list[_Row]] = {}
  for member in order:
    ids, predicted = inputs[member], len(requests[member].continuation)
    if predicted > longest:
      raise ValueError(
        f"likelihoods: a continuation of {predicted} tokens does not fit into the "
        f"model's {longest} positions; use a model with more."
      )
    length = -(-len(ids) // LENGTH_STEP) * LENGTH_STEP
    if is_shared:
      length = max(ROW, 1 << (len(ids) - 1).bit_length())
    filled = rows.setdefault(length, [])
    if not (filled and is_shared and filled[-1].add(member, ids, predicted)):
      filled.append(_Row(length))
      filled[-1].add(member, ids, predicted)
  return rows


def _batches(
  requests: Sequence[Request], longest: int, is_shared: bool
) -> Iterator[_Batch]:
  """Batches the rows of each length; the last batch may have fewer."""
  for length, rows in sorted(_rows(requests, longest, is_shared).items()):
    count = max(1, BATCH_TOKENS // length)
    for start in range(0, len(rows), count):
      yield _Batch.of(rows[start : start + count])


@execution.jit(static_argnames="model")
def _predict(
  model: CausalLanguageModel,
  params: Params,
  hidden: jax.Array,
  predictors: jax.Array,
  targets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-likelihood of each target, `[C]`, and whether it is likeliest."""
  states = hidden.reshape(-1, hidden.shape[-1])[predictors]
  logits = model.logits(params, states[None])[0]
  wanted = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
  likelihoods = wanted - jax.nn.logsumexp(logits, axis=-1)
  return likelihoods, logits.argmax(-1) == targets


def _score_batch(
  model: CausalLanguageModel,
  params: Params,
  batch: _Batch,
  hidden: jax.Array,
  requests: Sequence[Request],
) -> dict[int, Score]:
  """Scores the requests of a batch from what leaves the last layer."""
  members = list(batch.predictors)
  predictors = np.concatenate([batch.predictors[member] for member in members])
  targets = np.concatenate([requests[member].continuation for member in members])
  parts = []
  for start in range(0, len(targets), HEAD_CHUNK):
    some = slice(start, start + HEAD_CHUNK)
    padding = 0, max(0, start + HEAD_CHUNK - len(targets))
    pair = (np.pad(a[some], padding) for a in (predictors, targets))
    parts.append(_predict(model, params, hidden, *pair))
  joined = (np.concatenate(part)[: len(targets)] for part in zip(*parts, strict=True))
  likelihoods, is_likeliest = joined
  sizes = [len(batch.predictors[member]) for member in members]
  ends = np.cumsum(sizes)
  return {
    member: Score(
      float(likelihoods[end - size : end].sum(dtype=np.float64)),
      bool(is_likeliest[end - size : end].all()),
    )
    for member, size, end in zip(members, sizes, ends, strict=True)
  }


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
  is_shared = isinstance(model, CausalLM)
  batches = list(_batches(requests, max_length, is_shared))
  scores: dict[int, Score] = {}
  for start in range(0, len(batches), GROUP):
    group = batches[start : start + GROUP]
    tokens = [jnp.asarray(batch.tokens) for batch in group]
    trees = [batch.tree for batch in group] if is_shared else None
    hiddens = streams.final_hiddens(model, params, tokens, trees=trees)
    for batch, hidden in zip(group, hiddens, strict=True):
      scores |= _score_batch(model, outer, batch, hidden, requests)
    if on_progress:
      on_progress(len(scores), len(requests))
  return [scores[index] for index in range(len(requests))]
