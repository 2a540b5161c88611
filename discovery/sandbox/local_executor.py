"""The bench of level `off`: traces and runs in this process. For trusted source only.

It is what the synthetic world and the embedded cards use when speed matters more than
walls, and every record of such a run says so.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxjax.discovery.core.candidate_source import hook_keys
from mxjax.discovery.core.task import Call, Outcome, Status, Task
from mxjax.discovery.sandbox import artifact, faults, tracing
from mxjax.discovery.sandbox.laboratory import Traced


class LocalExecutor:
  """Everything in one process, without limits."""

  description: Mapping[str, Any] = {"level": "off"}

  def __init__(self, task: Task) -> None:
    """Opens a bench; phases load their data on first use."""
    self._task = task
    specs = task.interface.to_list()
    self._specs = specs
    self._table = artifact.ArtifactTable({spec["name"]: spec for spec in specs})
    self._sessions: dict[str, Any] = {}
    self._hooks: dict[str, str] = {}

  def sibling(self, task: Task) -> "LocalExecutor":
    """A bench for another task of the same interface, with this one's artifacts."""
    other = LocalExecutor(task)
    other._table, other._hooks = self._table, self._hooks
    return other

  def trace(self, source: str) -> Traced:
    """Traces and gates every hook; see `Executor.trace`.

    Hooks whose text and surroundings are known are not traced again.
    """
    keys = hook_keys(source, self._table.specs)
    computation = {n: self._hooks[k] for n, k in keys.items() if k in self._hooks}
    todo = [spec for spec in self._specs if spec["name"] not in computation]
    try:
      for traced in tracing.trace(source, todo) if todo else ():
        spec = self._table.specs[traced.name]
        lowered = artifact.gate(spec, traced.unit, traced.batched)
        computation[traced.name] = lowered
        self._hooks[keys[traced.name]] = lowered
        self._table.add(lowered, traced.name, traced.unit, traced.batched)
    except artifact.RefusedError as error:
      return Traced(Status.REFUSED, detail=str(error))
    except Exception as error:  # noqa: BLE001
      # Candidate code raises what it likes; that is its result, not ours.
      return Traced(Status.TRACE_FAILED, detail=f"{type(error).__name__}: {error}")
    return Traced(Status.OK, computation)

  def run(
    self, calls: Sequence[Call], on_done: Callable[[int, Outcome, float], None]
  ) -> None:
    """Runs the calls one after another; see `Executor.run`."""
    for index, call in enumerate(calls):
      start = time.perf_counter()
      outcome = run_phases(self._task, self._sessions, self._table, call)
      on_done(index, outcome, time.perf_counter() - start)

  def close(self) -> None:
    """Nothing to stop."""


def run_phases(
  task: Task, sessions: dict[str, Any], table: artifact.ArtifactTable, call: Call
) -> Outcome:
  """Runs all phases of a call here, and turns faults of a candidate into a status."""
  values: dict[str, Any] = {}
  outputs: dict[str, str] = {}
  payload = b""
  try:
    for phase in task.phases:
      if phase not in sessions:
        sessions[phase] = task.open(phase)
      result, payload = sessions[phase].run(call, table, payload)
      values |= result.get("values", {})
      outputs |= result.get("outputs", {})
    return Outcome.from_dict(
      {"status": "ok", "values": values, "outputs": outputs, "detail": ""}
    )
  except Exception as error:  # noqa: BLE001
    # A fault of the candidate is its result; what it is called says which.
    status, detail = faults.status_of(error)
    return Outcome(status, detail=detail)
