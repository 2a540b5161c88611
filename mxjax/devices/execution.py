"""Execution on CPU: one computation at a time, in reused memory.

Two rules keep XLA:CPU (jaxlib 0.10.2) from hanging with every pool thread idle:

1. On CPU only one computation is in flight: `block_on_cpu` after each.
2. No LAPACK call (eigh, Cholesky, LU, triangular solve) shares a jitted function with
   a matrix product large enough to run in parallel before it. A function of both, 18
   blocks of 32 by 576, hung within 50 calls in each of three tries on two busy
   cores; split, 250 whole linears of that size finished. Nor do two batches of LAPACK
   calls run side by side in one function; see `numerics.lapack`.

Small matrices have a third: `one_lapack_thread`.
"""

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import threadpoolctl

from mxjax import compilation

T = TypeVar("T")

# Below 64, at which XLA:CPU hung; see `call_in_batches`.
BLOCKS_AT_ONCE = 48
"""Blocks in one call of a function that mixes products and decompositions."""

LARGE_BYTES = 32 * 2**20
"""Array size from which freed memory is returned to the kernel before allocating."""

FEW_TEMPORARIES = {
  "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
  "xla_gpu_dot_merger_threshold_mb": 0,
}
"""Compiler options for functions with large temporaries; the bits stay the same.

XLA:CPU's default order starts everything as early as it can, such as the float32
copies of all weights of a layer: at width 2048 a layer's pass then takes three times
the temporaries. A layer of SmolLM2 takes as long either way. XLA:GPU would copy the
weights of q, k and v into one matrix in every call."""

# Parameters of glibc's mallopt, <malloc.h>.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def _allocator(name: str) -> Any | None:
  """Returns a function of this process's C library, or None if it lacks it."""
  return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def keep_freed_memory() -> bool:
  """Lets this process reuse large freed buffers; call it before any computation.

  XLA:CPU allocates the temporaries of every call anew, and glibc returns buffers of
  this size to the kernel when freed: fetching zeroed pages again took half the
  processor time of attention over 2,048 tokens. Used memory then stays with the
  process, so only programs call this, never the library. Returns whether the allocator
  took the settings; False if it is not glibc.
  """
  mallopt = _allocator("mallopt")
  if mallopt is None:
    return False
  # The heap is never trimmed, no buffer is mapped apart from it, and all threads share
  # one.
  settings = ((_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_MAX, 0), (_ARENA_MAX, 1))
  return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def trim_malloc(nbytes: int) -> bool:
  """Returns freed memory to the kernel before a step with arrays of `nbytes`.

  Memory retained by `keep_freed_memory` is fragmented: an array larger than every
  fragment, such as the factor of a wide Hessian, would need new memory on top. Below
  `LARGE_BYTES` nothing happens. Returns whether memory was given back.
  """
  trim = _allocator("malloc_trim") if nbytes >= LARGE_BYTES else None
  return trim is not None and trim(0) == 1


def block_on_cpu(tree: T) -> T:
  """Waits for a pytree's arrays on CPU; elsewhere lets dispatch run ahead.

  XLA:CPU runs computations and their parallel parts on one pool of threads. Independent
  computations in flight together can each hold a thread while waiting for parts that no
  thread is left to run: a deadlock seen on two cores.
  """
  if jax.default_backend() == "cpu":
    return jax.block_until_ready(tree)
  return tree


@functools.cache
def _blas() -> threadpoolctl.ThreadpoolController:
  """Returns the BLAS libraries of this process.

  JAX takes LAPACK from SciPy, which it loads only once it needs it.
  """
  # Loaded first, or the controller would not find its BLAS.
  importlib.import_module("scipy.linalg.cython_lapack")
  return threadpoolctl.ThreadpoolController().select(user_api="blas")


@contextlib.contextmanager
def one_lapack_thread() -> Iterator[None]:
  """Runs LAPACK without threads of its own inside the `with` block, on CPU.

  For batches of 32 x 32 matrices, whose bits stay the same. The threads of OpenBLAS
  wait for each other in loops: where other work took the cores, inverses of 48 blocks
  took twenty times longer (`benchmarks/lapack_threads.py`).
  """
  if jax.default_backend() != "cpu":
    yield
    return
  with _blas().limit(limits=1):
    yield


def jit(**options: Any) -> Callable[[Callable[..., T]], compilation.Jitted[T]]:
  """Decorates as `compilation.jit`; calls wait as `block_on_cpu` does."""
  return compilation.jit(then=block_on_cpu, **options)


@compilation.jit(static_argnums=0)
def _zeros(leaves: tuple[jax.ShapeDtypeStruct, ...]) -> list[jax.Array]:
  return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]


def zeros(like: Any) -> Any:
  """Returns zeros for a pytree of `jax.ShapeDtypeStruct`, by one program for all."""
  leaves, structure = jax.tree.flatten(like)
  return jax.tree.unflatten(structure, _zeros(tuple(leaves)))


def float64_zeros(*shapes: tuple[int, ...]) -> list[jax.Array]:
  """Returns the starts of several float64 sums, as `zeros` does."""
  return zeros([jax.ShapeDtypeStruct(shape, jnp.float64) for shape in shapes])


def call_in_batches(function: Callable[..., T], *arrays: jax.Array) -> T:
  """Calls a jitted function on a few blocks at a time, on CPU, and joins the results.

  For functions with products before decompositions (rule 2): XLA:CPU runs large batches
  of 32 x 32 products in parallel, which hung at 64 blocks. `function` maps arrays
  `[blocks, ...]` to a pytree of such arrays and treats blocks independently. Elsewhere
  it gets all blocks, because every size of a part is a program of its own.
  """
  if jax.default_backend() != "cpu":
    return function(*arrays)
  blocks = arrays[0].shape[0]
  # Parts as equal as can be: then at most two sizes, and so two programs, are compiled.
  size = -(-blocks // -(-blocks // BLOCKS_AT_ONCE))
  with one_lapack_thread():
    parts = [
      block_on_cpu(function(*(array[start : start + size] for array in arrays)))
      for start in range(0, blocks, size)
    ]
  if len(parts) == 1:
    return parts[0]
  return block_on_cpu(jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts))
