"""The bench of levels `strict` and `standard`: jailed tracing, jailed evaluation."""

import concurrent.futures
import functools
import json
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxjax.discovery.core import identity
from mxjax.discovery.core.candidate_source import hook_keys
from mxjax.discovery.core.store import Store
from mxjax.discovery.core.task import Call, Outcome, Status, Task
from mxjax.discovery.sandbox import jail, supervisor
from mxjax.discovery.sandbox.laboratory import Traced
from mxjax.discovery.sandbox.supervisor import RunWorker, Tracer, WorkerError


class EvaluatorWorker:
  """One evaluator: a jailed worker for each phase."""

  def __init__(
    self, task: Task, level: str, limits: jail.Limits, compiled: str = ""
  ) -> None:
    """Describes the workers; they start when they are needed."""
    self._workers = {
      phase: RunWorker(task.spec, phase, task.readable(phase), level, limits, compiled)
      for phase in task.phases
    }

  def run(
    self, call: Mapping[str, Any], artifacts: Mapping[str, tuple[str, bytes, bytes]]
  ) -> dict[str, Any]:
    """Runs all phases of a call; returns `Outcome.to_dict()`."""
    values: dict[str, Any] = {}
    outputs: dict[str, str] = {}
    payload = b""
    try:
      for worker in self._workers.values():
        result, payload = worker.run(call, artifacts, payload)
        values |= result.get("values", {})
        outputs |= result.get("outputs", {})
      outcome = {"status": "ok", "values": values, "outputs": outputs, "detail": ""}
      return Outcome.from_dict(outcome).to_dict()
    except WorkerError as error:
      return Outcome(error.status, detail=str(error)[:1000]).to_dict()
    except ValueError as error:
      return Outcome(Status.NOT_FINITE, detail=str(error)[:1000]).to_dict()

  def close(self) -> None:
    """Kills the workers."""
    for worker in self._workers.values():
      worker.close()


class JailedExecutor:
  """Candidates traced in disposable jails, calls spread over lanes.

  Artifacts are kept in the run's store, so a resumed run traces nothing again.
  """

  def __init__(
    self,
    task: Task,
    store: Store,
    *,
    level: str = "strict",
    workers: int = 1,
    trace_limits: jail.Limits = supervisor.TRACE_LIMITS,
    run_limits: jail.Limits = supervisor.RUN_LIMITS,
    lane: Callable[[Task, str, jail.Limits], Any] | None = None,
    compiled: pathlib.Path | None = None,
  ) -> None:
    """Starts the tracer.

    Args:
      task: The task.
      store: Where artifacts are kept.
      level: `strict` or `standard`.
      workers: Calls that run side by side.
      trace_limits: For candidate Python.
      run_limits: For evaluator phases.
      lane: Makes an evaluator elsewhere, such as `ray_lane.RayWorker`.
      compiled: A folder in which lanes, and runs, share compiled programs.

    Raises:
      WorkerError: The level cannot be had on this machine.
    """
    self._task, self._store, self._level = task, store, level
    self._specs = {spec["name"]: spec for spec in task.interface.to_list()}
    self._tracer = Tracer(level, trace_limits)
    self.description: Mapping[str, Any] = dict(self._tracer.features)
    if compiled is not None:
      compiled.mkdir(parents=True, exist_ok=True)
    kept = str(compiled.resolve()) if compiled else ""
    make_lane = lane or functools.partial(EvaluatorWorker, compiled=kept)
    self._lanes = [make_lane(task, level, run_limits) for _ in range(workers)]
    first = task.phases[0]
    self._gate = RunWorker(task.spec, first, task.readable(first), level, run_limits)
    # Workers die with the thread that started them, so each lane keeps one thread.
    make = concurrent.futures.ThreadPoolExecutor
    self._threads = [make(max_workers=1) for _ in self._lanes]

  def trace(self, source: str) -> Traced:
    """See `Executor.trace`: jail, then gate."""
    keys = hook_keys(source, self._specs)
    kept = {name: self._store.get("hooks", key) for name, key in keys.items()}
    todo = [spec for name, spec in self._specs.items() if kept.get(name) is None]
    if todo:
      raw = self._tracer.trace(source, todo)
      if raw.status != Status.OK:
        return Traced(raw.status, detail=raw.detail)
      try:
        computation = self._gate.gate(todo, raw.hooks)
      except WorkerError as error:
        return Traced(error.status, detail=str(error))
      for name, lowered in computation.items():
        unit, batched = raw.hooks[name]
        self._store.put_bytes("artifacts", f"{lowered}.unit", unit)
        self._store.put_bytes("artifacts", f"{lowered}.batched", batched)
        kept[name] = {"hook": name, "computation": lowered}
        self._store.put("hooks", keys[name], kept[name])
    return Traced(Status.OK, {n: k["computation"] for n, k in kept.items() if k})

  def artifacts(self, call: Call) -> dict[str, tuple[str, bytes, bytes]]:
    """Everything that a call may execute, its parent's hooks for controls included."""
    hooks = [*call.computation.items()]
    before = call.intervention.get("parent")
    if isinstance(before, Mapping):
      hooks += before["computation"].items()
    found = {}
    for name, computation in hooks:
      unit = self._store.get_bytes("artifacts", f"{computation}.unit")
      batched = self._store.get_bytes("artifacts", f"{computation}.batched")
      assert unit is not None and batched is not None
      found[computation] = (name, unit, batched)
    return found

  def run(
    self, calls: Sequence[Call], on_done: Callable[[int, Outcome, float], None]
  ) -> None:
    """See `Executor.run`: calls go to the next free lane."""
    lock, todo = threading.Lock(), list(enumerate(calls))[::-1]

    def drain(lane: EvaluatorWorker) -> None:
      while True:
        with lock:
          if not todo:
            return
          index, call = todo.pop()
        start = time.perf_counter()
        plain = json.loads(identity.canonical(call._asdict()))
        outcome = Outcome.from_dict(lane.run(plain, self.artifacts(call)))
        seconds = time.perf_counter() - start
        with lock:
          on_done(index, outcome, seconds)

    lanes = zip(self._threads, self._lanes, strict=True)
    running = [thread.submit(drain, lane) for thread, lane in lanes]
    for future in running:
      future.result()

  def close(self) -> None:
    """Ends all workers."""
    self._tracer.close()
    self._gate.close()
    for lane in self._lanes:
      lane.close()
    for thread in self._threads:
      thread.shutdown()
