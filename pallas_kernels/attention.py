"""Attention of the newest few tokens over a cache: one pass over keys and values.

The reference is `mxjax.models.functional.cached_attention`, which dispatches to here.

One token leaves nothing to share but the cache, so the time is that of reading the
cache once. The query heads of a key-value head, and the new tokens, are the rows of one
tile; the positions that are seen are cut into chunks and shared evenly among programs.
A program keeps, for each row, the largest score so far, the sum of the weights
relative to it and the sum of weighted values. A second kernel brings the shares to one
maximum and divides.

The position of the first query is read on the device: chunks in the future or before
the window are not read, and a cache that is half empty takes half the time.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.pallas_kernels import lowering

_STEP = 32
"""Shares that the second kernel reads at once."""


@dataclasses.dataclass(frozen=True)
class Tile:
  """How the work is cut.

  Attributes:
    rows: Rows of queries, a power of two, at least the 16 of a matrix instruction.
    chunk: Positions in a step, likewise.
    splits: Programs that share the positions of one key-value head, a power of two.
    warps: Warps of a program.
    stages: Steps whose loads are in flight.
  """

  rows: int
  chunk: int
  splits: int
  warps: int = 4
  stages: int = 3

  @classmethod
  def of(cls, queries: jax.Array, keys: jax.Array) -> "Tile":
    """The tile for `[batch, new, heads, d]` over `[batch, positions, kv_heads, d]`."""
    batch, positions, kv_heads, head_dim = keys.shape
    count = queries.shape[1] * queries.shape[2] // kv_heads
    if keys.dtype == jnp.float32:
      # A product on FP32 units holds whole rows in registers: more would spill.
      chunk, warps = 16, 8
    else:
      chunk, warps = min(64, 8192 // head_dim), 4
    # Two programs for each of about 132 multiprocessors keep the memory busy.
    wanted = max(1, min(264 // (batch * kv_heads), -(-positions // chunk)))
    splits = 1 << (wanted.bit_length() - 1)
    return cls(max(16, 1 << (count - 1).bit_length()), chunk, splits, warps)


def obstacle(queries: jax.Array, keys: jax.Array, values: jax.Array) -> str | None:
  """Why the kernel cannot take these arguments, or None."""
  dtypes = {queries.dtype, keys.dtype, values.dtype}
  if len(dtypes) > 1 or queries.dtype not in (jnp.float32, jnp.bfloat16):
    names = ", ".join(str(a.dtype) for a in (queries, keys, values))
    return f"operands must all be float32 or all bfloat16, got {names}"
  if 0 in queries.shape or 0 in keys.shape:
    return f"there is nothing to do in shapes {queries.shape} and {keys.shape}"
  head_dim, kv_heads = keys.shape[-1], keys.shape[2]
  if head_dim not in (16, 32, 64, 128, 256):
    return f"head_dim must be a power of two from 16 to 256, got {head_dim}"
  count = queries.shape[1] * queries.shape[2] // kv_heads
  # More rows of float32 would spill registers.
  most = 32 if queries.dtype == jnp.float32 else 64
  if count > most:
    return (
      f"query heads of a key-value head times new tokens must be at most {most}, "
      f"got {count}"
    )
  return None


def _share_kernel(
  start_ref: Any,
  queries_ref: Any,
  keys_ref: Any,
  values_ref: Any,
  sums_ref: Any,
  tops_ref: Any,
  totals_ref: Any,
  *,
  tile: Tile,
  positions: int,
  window: int | None,
) -> None:
  new, group, head_dim = queries_ref.shape
  dtype = values_ref.dtype
  dot = lowering.dot_float32 if dtype == jnp.float32 else lowering.dot_bfloat16
  row = lax.iota(jnp.int32, tile.rows)
  # Rows beyond the last repeat some of the others, and are not stored.
  token = jnp.minimum(row // group, new - 1)
  queries = queries_ref[token, row % group]
  start = start_ref[0]
  newest_seen = (start + token)[:, None]
  # Positions that some query sees: from the first to the one before `stop`.
  first = 0 if window is None else jnp.maximum(start - window + 1, 0)
  stop = jnp.minimum(start + new, positions)
  first_chunk = first // tile.chunk
  chunks = (stop + tile.chunk - 1) // tile.chunk - first_chunk

  def bound(split: jax.Array) -> jax.Array:
    return first_chunk + split * chunks // tile.splits

  def add(
    step: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    sums, top, total = carry
    here = lowering.columns(step * tile.chunk, tile.chunk)
    position = step * tile.chunk + lax.iota(jnp.int32, tile.chunk)
    # Zeros stand for values that no query sees: not even a NaN there times zero.
    exists = (position >= first) & (position < stop)
    keys, values = (
      lowering.load(r.at[here, :], exists) for r in (keys_ref, values_ref)
    )
    scores = dot(queries, keys, transpose_b=True)
    is_seen = exists[None, :] & (position[None, :] <= newest_seen)
    if window is not None:
      is_seen &= position[None, :] > newest_seen - window
    scores = jnp.where(is_seen, scores, -jnp.inf)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    # Infinity less infinity would be NaN in a row that has seen no key yet.
    origin = jnp.where(higher == -jnp.inf, 0.0, higher)
    weights = jnp.exp((scores - origin[:, None]) * head_dim**-0.5)
    kept = jnp.exp((top - origin) * head_dim**-0.5)
    sums = kept[:, None] * sums + dot(weights.astype(dtype), values)
    return sums, higher, kept * total + jnp.sum(weights, axis=1)

  empty = (
    jnp.zeros((tile.rows, head_dim), jnp.float32),
    jnp.full((tile.rows,), -jnp.inf, jnp.float32),
    jnp.zeros((tile.rows,), jnp.float32),
  )
  split = lowering.program_id(2)
  found = lax.fori_loop(bound(split), bound(split + 1), add, empty)
  mask = row < new * group
  for ref, value in zip((sums_ref, tops_ref, totals_ref), found, strict=True):
    lowering.store(ref, value, mask)


def _combine_kernel(
  sums_ref: Any, tops_ref: Any, totals_ref: Any, out_ref: Any
) -> None:
  splits, head_dim = sums_ref.shape
  top = jnp.max(tops_ref[...], axis=0)
  size = min(splits, _STEP)

  def add(
    step: jax.Array, carry: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    sums, total = carry
    here = lowering.columns(step * size, size)
    # A share without a seen key has the top -infinity, and so the weight zero.
    weights = jnp.exp((tops_ref[here] - top) * head_dim**-0.5)
    sums += jnp.sum(weights[:, None] * sums_ref[here, :], axis=0)
    return sums, total + jnp.sum(weights * totals_ref[here], axis=0)

  empty = jnp.zeros((head_dim,), jnp.float32), jnp.zeros((), jnp.float32)
  sums, total = lax.fori_loop(0, splits // size, add, empty)
  out_ref[...] = (sums / total).astype(out_ref.dtype)


def launch(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  start: jax.Array,
  *,
  window: int | None = None,
  tile: Tile | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Runs both kernels; arguments that `obstacle` has nothing against.

  Args:
    queries: `[batch, new, heads, head_dim]`, rotated, at positions from `start`,
      float32 or bfloat16.
    keys: `[batch, positions, kv_heads, head_dim]`, the new ones already in place, same
      dtype; what lies behind the newest token or before all windows is not read.
    values: Same shape and dtype.
    start: Position of the first query, int32.
    window: Newest keys that a query sees, itself included; None for all.
    tile: How the work is cut.
    interpret: Whether to run without a GPU.

  Returns:
    Outputs, `[batch, new, heads * head_dim]`, in the dtype of `values`.
  """
  batch, new, heads, head_dim = queries.shape
  positions, kv_heads = keys.shape[1:3]
  group = heads // kv_heads
  tile = Tile.of(queries, keys) if tile is None else tile
  spec, array = lowering.BlockSpec, jax.ShapeDtypeStruct
  # The block covers whole chunks; what is beyond the positions is masked.
  covered = -(-positions // tile.chunk) * tile.chunk
  past = spec((None, covered, None, head_dim), lambda b, k, s: (b, 0, k, 0))
  row = spec((None, None, None, tile.rows), lambda b, k, s: (s, b, k, 0))
  rows = tile.splits, batch, kv_heads, new * group
  shares = lowering.launch(
    functools.partial(_share_kernel, tile=tile, positions=positions, window=window),
    jnp.asarray(start, jnp.int32).reshape(1),
    queries.reshape(batch, new, kv_heads, group, head_dim),
    keys,
    values,
    name="cached_attention",
    grid=(batch, kv_heads, tile.splits),
    in_specs=[
      spec((1,), lambda b, k, s: (0,)),
      spec((None, new, None, group, head_dim), lambda b, k, s: (b, 0, k, 0, 0)),
      past,
      past,
    ],
    out_specs=[
      spec((None, None, None, tile.rows, head_dim), lambda b, k, s: (s, b, k, 0, 0)),
      row,
      row,
    ],
    out_shape=[
      array((*rows, head_dim), jnp.float32),
      array(rows, jnp.float32),
      array(rows, jnp.float32),
    ],
    warps=tile.warps,
    stages=tile.stages,
    interpret=interpret,
  )
  one = spec((tile.splits, None, None, None), lambda b, k, i: (0, b, k, i))
  out = lowering.launch(
    _combine_kernel,
    *shares,
    name="combine_attention",
    grid=(batch, kv_heads, new * group),
    in_specs=[
      spec((tile.splits, None, None, None, head_dim), lambda b, k, i: (0, b, k, i, 0)),
      one,
      one,
    ],
    out_specs=spec(
      (None, None, None, None, head_dim),
      lambda b, k, i: (b, i // group, k, i % group, 0),
    ),
    out_shape=array((batch, new, kv_heads, group, head_dim), values.dtype),
    warps=4,
    interpret=interpret,
  )
  return out.reshape(batch, new, heads * head_dim)
