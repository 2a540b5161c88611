"""Token generation, with a key-value cache or without one (the evaluation contract).

`generate` does all of it, and `generate_each` for prompts of different lengths. Their
parts are public for those who time or steer them: `prefill` goes from token ids to the
first token, `decode` on from there.

On a GPU each of them is one compiled program, because launching layers from Python
takes longer than running them. No program depends on the length of a prompt or on how
many tokens are wanted: prompts are padded to buckets (`bucket_of`), caches have
capacities in powers of two, and several steps are one program.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.errors import ValueRefusal
from mxjax.intake.token_ids import token_ids
from mxjax.models.config import ModelConfig
from mxjax.models.functional import CacheFormat
from mxjax.models.transformer import CausalLM
from mxjax.numerics import implementations, pytree_nodes

TOKENS_AT_ONCE = 16
"""Tokens per row that one program generates on a GPU; then it asks whether to stop."""
SMALLEST_BUCKET = 32
"""Length to which the shortest prompts are padded."""
OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0}
"""Compiler options of whole programs. XLA:GPU would copy the weights of q, k and v into
one matrix in every call, to multiply them at once."""


Prompts = jax.Array | np.ndarray | Sequence[np.ndarray | Sequence[int]]
"""Prompts of equal length, int32 `[B, T]`, or of any lengths, one after the other."""


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Choice:
  """How tokens are chosen from logits, and which of them end a row.

  Attributes:
    key: Random key of the samples; None takes the most likely token, and then
      `temperature`, `top_k` and `top_p` are not read.
    temperature: Positive; logits are divided by it.
    top_p: See `sample`.
    ends: Ids that end a row, int32 `[E]`; what follows in it is the first of them.
    top_k: See `sample` (static: part of the program).
  """

  key: jax.Array | None = None
  temperature: float = 1.0
  top_p: float | None = None
  ends: np.ndarray | None = None
  top_k: int | None = dataclasses.field(default=None, metadata={"static": True})

  def tokens(self, logits: jax.Array, position: int | jax.Array) -> jax.Array:
    """Chooses the tokens of a position, int32 `[B]`, from float32 logits `[B, V]`.

    Samples depend on the key, the position and the row. Of sequences of different
    lengths, the position is that of the longest.
    """
    if self.key is None:
      return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    step = jax.random.fold_in(self.key, position)
    keywords = {"top_k": self.top_k, "top_p": self.top_p}
    return sample(step, logits, self.temperature, **keywords)

  def is_end(self, tokens: jax.Array) -> jax.Array:
    """Returns which tokens end their row, bool of the same shape."""
    if self.ends is None:
      return jnp.zeros(tokens.shape, bool)
    return jnp.isin(tokens, self.ends)


GREEDY = Choice()
"""The most likely token; no token ends a row."""


def choice_of(
  temperature: float = 0.0,
  top_k: int | None = None,
  top_p: float | None = None,
  key: jax.Array | None = None,
  ends: np.ndarray | None = None,
) -> Choice:
  """Returns the choice that the arguments of `generate` describe.

  All greedy choices are alike, so that they share programs.
  """
  if temperature == 0:
    return Choice(ends=ends)
  return Choice(key, temperature, top_p, ends, top_k)


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Cache:
  """Key-value cache of all layers.

  Attributes:
    layers: What `CausalLM.empty_cache` allocates and `layer_with_cache` fills.
    lengths: Tokens of each sequence, int32 `[B]`; what lies behind them is not read.
  """

  layers: tuple[dict[str, Any], ...]
  lengths: jax.Array

  @property
  def capacity(self) -> int:
    """Tokens of a sequence for which there is room."""
    # Every array of every format is `[B, positions, ...]`.
    return jax.tree.leaves(self.layers)[0].shape[1]


def cache_bytes(config: ModelConfig, cache_format: CacheFormat = "compute") -> int:
  """Returns the bytes of a token in the cache of all layers.

  A cache has room for `capacity_of` its tokens, so for twice as many at most.
  """
  vectors = 2 * config.num_layers * config.num_kv_heads
  if cache_format == "e4m3":
    # A byte for each coordinate, and one for the scale of the vector.
    return vectors * (config.head_dim + 1)
  return vectors * config.head_dim * jnp.dtype(config.dtype).itemsize


def empty_cache(
  model: CausalLM, batch: int, positions: int, cache_format: CacheFormat = "compute"
) -> Cache:
  """Allocates a zeroed cache for up to `positions` tokens of each sequence."""
  layers = range(model.num_layers)
  empty = tuple(model.empty_cache(batch, positions, cache_format) for _ in layers)
  return Cache(empty, jnp.zeros(batch, jnp.int32))


@functools.partial(pytree_nodes.register, dropped=["longest"])
@dataclasses.dataclass(frozen=True)
class Decoding:
  """Sequences between two tokens: what programs take and give.

  Attributes:
    cache: Of all tokens but the newest; `decode` donates it.
    newest: The newest token of every sequence, int32 `[B]`.
    is_done: Which sequences have ended, bool `[B]`.
    longest: Tokens of the longest sequence in the cache, where the host knows them; no
      program sees it, and what a program returns has None.
  """

  cache: Cache
  newest: jax.Array
  is_done: jax.Array
  longest: int | None = None


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
  use_cache: bool = True,
  cache_format: CacheFormat = "compute",
  tokens_at_once: int | None = None,
) -> jax.Array:
  """Continues prompts, by default with a key-value cache.

  With a cache, `prefill` runs the prompt and `decode` each token; a prompt of another
  length in the same bucket, or another `max_new_tokens` in the same capacity, compiles
  nothing. Without one, every token recomputes the whole prefix, as the contract has it
  for evaluation: the tokens lie in a buffer of the final length, so all steps of a call
  compile once. Tokens are the same but where rounding decides: sums have another order,
  which in a quantized model may also turn a rounding of an activation.

  Args:
    model: The model that scores the tokens.
    params: Its params, float or quantized.
    tokens: Prompts of equal length, int32 `[B, T]`, T at least 1; `generate_each` takes
      others.
    max_new_tokens: Tokens to append, at least 0.
    temperature: 0 takes the most likely token; otherwise logits are divided by it.
    top_k: Sample only among the k most likely tokens.
    top_p: Sample only among the fewest tokens whose total probability reaches this.
    key: Random key, required when `temperature` is positive.
    eos_id: Token, or tokens such as `model.config.eos_ids`, that end a row; the rest
      of it is the first of them. None ends no row. Nothing runs once all have ended.
    use_cache: Whether to keep the keys and values of past tokens in memory.
    cache_format: What the cache holds: `compute`, the compute dtype; or `e4m3`, which
      takes 0.51 of bfloat16's bytes at 64 coordinates a head and changes the model, as
      `numerics.e4m3` rounds.
    tokens_at_once: With a cache, tokens per row that one program generates; the tokens
      do not depend on it. None takes `TOKENS_AT_ONCE` on a GPU, and elsewhere runs
      layer by layer, as 1 does.

  Returns:
    Prompts and continuations, int32 `[B, T + max_new_tokens]`.

  Raises:
    ValueError: An argument is out of range, the length exceeds the model's, or the
      model has no cache.
  """
  ids, lengths = padded_prompts(tokens, "generate", model.config.vocab_size)
  if (lengths < ids.shape[1]).any():
    raise ValueRefusal(
      "generate",
      expected="prompts of equal length",
      got=f"lengths {lengths.tolist()}",
      mend="pass them to generate_each",
    )
  new = _new_tokens(
    model,
    params,
    ids,
    lengths,
    max_new_tokens=max_new_tokens,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    key=key,
    eos_id=eos_id,
    use_cache=use_cache,
    cache_format=cache_format,
    tokens_at_once=tokens_at_once,
  )
  return jax.device_put(np.concatenate([ids, new], axis=1))


def generate_each(
  model: CausalLM,
  params: Mapping[str, Any],
  prompts: Sequence[np.ndarray | Sequence[int]],
  *,
  max_new_tokens: int,
  **options: Any,
) -> list[np.ndarray]:
  """Continues prompts of any lengths in one batch, each as `generate` would alone.

  Prompts are padded inside; no token sees the padding, and positions count from the
  beginning of each prompt. The most likely tokens are those of each prompt alone, but
  where rounding decides: products of other sizes add in another order. A prompt that
  ends does not stop the others. Samples depend on the row of a prompt in the batch.

  Args:
    model: The model that scores the tokens.
    params: Its params, float or quantized.
    prompts: Token ids of at least one prompt, int32 `[T]` each, T at least 1.
    max_new_tokens: Tokens to append to each prompt, at least 0.
    **options: The other options of `generate`.

  Returns:
    Each prompt and its continuation, int32 `[T + max_new_tokens]`.

  Raises:
    ValueError: As in `generate`; the length is that of the longest prompt.
  """
  ids, lengths = padded_prompts(prompts, "generate_each", model.config.vocab_size)
  keywords: Any = {"max_new_tokens": max_new_tokens} | options
  new = _new_tokens(model, params, ids, lengths, **keywords)
  return [
    np.concatenate([row[:length], continuation])
    for row, length, continuation in zip(ids, lengths, new, strict=True)
  ]


def padded_prompts(
  prompts: Prompts, place: str, vocabulary: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns prompts as one array, and their lengths.

  Args:
    prompts: Of equal length as an array `[B, T]`, or one after the other.
    place: Names the caller in messages.
    vocabulary: Number of ids of the model.

  Returns:
    int32 `[B, T]`, with zeros behind the shorter prompts; and int32 `[B]`.

  Raises:
    TypeError: Ids are no integers.
    ValueError: There is no prompt, one is empty, or ids are outside the vocabulary.
  """
  if isinstance(prompts, (jax.Array, np.ndarray)):
    rows = token_ids(prompts, place, vocabulary=vocabulary)
    shapes = {rows.shape[1:]}
  else:
    # An empty list has no integers, and is refused for its length.
    given = [row if len(row) else np.zeros(0, np.int32) for row in prompts]
    rows = [token_ids(row, place, vocabulary=vocabulary) for row in given]
    shapes = {row.shape for row in rows}
  if not len(rows) or any(len(shape) != 1 or not shape[0] for shape in shapes):
    raise ValueRefusal(
      place,
      expected="tokens of shape [batch >= 1, length >= 1]",
      got=rows.shape if isinstance(rows, np.ndarray) else sorted(shapes),
    )
  lengths = np.array([len(row) for row in rows], np.int32)
  # Padded behind the text, where no token sees it.
  ids = np.zeros((len(rows), lengths.max()), np.int32)
  for padded, row in zip(ids, rows, strict=True):
    padded[: len(row)] = row
  return ids, lengths


