"""MXFP4 encoding on the CPU, parallel over cores.

The reference is `mxjax.numerics.mxfp4.encode`, equal bit for bit. XLA:CPU is slower: it
makes one pass over memory for the maxima and another for the codes, and packs pairs one
by one. `encode_kernel` has the kernel; this module divides the array among the cores.
"""

import ctypes
import functools
import os
from concurrent import futures
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from mxjax.numerics import native

BLOCK_SIZE = 32
WORTH_IT = 2**20
"""Values from which compiling the kernel (once, a fifth of a second) soon pays off."""
VALUES_A_PART = 2**19
NOT_FINITE_BITS = 0x7F800000

# The bias is float32's 127 and the exponent of the largest element, 6 = 1.5 x 2^2.
SCALE_RULES = {"floor": (0, 129), "even": (1 << 21, 129), "rceil": ((1 << 22) - 1, 129)}
"""Scale rule to the carry and bias of `encode_kernel.write`. The smallest mantissa that
the carry pushes into the exponent field is the first that takes the next exponent."""


def obstacle(x: jax.Array, scale_rule: str, tie_rule: str) -> str | None:
  """Returns why the kernel cannot encode an array by these rules, or None."""
  if isinstance(x, jax.core.Tracer):
    return "it is not part of a traced function"
  if missing := native.missing():
    return missing
  if len(x.devices()) > 1:
    return f"it reads the memory of one CPU, and the array lies on {x.devices()}"
  if x.dtype == jnp.float64:
    return f"it takes values of at most 32 bits, got {x.dtype}"
  if scale_rule not in SCALE_RULES or tie_rule != "away":
    return f"it does not know scale rule {scale_rule} with ties {tie_rule}"
  return None


@native.once
def _compiled() -> Any:
  """Compiles the kernel, once per process."""
  from mxjax.numerics.native import encode_kernel
  from mxjax.numerics.native.custom_call import compile_module

  addresses = compile_module(str(encode_kernel.write()), ["encode"])
  kinds = [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_int32, ctypes.c_int32]
  return ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(addresses["encode"])


@functools.cache
def _pool() -> futures.ThreadPoolExecutor:
  """Returns a pool with a thread per core; a forked process starts its own."""
  if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
  return futures.ThreadPoolExecutor(native.cores(), "mxjax-encode")


def encode(x: np.ndarray, scale_rule: str) -> tuple[np.ndarray, np.ndarray] | None:
  """Encodes float32 `[..., d]` by a rule of `SCALE_RULES`; ties round away from 0.

  `x` is contiguous with d a multiple of 32. Returns packed codes uint8 `[..., d/2]` and
  scale bytes uint8 `[..., d/32]`, or None if a value is inf or NaN.
  """
  function = _compiled()
  rows, blocks = x.shape[:-1], x.size // BLOCK_SIZE
  # Codes and scales start at multiples of 64 bytes, so that JAX takes them over without
  # a copy. They share one allocation, because looking up an address is the largest cost
  # after memory.
  room = -(-16 * blocks // 64) * 64
  raw = np.empty(64 + room + blocks, np.uint8)
  values_at, raw_at = x.ctypes.data, raw.ctypes.data
  start = -raw_at % 64
  codes_at, scales_at = raw_at + start, raw_at + start + room
  carry, bias = SCALE_RULES[scale_rule]
  parts = max(1, x.size // VALUES_A_PART)
  edges = [blocks * i // parts for i in range(parts + 1)]
  largest = [0] * parts
  # Shared by the threads: Python's lock gives each number to one of them.
  left = iter(range(parts))

  def work() -> None:
    # A free thread takes the next part, because a thread that was asleep starts late.
    for i in left:
      first, count = edges[i], edges[i + 1] - edges[i]
      # A block has 128 bytes of values, 16 of codes and one of scale.
      starts = values_at + 128 * first, codes_at + 16 * first, scales_at + first
      largest[i] = function(*starts, count, carry, bias) if count else 0

  helpers = [_pool().submit(work) for _ in range(min(native.cores(), parts) - 1)]
  work()
  for helper in helpers:
    helper.result()
  if max(largest) >= NOT_FINITE_BITS:
    return None
  codes, scales = raw[start : start + 16 * blocks], raw[start + room :][:blocks]
  codes = codes.reshape(*rows, x.shape[-1] // 2)
  return codes, scales.reshape(*rows, x.shape[-1] // BLOCK_SIZE)
