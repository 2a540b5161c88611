"""CPU kernels in this machine's vector instructions, compiled by LLVM.

XLA:CPU makes one pass over memory for each product or reduction of a function. These
kernels take a tile through the whole function in registers and first-level cache, with
the same bits as their XLA references, unless a module says otherwise. They need
`llvmlite`, which is slow to load, so the modules that import it are loaded when a
kernel first runs.
"""

import functools
import importlib.util
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

LANES = 32
"""Numbers in a vector: two AVX-512 registers, so that their latencies overlap."""
ROWS = 8
"""Rows that a part of the rounding of rows takes: one AVX register, so that a small
group of linears has work for two threads."""


@functools.cache
def is_installed() -> bool:
  """Returns whether `llvmlite` is installed."""
  return importlib.util.find_spec("llvmlite") is not None


def missing() -> str | None:
  """Returns why no native kernel can run on this machine, or None."""
  if not is_installed():
    return "the package llvmlite is not installed: `pip install llvmlite`"
  return None


def cores() -> int:
  """Returns the number of CPU cores that this process may use."""
  known = hasattr(os, "sched_getaffinity")
  return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def once(function: Callable[..., T]) -> Callable[..., T]:
  """Decorates as `functools.cache`, and a thread waits for another that computes.

  `functools.cache` lets both compute, and XLA refuses the second kernel of one name.
  """
  cached, lock = functools.cache(function), threading.Lock()

  @functools.wraps(function)
  def run(*args: Any, **kwargs: Any) -> T:
    with lock:
      return cached(*args, **kwargs)

  return run