def _new_tokens(
  model: CausalLM,
  params: Mapping[str, Any],
  ids: np.ndarray,
  lengths: np.ndarray,
  *,
  max_new_tokens: int,
  temperature: float = 0.0,
  top_k: int | None = None,
  top_p: float | None = None,
  key: jax.Array | None = None,
  eos_id: int | Collection[int] | None = None,
  use_cache: bool = True,
  cache_format: CacheFormat = "compute",
  tokens_at_once: int | None = None,
) -> np.ndarray:
  """Returns the continuations of `generate`, int32 `[B, max_new_tokens]`.

  `ids` and `lengths` are those of `padded_prompts`.
  """
  check_arguments(
    model, int(lengths.max()), max_new_tokens, temperature, top_k, top_p, key
  )
  if tokens_at_once is not None and tokens_at_once < 1:
    raise ValueRefusal("generate", expected="tokens_at_once >= 1", got=tokens_at_once)
  if use_cache and not hasattr(model, "layer_with_cache"):
    raise ValueRefusal(
      "generate",
      expected="a model with `layer_with_cache`, such as those of mxjax.models",
      got=type(model).__name__,
      mend="pass use_cache=False, which recomputes the prefix for every token",
    )
  if not use_cache and cache_format != "compute":
    raise ValueRefusal(
      "generate",
      expected="use_cache=True beside a cache format",
      got=f"cache_format={cache_format!r} and no cache",
      mend="leave one of them out",
    )
  ends = None
  listed = [*eos_id] if isinstance(eos_id, Collection) else [eos_id]
  if listed := [one for one in listed if one is not None]:
    vocabulary = model.config.vocab_size
    ends = token_ids(listed, "generate: eos_id", vocabulary=vocabulary)
  choice = choice_of(temperature, top_k, top_p, key, ends)
  if not max_new_tokens:
    parts = []
  elif use_cache:
    prompts = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    parts = _cached(
      model, params, prompts, max_new_tokens, tokens_at_once, choice, cache_format
    )
  else:
    parts = _uncached(model, params, ids, lengths, max_new_tokens, choice)
  # Put together by numpy: JAX would compile it for every length.
  arrays = [np.asarray(part).reshape(len(ids), -1) for part in parts]
  new = np.concatenate([np.zeros((len(ids), 0), np.int32), *arrays], axis=1)
  # The last program may have made more than was asked for.
  new = new[:, :max_new_tokens]
  if (missing := max_new_tokens - new.shape[1]) and ends is not None:
    new = np.pad(new, ((0, 0), (0, missing)), constant_values=int(ends[0]))
  return new


