"""What every executor does: tracing a source, running a call through its phases."""

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

MEMORY_SIGNS = ("RESOURCE_EXHAUSTED", "ut of memory", "bad_alloc")
OnDone = Callable[[int, Outcome, float], None]
"""Told the position of a call, its outcome and its seconds."""
Phase = Callable[[bytes], tuple[dict[str, Any], bytes]]
"""From the bytes of the phase before to JSON results and bytes for the next."""


@dataclasses.dataclass(frozen=True)
class Traced:
  """What tracing and the artifact gate made of a source.

  Attributes:
    status: `OK`, `TRACE_FAILED`, `REFUSED`, or how the worker ended.
    computation: Hook name to the hash of its lowered program.
    detail: One sentence about a failure.
  """

  status: Status
  computation: Mapping[str, str] = dataclasses.field(default_factory=dict)
  detail: str = ""


class Executor(Protocol):
  """Where candidates are traced and calls are executed."""

  @property
  def description(self) -> Mapping[str, Any]:
    """Sandbox level and the isolation in force, for the execution identity."""

  def trace(self, source: str) -> Traced:
    """Traces all hooks of an admitted source; artifacts stay with the executor."""

  def run(self, calls: Sequence[Call], on_done: OnDone) -> None:
    """Runs calls, side by side where it can.

    `on_done` is told of each call as soon as it ends, from one thread at a time.
    """

  def close(self) -> None:
    """Ends its workers."""


def run_phases(phases: Iterable[Phase]) -> Outcome:
  """Runs the phases of a call in order.

  Raises:
    ValueError: An observable is not a finite number, or there is none.
  """
  values: dict[str, float] = {}
  outputs: dict[str, str] = {}
  payload = b""
  for phase in phases:
    result, payload = phase(payload)
    values |= result.get("values", {})
    outputs |= result.get("outputs", {})
  return Outcome.from_dict(
    {"status": "ok", "values": values, "outputs": outputs, "detail": ""}
  )


def status_of(error: BaseException) -> tuple[Status, str]:
  """What a candidate's fault in an evaluator phase is called, and a bounded detail.

  The pipeline adds the place of an error by raising another from it, so the cause
  decides: a broken contract stays one wherever it is noticed.
  """
  detail = f"{type(error).__name__}: {error}"[:1000]
  cause: BaseException | None = error
  while cause is not None:
    if isinstance(cause, RefusedError | ContractError):
      return Status.CONTRACT, detail
    if isinstance(cause, FloatingPointError):
      return Status.NOT_FINITE, detail
    if isinstance(cause, MemoryError) or any(s in str(cause) for s in MEMORY_SIGNS):
      return Status.MEMORY, detail
    cause = cause.__cause__
  return Status.CRASHED, detail
