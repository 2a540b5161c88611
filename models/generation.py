"""Token generation, without a cache (the evaluation contract) or with one."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.errors import ValueRefusal
from mxjax.intake.token_ids import token_ids
from mxjax.models.transformer import CausalLM

TOKENS_AT_ONCE = 16
"""Tokens per row that one program generates on a GPU; then it asks whether to stop."""
CACHE_STEP = 256
"""Positions by which caches of such programs grow: close lengths compile once."""


def generate(
  model: CausalLM,
  params: Mapping[str, Any],
  tokens: jax.Array | np.ndarray,
  *,
  max_new_tokens: int,
  temperature: float = 0.0,
  top_k: int | None = None,
  top_p: float | None = None,
  key: jax.Array | None = None,
  eos_id: int | Collection[int] | None = None,
  use_cache: bool = False,
  tokens_at_once: int | None = None,
) -> jax.Array:
  """Continues prompts, by default recomputing the whole prefix for every token.

  Without a cache, the tokens lie in a buffer of the final length, so every step has the
  same shapes and compiles once. With a cache, the prompt runs once and each step runs
  one token per row: two compiled shapes, and the same tokens except for ties within
  rounding. On a GPU several steps are one program, because starting each from Python
  would take longer than some of its kernels.

  Args:
    model: The model that scores the tokens.
    params: Its params, float or quantized.
    tokens: Prompts of equal length, int32 `[B, T]`, T at least 1.
    max_new_tokens: Tokens to append, at least 0.
    temperature: 0 takes the most likely token; otherwise logits are divided by it.
    top_k: Sample only among the k most likely tokens.
    top_p: Sample only among the fewest tokens whose total probability reaches this.
    key: Random key, required when `temperature` is positive.
    eos_id: Token, or tokens such as `model.config.eos_ids`, that end a row; the rest
      of it is the first of them. None ends no row.
    use_cache: Whether to keep the keys and values of past tokens in memory.
    tokens_at_once: With a cache, tokens per row that one program generates; the tokens
      do not depend on it. None takes `TOKENS_AT_ONCE` on a GPU, and elsewhere runs
      layer by layer, as 1 does.

  Returns:
    Prompts and continuations, int32 `[B, T + max_new_tokens]`.

  Raises:
    ValueError: An argument is out of range, or the length exceeds the model's.
  """
  check_arguments(model, tokens, max_new_tokens, temperature, top_k, top_p, key)
  batch, start = tokens.shape
  ids = token_ids(tokens, "generate", vocabulary=model.config.vocab_size)
  if tokens_at_once is not None and tokens_at_once < 1:
    raise ValueRefusal("generate", expected="tokens_at_once >= 1", got=tokens_at_once)
  ends = _ends(eos_id, model.config.vocab_size)
  if tokens_at_once is None:
    tokens_at_once = TOKENS_AT_ONCE if jax.default_backend() == "gpu" else 1
  if use_cache and tokens_at_once > 1 and max_new_tokens > 1:
    how = _How(temperature, top_k, top_p, key, ends)
    return _in_programs(model, params, ids, max_new_tokens, tokens_at_once, how)
  buffer = jnp.pad(ids, ((0, 0), (0, max_new_tokens)))
  is_done = jnp.zeros(batch, bool)
  cache = empty_cache(model, batch, buffer.shape[1]) if use_cache else None
  seen = 0
  for position in range(start, start + max_new_tokens):
    if cache is None:
      logits = _next_logits(model, params, buffer, position - 1)
    else:
      logits, cache = next_logits(model, params, cache, buffer[:, seen:position])
      seen = position
    newest = choose(logits, position, temperature, top_k, top_p, key)
    if ends is not None:
      newest = jnp.where(is_done, ends[0], newest)
      is_done |= _is_end(newest, ends)
      if bool(is_done.all()):
        buffer = buffer.at[:, position].set(newest)
        return buffer.at[:, position + 1 :].set(ends[0])
    buffer = buffer.at[:, position].set(newest)
  return buffer


def _ends(eos_id: int | Collection[int] | None, vocabulary: int) -> jax.Array | None:
  """Returns the ids that end a row, int32 `[E]`, or None."""
  ids = () if eos_id is None else eos_id
  ids = [*ids] if isinstance(ids, Collection) else [ids]
  if not ids:
    return None
  return jnp.asarray(token_ids(ids, "generate: eos_id", vocabulary=vocabulary))


def _is_end(tokens: jax.Array, ends: jax.Array) -> jax.Array:
  return (tokens[:, None] == ends[None]).any(axis=-1)


class _How(NamedTuple):
  """How `generate` chooses tokens, and where it stops."""

  temperature: float
  top_k: int | None
  top_p: float | None
  key: jax.Array | None
  ends: jax.Array | None


class _Decoding(NamedTuple):
  """State between two tokens: the newest `[B]` is not in the cache yet."""

  cache: "Cache"
  newest: jax.Array
  is_done: jax.Array
  position: jax.Array
  """Of the token after the newest, int32."""


def _in_programs(
  model: CausalLM,
  params: Mapping[str, Any],
  ids: jax.Array,
  count: int,
  at_once: int,
  how: _How,
) -> jax.Array:
  """Generates `count` tokens, all but the first by programs of `at_once` each."""
  batch, start = ids.shape
  at_once = min(at_once, count - 1)
  programs = -(-(count - 1) // at_once)
  # The last program may run too many tokens: another length would compile again.
  cache = _cache_of(model, batch, start + programs * at_once)
  logits, cache = next_logits(model, params, cache, ids)
  newest = choose(logits, start, *how[:4])
  is_done = jnp.zeros(batch, bool)
  if how.ends is not None:
    is_done = _is_end(newest, how.ends)
  state, made = _Decoding(cache, newest, is_done, jnp.int32(start + 1)), [newest[None]]
  traced = how._replace(key=None if how.temperature == 0 else how.key, top_k=None)
  for _ in range(programs):
    if how.ends is not None and bool(state.is_done.all()):
      made.append(jnp.full((count, batch), how.ends[0], jnp.int32))
      break
    state, tokens = _run_tokens(model, params, state, traced, at_once, how.top_k)
    made.append(tokens)
  return jnp.concatenate([ids, jnp.concatenate(made)[:count].T], axis=1)


def _cache_of(model: CausalLM, batch: int, positions: int) -> "Cache":
  return empty_cache(model, batch, -(-positions // CACHE_STEP) * CACHE_STEP)


@functools.partial(
  jax.jit, static_argnames=("model", "count", "top_k"), donate_argnames="state"
)
def _run_tokens(
  model: CausalLM,
  params: Mapping[str, Any],
  state: _Decoding,
  how: _How,
  count: int,
  top_k: int | None,
) -> tuple[_Decoding, jax.Array]:
  """Generates the next tokens of every sequence, int32 `[count, B]`, in one program.

  Layers stay arrays of their own: a scan over stacked layers would copy each layer's
  weights out of the stack before its kernels.
  """

  def step(state: _Decoding, _: None) -> tuple[_Decoding, jax.Array]:
    tokens = state.newest[:, None]
    hidden, cache = _run_cached_layers(model, params, state.cache, tokens)
    logits = model.logits(params, hidden)[:, -1]
    newest = _choose(logits, state.position, how.temperature, top_k, *how[2:4])
    is_done = state.is_done
    if how.ends is not None:
      newest = jnp.where(is_done, how.ends[0], newest)
      is_done |= _is_end(newest, how.ends)
    return _Decoding(cache, newest, is_done, state.position + 1), newest

  return jax.lax.scan(step, state, None, length=count)


def choose(
  logits: jax.Array,
  position: int,
  temperature: float,
  top_k: int | None,
  top_p: float | None,
  key: jax.Array | None,
) -> jax.Array:
  """Chooses the tokens of a position, int32 `[B]`, from float32 logits `[B, V]`.

  The arguments are those of `generate`. Samples depend on the key and the position.
  """
  key = None if temperature == 0 else key
  return _choose(logits, position, temperature, top_k, top_p, key)


def _choose(
  logits: jax.Array,
  position: Any,
  temperature: Any,
  top_k: int | None,
  top_p: Any,
  key: jax.Array | None,
) -> jax.Array:
  """Chooses like `choose`, with all but `top_k` traced or not; no key is greedy."""
  if key is None:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  step = jax.random.fold_in(key, position)
  return sample(step, logits, temperature, top_k=top_k, top_p=top_p)


def sample(
  key: jax.Array,
  logits: jax.Array,
  temperature: Any,
  *,
  top_k: int | None = None,
  top_p: Any = None,
) -> jax.Array:
  """Samples one token per row: int32 `[B]` from float32 logits `[B, V]`.

  Logits are divided by the positive `temperature`. `top_k` keeps the k most likely
  tokens (and any tied with the last); of those, `top_p` keeps the fewest whose total
  probability reaches it.
  """
  scores = logits / temperature
  if top_k is not None:
    smallest = jax.lax.top_k(scores, min(top_k, scores.shape[-1]))[0][:, -1:]
    scores = jnp.where(scores < smallest, -jnp.inf, scores)
  if top_p is not None:
    scores = _mask_outside_nucleus(scores, top_p)
  return jax.random.categorical(key, scores, axis=-1).astype(jnp.int32)


def _mask_outside_nucleus(scores: jax.Array, top_p: Any) -> jax.Array:
  ordered = jnp.sort(scores, axis=-1, descending=True)
  probabilities = jax.nn.softmax(ordered, axis=-1)
  # A token stays while the ones before it fall short, so the first always stays.
  before = jnp.cumsum(probabilities, axis=-1) - probabilities
  smallest = jnp.where(before < top_p, ordered, jnp.inf).min(-1, keepdims=True)
  return jnp.where(scores < smallest, -jnp.inf, scores)


@functools.partial(jax.jit, static_argnames="model")
def _run_layer(
  model: CausalLM, layer_params: Mapping[str, Any], hidden: jax.Array
) -> jax.Array:
  return model.layer(layer_params, hidden)


@functools.partial(jax.jit, static_argnames="model")
def _run_head(
  model: CausalLM, params: Mapping[str, Any], hidden: jax.Array, position: jax.Array
) -> jax.Array:
  row = jax.lax.dynamic_slice_in_dim(hidden, position, 1, axis=1)
  return model.logits(params, row)[:, 0]


def _next_logits(
  model: CausalLM, params: Mapping[str, Any], buffer: jax.Array, position: int
) -> jax.Array:
  hidden = model.embed(params, buffer)
  for index in range(model.num_layers):
    hidden = _run_layer(model, params[model.layer_name(index)], hidden)
  return _run_head(model, _outside_layers(model, params), hidden, jnp.int32(position))


def _outside_layers(model: CausalLM, params: Mapping[str, Any]) -> dict[str, Any]:
  layers = {model.layer_name(index) for index in range(model.num_layers)}
  # `items()` would read every layer of params on disk.
  return {name: params[name] for name in params if name not in layers}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """Key-value cache of all layers (`CausalLM.empty_cache`); int32 length in tokens."""

  layers: tuple[dict[str, Any], ...]
  length: jax.Array


def empty_cache(model: CausalLM, batch: int, positions: int) -> Cache:
  """Allocates a zeroed cache for up to `positions` tokens, in the compute dtype."""
  layers = range(model.num_layers)
  empty = tuple(model.empty_cache(batch, positions) for _ in layers)
  return Cache(empty, jnp.zeros((), jnp.int32))


def next_logits(
  model: CausalLM,
  params: Mapping[str, Any],
  cache: Cache,
  tokens: jax.Array,
  position: int | None = None,
) -> tuple[jax.Array, Cache]:
  """Runs the next tokens of every sequence and scores the token after them.

  Tokens are int32 `[B, T]`: the prompt first, then one token per step. `position` is
  that of the token, among these, whose successor is scored: by default the last. The
  buffers of `cache` are donated. Returns float32 logits `[B, V]` and the updated cache.
  """
  if tokens.shape[1] == 1 and jax.default_backend() == "gpu":
    # Launching layer by layer from Python would take longer than running them.
    return _run_token(model, params, cache, tokens)
  hidden, cache = _run_cached_layers(model, params, cache, tokens)
  last = jnp.int32(tokens.shape[1] - 1 if position is None else position)
  return _run_head(model, _outside_layers(model, params), hidden, last), cache


def _run_cached_layers(
  model: CausalLM, params: Mapping[str, Any], cache: Cache, tokens: jax.Array
) -> tuple[jax.Array, Cache]:
  hidden = model.embed(params, tokens)
  updated = []
  for index, past in enumerate(cache.layers):
    # Inside a jitted function, equal layers are traced and lowered once.
    layer = params[model.layer_name(index)]
    hidden, new = _run_cached_layer(model, layer, past, hidden, cache.length)
    updated.append(new)
  return hidden, Cache(tuple(updated), cache.length + tokens.shape[1])


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _run_cached_layer(
  model: CausalLM,
  layer_params: Mapping[str, Any],
  cache: dict[str, Any],
  hidden: jax.Array,
  start: jax.Array,
) -> tuple[jax.Array, dict[str, Any]]:
  return model.layer_with_cache(layer_params, cache, hidden, start)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _run_token(
  model: CausalLM, params: Mapping[str, Any], cache: Cache, tokens: jax.Array
) -> tuple[jax.Array, Cache]:
  """Runs one token of every sequence through the whole model in one program."""
  hidden, cache = _run_cached_layers(model, params, cache, tokens)
  return model.logits(params, hidden)[:, -1], cache


def check_arguments(
  model: CausalLM,
  tokens: jax.Array | np.ndarray,
  max_new_tokens: int,
  temperature: float,
  top_k: int | None,
  top_p: float | None,
  key: jax.Array | None,
) -> None:
  """Raises ValueError for arguments of `generate` that are out of range."""
  length, limit = tokens.shape[-1] + max_new_tokens, model.config.max_positions
  is_empty = tokens.ndim != 2 or 0 in tokens.shape
  problems = (
    (is_empty, "tokens of shape [batch >= 1, length >= 1]", tokens.shape),
    (max_new_tokens < 0, "max_new_tokens >= 0", max_new_tokens),
    (length > limit, f"at most {limit} positions", length),
    (not temperature >= 0, "temperature >= 0", temperature),
    (top_k is not None and top_k < 1, "top_k >= 1", top_k),
    (top_p is not None and not 0 < top_p <= 1, "0 < top_p <= 1", top_p),
    (temperature > 0 and key is None, "a random key above temperature 0", "none"),
  )
  for is_present, expected, got in problems:
    if is_present:
      raise ValueRefusal("generate", expected=expected, got=got)
