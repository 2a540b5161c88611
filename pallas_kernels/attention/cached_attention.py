"""Attention of the newest few tokens, in one pass over cached keys and values.

The reference, `mxjax.models.functional.cached_attention`, dispatches to this kernel.

The query heads of a key-value head and the new tokens form the rows of one tile; the
visible positions are divided into chunks and shared evenly among programs, and
`shares.py` combines what they write. The first program of a key-value head starts with
the new tokens' own keys and values and writes them into the cache, where no other
program reads. The device reads the position of the first query of each sequence: chunks
in the future or before the window are skipped, so a half-empty cache takes half the
time, and sequences may have any lengths.

Keys and values in E4M3 stay codes until they are in registers. Their scales are powers
of two, so a score takes the key's and a weight the value's, and each element takes two
shifts, a mask and a product in pairs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import e4m3, float_bits
from mxjax.numerics.e4m3 import ScaledE4M3
from mxjax.pallas_kernels import lowering
from mxjax.pallas_kernels.attention.running import Running
from mxjax.pallas_kernels.attention.shares import Attended

Kept = jax.Array | ScaledE4M3
"""Keys or values: `[batch, tokens, kv_heads, head_dim]`."""

# As bfloat16, 0x7B80 is 2^120 and 0x8000 is -0. The exponent's lowest bit is bit 3 of a
# code and bit 7 of a bfloat16, hence the shift by 4.
E4M3_PTX = """{
  .reg .b32 sign, size, power, zero;
  shl.b32 sign, $1, 8;
  and.b32 sign, sign, 0x80008000;
  shl.b32 size, $1, 4;
  and.b32 size, size, 0x07F007F0;
  or.b32 size, size, sign;
  mov.b32 power, 0x7B807B80;
  mov.b32 zero, 0x80008000;
  fma.rn.bf16x2 $0, size, power, zero;
}"""
"""From two E4M3 codes, the lower bytes of 16-bit halves, to bfloat16 values.

