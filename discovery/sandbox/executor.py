"""Common parts of executors: tracing a source and running a call through its phases."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from mxjax.discovery.core.task import (
  Call,
  ContractError,
  Outcome,
  RefusedError,
  Status,
)
from mxjax.discovery.sandbox.processor import METER, Seconds
from mxjax.errors import Refusal

MEMORY_SIGNS = ("RESOURCE_EXHAUSTED", "ut of memory", "bad_alloc")
"""How XLA and C++ tell a lack of memory, for which they have no class or number."""


@dataclasses.dataclass(frozen=True)
class Took:
  """How long a call took.

  Attributes:
    seconds: By a clock on the wall, which other work on the machine stretches.
    processor: Processor seconds of the workers by part, see `processor.Meter`; empty
      if they are not known, as of a call that failed.
  """

  seconds: float
  processor: Seconds = dataclasses.field(default_factory=dict)


OnDone = Callable[[int, Outcome, Took], None]
"""Receives the position of a call, its outcome and how long it took."""
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


def run_phases(phases: Iterable[Phase]) -> tuple[Outcome, dict[str, float]]:
  """Runs the phases of a call in order.

  Returns its outcome, and the processor seconds of its phases by part.

  Raises:
    ValueError: An observable is not a finite number, or there is none.
  """
  values: dict[str, float] = {}
  outputs: dict[str, str] = {}
  parts: dict[str, dict[str, float]] = {}
  spent: Counter[str] = Counter()
  payload = b""
  for phase in phases:
    result, payload = phase(payload)
    values |= result.get("values", {})
    outputs |= result.get("outputs", {})
    parts |= result.get("parts", {})
    spent.update(result.get("processor", {}))
  outcome = Outcome.from_dict(
    {
      "status": "ok",
      "values": values,
      "outputs": outputs,
      "detail": "",
      "parts": parts,
    }
  )
  return outcome, dict(spent)


def metered(phase: Phase) -> Phase:
  """Returns a phase that runs in this process, with the processor seconds it takes."""

  def run(before: bytes) -> tuple[dict[str, Any], bytes]:
    with METER.measured() as spent:
      result, payload = phase(before)
    return {**result, "processor": dict(spent)}, payload

  return run


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
    # A refusal of ours may quote these words without any lack of memory.
    is_foreign = not isinstance(cause, Refusal)
    has_sign = is_foreign and any(sign in str(cause) for sign in MEMORY_SIGNS)
    if isinstance(cause, MemoryError) or has_sign:
      return Status.MEMORY, detail
    cause = cause.__cause__
  return Status.CRASHED, detail
