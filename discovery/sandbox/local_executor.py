"""The executor of level `off`: runs trusted source in this process.

The synthetic world and the embedded edit templates use it when speed matters more than
isolation. Every record of such a run says so.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.discovery.core.candidate_source import hook_keys
from mxjax.discovery.core.task import Call, Outcome, RefusedError, Session, Status, Task
from mxjax.discovery.sandbox import artifact, frames, tracing
from mxjax.discovery.sandbox.executor import (
  OnDone,
  Took,
  Traced,
  metered,
  run_phases,
  status_of,
)


class LocalExecutor:
  """Traces and runs everything in one process, without limits."""

  description: Mapping[str, Any] = {"level": "off"}

  def __init__(self, task: Task) -> None:
    """Binds a task; phases load their data on first use."""
    self._task = task
    specs = {spec["name"]: spec for spec in task.interface.to_list()}
    self.artifacts = artifact.ArtifactTable(specs)
    self._sessions: dict[str, Session] = {}
    self._hooks: dict[str, str] = {}

  def sibling(self, task: Task) -> "LocalExecutor":
    """Returns an executor that shares these artifacts, for a task of this interface."""
    other = LocalExecutor(task)
    other.artifacts, other._hooks = self.artifacts, self._hooks
    return other

  def trace(self, source: str) -> Traced:
    """See `Executor.trace`; a hook with a known key (`hook_keys`) is not retraced."""
    specs = self.artifacts.specs
    keys = hook_keys(source, specs)
    computation = {n: self._hooks[k] for n, k in keys.items() if k in self._hooks}
    missing = [dict(spec) for name, spec in specs.items() if name not in computation]
    try:
      for hook in tracing.trace(source, missing) if missing else ():
        packed = frames.pack(hook.units)
        lowered = artifact.gate(specs[hook.name], packed)
        computation[hook.name] = self._hooks[keys[hook.name]] = lowered
        self.artifacts.add(lowered, hook.name, packed)
    except RefusedError as error:
      # In the words of the gate behind walls: a prompt may tell them, and its replay
      # without walls is to be the same prompt.
      return Traced(Status.REFUSED, detail=str(error)[:1000])
    except Exception as error:  # noqa: BLE001
      # An exception of candidate code is a result of the candidate, not an error of
      # ours.
      return Traced(Status.TRACE_FAILED, detail=f"{type(error).__name__}: {error}")
    return Traced(Status.OK, computation)

  def run(self, calls: Sequence[Call], on_done: OnDone) -> None:
    """See `Executor.run`; runs the calls one after another."""
    for index, call in enumerate(calls):
      start = time.perf_counter()
      outcome, spent = self._outcome(call)
      on_done(index, outcome, Took(time.perf_counter() - start, spent))

  def _outcome(self, call: Call) -> tuple[Outcome, dict[str, float]]:
    try:
      return run_phases(
        metered(functools.partial(self._session(phase).run, call, self.artifacts))
        for phase in self._task.phases
      )
    except Exception as error:  # noqa: BLE001
      # A fault of the candidate is its result; `status_of` classifies it.
      status, detail = status_of(error)
      return Outcome(status, detail=detail), {}

  def _session(self, phase: str) -> Session:
    if phase not in self._sessions:
      self._sessions[phase] = self._task.open(phase)
    return self._sessions[phase]

  def close(self) -> None:
    """Does nothing; there are no workers."""
