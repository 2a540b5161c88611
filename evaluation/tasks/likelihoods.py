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
from mxjax.errors import ValueRefusal
from mxjax.intake.token_ids import token_ids
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
HEAD_CHUNK = 512
"""Most tokens predicted per call of the output head."""
HEAD_STEP = 128
"""The last call's tokens are padded to a multiple of this."""


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


def _common(ids: np.ndarray, others: np.ndarray) -> int:
  """Returns the length of the prefix that two requests have in common."""
  both = min(len(ids), len(others))
  differs = np.flatnonzero(ids[:both] != others[:both])
  return int(differs[0]) if differs.size else both


class _Family(NamedTuple):
  """Requests that share most of their ids, such as the choices of an item.

  Attributes:
    tokens: How many they have together, what is shared once.
    members: Their numbers, in the order of their ids.
  """

  tokens: int
  members: list[int]


class _Row:
  """A row that is being filled with requests in the order of their ids."""

  def __init__(self, length: int) -> None:
    self.tokens, self.positions = np.zeros((2, length), np.int32)
    # Padding sees itself alone and is seen by nothing.
    self.ends = np.arange(1, length + 1, dtype=np.int32)
    self.size = 0
    self.predictors: dict[int, np.ndarray] = {}
    self._ids = self._path = np.zeros(0, np.int32)

  def has_room(self, tokens: int, ids: np.ndarray) -> bool:
    """Whether a family of so many tokens fits, of which `ids` are the first."""
    return self.size + tokens - _common(ids, self._ids) <= len(self.tokens)

  def add(self, member: int, ids: np.ndarray, predicted: int) -> None:
    """Adds a request, of whose ids the last `predicted` predict.

    The prefix in common with the request before is not added again.
    """
    common = _common(ids, self._ids)
    stop = self.size + len(ids) - common
    own = np.arange(self.size, stop, dtype=np.int32)
    self._path = np.concatenate([self._path[:common], own])
    self.tokens[own], self.positions[own] = ids[common:], np.arange(common, len(ids))
    # Of the tokens before, only those of the path have these as descendants.
    self.ends[self._path] = stop
    self._ids, self.size = ids, stop
    self.predictors[member] = self._path[len(ids) - predicted :]


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
    width = _padded(max(row.size for row in rows))
    stack = lambda name: np.stack([getattr(row, name)[:width] for row in rows])
    predictors = {
      member: index * width + path
      for index, row in enumerate(rows)
      for member, path in row.predictors.items()
    }
    return cls(stack("tokens"), Tree(stack("positions"), stack("ends")), predictors)


