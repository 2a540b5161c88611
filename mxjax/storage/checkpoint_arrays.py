"""The arrays of a checkpoint, stored by Orbax in files small enough to read in part."""

import contextlib
import gc
import logging
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.devices import processes
from mxjax.errors import ValueRefusal
from mxjax.storage.tree_io import at, nested

CHUNK_BYTES = 4 * 2**20
"""Maximum bytes of a weight in one file, so that reading few rows reads few files."""
BATCH_BYTES = 256 * 2**20
"""Approximate bytes that a process reads before it frees leftovers of reading."""
_EVEN_ROWS = 64
"""Weights are split only if their rows divide by this; a prime number of rows would
give each row a file."""


def save_arrays(folder: pathlib.Path, arrays: Mapping[str, jax.Array]) -> None:
  """Writes arrays with Orbax, in files named by their paths.

  All processes of a job must call it. Equal arrays give equal files, but for the time
  of day in `_CHECKPOINT_METADATA` and `commit_success.txt`: the default layout (OCDBT),
  whose file names are random, is avoided.
  """
  from orbax.checkpoint import v1 as ocp

  to_save: Mapping[str, Any] = arrays
  if jax.process_count() > 1:
    # Orbax writes process 0's host arrays; the others only provide shapes.
    shape = lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape)
    host = np.asarray if processes.is_leader() else shape
    to_save = {path: host(array) for path, array in arrays.items()}
  context = ocp.Context()
  saving = context.array.saving
  saving.use_ocdbt = False
  # Orbax expects version 2 when it checks a folder that is not OCDBT.
  saving.use_zarr3 = False
  in_chunks = saving.StorageOptions(chunk_byte_size=CHUNK_BYTES)

  def split(key: Any, value: Any) -> Any:
    del key
    # Only matrices: their rows are what a mesh shares out.
    is_even = value.ndim == 2 and value.shape[0] % _EVEN_ROWS == 0
    return in_chunks if is_even else None

  saving.scoped_storage_options_creator = split
  with context, _without_log_message("Skipping merge of OCDBT checkpoints"):
    ocp.save(str(folder.absolute()), nested(to_save))


@contextlib.contextmanager
def _without_log_message(start: str) -> Iterator[None]:
  """Drops one Orbax log message about a layout that is not used here."""
  logger = logging.getLogger("absl")
  is_other = lambda record: start not in record.getMessage()
  logger.addFilter(is_other)
  try:
    yield
  finally:
    logger.removeFilter(is_other)


def load_arrays(
  folder: pathlib.Path, abstract: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  """Reads arrays of known shape, dtype and sharding, if any, by path.

  Each process reads only its part.

  Raises:
    ValueError: The arrays on disk are others or damaged.
  """
  arrays: dict[str, jax.Array] = {}
  for batch in _read_batches(abstract):
    try:
      with _leftovers_freed():
        arrays |= _load(folder, batch)
    except (KeyError, OSError, TypeError, ValueError) as error:
      first = str(error).strip().splitlines()[:1]
      raise ValueRefusal(
        f"restore_checkpoint: {folder}",
        expected=f"the {len(abstract)} arrays that the checkpoint's manifest lists",
        got=f"others or damaged ones: {''.join(first)[:300]}",
        mend="copy the checkpoint again, or quantize anew",
      ) from error
  return arrays


@contextlib.contextmanager
def _leftovers_freed() -> Iterator[None]:
  """Frees the cyclic garbage that reading makes, and looks at no older object.

  Orbax leaves the host copies of arrays in reference cycles. Python collects cycles by
  object count, not bytes, so they would pile up. A collection of everything would take
  seconds in a program of millions of objects, and one of the young generations could
  miss what has grown old while a batch was read.
  """
  # Where a program has frozen objects itself, nobody could tell ours from its own.
  is_frozen = gc.get_freeze_count() > 0
  if not is_frozen:
    # This moves all existing objects to where no collection looks.
    gc.freeze()
  try:
    yield
    gc.collect()
  finally:
    if not is_frozen:
      gc.unfreeze()


def _read_batches(
  abstract: Mapping[str, jax.ShapeDtypeStruct],
) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
  """Splits a checkpoint into parts of which this process reads about `BATCH_BYTES`."""
  batch, size = {}, 0
  for path, one in abstract.items():
    here = math.prod(one.shape) * one.dtype.itemsize
    if one.sharding is not None:
      part = math.prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize
      # A process with several devices reads the part of each of them.
      here = part * len(one.sharding.addressable_devices)
    if batch and size + here > BATCH_BYTES:
      yield batch
      batch, size = {}, 0
    batch[path] = one
    size += here
  yield batch


def _load(
  folder: pathlib.Path, abstract: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  """Reads some arrays of a checkpoint, one large array at a time.

  An array without a sharding is read on the host and left uncommitted, so that a jitted
  function may place it beside its other arguments.
  """
  from orbax.checkpoint import v1 as ocp

  sizes = [math.prod(one.shape) * one.dtype.itemsize for one in abstract.values()]
  context = ocp.Context()
  context.pytree.loading.partial_load = True
  # Orbax needs a limit one byte above what it reads.
  context.memory.read_concurrent_bytes = max(sizes, default=0) + 1
  with context:
    # Orbax takes from it that a host array of this shape is wanted. It is a view of one
    # zero and takes no memory.
    on_host = lambda one: np.broadcast_to(np.zeros((), one.dtype), one.shape)
    wanted = {
      path: on_host(one) if one.sharding is None else one
      for path, one in abstract.items()
    }
    tree = ocp.load(str(folder.absolute()), nested(wanted))
  arrays = {path: at(tree, path) for path in abstract}
  if absent := [
    k for k, one in arrays.items() if not isinstance(one, jax.Array | np.ndarray)
  ]:
    raise KeyError(f"no array {', '.join(absent[:3])}")
  # The host keeps the sources until the copies to the devices are finished.
  return {path: jax.block_until_ready(jnp.asarray(one)) for path, one in arrays.items()}
