"""Generation of one sequence token by token, as a chat or a terminal shows it."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.errors import ValueRefusal
from mxjax.intake.token_ids import token_ids
from mxjax.models import generation
from mxjax.models.functional import CacheFormat
from mxjax.models.transformer import CausalLM
from mxjax.numerics import implementations

CHUNK = 32
"""Tokens behind a kept prefix that run at once. They share this shape whatever their
number, so a turn of a chat compiles nothing new."""
STEPS = 8
"""Tokens that a GPU makes before it shows them: less time than a glance takes."""


class PrefixCache:
  """The key-value cache of one sequence, which keeps the prefix that the next shares.

  Attributes:
    limit: Most tokens of a sequence.
  """

  def __init__(
    self,
    model: CausalLM,
    params: Mapping[str, Any],
    limit: int | None = None,
    cache_format: CacheFormat = "compute",
  ) -> None:
    """Prepares an empty cache.

    Args:
      model: The model that scores the tokens.
      params: Its params, float or quantized.
      limit: Most tokens of a sequence; None takes the model's limit, as does more.
      cache_format: What the cache holds: `compute`, the compute dtype, or `e4m3`; see
        `generation.generate`.
    """
    self.model, self._params = model, params
    self._format: CacheFormat = cache_format
    self.limit = min(limit or model.config.max_positions, model.config.max_positions)
    self._cache: generation.Cache | None = None
    self._held = np.zeros(0, np.int32)

  def logits(self, ids: np.ndarray) -> jax.Array:
    """Scores the token after `ids`, int32 `[T]`, T from 1 to `limit`: float32 `[V]`.

    Runs only the tokens behind the longest prefix that the last call left here.
    """
    return self._run(ids, generation.GREEDY)[1][0]

  def tokens(
    self, ids: np.ndarray, count: int, choice: generation.Choice
  ) -> Iterator[int]:
    """Yields `count` tokens after `ids`, int32 `[T]`; `limit` has room for them.

    A GPU makes several at a time, and some that nobody asks for at the end.
    """
    state, _ = self._run(ids, choice)
    yield int(state.newest[0])
    left = count - 1
    whole = implementations.target_platform() == "gpu"
    steps = STEPS if whole else 1
    while left > 0:
      # The buffers are donated: after an interruption there is nothing to go on from.
      self._cache = None
      before = np.asarray(state.newest)
      keywords: Any = {"steps": steps, "choice": choice, "may_overrun": True}
      state, made = generation.decode(self.model, self._params, state, **keywords)
      # The cache holds what has run: all tokens but the newest.
      found = np.asarray(made)[0]
      self._cache = state.cache
      self._held = np.concatenate([self._held, before, found[:-1]])
      for token in found[:left]:
        yield int(token)
      left -= steps

  def _run(
    self, ids: np.ndarray, choice: generation.Choice
  ) -> tuple[generation.Decoding, jax.Array]:
    """Fills the cache with `ids`; returns the first token and its logits `[1, V]`."""
    # The last token always runs: its logits are not kept.
    common = min(len(self._held), len(ids) - 1)
    differs = np.flatnonzero(self._held[:common] != ids[:common])
    start = int(differs[0]) if differs.size else common
    # The buffers are donated: after an interruption there is nothing to go on from.
    cache, self._cache = self._cache, None
    if cache is None or start == 0:
      del cache
      state, scores = generation.prefill(
        self.model,
        self._params,
        ids[None],
        choice=choice,
        cache_format=self._format,
      )
      # At once, so that no later token compiles.
      state = generation.with_room(state, self.limit - len(ids))
      self._cache, self._held = state.cache, ids
      return state, scores
    scores = None
    while start < len(ids):
      if start + 1 < len(ids):
        # Where the padding would not fit, a few tokens run again.
        start = min(start, cache.capacity - CHUNK)
      part = ids[start : start + CHUNK]
      # Zeros behind a shorter chunk change nothing: no token of it sees them, and the
      # next tokens overwrite them, because the length excludes them.
      padded = part if len(part) == 1 else np.pad(part, (0, CHUNK - len(part)))
      cache = dataclasses.replace(cache, lengths=jnp.full(1, start, jnp.int32))
      scores, cache = generation.next_logits(
        self.model, self._params, cache, padded[None], len(part) - 1
      )
      start += len(part)
    assert scores is not None
    cache = dataclasses.replace(cache, lengths=jnp.full(1, start, jnp.int32))
    self._cache, self._held = cache, ids
    newest = choice.tokens(scores, start)
    return generation.Decoding(cache, newest, choice.is_end(newest), start), scores


def stream(
  cache: PrefixCache,
  ids: np.ndarray,
  *,
  max_new_tokens: int,
  temperature: float = 0.0,
  top_k: int | None = None,
  top_p: float | None = None,
  key: jax.Array | None = None,
  eos_ids: Collection[int] = (),
) -> Iterator[int]:
  """Yields the tokens after a prompt, each as soon as it is known.

  Ends before the first of `eos_ids`, after `max_new_tokens`, or where the sequence
  fills the cache. The other arguments, and the tokens up to ties within rounding, are
  those of `generation.generate`.

  Args:
    cache: Scores the tokens and keeps them for the next call.
    ids: The prompt, int32 `[T]`, T at least 1.
    max_new_tokens: Most tokens to yield.
    temperature: 0 takes the most likely token; otherwise logits are divided by it.
    top_k: Sample only among the k most likely tokens.
    top_p: Sample only among the fewest tokens whose total probability reaches this.
    key: Random key, required when `temperature` is positive.
    eos_ids: Tokens that end the text; they are not yielded.

  Raises:
    ValueError: An argument is out of range, or the prompt leaves no room in the cache.
  """
  ids = np.asarray(token_ids(ids, "generate", vocabulary=cache.model.config.vocab_size))
  room = cache.limit - len(ids)
  if room < 1:
    raise ValueRefusal(
      "generate",
      expected=f"a prompt of less than {cache.limit} tokens, the context of the "
      "model here",
      got=len(ids),
      mend="shorten it, or start another conversation",
    )
  count = min(max_new_tokens, room)
  generation.check_arguments(
    cache.model, len(ids), count, temperature, top_k, top_p, key
  )
  # No ends in the choice: the loop below stops at them, between two tokens.
  choice = generation.choice_of(temperature, top_k, top_p, key)
  for token in cache.tokens(ids, count, choice) if count else ():
    if token in eos_ids:
      return
    yield token


def text_pieces(
  tokens: Iterable[int],
  decode: Callable[[Sequence[int]], str],
  stops: Sequence[str] = (),
) -> Iterator[str]:
  """Yields the text of tokens piece by piece, up to the first stop string.

  What may be the beginning of a stop string, or of a character whose bytes are not
  complete, is held back until the next token decides. The pieces join to the decoded
  text without the stop string and what follows it.
  """
  ids: list[int] = []
  shown, text = 0, ""
  for token in tokens:
    ids.append(token)
    # All ids each time, because a token's text can depend on those before it.
    text = decode(ids)
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
      yield text[shown : min(found)]
      return
    end = len(text.rstrip("\ufffd"))
    held = (
      n for stop in stops for n in range(1, len(stop)) if text[:end].endswith(stop[:n])
    )
    end -= max(held, default=0)
    if end > shown:
      yield text[shown:end]
      shown = end
  if shown < len(text):
    yield text[shown:]
