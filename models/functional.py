"""Rotary embedding and attention as plain functions, independent of flax.

Sums and softmax run in float32 whatever the dtype of the operands; products run at full
precision. In bfloat16, results are rounded where transformers rounds them.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.errors import ValueRefusal
from mxjax.models import softmax_attention
from mxjax.models.config import RopeScaling
from mxjax.numerics import e4m3, implementations
from mxjax.numerics.e4m3 import ScaledE4M3
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.precision import rounded
from mxjax.pallas_kernels import lowering
from mxjax.pallas_kernels.attention import cached_attention as attention
from mxjax.pallas_kernels.attention import prefill
from mxjax.pallas_kernels.attention.shares import Attended

QUERY_CHUNK = 256
"""Queries per chunk: bounds the score array to `QUERY_CHUNK * length`."""
TREE_CHUNK = 64
"""Queries per chunk on a CPU where sequences branch, whose rows are short. Elsewhere
they have `QUERY_CHUNK`: XLA:GPU tries many programs for each product of each chunk."""


def inverse_frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> np.ndarray:
  """Computes the rotary frequencies of heads of `head_dim` coordinates.

  Returns radians per token, float32 `[head_dim / 2]`, equal to those of transformers: a
  geometric series with base `theta`, optionally with Llama-3 scaling.
  """
  # In float32 throughout, as transformers computes them: float64 would give other last
  # bits.
  exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
  frequencies = np.float32(1.0) / np.float32(theta) ** exponents
  if scaling is None:
    return frequencies
  original = scaling.original_max_position
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  wavelengths = 2 * math.pi / frequencies
  # `low_freq_factor` bounds the long wavelengths, because a low frequency is a long
  # wave.
  is_long, is_short = wavelengths > original / low, wavelengths < original / high
  stretched = frequencies / scaling.factor
  blend = (original / wavelengths - low) / (high - low)
  blended = (1 - blend) * stretched + blend * frequencies
  scaled = np.where(is_long, stretched, np.where(is_short, frequencies, blended))
  return scaled.astype(np.float32)


def _rotations(
  frequencies: np.ndarray, length: int, start: int | jax.Array
) -> tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]:
  """Returns cosines and sines at `length` positions, float32 `[half, length]`.

  Where each sequence has its own, they are `[batch, 1, half, length]`.
  """
  if isinstance(start, int):
    # Constants: XLA:CPU would recompute them for every head inside the loop.
    positions = np.arange(start, start + length, dtype=np.float32)
    angles = frequencies[:, None] * positions[None, :]
    return np.cos(angles), np.sin(angles)
  # Positions of a tree are below `length`, so that one table has them all.
  if start.ndim == 2:
    tables = _rotations(frequencies, length, 0)
    looked_up = (jnp.asarray(table).T[start] for table in tables)
    cos, sin = (a.transpose(0, 2, 1)[:, None] for a in looked_up)
    return cos, sin
  place = jnp.arange(length, dtype=jnp.int32)[None, None, None]
  positions = (start.reshape(-1, 1, 1, 1) + place).astype(jnp.float32)
  angles = jnp.asarray(frequencies)[None, None, :, None] * positions
  return jnp.cos(angles), jnp.sin(angles)


def rotary(
  x: jax.Array, frequencies: np.ndarray, start: int | jax.Array = 0
) -> jax.Array:
  """Rotates each head by angles proportional to the position.

  Coordinate i is paired with i + head_dim/2, the layout of Hugging Face checkpoints.
  `x` is `[batch, length, heads, head_dim]`, as is the result; `frequencies` are float32
  `[head_dim / 2]` in radians per token. Positions count from `start`, an int or int32,
  one for all or `[batch]`; or are `start` where that is `[batch, length]`, each below
  `length`.
  """
  # In the compute dtype, in which transformers multiplies by them, too.
  tables = (a.astype(x.dtype) for a in _rotations(frequencies, x.shape[1], start))
  cos, sin = (rounded(jnp.asarray(a if a.ndim == 4 else a[None, None])) for a in tables)
  first, second = jnp.split(_positions_last(x), 2, axis=2)
  product = lambda left, right: rounded(left * right)
  turned = [
    rounded(product(first, cos) - product(second, sin)),
    rounded(product(second, cos) + product(first, sin)),
  ]
  return jnp.concatenate(turned, axis=2).transpose(0, 3, 1, 2)


def _positions_last(x: jax.Array) -> jax.Array:
  """Moves positions last: `[batch, heads, head_dim, length]`.

  Linears produce and consume this layout, so XLA inserts no transposes.
  """
  return x.transpose(0, 2, 3, 1)


def _by_group(
  queries: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Moves positions last and groups query heads by their key-value head."""
  queries, keys, values = (_positions_last(a) for a in (queries, keys, values))
  batch, heads, head_dim, length = queries.shape
  kv_heads = keys.shape[1]
  # Query heads that share a key-value head are neighbours.
  shape = batch, kv_heads, heads // kv_heads, head_dim, length
  return queries.reshape(shape), keys, values


