"""Causal attention of many tokens, without an array of scores.

The reference, `mxjax.models.functional.causal_attention`, dispatches to this kernel;
it, too, sums in float32 and rounds weights to bfloat16, at another maximum.

A program takes a tile of the queries of one head and passes over the keys that they
see, a chunk a step. Scores stay in registers: a program reads its queries, and keys and
values once (from the L2 for most of its heads), and writes its outputs. Chunks that all
queries see whole have no mask. Tiles of late queries see most keys and start first.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import implementations
from mxjax.numerics.implementations import Capability
from mxjax.pallas_kernels import lowering
from mxjax.pallas_kernels.attention.running import Running


@dataclasses.dataclass(frozen=True)
class Tile:
  """Queries of a program, keys of a step, and launch parameters.

  The first two are powers of two, at least the 16 of a matrix instruction; `stages`
  steps have their loads in flight.
  """

  rows: int
  chunk: int
  warps: int
  stages: int

  @classmethod
  def of(cls, head_dim: int, capability: Capability | None) -> "Tile":
    """Returns the tile for heads of `head_dim` coordinates by compute capability.

    Hopper and its successors in data centers, 9.0 to 11, have 227 KB of shared memory a
    program, other GPUs 99 KB or more.
    """
    if capability is None or not (9, 0) <= capability < (12, 0):
      return cls(128, 64, 8, 2) if head_dim <= 128 else cls(64, 32, 8, 2)
    # With more keys, scores beside 256 coordinates would spill.
    return cls(128, 64 if head_dim <= 128 else 32, 8, 3)

  def shared_bytes(self, head_dim: int) -> int:
    """Returns the shared memory of a program: queries, and steps in flight."""
    return 2 * head_dim * (self.rows + 2 * self.stages * self.chunk)


def obstacle(queries: jax.Array, keys: jax.Array, values: jax.Array) -> str | None:
  """Returns why the kernel cannot attend to these whole sequences, or None.

  Lengths do not matter, so it is the same for all calls of a model.
  """
  if (head_dim := keys.shape[-1]) not in (16, 32, 64, 128, 256):
    return f"head_dim must be a power of two from 16 to 256, got {head_dim}"
  operands = queries, keys, values
  if any(a.dtype != jnp.bfloat16 for a in operands):
    return f"operands must be bfloat16, got {', '.join(str(a.dtype) for a in operands)}"
  if any(0 in a.shape for a in operands):
    return f"there is nothing to do in shapes {[a.shape for a in operands]}"
  return None


def _kernel(
  start_ref: Any,
  queries_ref: Any,
  keys_ref: Any,
  values_ref: Any,
  out_ref: Any,
  *,
  tile: Tile,
  new: int,
  window: int | None,
  interpret: bool,
) -> None:
  index = _last_first(lowering.program_id(1), new, tile)
  exists = lowering.tail_mask(new, tile.rows, index)
  queries = lowering.load(queries_ref, exists)
  start = start_ref[0]
  oldest, stop = start + index * tile.rows, start + new
  place = oldest + lax.iota(jnp.int32, tile.rows)

  def add(step: jax.Array, running: Running, *, is_whole: bool) -> Running:
    here = lowering.columns(step * tile.chunk, tile.chunk)
    if is_whole:
      keys, values = keys_ref[here, :], values_ref[here, :]
      return running.with_keys(queries, keys, values, None, interpret=interpret)
    position = step * tile.chunk + lax.iota(jnp.int32, tile.chunk)
    is_seen = position[None, :] <= place[:, None]
    if window is not None:
      is_seen &= position[None, :] > place[:, None] - window
    # Zero-fill what comes after the last token, because even zero times NaN is NaN.
    keys, values = (
      lowering.load(ref.at[here, :], position < stop) for ref in (keys_ref, values_ref)
    )
    return running.with_keys(queries, keys, values, is_seen, interpret=interpret)

  masked, whole = (
    functools.partial(add, is_whole=all_seen) for all_seen in (False, True)
  )
  running = Running.none(tile.rows, queries.shape[1])
  # All of a chunk is past to every query before `past`, and in its window from `near`.
  first, past = 0, (oldest + 1) // tile.chunk
  if window is not None:
    first = jnp.maximum(oldest - window + 1, 0) // tile.chunk
    # The last query, at oldest + rows - 1, sees keys from oldest + rows - window on:
    # rounded up to a chunk, here by a floor of the negative.
    near = -((window - oldest - tile.rows) // tile.chunk)
    near = jnp.clip(near, first, past)
    running = lax.fori_loop(first, near, masked, running)
    first = near
  running = lax.fori_loop(first, past, whole, running)
  newest = jnp.minimum(oldest + tile.rows, stop) - 1
  running = lax.fori_loop(past, newest // tile.chunk + 1, masked, running)
  # No total is zero: each query that is stored sees at least its own key.
  outputs = running.sums / running.total[:, None]
  lowering.store(out_ref, outputs.astype(out_ref.dtype), exists)


def _last_first(program: Any, new: int, tile: Tile) -> Any:
  """Returns the tile of queries of a program."""
  return -(-new // tile.rows) - 1 - program


def launch(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  start: jax.Array | int = 0,
  *,
  window: int | None = None,
  tile: Tile | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Runs the kernel on arguments for which `obstacle` returns None.

  `queries` is `[batch, new, heads, head_dim]`, at positions from `start` on, int32, one
  for all or `[batch]`; `keys` and `values` are `[batch, positions, kv_heads,
  head_dim]`, of which those after the last query are not read; queries and keys are
  rotated. All are bfloat16. A query sees the `window` newest keys, including its own;
  None for all.

  Returns outputs, `[batch, new, heads * head_dim]`, in bfloat16.
  """
  batch, new, heads, head_dim = queries.shape
  positions, kv_heads = keys.shape[1:3]
  tile = tile or Tile.of(head_dim, implementations.target().capability)
  some = lowering.BlockSpec(
    (None, tile.rows, None, head_dim),
    lambda h, t, b: (b, _last_first(t, new, tile), h, 0),
  )
  # Blocks cover whole chunks; accesses beyond the positions are masked.
  covered = -(-positions // tile.chunk) * tile.chunk
  every = lowering.BlockSpec(
    (None, covered, None, head_dim),
    lambda h, t, b: (b, 0, h // (heads // kv_heads), 0),
  )
  outputs = lowering.launch(
    functools.partial(_kernel, tile=tile, new=new, window=window, interpret=interpret),
    jnp.broadcast_to(jnp.asarray(start, jnp.int32), (batch,)),
    queries,
    keys,
    values,
    name="prefill_attention",
    # Heads are the launch's fastest axis, so that those of one key-value head, which
    # follow each other, find its keys and values in the L2.
    grid=(heads, -(-new // tile.rows), batch),
    in_specs=[lowering.BlockSpec((1,), lambda h, t, b: (b,)), some, every, every],
    out_specs=some,
    out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
    warps=tile.warps,
    stages=tile.stages,
    interpret=interpret,
  )
  return outputs.reshape(batch, new, -1)