As bfloat16, the shifted bits are the value times 2^-120, subnormal ones included; 480
stands for NaN. `pallas_kernels.pairs` says why -0 is added."""


def e4m3_values(codes: jax.Array) -> jax.Array:
  """Returns the values of uint8 E4M3 codes, float32 of the same shape.

  480 stands for NaN. No float32 is subnormal meanwhile, which a backend might flush.
  """
  code = codes.astype(jnp.int32)
  size = code & 0x7F
  # The shift takes bit 3, the exponent's lowest, to bit 23; the biases 127 and 7 differ
  # by 120. Below 8 the exponent's field is zero: multiples of 2^-9.
  normal = lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
  values = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
  return jnp.where(code >= 0x80, -values, values)


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
  def of(cls, queries: jax.Array, keys: Kept) -> "Tile":
    """Returns the tile for queries `[b, new, heads, d]` and the keys of a cache."""
    batch, positions, kv_heads, head_dim = keys.shape
    new, heads = queries.shape[1:3]
    at_least_16 = lambda n: max(16, 1 << (n - 1).bit_length())
    if queries.dtype == jnp.float32:
      # FP32 units hold whole rows of a product in registers; more rows would spill.
      chunk, warps = 16, 8
    else:
      chunk, warps = min(64, 8192 // head_dim), 4
    # Two programs for each multiprocessor keep the memory busy.
    programs = 2 * lowering.multiprocessors() // (batch * kv_heads)
    wanted = max(1, min(programs, -(-positions // chunk)))
    # Down to a power of two, as arrays of Triton have to be; see `shares.combine`.
    splits = 1 << (wanted.bit_length() - 1)
    rows = at_least_16(new * heads // kv_heads)
    return cls(rows, at_least_16(new), chunk, splits, warps)


def obstacle(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  past: tuple[Kept, Kept],
) -> str | None:
  """Returns why the kernel cannot take these arguments, or None.

  `keys` and `values` are in the compute dtype, whatever `past` holds.
  """
  held = [a for a in past if not isinstance(a, ScaledE4M3)]
  dtypes = [a.dtype for a in (queries, keys, values, *held)]
  if len(set(dtypes)) > 1 or queries.dtype not in (jnp.float32, jnp.bfloat16):
    names = ", ".join(map(str, dtypes))
    return f"operands must all be float32 or all bfloat16, got {names}"
  if 0 in queries.shape or 0 in past[0].shape:
    return f"there is nothing to do in shapes {queries.shape} and {past[0].shape}"
  head_dim, kv_heads = keys.shape[-1], keys.shape[2]
  # Arrays in registers have powers of two for sizes, and a matrix instruction takes 16
  # columns at least.
  if head_dim not in (16, 32, 64, 128, 256):
    return f"head_dim must be a power of two from 16 to 256, got {head_dim}"
  count = queries.shape[1] * queries.shape[2] // kv_heads
  # More float32 rows would spill registers.
  most = 32 if queries.dtype == jnp.float32 else 64
  what = "query heads of a key-value head times new tokens"
  if count > most:
    return f"{what} must be at most {most}, got {count}"
  return lowering.unaddressed(*jax.tree.leaves(past))


def _values_and_factors(
  kept: Kept, dtype: jnp.dtype, *, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
  """Returns keys or values `[s, head_dim]` before their factors `[s]`, None ones."""
  if not isinstance(kept, ScaledE4M3):
    return kept, None
  factors = float_bits.power_of_two(kept.scales.astype(jnp.int32) - 127)
  if dtype == jnp.float32:
    return e4m3_values(kept.codes), factors
  meaning = lambda codes: e4m3_values(codes).astype(dtype)
  # `by_ptx` takes operands as wide as the result, and so two codes a register.
  halves = kept.codes.astype(jnp.uint16)
  return lowering.by_ptx(E4M3_PTX, meaning, halves, interpret=interpret), factors


def _kernel(
  start_ref: Any,
  queries_ref: Any,
  new_refs: tuple[Any, Any],
  past_refs: tuple[Any, Any],
  sums_ref: Any,
  tops_ref: Any,
  totals_ref: Any,
  filled_refs: tuple[Any, Any],
  *,
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

  # Shares of whole chunks that differ by one at most.
  bound = lambda split: first_chunk + split * chunks // tile.splits

  def seen(position: jax.Array, exists: jax.Array) -> jax.Array:
    is_seen = exists[None, :] & (position[None, :] <= newest_seen)
    if window is not None:
      is_seen &= position[None, :] > newest_seen - window
    return is_seen

  def with_tokens(
    running: Running, kept: Any, position: jax.Array, exists: jax.Array
  ) -> Running:
    (keys, of_keys), (values, of_values) = (
      _values_and_factors(one, queries.dtype, interpret=interpret) for one in kept
    )
    scales = None
    if of_keys is not None and of_values is not None:
      scales = of_keys, of_values
    is_seen = seen(position, exists)
    return running.with_keys(
      queries, keys, values, is_seen, scales, interpret=interpret
    )

  def add(step: jax.Array, running: Running) -> Running:
    here = lowering.columns(step * tile.chunk, tile.chunk)
    position = step * tile.chunk + lax.iota(jnp.int32, tile.chunk)
    # Zero-fill values that no query sees, because even zero times NaN is NaN.
    exists = (position >= first) & (position < start)
    kept = jax.tree.map(lambda ref: lowering.load(ref.at[here], exists), past_refs)
    return with_tokens(running, kept, position, exists)

  place = lax.iota(jnp.int32, tile.new)
  # One program alone counts the new tokens; its partners would count them again.
  exists = (place < new) & (split == 0)
  # Padding tokens repeat the last one; they are neither seen nor stored.
  newest = jax.tree.map(lambda ref: ref[jnp.minimum(place, new - 1)], new_refs)
  here = lowering.columns(start, tile.new)
  is_stored = exists & (start + place < positions)
  for ref, value in zip(*map(jax.tree.leaves, (filled_refs, newest)), strict=True):
    lowering.store(ref.at[here], value, is_stored)
  running = Running.none(tile.rows, head_dim)
  running = with_tokens(running, newest, start + place, exists)
  running = lax.fori_loop(bound(split), bound(split + 1), add, running)
  for ref, value in zip((sums_ref, tops_ref, totals_ref), running, strict=True):
    lowering.store(ref, value, row < new * group)


def launch(
  queries: jax.Array,
  newest: tuple[jax.Array, jax.Array],
  past: tuple[Kept, Kept],
  start: jax.Array,
  *,
  window: int | None = None,
  tile: Tile | None = None,
  interpret: bool = False,
) -> tuple[Attended, tuple[Kept, Kept]]:
  """Runs the kernel on arguments for which `obstacle` returns None.

  `queries` is `[batch, new, heads, head_dim]`, at positions from `start` on, int32, one
  for all or `[batch]`; `newest` are the keys and values of the same tokens, `[batch,
  new, kv_heads, head_dim]`; queries and keys are rotated. `past` is the cache's keys
  and values, `[batch, positions, kv_heads, head_dim]`; positions from `start` on or
  before all windows are not read. All are float32 or bfloat16, but the cache may be
  E4M3, and then new keys and values are rounded. A query sees the `window` newest keys,
  including its own; None for all.

  Returns outputs, `[batch, new, heads * head_dim]`, in the dtype of `queries`, and the
  cache with the new keys and values, in the same memory if it may be overwritten.
  """
  tile = Tile.of(queries, past[0]) if tile is None else tile
  batch, (heads, kv_heads) = len(queries), (queries.shape[2], past[0].shape[2])
  # Few arrays, because XLA writes each in a launch or two.
  if isinstance(past[0], ScaledE4M3):
    of_queries, joined = queries, e4m3.encode(jnp.concatenate(newest, axis=2))
    firsts = 0, kv_heads
  else:
    of_queries = joined = jnp.concatenate([queries, *newest], axis=2)
    firsts = heads, heads + kv_heads
  sizes = {"positions": past[0].shape[1], "window": window}
  arrays = len(jax.tree.leaves(past))
  results: Any = lowering.launch(
    functools.partial(_kernel, tile=tile, interpret=interpret, **sizes),
    jnp.broadcast_to(jnp.asarray(start, jnp.int32), (batch,)),
    of_queries,
    (joined, joined),
    past,
    name="cached_attention",
    grid=(batch, kv_heads, tile.splits),
    **_specs(queries, past, firsts, tile),
    # Operands: start, queries, as many arrays of new tokens as the cache has, the
    # cache. Results: sums, tops, totals, the cache.
    in_place={2 + arrays + i: 3 + i for i in range(arrays)},
    warps=tile.warps,
    stages=tile.stages,
    interpret=interpret,
  )
  scale, leading = queries.shape[-1] ** -0.5, queries.shape[:2]
  sums, tops, totals, filled = results
  outputs = Attended(sums, tops, totals, scale, leading, queries.dtype, interpret)
  return outputs, filled


def _specs(
  queries: jax.Array, past: tuple[Kept, Kept], firsts: tuple[int, int], tile: Tile
) -> dict[str, Any]:
  """Returns block specs of the kernel's operands and results, and the results' shapes.

  `firsts` are the heads at which new keys and new values begin. Results are sums, tops,
  totals and the filled cache.
  """
  batch, new, heads, head_dim = queries.shape
  positions, kv_heads = past[0].shape[1:3]
  spec, array = lowering.BlockSpec, jax.ShapeDtypeStruct
  # The blocks cover whole chunks, plus room for a whole tile of new tokens at any
  # position; accesses beyond the positions are masked.
  covered = -(-positions // tile.chunk) * tile.chunk + tile.new

  def of_head(a: jax.Array, tokens: int, first: int) -> Any:
    rest = a.shape[3:]
    return spec(
      (None, tokens, None, *rest), lambda b, k, s: (b, 0, first + k, *[0] * len(rest))
    )

  cache = jax.tree.map(lambda a: of_head(a, covered, 0), past)
  newest = tuple(
    jax.tree.map(lambda a, first=first: of_head(a, new, first), kept)
    for kept, first in zip(past, firsts, strict=True)
  )
  group = spec((None, new, heads // kv_heads, head_dim), lambda b, k, s: (b, 0, k, 0))
  row = spec((None, None, None, tile.rows), lambda b, k, s: (s, b, k, 0))
  sums = spec((None, None, None, tile.rows, head_dim), lambda b, k, s: (s, b, k, 0, 0))
  rows = tile.splits, batch, kv_heads, new * heads // kv_heads
  shares = [array(shape, jnp.float32) for shape in ((*rows, head_dim), rows, rows)]
  like = jax.tree.map(lambda a: array(a.shape, a.dtype), past)
  return {
    "in_specs": [spec((1,), lambda b, k, s: (b,)), group, newest, cache],
    "out_specs": [sums, row, row, cache],
    "out_shape": [*shares, like],
  }