def _by_position(chunks: list[jax.Array]) -> jax.Array:
  """Joins output chunks `[b, k, g, t, d]` into `[batch, length, features]`."""
  # `[b, k, g, t, d]` to `[b, k, g, d, t]`: heads and coordinates merge to features.
  features = jnp.concatenate(chunks, axis=3).transpose(0, 1, 2, 4, 3)
  batch, *sizes, length = features.shape
  return features.reshape(batch, math.prod(sizes), length).transpose(0, 2, 1)


class Tree(NamedTuple):
  """Rows of tokens that branch: sequences behind a prefix that they share.

  The tokens of a row are the nodes of trees in depth-first order. A token attends to
  itself and its ancestors, so it is computed as in a sequence of them alone, up to the
  order of sums.

  Attributes:
    positions: Ancestors of each token, int32 `[batch, length]`.
    ends: Index behind the last descendant of each token, int32 `[batch, length]`.
  """

  positions: jax.Array | np.ndarray
  ends: jax.Array | np.ndarray


def causal_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  *,
  window: int | None = None,
  tree: Tree | None = None,
  query_chunk: int | None = None,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Computes causal grouped-query softmax attention.

  Each chunk of queries reads only the keys from the start of its first query's window
  to its own end: the `length x length` scores never exist at once, and nearly half of
  the products are saved, more with a window. On a GPU `prefill` keeps them out of
  memory altogether; where a gradient is taken, the reference runs forward and backward.

  Args:
    queries: `[batch, length, heads, head_dim]`, rotated.
    keys: `[batch, length, kv_heads, head_dim]`, rotated; query head h reads key-value
      head `h // (heads / kv_heads)`.
    values: Same shape as `keys`.
    window: Tokens that a query attends to, itself included; None for the whole past.
    tree: Where sequences branch; None if each row is one sequence.
    query_chunk: Queries per chunk, by default `TREE_CHUNK` in a tree on a CPU and
      `QUERY_CHUNK` elsewhere; does not affect the result.
    implementation: See `implementations.choose`; `prefill.obstacle` has the rule.

  Returns:
    Outputs, `[batch, length, heads * head_dim]`, in the dtype of `values`.

  Raises:
    NotImplementedError: A kernel was requested and cannot run.
  """
  chosen = _choose(queries, keys, values, tree, implementation)
  if chosen != "xla":
    keywords: Any = {"window": window, "interpret": chosen == "interpret"}
    kernel = functools.partial(prefill.launch, **keywords)
    reference = functools.partial(causal_attention, window=window, implementation="xla")
    # A kernel has no gradient; the reference has one.
    return lowering.with_reference(kernel, reference, queries, keys, values)
  length = queries.shape[1]
  is_short = tree is not None and implementations.target_platform() == "cpu"
  query_chunk = query_chunk or (TREE_CHUNK if is_short else QUERY_CHUNK)
  grouped = _by_group(queries, keys, values)
  chunks = _chunks(length, query_chunk, window, tree)
  return _by_position(softmax_attention.attend_chunks(*grouped, chunks))


def _chunks(
  length: int, query_chunk: int, window: int | None, tree: Tree | None
) -> list[softmax_attention.Chunk]:
  """Cuts queries into chunks, and their keys into those with a mask and the rest."""
  chunks = []
  for start in range(0, length, query_chunk):
    stop = min(start + query_chunk, length)
    # In a tree, ancestors in the window may lie far back in the row.
    first = 0 if window is None or tree else max(0, start - window + 1)
    positions = np.arange(start, stop)[:, None]
    # Only the chunk's own keys can lie in its future; earlier keys need no mask.
    past, own = np.arange(first, start)[None, :], np.arange(start, stop)[None, :]
    masks = [None, own <= positions]
    if tree is not None:
      masks = [_is_ancestor(tree, window, positions, keys) for keys in (past, own)]
    elif window is not None:
      masks = [past > positions - window, masks[1] & (own > positions - window)]
    spans = [
      softmax_attention.Span(low, high, mask)
      for low, high, mask in ((first, start, masks[0]), (start, stop, masks[1]))
      if high > low
    ]
    chunks.append(softmax_attention.Chunk(start, stop, spans))
  return chunks


def _choose(
  queries: Any,
  keys: Any,
  values: Any,
  tree: Tree | None = None,
  implementation: Implementation | None = None,
) -> Implementation:
  obstacle = prefill.obstacle(queries, keys, values)
  if tree is not None:
    obstacle = "sequences branch"
  return implementations.choose("causal_attention", implementation, pallas=obstacle)


def attention_chosen(dtype: str, head_dim: int) -> dict[str, str]:
  """Names what computes attention on this machine, for a model's record.

  Returns:
    `sequences`: `xla`, or `pallas` for the kernel of whole sequences; `branching`:
    `xla`, always, where sequences branch or a gradient is taken.
  """
  like = jax.ShapeDtypeStruct((1, 1, 1, head_dim), dtype)
  return {"sequences": _choose(like, like, like), "branching": "xla"}


def _is_ancestor(
  tree: Tree, window: int | None, queries: np.ndarray, keys: np.ndarray
) -> jax.Array:
  """Masks keys `[1, s]` of queries `[t, 1]`, indices in a row: `[b, 1, 1, t, s]`."""
  ends, depths = jnp.asarray(tree.ends), jnp.asarray(tree.positions)
  rows, columns = jnp.asarray(queries)[None], jnp.asarray(keys)[None]
  # In depth-first order, a key is an ancestor if the query lies between it and the end
  # of its descendants.
  is_seen = (columns <= rows) & (rows < ends[:, keys])
  if window is not None:
    is_seen &= depths[:, queries] - depths[:, keys] < window
  return jnp.expand_dims(is_seen, (1, 2))


CacheFormat = Literal["compute", "e4m3"]
"""What a key-value cache holds: the compute dtype, or `numerics.e4m3` vectors, one for
each head and token, in half of bfloat16's bytes and one for the scale."""
Kept = jax.Array | ScaledE4M3
"""Keys or values in a cache: `[batch, positions, kv_heads, head_dim]`."""
KeysAndValues = tuple[Kept, Kept]
"""A layer's cache."""