def _cached(
  model: CausalLM,
  params: Mapping[str, Any],
  prompts: Sequence[np.ndarray],
  count: int,
  at_once: int | None,
  choice: Choice,
  cache_format: CacheFormat,
) -> list[jax.Array]:
  """Generates at least `count` tokens, or as many as until all rows have ended.

  The parts are int32, `[B]` or `[B, n]`.
  """
  whole = _is_one_program(params) if at_once is None else at_once > 1
  at_once = at_once or (TOKENS_AT_ONCE if whole else 1)
  keywords: Any = {"one_program": whole, "choice": choice}
  state, _ = prefill(model, params, prompts, cache_format=cache_format, **keywords)
  parts, steps = [state.newest], count - 1
  # The last program may run too many steps: another number would compile again.
  programs = -(-steps // at_once)
  if programs:
    # Once for all programs: each growth copies the cache, and each capacity is another
    # program.
    state = with_room(state, programs * at_once)
  for _ in range(programs):
    if choice.ends is not None and np.asarray(state.is_done).all():
      break
    state, tokens = decode(
      model, params, state, steps=at_once, may_overrun=True, **keywords
    )
    parts.append(tokens)
  return parts


def _uncached(
  model: CausalLM,
  params: Mapping[str, Any],
  ids: np.ndarray,
  lengths: np.ndarray,
  count: int,
  choice: Choice,
) -> list[jax.Array]:
  """Generates like `_cached`, recomputing the whole prefix for every token."""
  parts, rows = [], np.arange(len(ids))
  buffer, is_done = jnp.pad(ids, ((0, 0), (0, count))), jnp.zeros(len(ids), bool)
  for step in range(count):
    hidden = model.embed(params, buffer)
    for index in range(model.num_layers):
      hidden = _run_layer(model, params[model.layer_name(index)], hidden)
    # `places` are the ends of the prefixes: the token before each is scored.
    outside, places = _outside_layers(model, params), lengths + np.int32(step)
    _, newest, is_done = _run_head(
      model, outside, hidden, places - 1, places, is_done, choice
    )
    buffer = buffer.at[rows, places].set(newest)
    parts.append(newest)
    if choice.ends is not None and np.asarray(is_done).all():
      break
  return parts


def bucket_of(length: int) -> int:
  """Returns the length to which a prompt is padded.

  Buckets are the powers of two and the numbers halfway between them, from
  `SMALLEST_BUCKET` on: a prompt is padded by less than half, and prompts of up to 2,048
  tokens need at most 13 programs.
  """
  top = capacity_of(length)
  return max(SMALLEST_BUCKET, top * 3 // 4 if length <= top * 3 // 4 else top)


def capacity_of(positions: int) -> int:
  """Returns the capacity of a cache for so many tokens: a power of two."""
  return max(SMALLEST_BUCKET, 1 << (positions - 1).bit_length())


def _is_one_program(params: Mapping[str, Any], asked: bool | None = None) -> bool:
  """Decides whether whole models are compiled, not layers.

  A model of 30 layers takes two cores of a CPU 10 s to compile as a whole and 5 s as
  one layer, which saves less than that. Params on disk are read a layer at a time.
  """
  if asked is not None:
    return asked
  return implementations.target_platform() == "gpu" and isinstance(params, dict)


def prefill(
  model: CausalLM,
  params: Mapping[str, Any],
  tokens: Prompts,
  *,
  choice: Choice = GREEDY,
  cache_format: CacheFormat = "compute",
  one_program: bool | None = None,
) -> tuple[Decoding, jax.Array]:
  """Runs prompts and chooses the first token after them.

  Prompts are padded on the right with the id 0 to `bucket_of` the longest. No token
  sees a later one, so the padding changes no score, up to the order of sums where a
  product of more rows has another; what it leaves in the cache is hidden by the
  lengths, and the next tokens overwrite it. All prompts of a batch size and a bucket
  share one program, which makes the cache, with a capacity of `capacity_of` the bucket.

  Args:
    model: The model that scores the tokens.
    params: Its params, float or quantized.
    tokens: Prompts of equal length, int32 `[B, T]`, or a list of any lengths.
    choice: How the token is chosen.
    cache_format: What the cache holds; see `generate`.
    one_program: Whether everything from ids to the token is one compiled call. None is
      True on a GPU with params in memory, and elsewhere one program a layer.

  Returns:
    What `decode` goes on from, and the logits of the first token, float32 `[B, V]`.

  Raises:
    ValueError: The prompts are empty, too long for the model or outside its vocabulary.
  """
  ids, lengths = padded_prompts(tokens, "prefill", model.config.vocab_size)
  length = ids.shape[1]
  # Of the arguments only the length is in question.
  check_arguments(model, length, 0, 0.0, None, None, None, place="prefill")
  padded = np.pad(ids, ((0, 0), (0, bucket_of(length) - length)))
  whole = _is_one_program(params, one_program)
  run = _prefill_in_one_program if whole else _prefill_by_layers
  state, logits = run(model, params, padded, lengths, choice, cache_format)
  return dataclasses.replace(state, longest=length), logits


def _prefill_by_layers(
  model: CausalLM,
  params: Mapping[str, Any],
  padded: jax.Array | np.ndarray,
  lengths: jax.Array | np.ndarray,
  choice: Choice,
  cache_format: CacheFormat = "compute",
) -> tuple[Decoding, jax.Array]:
  """Runs prompts `[B, bucket]`; returns the sequences, and the logits of `newest`."""
  hidden, layers = model.embed(params, jnp.asarray(padded)), []
  for index in range(model.num_layers):
    # Inside a jitted function, equal layers are traced and lowered once.
    layer = params[model.layer_name(index)]
    hidden, filled = _run_first_layer(model, layer, hidden, cache_format)
    layers.append(filled)
  outside = _outside_layers(model, params)
  head = _run_head(model, outside, hidden, lengths - 1, lengths, None, choice)
  logits, newest, is_done = head
  cache = Cache(tuple(layers), jnp.asarray(lengths))
  return Decoding(cache, newest, is_done), logits


_prefill_in_one_program = jax.jit(
  _prefill_by_layers,
  static_argnames=("model", "cache_format"),
  compiler_options=OPTIONS,
)


@compilation.jit(static_argnames=("model", "cache_format"))
def _run_first_layer(
  model: CausalLM,
  layer_params: Mapping[str, Any],
  hidden: jax.Array,
  cache_format: CacheFormat,
) -> tuple[jax.Array, dict[str, Any]]:
  """Runs a layer on prompts, and returns its cache too."""
  batch, bucket = hidden.shape[:2]
  empty = model.empty_cache(batch, capacity_of(bucket), cache_format)
  return model.layer_with_cache(layer_params, empty, hidden, 0)


def with_room(state: Decoding, steps: int) -> Decoding:
  """Returns sequences whose cache has room for so many more tokens.

  A cache that has none is copied into one whose capacity is the next sufficient power
  of two; both exist for a moment.
  """
  cache, longest = state.cache, state.longest
  if longest is None:
    # This waits for the device, which is why the host keeps count where it can.
    longest = int(np.max(np.asarray(cache.lengths)))
    state = dataclasses.replace(state, longest=longest)
  if (needed := longest + steps) <= cache.capacity:
    return state
  layers = _grown(cache.layers, capacity_of(needed))
  return dataclasses.replace(state, cache=Cache(layers, cache.lengths))


@functools.partial(jax.jit, static_argnames="capacity")
def _grown(layers: tuple[dict[str, Any], ...], capacity: int) -> Any:
  def grow(a: jax.Array) -> jax.Array:
    return jnp.pad(a, [(0, 0), (0, capacity - a.shape[1])] + [(0, 0)] * (a.ndim - 2))

  return jax.tree.map(grow, layers)


def decode(
  model: CausalLM,
  params: Mapping[str, Any],
  state: Decoding,
  *,
  steps: int = TOKENS_AT_ONCE,
  choice: Choice = GREEDY,
  one_program: bool | None = None,
  may_overrun: bool = False,
) -> tuple[Decoding, jax.Array]:
  """Generates the next tokens of every sequence.

  There is one program for each batch size, capacity and number of steps; where the
  cache of `state` has no room, `with_room` makes it. All steps run, even after all
  sequences have ended: `state.is_done` says when to stop.

  Args:
    model: The model that scores the tokens.
    params: Its params, float or quantized.
    state: What `prefill` or `decode` returned; its cache is donated.
    steps: Tokens of every sequence, at least 1.
    choice: How tokens are chosen; that of `prefill`.
    one_program: Whether all steps are one compiled call; see `prefill`.
    may_overrun: Whether steps may lie beyond the positions of the model, because the
      caller drops their tokens.

  Returns:
    What the next call goes on from, and the tokens, int32 `[B, steps]`.

  Raises:
    ValueError: The sequences would exceed the positions of the model.
  """
  if steps < 1:
    raise ValueRefusal("decode", expected="steps >= 1", got=steps)
  roomy = with_room(state, steps)
  assert roomy.longest is not None
  # The newest token is not in the cache yet.
  length, limit = roomy.longest + 1 + steps, model.config.max_positions
  if length > limit and not may_overrun:
    raise ValueRefusal("decode", expected=f"at most {limit} positions", got=length)
  whole = _is_one_program(params, one_program)
  run = _decode_in_one_program if whole else _decode_by_layers
  # The cache is an argument of its own, because it alone is donated.
  newest, is_done = roomy.newest, roomy.is_done
  after, tokens = run(model, params, roomy.cache, newest, is_done, choice, steps)
  return dataclasses.replace(after, longest=roomy.longest + steps), tokens


def _step(
  model: CausalLM, params: Mapping[str, Any], state: Decoding, choice: Choice
) -> Decoding:
  """Generates one token of every sequence."""
  tokens = state.newest[:, None]
  hidden, cache = _run_cached_layers(model, params, state.cache, tokens)
  outside = _outside_layers(model, params)
  _, newest, is_done = _run_head(
    model, outside, hidden, None, cache.lengths, state.is_done, choice
  )
  return Decoding(cache, newest, is_done)


def _decode_by_layers(
  model: CausalLM,
  params: Mapping[str, Any],
  cache: Cache,
  newest: jax.Array,
  is_done: jax.Array,
  choice: Choice,
  steps: int,
) -> tuple[Decoding, jax.Array]:
  state, parts = Decoding(cache, newest, is_done), []
  for _ in range(steps):
    state = _step(model, params, state, choice)
    parts.append(state.newest)
  return state, jnp.stack(parts, axis=1)


# `jax.jit` and not `compilation.jit`: a step of decoding runs often enough to pay for
# XLA's trials of products.
@functools.partial(
  jax.jit,
  static_argnames=("model", "steps"),
  donate_argnames="cache",
  compiler_options=OPTIONS,
)
def _decode_in_one_program(
  model: CausalLM,
  params: Mapping[str, Any],
  cache: Cache,
  newest: jax.Array,
  is_done: jax.Array,
  choice: Choice,
  steps: int,
) -> tuple[Decoding, jax.Array]:
  """Runs the steps as a loop on the device.

  Layers stay arrays of their own: a scan over stacked layers would copy each layer's
  weights out of the stack before its kernels. The number of steps is known, because
  a loop that asked whether to go on would send each answer to the host.
  """

  def step(state: Decoding, _: None) -> tuple[Decoding, jax.Array]:
    state = _step(model, params, state, choice)
    return state, state.newest

  state, tokens = jax.lax.scan(
    step, Decoding(cache, newest, is_done), None, length=steps
  )
  return state, tokens.T


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
    ordered = jnp.sort(scores, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    # A token stays while the ones before it fall short, so the first always stays.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    smallest = jnp.where(before < top_p, ordered, jnp.inf).min(-1, keepdims=True)
    scores = jnp.where(scores < smallest, -jnp.inf, scores)
  return jax.random.categorical(key, scores, axis=-1).astype(jnp.int32)


@compilation.jit(static_argnames="model")
def _run_layer(
  model: CausalLM, layer_params: Mapping[str, Any], hidden: jax.Array
) -> jax.Array:
  return model.layer(layer_params, hidden)


@compilation.jit(static_argnames="model")
def _run_head(
  model: CausalLM,
  params: Mapping[str, Any],
  hidden: jax.Array,
  places: jax.Array | np.ndarray | None,
  lengths: jax.Array | np.ndarray,
  is_done: jax.Array | None,
  choice: Choice,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Scores and chooses the tokens behind sequences of `lengths`, int32 `[B]`.

  Their last hidden states are at `places` of `hidden`, int32 `[B]`; None where there
  are no others. Returns logits, float32 `[B, V]`, the tokens, int32 `[B]`, and which
  rows have ended.
  """
  if places is not None:
    # One position of each row goes through the head, the widest product of a model.
    at = jnp.asarray(places)[:, None, None]
    hidden = jnp.take_along_axis(hidden, at, axis=1, mode="clip")
  logits = model.logits(params, hidden)[:, 0]
  newest = choice.tokens(logits, jnp.max(jnp.asarray(lengths), initial=0))
  # Behind a prompt: nothing has ended before its first token.
  if is_done is None:
    return logits, newest, choice.is_end(newest)
  if choice.ends is not None:
    newest = jnp.where(is_done, choice.ends[0], newest)
  return logits, newest, is_done | choice.is_end(newest)


def _outside_layers(model: CausalLM, params: Mapping[str, Any]) -> dict[str, Any]:
  layers = {model.layer_name(index) for index in range(model.num_layers)}
  # `items()` would read every layer of params on disk.
  return {name: params[name] for name in params if name not in layers}


def next_logits(
  model: CausalLM,
  params: Mapping[str, Any],
  cache: Cache,
  tokens: jax.Array | np.ndarray,
  position: int | None = None,
) -> tuple[jax.Array, Cache]:
  """Runs the next tokens of cached sequences and scores the token after them.

  Tokens are int32 `[B, T]`. `position` is that of the token, among these, whose
  successor is scored: by default the last. The buffers of `cache` are donated. Returns
  float32 logits `[B, V]` and the updated cache. It is one program on a GPU; there is
  one for each shape of tokens and of the cache.
  """
  batch, length = tokens.shape
  last = length - 1 if position is None else position
  whole = _is_one_program(params)
  run = _next_in_one_program if whole else _next_by_layers
  places = np.full(batch, last, np.int32)
  return run(model, params, cache, jnp.asarray(tokens), places)


def _next_by_layers(
  model: CausalLM,
  params: Mapping[str, Any],
  cache: Cache,
  tokens: jax.Array,
  places: jax.Array | np.ndarray,
) -> tuple[jax.Array, Cache]:
  hidden, cache = _run_cached_layers(model, params, cache, tokens)
  outside = _outside_layers(model, params)
  head = _run_head(model, outside, hidden, places, cache.lengths, None, GREEDY)
  return head[0], cache


_next_in_one_program = jax.jit(
  _next_by_layers,
  static_argnames="model",
  donate_argnames="cache",
  compiler_options=OPTIONS,
)


def _run_cached_layers(
  model: CausalLM, params: Mapping[str, Any], cache: Cache, tokens: jax.Array
) -> tuple[jax.Array, Cache]:
  hidden = model.embed(params, tokens)
  updated = []
  for index, past in enumerate(cache.layers):
    # Inside a jitted function, equal layers are traced and lowered once.
    layer = params[model.layer_name(index)]
    hidden, new = _run_cached_layer(model, layer, past, hidden, cache.lengths)
    updated.append(new)
  return hidden, Cache(tuple(updated), cache.lengths + tokens.shape[1])


@compilation.jit(static_argnames="model", donate_argnames="cache")
def _run_cached_layer(
  model: CausalLM,
  layer_params: Mapping[str, Any],
  cache: dict[str, Any],
  hidden: jax.Array,
  start: jax.Array,
) -> tuple[jax.Array, dict[str, Any]]:
  return model.layer_with_cache(layer_params, cache, hidden, start)


def check_arguments(
  model: CausalLM,
  length: int,
  max_new_tokens: int,
  temperature: float,
  top_k: int | None,
  top_p: float | None,
  key: jax.Array | None,
  place: str = "generate",
) -> None:
  """Checks the arguments of `generate`, or of another function named by `place`.

  `length` is that of the longest prompt.

  Raises:
    ValueError: One is out of range.
  """
  total, limit = length + max_new_tokens, model.config.max_positions
  problems = (
    (max_new_tokens < 0, "max_new_tokens >= 0", max_new_tokens),
    (total > limit, f"at most {limit} positions", total),
    # So written, NaN is refused, too.
    (not temperature >= 0, "temperature >= 0", temperature),
    (top_k is not None and top_k < 1, "top_k >= 1", top_k),
    (top_p is not None and not 0 < top_p <= 1, "0 < top_p <= 1", top_p),
    (temperature > 0 and key is None, "a random key above temperature 0", "none"),
  )
  for is_present, expected, got in problems:
    if is_present:
      raise ValueRefusal(place, expected=expected, got=got)
