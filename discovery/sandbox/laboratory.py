"""The laboratory: prepares candidates and runs calls, paying for each only once."""

import dataclasses
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jaxlib

from mxjax.discovery.core import identity
from mxjax.discovery.core.candidate_source import (
  Program,
  RejectedError,
  admit,
  with_functions,
)
from mxjax.discovery.core.packet import Condition
from mxjax.discovery.core.store import Store
from mxjax.discovery.core.task import Call, Outcome, Status, Task


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
  """Workers: where candidates are traced and calls are executed."""

  @property
  def description(self) -> Mapping[str, Any]:
    """Sandbox level and the jail's features in force, for the execution identity."""
    ...

  def trace(self, source: str) -> Traced:
    """Traces all hooks of an admitted source; artifacts stay with the bench."""
    ...

  def run(
    self, calls: Sequence[Call], on_done: Callable[[int, Outcome, float], None]
  ) -> None:
    """Runs calls, side by side where it can.

    Args:
      calls: What to run.
      on_done: Called once a call, with its position, outcome and seconds, as soon as
        it ends and from one thread at a time.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A proposed source after admission and tracing.

  Attributes:
    id: Identity of the source, also of one that was rejected.
    source: The text.
    status: `OK` or why there is no call.
    detail: One sentence about a failure.
    program: The admitted program, or None.
    computation: Lowered identity of every hook.
    call: The primary call with active hooks only, or None.
  """

  id: str
  source: str
  status: Status
  detail: str = ""
  program: Program | None = None
  computation: Mapping[str, str] = dataclasses.field(default_factory=dict)
  call: Call | None = None


class Laboratory:
  """Admission, tracing and execution behind a store.

  Attributes:
    task: The task.
    evaluator: Hash of everything but the program that fixes an outcome.
  """

  def __init__(
    self,
    task: Task,
    bench: Executor,
    store: Store,
    *,
    identity_by: str = "lowered",
    archive: Store | None = None,
  ) -> None:
    """Opens a laboratory.

    Args:
      task: The task.
      bench: The workers.
      store: Where what was paid for is kept.
      identity_by: `lowered`, or `source` for studies without the lowered identity.
      archive: Outcomes of other runs, by execution identity. They save time and
        nothing else: a run is charged for what it asks.
    """
    self.task = task
    self._bench, self._store, self._by = bench, store, identity_by
    self._archive = archive
    self.evaluator = identity.digest(
      {
        "task": dict(task.spec),
        "contract": dict(task.contract),
        "margins": dict(task.margins),
        "bench": dict(bench.description),
        "identity_by": identity_by,
        "versions": {
          "jax": jax.__version__,
          "jaxlib": jaxlib.__version__,
          "python": sys.version.split()[0],
          "machine": platform.machine(),
        },
      }
    )
    self._prepared: dict[str, Prepared] = {}

  def prepare(self, source: str) -> Prepared:
    """Admits and traces a source; the same text is traced once."""
    key = identity.digest(source.encode())
    if key not in self._prepared:
      self._prepared[key] = self._prepare(key, source)
    return self._prepared[key]

  def _prepare(self, key: str, source: str) -> Prepared:
    try:
      admitted = admit(source, self.task.interface)
    except RejectedError as error:
      return Prepared(key, source, Status.REJECTED, str(error))
    return self._traced(admitted, self._completed(admitted))

  def _traced(self, admitted: Program, completed: str) -> Prepared:
    """Traces an admitted program whose missing hooks were filled in."""
    traced, source = self._bench.trace(completed), admitted.source
    if traced.status != Status.OK:
      return Prepared(admitted.id, source, traced.status, traced.detail, admitted)
    computation = dict(traced.computation)
    if self._by == "source":
      computation = {
        name: identity.digest([lowered, admitted.id])
        for name, lowered in computation.items()
      }
    full = Call(computation, admitted.plan, {})
    return Prepared(
      admitted.id,
      source,
      Status.OK,
      program=admitted,
      computation=computation,
      call=self.effective(full),
    )

  def _completed(self, admitted: Program) -> str:
    """The source with the defaults of hooks that it inherits."""
    missing = [h for h in self.task.interface.hooks if h.name not in admitted.hooks]
    if not missing:
      return admitted.source
    defaults = "\n".join([self.task.interface.header, *(h.default for h in missing)])
    return with_functions(admitted.source, defaults, replace=False)

  def full_call(self, prepared: Prepared) -> Call:
    """The call with every hook, active or not."""
    assert prepared.program is not None
    return Call(prepared.computation, prepared.program.plan, {})

  def effective(self, call: Call) -> Call:
    """A call without the hooks that its plan never runs."""
    active = {
      hook.name
      for hook in self.task.interface.hooks
      if hook.is_active(call.plan) and hook.name in call.computation
    }
    hooks = {name: h for name, h in call.computation.items() if name in active}
    return call._replace(computation=hooks)

  def run(self, conditions: Sequence[Condition]) -> list[Outcome]:
    """Outcomes in order; only what no run kept is executed, each identity once."""
    kept: dict[str, Any] = {c.exec_id: self._kept(c.exec_id) for c in conditions}
    todo = {c.exec_id: c.call for c in conditions if kept[c.exec_id] is None}
    names = list(todo)

    def keep(index: int, outcome: Outcome, seconds: float) -> None:
      kept[names[index]] = {"outcome": outcome.to_dict(), "seconds": seconds}
      for store in (self._store, self._archive):
        if store is not None:
          store.put("outcomes", names[index], kept[names[index]])

    if todo:
      self._bench.run(list(todo.values()), keep)
    return [Outcome.from_dict(kept[c.exec_id]["outcome"]) for c in conditions]

  def _kept(self, exec_id: str) -> Any | None:
    """What this run kept, or else the archive, whose entry becomes this run's."""
    kept = self._store.get("outcomes", exec_id)
    if kept is None and self._archive is not None:
      kept = self._archive.get("outcomes", exec_id)
      if kept is not None:
        self._store.put("outcomes", exec_id, kept)
    return kept