def _written(kept: Kept, new: Kept, start: jax.Array | int) -> Kept:
  """Writes new tokens into a cache behind the first `start`, int32 `[batch]` or 0."""

  def write(whole: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    place = start, *[start * 0] * (whole.ndim - 1)
    return jax.lax.dynamic_update_slice(whole, part, place)

  if isinstance(start, int):
    return jax.tree.map(lambda whole, part: write(whole, part, 0), kept, new)
  # Unsigned start indices: for signed ones JAX launches a kernel to wrap negatives.
  starts = start.astype(jnp.uint32)
  each: Any = jax.vmap(write)
  return jax.tree.map(lambda whole, part: each(whole, part, starts), kept, new)


def cached_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  past: KeysAndValues,
  start: jax.Array | int,
  *,
  window: int | None = None,
  query_chunk: int = QUERY_CHUNK,
  implementation: Implementation | None = None,
) -> tuple[jax.Array | Attended, KeysAndValues]:
  """Computes grouped-query softmax attention of new tokens with a key-value cache.

  With an E4M3 cache, every query reads rounded keys and values, its own token's too:
  outputs do not depend on which tokens came together, up to the order of sums.

  Args:
    queries: `[batch, new, heads, head_dim]`, rotated, at the positions from `start`.
    keys: Keys of the same tokens, `[batch, new, kv_heads, head_dim]`, rotated.
    values: Values of the same tokens, same shape as `keys`.
    past: The cache, with room for the new tokens. What is from `start` on must be
      finite, and has no influence.
    start: Position of the first query, int32, of each sequence, `[batch]`, or one of
      all; or the int 0 of an empty cache, where the outputs are those of
      `causal_attention` of what is kept, bit for bit.
    window: Newest keys that a query attends to, itself included; None for all.
    query_chunk: Queries per chunk; does not affect the result.
    implementation: See `implementations.choose`; there is a kernel for a few new tokens
      and, in bfloat16, one for many.

  Returns:
    Outputs, `[batch, new, heads * head_dim]`, in the dtype of `values` (with a kernel,
    deferred until a linear consumes them), and the cache with the new tokens added.

  Raises:
    NotImplementedError: A kernel was requested and cannot run.
    ValueError: `start` is another int than 0.
  """
  kept: KeysAndValues
  if isinstance(past[0], ScaledE4M3):
    dtype = values.dtype
    kept = e4m3.encode(keys), e4m3.encode(values)
    read = kept[0].decode(dtype), kept[1].decode(dtype)
  else:
    dtype = past[0].dtype
    read = kept = keys, values = keys.astype(dtype), values.astype(dtype)
  if isinstance(start, int):
    if start:
      raise ValueRefusal(
        "cached_attention",
        expected="the int 0 of an empty cache, or an int32 array",
        got=start,
      )
    outputs = causal_attention(
      queries,
      *read,
      window=window,
      query_chunk=query_chunk,
      implementation=implementation,
    )
    return outputs, (_written(past[0], kept[0], 0), _written(past[1], kept[1], 0))
  start = jnp.broadcast_to(start, queries.shape[:1])
  obstacle = attention.obstacle(queries, keys, values, past)
  # Many tokens, such as a prompt, take the kernel of whole sequences.
  many = obstacle is not None and prefill.obstacle(queries, keys, values) is None
  obstacle = None if many else obstacle
  lowered = implementations.choose("cached_attention", implementation, pallas=obstacle)
  keywords: Any = {"window": window, "interpret": lowered == "interpret"}
  if lowered != "xla" and not many:
    return attention.launch(queries, (keys, values), past, start, **keywords)
  filled = _written(past[0], kept[0], start), _written(past[1], kept[1], start)
  keys, values = (a.decode(dtype) if isinstance(a, ScaledE4M3) else a for a in filled)
  if lowered != "xla":
    return prefill.launch(queries, keys, values, start, **keywords), filled
  new, before = queries.shape[1], np.arange(keys.shape[1], dtype=np.int32)
  grouped = _by_group(queries, keys, values)
  chunks = []
  # In chunks, so that the scores of many new tokens never exist at once.
  for first in range(0, new, query_chunk):
    stop = min(first + query_chunk, new)
    own = np.arange(first, stop, dtype=np.int32)
    positions = start.reshape(-1, 1, 1, 1, 1) + own[None, None, None, :, None]
    behind = positions - before[None, None, None, None]
    # This hides what is behind the filled positions as well: it lies in the future of
    # every query.
    is_seen = behind >= 0
    if window is not None:
      is_seen &= behind < window
    parts = [(*grouped[1:], is_seen)]
    chunks.append(softmax_attention.attend(grouped[0][..., first:stop], parts))
  return _by_position(chunks), filled
