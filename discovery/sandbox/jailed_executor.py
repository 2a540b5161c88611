"""The executor of levels `strict` and `standard`: jailed tracing and evaluation.

Evaluators run on this machine or on a Ray cluster. The trajectory of a run is the same
in both cases: calls are committed in the order of the packets, wherever and whenever
they end.
"""

import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxjax.discovery.core import identity
from mxjax.discovery.core import task as task_
from mxjax.discovery.core.candidate_source import hook_keys
from mxjax.discovery.core.store import Store
from mxjax.discovery.core.task import Call, Outcome, Status, Task
from mxjax.discovery.sandbox import jail, supervisor
from mxjax.discovery.sandbox.executor import OnDone, Phase, Took, Traced, run_phases
from mxjax.discovery.sandbox.supervisor import RunWorker, Tracer, WorkerError
from mxjax.errors import ImportRefusal

Serialized = Mapping[str, tuple[str, bytes]]
"""Name of the hook and its artifact, by identity."""


class EvaluatorWorker:
  """One evaluator, with a jailed worker for each phase."""

  def __init__(
    self, task: Task, level: str, limits: jail.Limits, compiled: str = ""
  ) -> None:
    """Configures the workers, which start on first use."""
    self._workers = [
      RunWorker(task.spec, phase, task.readable(phase), level, limits, compiled)
      for phase in task.phases
    ]

  def run(self, call: Mapping[str, Any], artifacts: Serialized) -> dict[str, Any]:
    """Runs all phases of a call.

    Returns `Outcome.to_dict()`, and under `processor` the processor seconds by part.

    Raises:
      OutageError: Workers were killed in it twice, so it has no outcome; see
        `supervisor.twice`.
    """

    def ran() -> tuple[Outcome, dict[str, float]]:
      spent = 0.0

      def phase_of(worker: RunWorker) -> Phase:
        def phase(before: bytes) -> tuple[dict[str, Any], bytes]:
          nonlocal spent
          result, payload = worker.run(call, artifacts, before, spent)
          spent += sum(result.get("processor", {}).values())
          return result, payload

        return phase

      return run_phases(map(phase_of, self._workers))

    spent: dict[str, float] = {}
    try:
      outcome, spent = supervisor.twice(ran)
    except WorkerError as error:
      outcome = Outcome(error.status, detail=str(error)[:1000])
    # `Outcome` refuses values that are not finite.
    except ValueError as error:
      outcome = Outcome(Status.NOT_FINITE, detail=str(error)[:1000])
    return {**outcome.to_dict(), "processor": spent}

  def close(self) -> None:
    """Kills the workers."""
    for worker in self._workers:
      worker.close()


class RemoteEvaluator(EvaluatorWorker):
  """An evaluator built from serializable arguments on the node that runs it."""

  def __init__(
    self, spec: Mapping[str, Any], level: str, limits: Mapping[str, Any]
  ) -> None:
    """Builds the task and configures its workers."""
    super().__init__(task_.load(spec), level, jail.Limits(**limits))


class RayWorker:
  """One Ray actor that holds one evaluator."""

  def __init__(self, task: Task, level: str, limits: jail.Limits) -> None:
    """Starts the actor on any node of the cluster that this process has joined.

    Raises:
      ImportError: Ray is not installed.
    """
    try:
      import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
      raise ImportRefusal(
        "discover: --ray",
        expected="the optional package ray",
        got="none",
        mend="run `pip install mxjax[ray]`",
      ) from error
    if not ray.is_initialized():
      ray.init(log_to_driver=False, include_dashboard=False)
    self._ray = ray
    actor = ray.remote(num_cpus=1)(RemoteEvaluator)
    self._actor = actor.remote(dict(task.spec), level, dataclasses.asdict(limits))

  def run(self, call: Mapping[str, Any], artifacts: Serialized) -> dict[str, Any]:
    """Runs a call on the actor, which has workers of its own."""
    return self._ray.get(self._actor.run.remote(dict(call), dict(artifacts)))

  def close(self) -> None:
    """Ends the actor and its workers."""
    self._ray.get(self._actor.close.remote())
    self._ray.kill(self._actor)


