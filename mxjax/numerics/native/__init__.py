"""What runs in the vector instructions of this machine's processor, by way of LLVM.

XLA:CPU makes a pass over memory for every product and reduction of a function. The
kernels here take a tile through all of it in registers and first-level cache, with the
bits of the references beside them. They need `llvmlite`; on a machine that has none the
references run, so modules that import it are themselves imported late.
"""

import functools
import importlib.util
import os
from typing import Literal

Implementation = Literal["xla", "native"]

LANES = 32
"""Numbers in a vector: two registers of AVX-512, whose latencies then overlap."""


@functools.cache
def is_installed() -> bool:
  """Whether `llvmlite` is there."""
  return importlib.util.find_spec("llvmlite") is not None


def choose(
  implementation: Implementation | None,
  place: str,
  obstacle: str | None,
  *,
  is_worth_it: bool = True,
) -> Implementation:
  """Picks what runs; an explicit choice stands or is refused.

  Args:
    implementation: The caller's choice, or None.
    place: Name of the operation, for the message.
    obstacle: Why the kernel cannot take the call, or None.
    is_worth_it: Whether None takes the kernel where it can run.

  Returns:
    `native` or `xla`.

  Raises:
    NotImplementedError: `native` was asked for and cannot run.
    ValueError: The choice is not a known name.
  """
  if implementation not in (None, "xla", "native"):
    raise ValueError(
      f"{place}: implementation must be None, 'xla' or 'native', got "
      f"{implementation!r}."
    )
  if implementation == "native" and obstacle:
    raise NotImplementedError(
      f"{place}: implementation='native' cannot run because {obstacle}; pass "
      "implementation='xla' or None."
    )
  if implementation is not None:
    return implementation
  return "native" if is_worth_it and obstacle is None else "xla"


def missing() -> str | None:
  """Why no kernel at all can run here, or None."""
  if not is_installed():
    return "the package llvmlite is not installed: `pip install llvmlite`"
  return None


def cores() -> int:
  """Cores that this process may use."""
  known = hasattr(os, "sched_getaffinity")
  return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
