"""Batching of functions that treat blocks independently, and where it is done."""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from mxjax.numerics import implementations

T = TypeVar("T")

BATCH_BYTES = 3 * 2**19
"""Maximum size of a batch's first operand: six blocks of 2,048 float32 tokens. On two
cores with 1 MB of second-level cache each, three and six blocks were a third faster
than all at once, and one was slower."""


LISTED_AT_ONCE = 2
"""Blocks processed together from a list; one at a time takes XLA:CPU twice as long."""


def _is_batched() -> bool:
  """Whether a few blocks at a time are faster than all: on a CPU, never on a GPU."""
  return implementations.target_platform() == "cpu"


def batch_size(blocks: int, nbytes: int) -> int:
  """Returns the largest divisor of `blocks`, at least 2, that fits; else `blocks`.

  `nbytes` is the size of one block.
  """
  # Parts of one size, because `lax.map` compiles its body for one shape. Two blocks at
  # least, see `BATCH_BYTES` and `LISTED_AT_ONCE`.
  most = max(2, BATCH_BYTES // max(nbytes, 1))
  sizes = [n for n in range(2, min(most, blocks) + 1) if blocks % n == 0]
  return max(sizes, default=blocks)


def map_block_batches(function: Callable[..., T], *arrays: jax.Array) -> T:
  """Applies a function of independent blocks, in small batches on a CPU.

  XLA:CPU makes one pass over memory for each product or reduction; with a few blocks
  those passes stay in cache. Batching does not change the bits. `function` takes arrays
  `[n, ...]` for any number n of blocks and returns a pytree of such arrays; the first
  of `arrays`, `[blocks, ...]`, determines the batch size.
  """
  blocks = arrays[0].shape[0]
  nbytes = math.prod(arrays[0].shape[1:]) * arrays[0].dtype.itemsize
  size = batch_size(blocks, nbytes)
  if not _is_batched() or size == blocks:
    return function(*arrays)
  batches = tuple(a.reshape(blocks // size, size, *a.shape[1:]) for a in arrays)
  results = jax.lax.map(lambda batch: function(*batch), batches)
  return jax.tree.map(lambda a: a.reshape(blocks, *a.shape[2:]), results)


def map_listed_blocks(
  function: Callable[..., jax.Array],
  order: jax.Array,
  count: jax.Array,
  *arrays: jax.Array,
) -> jax.Array:
  """Applies a function of independent blocks to selected ones at least.

  `order` lists all blocks, int32 `[blocks]`, with the `count` selected ones first;
  `function` maps arrays `[n, ...]` for any number n of blocks to float64 `[n]`. Only
  entries of selected blocks are meaningful. A CPU leaves the other blocks out; a GPU
  takes all at once, because it would wait for the host in every turn of a loop of
  unknown length.
  """
  blocks = arrays[0].shape[0]
  if not _is_batched():
    return function(*arrays)
  size = min(LISTED_AT_ONCE, blocks)

  def add(turn: jax.Array, result: jax.Array) -> jax.Array:
    # JAX clamps the start of the last slice, so it may recompute a block.
    places = jax.lax.dynamic_slice(order, (turn * size,), (size,))
    return result.at[places].set(function(*(array[places] for array in arrays)))

  # The number of turns is known to the device alone, so there is one program for all.
  turns = (count + (size - 1)) // size
  zeros = jnp.zeros(blocks, jnp.float64)
  return jax.lax.fori_loop(jnp.int32(0), turns, add, zeros)