class JailedExecutor:
  """Traces candidates in disposable jails and distributes calls over workers.

  Artifacts are stored with the run, so a resumed run does not trace them again.
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
    make_worker: Callable[[Task, str, jail.Limits], Any] | None = None,
    compiled: pathlib.Path | None = None,
  ) -> None:
    """Starts the tracer.

    Calls run in parallel on `workers` evaluators, which `make_worker` can build
    elsewhere, as `RayWorker` does. `trace_limits` bound candidate Python and
    `run_limits` evaluator phases. Workers and runs share compiled programs in the
    folder `compiled`.

    Raises:
      LevelError: This machine cannot provide the level.
    """
    self._store = store
    self._specs = {spec["name"]: spec for spec in task.interface.to_list()}
    self._tracer = Tracer(level, trace_limits)
    self.description: Mapping[str, Any] = dict(self._tracer.features)
    shared = ""
    if compiled is not None:
      # Entries are programs that workers execute, so nobody else may write them.
      compiled.mkdir(mode=0o700, parents=True, exist_ok=True)
      shared = str(compiled.resolve())
    make = make_worker or functools.partial(EvaluatorWorker, compiled=shared)
    self._workers = [make(task, level, run_limits) for _ in range(workers)]
    first = task.phases[0]
    self._gate = RunWorker(task.spec, first, task.readable(first), level, run_limits)
    # A worker dies with the thread that started it, so each has one permanent thread.
    self._threads = [
      concurrent.futures.ThreadPoolExecutor(max_workers=1) for _ in self._workers
    ]

  def trace(self, source: str) -> Traced:
    """See `Executor.trace`; traces in a jail and then applies the gate."""
    keys = hook_keys(source, self._specs)
    known = {name: self._store.get("hooks", key) for name, key in keys.items()}
    computation = {n: entry["computation"] for n, entry in known.items() if entry}
    missing = [spec for name, spec in self._specs.items() if name not in computation]
    if not missing:
      return Traced(Status.OK, computation)
    hooks: dict[str, bytes] = {}
    for spec in missing:
      # Each in a jail of its own: another hook's trace may change what both share.
      raw = self._tracer.trace(source, [spec])
      if raw.status != Status.OK:
        return Traced(raw.status, detail=raw.detail)
      hooks |= raw.hooks
    try:
      gated = self._gate.gate(missing, hooks)
    except WorkerError as error:
      return Traced(error.status, detail=str(error))
    for name, lowered in gated.items():
      # The artifact before the entry that names it: a run that is killed between the
      # two traces the hook again.
      self._store.put_bytes("artifacts", f"{lowered}.unit", hooks[name])
      self._store.put("hooks", keys[name], {"hook": name, "computation": lowered})
    return Traced(Status.OK, computation | gated)

  def artifacts(self, call: Call) -> Serialized:
    """Returns everything that a call may execute, including the parent's hooks."""
    hooks = [*call.computation.items()]
    parent = call.intervention.get("parent")
    if parent:
      hooks += parent["computation"].items()
    return {lowered: (name, self._artifact(lowered)) for name, lowered in hooks}

  def _artifact(self, lowered: str) -> bytes:
    data = self._store.get_bytes("artifacts", f"{lowered}.unit")
    assert data is not None
    return data

  def run(self, calls: Sequence[Call], on_done: OnDone) -> None:
    """See `Executor.run`; calls go to the next free worker."""
    # In reverse, because `pop` takes from the end.
    lock, waiting = threading.Lock(), list(enumerate(calls))[::-1]

    def drain(worker: EvaluatorWorker) -> None:
      while True:
        with lock:
          if not waiting:
            return
          index, call = waiting.pop()
        start = time.perf_counter()
        plain = json.loads(identity.canonical(call._asdict()))
        answer = worker.run(plain, self.artifacts(call))
        took = Took(time.perf_counter() - start, answer["processor"])
        with lock:
          on_done(index, Outcome.from_dict(answer), took)

    pairs = zip(self._threads, self._workers, strict=True)
    for future in [thread.submit(drain, worker) for thread, worker in pairs]:
      future.result()

  def close(self) -> None:
    """Ends all workers."""
    for ending in (self._tracer, self._gate, *self._workers):
      ending.close()
    for thread in self._threads:
      thread.shutdown()
