"""Log-likelihoods of continuations, each shared prefix run once, under strict A4.

Requests are sorted by their ids and packed into rows of one length as trees (see
`functional.Tree`): what a request has in common with the one before, such as the prompt
of an item's choices, is in the row once. Activations are rounded per token and block
and a token attends to its ancestors alone, so a score depends on nothing else in its
row; only the order of float32 sums differs from that of a sequence alone. Under strict
4-bit activations even that can move a rounded input, and with it the score.

Models of your own, whose `layer` takes no tree, run one request a row: none is shared.
Rows of one sequence each, such as windows of a long text, have no tree either where
calls have fixed shapes: a GPU's kernel attends there without a mask.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration import streams
from mxjax.calibration.calibration import CausalLanguageModel, Params
from mxjax.devices import execution
from mxjax.errors import ValueRefusal
from mxjax.evaluation import device_calls
from mxjax.evaluation.device_calls import CallShapes
from mxjax.intake.token_ids import token_ids
from mxjax.models.functional import Tree
from mxjax.models.transformer import CausalLM

LENGTH_STEP = 32
"""Lengths are padded to a multiple of this, so that few shapes are compiled."""
GROUP = 32
"""Batches run through a layer while it is resident."""


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
    # The inputs end one token before the request: the last `predicted` of them predict.
    self.predictors[member] = self._path[len(ids) - predicted :]

  @property
  def is_sequence(self) -> bool:
    """Whether every token follows the one before, so that nothing branches."""
    return len(self._path) == self.size


class _Batch(NamedTuple):
  """Rows of one length, int32 `[B, T]`, and what they predict.

  `tree` says where they branch, None if they do not. `predictors` are, by request, the
  indices in the flat batch of the tokens that predict its continuation.
  """

  tokens: np.ndarray
  tree: Tree | None
  predictors: dict[int, np.ndarray]

  @classmethod
  def of(cls, rows: Sequence[_Row], width: int, *, has_tree: bool) -> "_Batch":
    """Stacks the first `width` columns of rows."""
    stack = lambda name: np.stack([getattr(row, name)[:width] for row in rows])
    predictors = {
      member: index * width + path
      for index, row in enumerate(rows)
      for member, path in row.predictors.items()
    }
    tree = Tree(stack("positions"), stack("ends")) if has_tree else None
    return cls(stack("tokens"), tree, predictors)


def _padded(size: int) -> int:
  return -(-size // LENGTH_STEP) * LENGTH_STEP


def _lengths(
  sizes: Sequence[int], shapes: CallShapes, is_shared: bool
) -> Callable[[int], int]:
  """Returns what maps the size of a request to the length of its row.

  Where calls have fixed shapes there are two lengths: that of the longest request, and
  the shorter one that spares the most. Rows that requests share are full whatever
  their length, and spare keys that a token is compared with; other rows spare padding.
  """
  shortest = shapes.row if is_shared else LENGTH_STEP
  power = lambda size: max(shortest, 1 << (size - 1).bit_length())
  if not shapes.is_fixed or not sizes:
    return power if is_shared else _padded
  found = sorted({power(size) for size in sizes})
  weights = sizes if is_shared else [1] * len(sizes)
  cost = lambda short: sum(
    weight * (short if size <= short else found[-1])
    for size, weight in zip(sizes, weights, strict=True)
  )
  short = min(found, key=cost)
  return lambda size: short if size <= short else found[-1]


def _families(
  inputs: Sequence[np.ndarray], length_of: Callable[[int], int], is_shared: bool
) -> Iterator[tuple[int, _Family]]:
  """Yields each family and the length of its row; one request each if not shared."""
  length, family, before = 0, _Family(0, []), np.zeros(0, np.int32)
  # The prefix in common with any request before is that with the one just before.
  for member in sorted(range(len(inputs)), key=lambda m: inputs[m].tolist()):
    ids = inputs[member]
    tokens = family.tokens + len(ids) - _common(ids, before)
    is_near = 2 * _common(ids, before) >= len(ids)
    before = ids
    # A family stays in a row of the length that its first member asks for.
    if is_shared and is_near and tokens <= length:
      family = _Family(tokens, [*family.members, member])
      continue
    if family.members:
      yield length, family
    length, family = length_of(len(ids)), _Family(len(ids), [member])
  if family.members:
    yield length, family


def _rows(
  requests: Sequence[Request], longest: int, is_shared: bool, shapes: CallShapes
) -> dict[int, list[_Row]]:
  """Packs requests into rows, by the length of the rows; one a row if not shared.

  A family joins the one before, whose prompt may begin alike, else fills up the first
  row with room.
  """
  inputs = [request.inputs(longest) for request in requests]
  length_of = _lengths([len(ids) for ids in inputs], shapes, is_shared)
  rows: dict[int, list[_Row]] = {}
  last: dict[int, _Row] = {}
  for length, (tokens, members) in _families(inputs, length_of, is_shared):
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
  requests: Sequence[Request], longest: int, is_shared: bool, shapes: CallShapes
) -> Iterator[_Batch]:
  """Batches rows of one length.

  Batches of a fixed shape are filled up with empty rows. Else rows less than half as
  full as the first begin another batch, and columns that are padding in all are cut.
  """
  for length, rows in sorted(_rows(requests, longest, is_shared, shapes).items()):
    count = max(1, shapes.tokens // length)
    if shapes.is_fixed:
      has_tree = is_shared and not all(row.is_sequence for row in rows)
      rows += [_Row(length) for _ in range(-len(rows) % count)]
      for start in range(0, len(rows), count):
        yield _Batch.of(rows[start : start + count], length, has_tree=has_tree)
      continue
    batch: list[_Row] = []
    width = lambda batch: _padded(max(row.size for row in batch))
    # From the fullest on, so that rows of a batch need about as many columns.
    for row in sorted(rows, key=lambda row: -row.size):
      if batch and (len(batch) == count or 2 * row.size < batch[0].size):
        yield _Batch.of(batch, width(batch), has_tree=is_shared)
        batch = []
      batch.append(row)
    yield _Batch.of(batch, width(batch), has_tree=is_shared)


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


@execution.jit()
def _take(hidden: jax.Array, nodes: jax.Array) -> jax.Array:
  """Takes tokens of a batch `[B, T, d]` by their indices in it: `[C, d]`."""
  return hidden.reshape(-1, hidden.shape[-1])[nodes]


def _score_group(
  model: CausalLanguageModel,
  params: Params,
  batches: Sequence[_Batch],
  hiddens: Sequence[jax.Array],
  requests: Sequence[Request],
  shapes: CallShapes,
) -> dict[int, Score]:
  """Scores the requests of batches from what leaves the last layer.

  What several choices predict after the same tokens is predicted once. From a GPU come
  scores alone; on a CPU the tokens of all batches fill up the calls of the head.
  """
  sources: list[tuple[jax.Array | np.ndarray, np.ndarray, np.ndarray]] = []
  places: dict[int, np.ndarray] = {}
  count = 0
  for batch, hidden in zip(batches, hiddens, strict=True):
    members = list(batch.predictors)
    if not members:
      continue
    nodes = np.concatenate([batch.predictors[member] for member in members])
    wanted = np.concatenate([requests[member].continuation for member in members])
    pairs, index = np.unique(np.stack([nodes, wanted]), axis=1, return_inverse=True)
    nodes, wanted = pairs.astype(np.int32)
    sources.append((hidden, nodes, wanted))
    ends = np.cumsum([len(batch.predictors[member]) for member in members])
    # Flat, because versions of numpy differ in the shape of an inverse along an axis.
    places |= zip(members, np.split(count + index.ravel(), ends[:-1]), strict=True)
    # Each batch is padded by itself below, or all of them together.
    count += len(nodes) + (-len(nodes) % shapes.head_step if shapes.is_fixed else 0)
  if not shapes.is_fixed:
    flat = [np.asarray(h).reshape(-1, h.shape[-1])[nodes] for h, nodes, _ in sources]
    wanted = np.concatenate([targets for *_, targets in sources])
    sources = [(np.concatenate(flat), np.arange(count), wanted)]
  parts = []
  for states, nodes, targets in sources:
    padding = 0, -len(nodes) % shapes.head_step
    nodes, targets = np.pad(nodes, padding), np.pad(targets, padding)
    for start in range(0, len(nodes), shapes.head):
      call = slice(start, start + shapes.head)
      # A GPU's states stay on it; a CPU's are numpy arrays by here.
      taken = _take(states, nodes[call]) if shapes.is_fixed else states[nodes[call]]
      parts.append(_predict(model, params, taken, targets[call]))
  parts = jax.device_get(parts)
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
  shapes: CallShapes | None = None,
) -> list[Score]:
  """Scores continuations in the order of the requests; params may be on disk.

  The oldest tokens of requests beyond `max_length` are cut. `on_progress` is called
  repeatedly with (done, requests). `shapes` are those of a device's calls, by default
  `device_calls.of_device()`.

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
  is_shared, shapes = isinstance(model, CausalLM), shapes or device_calls.of_device()
  batches = list(_batches(requests, max_length, is_shared, shapes))
  scores: dict[int, Score] = {}
  for start in range(0, len(batches), GROUP):
    group = batches[start : start + GROUP]
    # Put on the device once: every layer reads the trees.
    tokens, trees = jax.device_put(
      ([batch.tokens for batch in group], [batch.tree for batch in group])
    )
    hiddens = streams.final_hiddens(
      model, params, tokens, trees=trees if is_shared else None
    )
    scores |= _score_group(model, outer, group, hiddens, requests, shapes)
    if on_progress:
      on_progress(len(scores), len(requests))
  return [scores[index] for index in range(len(requests))]
