"""Common parts of executors: tracing a source and running a call through its phases."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from mxjax.discovery.core.task import (
  Call,
  ContractError,
  Outcome,
  RefusedError,
  Status,
)
from mxjax.errors import Refusal

MEMORY_SIGNS = ("RESOURCE_EXHAUSTED", "ut of memory", "bad_alloc")
"""How XLA and C++ tell a lack of memory, for which they have no class or number."""
OnDone = Callable[[int, Outcome, float], None]
"""Receives the position of a call, its outcome and its duration in seconds."""
Phase = Callable[[bytes], tuple[dict[str, Any], bytes]]
"""Maps the bytes of the previous phase to JSON results and bytes for the next."""


@dataclasses.dataclass(frozen=True)
class Traced:
  """Result of tracing a source and passing its artifacts through the gate.

  `computation` holds the hash of each hook's lowered program.
  """

  status: Status
  computation: Mapping[str, str] = dataclasses.field(default_factory=dict)
  detail: str = ""


class Executor(Protocol):
  """Traces candidates and executes calls."""

  @property
  def description(self) -> Mapping[str, Any]:
    """Sandbox level and the isolation in force, for the execution identity."""

  def trace(self, source: str) -> Traced:
    """Traces all hooks of an admitted source; the executor retains the artifacts."""

  def run(self, calls: Sequence[Call], on_done: OnDone) -> None:
    """Runs calls, in parallel where possible.

    `on_done` is called for each call as soon as it ends, by one thread at a time.
    """

  def close(self) -> None:
    """Ends the workers."""


def run_phases(phases: Iterable[Phase]) -> Outcome:
  """Runs the phases of a call in order.

  Raises:
    ValueError: An observable is not a finite number, or there is none.
  """
  values: dict[str, float] = {}
  outputs: dict[str, str] = {}
  parts: dict[str, dict[str, float]] = {}
  payload = b""
  for phase in phases:
    result, payload = phase(payload)
    values |= result.get("values", {})
    outputs |= result.get("outputs", {})
    parts |= result.get("parts", {})
  return Outcome.from_dict(
    {
      "status": "ok",
      "values": values,
      "outputs": outputs,
      "detail": "",
      "parts": parts,
    }
  )


def status_of(error: BaseException) -> tuple[Status, str]:
  """Returns the status of a candidate's fault in a phase, and a bounded detail.

  The pipeline raises errors with the place from their causes, so the chain of causes
  decides the status.
  """
  detail = f"{type(error).__name__}: {error}"[:1000]
  cause: BaseException | None = error
  while cause is not None:
    if isinstance(cause, RefusedError | ContractError):
      return Status.CONTRACT, detail
    if isinstance(cause, FloatingPointError):
      return Status.NOT_FINITE, detail
    is_foreign = not isinstance(cause, Refusal)
    has_sign = is_foreign and any(sign in str(cause) for sign in MEMORY_SIGNS)
    if isinstance(cause, MemoryError) or has_sign:
      return Status.MEMORY, detail
    cause = cause.__cause__
  return Status.CRASHED, detail
