"""Attention of the newest few tokens, in one pass over cached keys and values.

The reference, `mxjax.models.functional.cached_attention`, dispatches to this kernel.

The query heads of a key-value head and the new tokens form the rows of one tile; the
visible positions are divided into chunks and shared evenly among programs, and
`shares.py` combines what they write. The first program of a key-value head starts with
the new tokens' own keys and values and writes them into the cache, where no other
program reads. The device reads the position of the first query: chunks in the future or
before the window are skipped, so a half-empty cache takes half the time.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.pallas_kernels import lowering
from mxjax.pallas_kernels.attention.running import Running
from mxjax.pallas_kernels.attention.shares import Attended


@dataclasses.dataclass(frozen=True)
class Tile:
  """Rows of queries, new tokens and positions per step, and launch parameters.

  The first three are powers of two, at least the 16 of a matrix instruction. `splits`,
  a power of two, programs share the positions of one key-value head; `stages` steps
  have their loads in flight.
  """

  rows: int
  new: int
  chunk: int
  splits: int
  warps: int = 4
  stages: int = 3

  @classmethod
  def of(cls, queries: jax.Array, keys: jax.Array) -> "Tile":
    """Returns the tile for queries `[b, new, heads, d]` and the keys of a cache."""
    batch, positions, kv_heads, head_dim = keys.shape
    new, heads = queries.shape[1:3]
    at_least_16 = lambda n: max(16, 1 << (n - 1).bit_length())
    if keys.dtype == jnp.float32:
      # FP32 units hold whole rows of a product in registers; more rows would spill.
      chunk, warps = 16, 8
    else:
      chunk, warps = min(64, 8192 // head_dim), 4
    # Two programs for each multiprocessor keep the memory busy.
    programs = 2 * lowering.multiprocessors() // (batch * kv_heads)
    wanted = max(1, min(programs, -(-positions // chunk)))
    splits = 1 << (wanted.bit_length() - 1)
    rows = at_least_16(new * heads // kv_heads)
    return cls(rows, at_least_16(new), chunk, splits, warps)


def obstacle(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  past: tuple[jax.Array, jax.Array],
) -> str | None:
  """Returns why the kernel cannot take these arguments, or None."""
  dtypes = [a.dtype for a in (queries, keys, values, *past)]
  if len(set(dtypes)) > 1 or queries.dtype not in (jnp.float32, jnp.bfloat16):
    names = ", ".join(map(str, dtypes))
    return f"operands must all be float32 or all bfloat16, got {names}"
  if 0 in queries.shape or 0 in past[0].shape:
    return f"there is nothing to do in shapes {queries.shape} and {past[0].shape}"
  head_dim, kv_heads = keys.shape[-1], keys.shape[2]
  if head_dim not in (16, 32, 64, 128, 256):
    return f"head_dim must be a power of two from 16 to 256, got {head_dim}"
  count = queries.shape[1] * queries.shape[2] // kv_heads
  # More float32 rows would spill registers.
  most = 32 if queries.dtype == jnp.float32 else 64
  what = "query heads of a key-value head times new tokens"
  if count > most:
    return f"{what} must be at most {most}, got {count}"
  return None


def _kernel(
  start_ref: Any,
  queries_ref: Any,
  new_refs: tuple[Any, Any],
  past_refs: tuple[Any, Any],
  sums_ref: Any,
  tops_ref: Any,
  totals_ref: Any,
  *filled_refs: Any,
  tile: Tile,
  positions: int,
  window: int | None,
  interpret: bool,
) -> None:
  new, group, head_dim = queries_ref.shape
  row = lax.iota(jnp.int32, tile.rows)
  # Padding rows repeat other rows and are not stored.
  token = jnp.minimum(row // group, new - 1)
  queries = queries_ref[token, row % group]
  start, split = start_ref[0], lowering.program_id(2)
  newest_seen = (start + token)[:, None]
  # Past positions that at least one query sees.
  first = 0 if window is None else jnp.maximum(start - window + 1, 0)
  first_chunk = first // tile.chunk
  chunks = (start + tile.chunk - 1) // tile.chunk - first_chunk

  bound = lambda split: first_chunk + split * chunks // tile.splits

  def seen(position: jax.Array, exists: jax.Array) -> jax.Array:
    is_seen = exists[None, :] & (position[None, :] <= newest_seen)
    if window is not None:
      is_seen &= position[None, :] > newest_seen - window
    return is_seen

  def add(step: jax.Array, running: Running) -> Running:
    here = lowering.columns(step * tile.chunk, tile.chunk)
    position = step * tile.chunk + lax.iota(jnp.int32, tile.chunk)
    # Zero-fill values that no query sees, because even zero times NaN is NaN.
    exists = (position >= first) & (position < start)
    keys, values = (lowering.load(ref.at[here, :], exists) for ref in past_refs)
    is_seen = seen(position, exists)
    return running.with_keys(queries, keys, values, is_seen, interpret=interpret)

  place = lax.iota(jnp.int32, tile.new)
  exists = (place < new) & (split == 0)
  # Padding tokens repeat the last one; they are neither seen nor stored.
  newest = [ref[jnp.minimum(place, new - 1)] for ref in new_refs]
  here = lowering.columns(start, tile.new)
  for ref, values in zip(filled_refs, newest, strict=True):
    lowering.store(ref.at[here, :], values, exists & (start + place < positions))
  running = Running.none(tile.rows, head_dim)
  is_seen = seen(start + place, exists)
  running = running.with_keys(queries, *newest, is_seen, interpret=interpret)
  running = lax.fori_loop(bound(split), bound(split + 1), add, running)
  for ref, value in zip((sums_ref, tops_ref, totals_ref), running, strict=True):
    lowering.store(ref, value, row < new * group)


def launch(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  past: tuple[jax.Array, jax.Array],
  start: jax.Array,
  *,
  window: int | None = None,
  tile: Tile | None = None,
  interpret: bool = False,
) -> tuple[Attended, tuple[jax.Array, jax.Array]]:
  """Runs the kernel on arguments for which `obstacle` returns None.

  `queries` is `[batch, new, heads, head_dim]`, at positions from `start`, int32, on;
  `keys` and `values` are `[batch, new, kv_heads, head_dim]`; queries and keys are
  rotated. `past` is the cache's keys and values, `[batch, positions, kv_heads,
  head_dim]`; positions from `start` on or before all windows are not read. All are
  float32 or bfloat16. A query sees the `window` newest keys, including its own; None
  for all.

  Returns outputs, `[batch, new, heads * head_dim]`, in the dtype of `values`, and the
  cache with the new keys and values, in the same memory if it may be overwritten.
  """
  tile = Tile.of(queries, past[0]) if tile is None else tile
  # One array, because XLA writes it in one launch.
  newest = jnp.concatenate([queries, keys, values], axis=2)
  sizes = {"positions": past[0].shape[1], "window": window}
  *shares, filled_keys, filled_values = lowering.launch(
    functools.partial(_kernel, tile=tile, interpret=interpret, **sizes),
    jnp.asarray(start, jnp.int32).reshape(1),
    newest,
    (newest, newest),
    past,
    name="cached_attention",
    grid=(queries.shape[0], keys.shape[2], tile.splits),
    **_specs(queries, past, tile),
    in_place={4: 3, 5: 4},
    warps=tile.warps,
    stages=tile.stages,
    interpret=interpret,
  )
  scale, leading = queries.shape[-1] ** -0.5, queries.shape[:2]
  outputs = Attended(*shares, scale, leading, values.dtype, interpret)
  return outputs, (filled_keys, filled_values)


def _specs(
  queries: jax.Array, past: tuple[jax.Array, jax.Array], tile: Tile
) -> dict[str, Any]:
  """Returns block specs of the kernel's operands and results, and the results' shapes.

  Results are sums, tops, totals and the filled cache.
  """
  batch, new, heads, head_dim = queries.shape
  positions, kv_heads = past[0].shape[1:3]
  spec, array = lowering.BlockSpec, jax.ShapeDtypeStruct
  # The blocks cover whole chunks, plus room for a whole tile of new tokens at any
  # position; accesses beyond the positions are masked.
  covered = -(-positions // tile.chunk) * tile.chunk + tile.new
  cache = spec((None, covered, None, head_dim), lambda b, k, s: (b, 0, k, 0))
  token = None, new, None, head_dim
  newest = tuple(
    spec(token, lambda b, k, s, first=first: (b, 0, first + k, 0))
    for first in (heads, heads + kv_heads)
  )
  group = spec((None, new, heads // kv_heads, head_dim), lambda b, k, s: (b, 0, k, 0))
  row = spec((None, None, None, tile.rows), lambda b, k, s: (s, b, k, 0))
  sums = spec((None, None, None, tile.rows, head_dim), lambda b, k, s: (s, b, k, 0, 0))
  start = spec((1,), lambda b, k, s: (0,))
  rows = tile.splits, batch, kv_heads, new * heads // kv_heads
  shares = [array(shape, jnp.float32) for shape in ((*rows, head_dim), rows, rows)]
  return {
    "in_specs": [start, group, newest, (cache, cache)],
    "out_specs": [sums, row, row, cache, cache],
    "out_shape": [*shares, *(array(a.shape, a.dtype) for a in past)],
  }