def _padded(size: int) -> int:
  return -(-size // LENGTH_STEP) * LENGTH_STEP


def _families(
  requests: Sequence[Request], inputs: Sequence[np.ndarray], is_shared: bool
) -> Iterator[tuple[int, _Family]]:
  """Yields each family and the length of its row; one request each if not shared."""
  length, family, before = 0, _Family(0, []), np.zeros(0, np.int32)
  # The prefix in common with any request before is that with the one just before.
  for member in sorted(range(len(requests)), key=lambda m: inputs[m].tolist()):
    ids = inputs[member]
    tokens = family.tokens + len(ids) - _common(ids, before)
    is_near = 2 * _common(ids, before) >= len(ids)
    before = ids
    if is_shared and is_near and tokens <= length:
      family = _Family(tokens, [*family.members, member])
      continue
    if family.members:
      yield length, family
    length, family = _padded(len(ids)), _Family(len(ids), [member])
    if is_shared:
      length = max(ROW, 1 << (len(ids) - 1).bit_length())
  if family.members:
    yield length, family


def _rows(
  requests: Sequence[Request], longest: int, is_shared: bool
) -> dict[int, list[_Row]]:
  """Packs requests into rows, by the length of the rows; one a row if not shared.

  A family joins the one before, whose prompt may begin alike, else fills up the first
  row with room.
  """
  inputs = [request.inputs(longest) for request in requests]
  rows: dict[int, list[_Row]] = {}
  last: dict[int, _Row] = {}
  for length, (tokens, members) in _families(requests, inputs, is_shared):
    known, row = rows.setdefault(length, []), last.get(length)
    if row and not row.has_room(tokens, inputs[members[0]]):
      row = next((other for other in known if other.size + tokens <= length), None)
    if row is None or not is_shared:
      row = _Row(length)
      known.append(row)
    for member in members:
      row.add(member, inputs[member], len(requests[member].continuation))
    last[length] = row
  return rows


def _batches(
  requests: Sequence[Request], longest: int, is_shared: bool
) -> Iterator[_Batch]:
  """Batches rows of one length; rows less than half as full begin another batch."""
  for length, rows in sorted(_rows(requests, longest, is_shared).items()):
    count = max(1, BATCH_TOKENS // length)
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: -row.size):
      if batch and (len(batch) == count or 2 * row.size < batch[0].size):
        yield _Batch.of(batch)
        batch = []
      batch.append(row)
    yield _Batch.of(batch)


@execution.jit(static_argnames="model")
def _predict(
  model: CausalLanguageModel, params: Params, states: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-likelihood of each target, `[C]`, and whether it is likeliest."""
  logits = model.logits(params, states[None])[0]
  wanted = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
  # Of equal logits the first is likeliest. XLA:CPU's argmax takes three times as long.
  top = logits.max(-1)
  is_before = jnp.arange(logits.shape[1])[None] < targets[:, None]
  is_second = ((logits == top[:, None]) & is_before).any(-1)
  likelihoods = wanted - jax.nn.logsumexp(logits, axis=-1)
  return likelihoods, (wanted == top) & ~is_second


def _score_group(
  model: CausalLanguageModel,
  params: Params,
  batches: Sequence[_Batch],
  hiddens: Sequence[jax.Array],
  requests: Sequence[Request],
) -> dict[int, Score]:
  """Scores the requests of batches from what leaves the last layer.

  What several choices predict after the same tokens is predicted once.
  """
  states, targets, places, count = [], [], {}, 0
  for batch, hidden in zip(batches, hiddens, strict=True):
    members = list(batch.predictors)
    nodes = np.concatenate([batch.predictors[member] for member in members])
    wanted = np.concatenate([requests[member].continuation for member in members])
    pairs, index = np.unique(np.stack([nodes, wanted]), axis=1, return_inverse=True)
    states.append(np.asarray(hidden).reshape(-1, hidden.shape[-1])[pairs[0]])
    targets.append(pairs[1].astype(np.int32))
    ends = np.cumsum([len(batch.predictors[member]) for member in members])
    places |= zip(members, np.split(count + index.ravel(), ends[:-1]), strict=True)
    count += pairs.shape[1]
  padding = 0, -count % HEAD_STEP
  inputs = np.pad(np.concatenate(states), (padding, (0, 0)))
  wanted = np.pad(np.concatenate(targets), padding)
  parts = [
    _predict(
      model, params, inputs[start : start + HEAD_CHUNK], wanted[start:][:HEAD_CHUNK]
    )
    for start in range(0, len(wanted), HEAD_CHUNK)
  ]
  likelihoods, is_likeliest = map(np.concatenate, zip(*parts, strict=True))
  return {
    member: Score(
      float(likelihoods[place].sum(dtype=np.float64)), bool(is_likeliest[place].all())
    )
    for member, place in places.items()
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
    ValueError: A continuation alone is longer than `max_length`, or an id is outside
      the vocabulary of `model.config`.
  """
  vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
  for request in requests:
    for part in request:
      token_ids(part, "likelihoods", vocabulary=vocabulary)
    if len(request.continuation) > max_length:
      raise ValueRefusal(
        "likelihoods",
        expected=f"continuations that fit into the model's {max_length} positions",
        got=f"one of {len(request.continuation)} tokens",
        mend="use a model with more",
      )
  outer = streams.outer_params(model, params)
  is_shared = isinstance(model, CausalLM)
  batches = list(_batches(requests, max_length, is_shared))
  scores: dict[int, Score] = {}
  for start in range(0, len(batches), GROUP):
    group = batches[start : start + GROUP]
    tokens = [jnp.asarray(batch.tokens) for batch in group]
    trees = [batch.tree for batch in group] if is_shared else None
    hiddens = streams.final_hiddens(model, params, tokens, trees=trees)
    scores |= _score_group(model, outer, group, hiddens, requests)
    if on_progress:
      on_progress(len(scores), len(requests))
  return [scores[index] for index in range(len(requests))]
