"""Prepares candidates and runs calls for one run, paying for each only once."""

import dataclasses
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib

from mxjax.discovery.core import identity
from mxjax.discovery.core.candidate_source import (
  CandidateSource,
  RejectedError,
  admit,
  with_functions,
)
from mxjax.discovery.core.packet import Condition
from mxjax.discovery.core.residual import PRIMARY
from mxjax.discovery.core.store import Store
from mxjax.discovery.core.task import Call, Outcome, Status, Task
from mxjax.discovery.sandbox.executor import Executor, Took, Traced
from mxjax.discovery.sandbox.processor import Seconds


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A proposed source after admission and tracing.

  Attributes:
    id: Identity of the source, also for a rejected one.
    admitted: The source as admitted, or None.
    computation: Lowered identity of every hook.
    call: The primary call with active hooks only, or None.
  """

  id: str
  source: str
  status: Status
  detail: str = ""
  admitted: CandidateSource | None = None
  computation: Mapping[str, str] = dataclasses.field(default_factory=dict)
  call: Call | None = None

  @property
  def full_call(self) -> Call:
    """The call with every hook, active or not; needs an admitted source."""
    assert self.admitted is not None
    return Call(self.computation, self.admitted.plan, {})


PREPARED = 512
"""Sources whose traces are kept in memory, those used last; others are traced anew."""


class CachedEvaluator:
  """Admits, traces and executes candidates; a store remembers every outcome.

  `fingerprint` hashes everything that determines an outcome, except the program.
  """

  def __init__(
    self,
    task: Task,
    executor: Executor,
    store: Store,
    *,
    identity_by: str = "lowered",
    archive: Store | None = None,
  ) -> None:
    """Binds a task to workers and a store.

    `identity_by` is `lowered`, or `source` for studies without the lowered identity.
    `archive` holds outcomes of other runs by execution identity. They save time only: a
    run is charged for every call that it asks for.
    """
    self.task = task
    self._executor, self._store, self._archive = executor, store, archive
    self._identity_by = identity_by
    # These names are part of every stored execution identity.
    self.fingerprint = identity.digest(
      {
        # Where files lie says nothing of an outcome; the contract has their content.
        "task": {k: v for k, v in task.spec.items() if k not in task.places},
        "contract": dict(task.contract),
        "margins": dict(task.margins),
        "bench": dict(executor.description),
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
    """Admits and traces a source; one of the last used is not traced again."""
    key = identity.digest(source.encode())
    # Taken out and put back: a dict keeps the order of insertion, so its first entry is
    # the one that was not used for longest.
    prepared = self._prepared.pop(key, None) or self._prepare(key, source)
    self._prepared[key] = prepared
    if len(self._prepared) > PREPARED:
      del self._prepared[next(iter(self._prepared))]
    return prepared

  def _prepare(self, key: str, source: str) -> Prepared:
    try:
      admitted = admit(source, self.task.interface)
    except RejectedError as error:
      return Prepared(key, source, Status.REJECTED, str(error))
    return self._traced(admitted, self._completed(admitted))

  def _traced(self, admitted: CandidateSource, completed: str) -> Prepared:
    traced = self._trace(completed)
    prepared = Prepared(
      admitted.id, admitted.source, traced.status, traced.detail, admitted
    )
    if traced.status != Status.OK:
      return prepared
    computation = dict(traced.computation)
    # Every other text is then another computation, also one that lowers to the same
    # program.
    if self._identity_by == "source":
      computation = {
        name: identity.digest([lowered, admitted.id])
        for name, lowered in computation.items()
      }
    call = Call(computation, admitted.plan, {}).active(self.task.interface)
    return dataclasses.replace(prepared, computation=computation, call=call)

  def _trace(self, completed: str) -> Traced:
    """Traces a source; one that failed stays so, with its first detail.

    Errors name addresses, and time limits depend on the machine, so a resumed run could
    not repeat its log.
    """
    key = identity.digest([self.fingerprint, completed])
    if (failed := self._store.get("failures", key)) is not None:
      return Traced(Status(failed["status"]), detail=failed["detail"])
    traced = self._executor.trace(completed)
    if traced.status != Status.OK:
      self._store.put(
        "failures", key, {"status": traced.status, "detail": traced.detail}
      )
    return traced

  def _completed(self, admitted: CandidateSource) -> str:
    """Returns the source with defaults added for hooks that it does not define."""
    missing = [h for h in self.task.interface.hooks if h.name not in admitted.hooks]
    if not missing:
      return admitted.source
    defaults = "\n".join([self.task.interface.header, *(h.default for h in missing)])
    return with_functions(admitted.source, defaults, replace=False)

  def condition(self, name: str, kind: str, call: Call, cost: int = 1) -> Condition:
    """Builds a condition addressed by its call's content, without inactive hooks."""
    call = call.active(self.task.interface)
    address = {"evaluator": self.fingerprint, **call._asdict()}
    return Condition(name, kind, call, cost, identity.digest(address))

  def run(self, conditions: Sequence[Condition]) -> list[Outcome]:
    """Returns outcomes in order, executing once each identity that is not stored."""
    # By identity, so that conditions which execute the same are executed once.
    stored = {c.exec_id: self._stored(c.exec_id) for c in conditions}
    missing = {c.exec_id: c.call for c in conditions if stored[c.exec_id] is None}
    names = list(missing)

    def on_done(index: int, outcome: Outcome, took: Took) -> None:
      entry = {"outcome": outcome.to_dict(), **dataclasses.asdict(took)}
      # As a resumed run reads it, so that both send a proposer the same prompt.
      entry = json.loads(identity.canonical(entry))
      stored[names[index]] = entry
      for store in (self._store, self._archive):
        if store is not None:
          store.put("outcomes", names[index], entry)

    if missing:
      self._executor.run(list(missing.values()), on_done)
    return [Outcome.from_dict(stored[c.exec_id]["outcome"]) for c in conditions]

  def processor(self, exec_id: str) -> Seconds | None:
    """Returns the processor seconds of an execution by part; see `processor.Meter`.

    None if it did not run in this folder, or if they are not known.
    """
    entry = self._store.get("outcomes", exec_id) or {}
    return entry.get("processor") or None

  def measure(self, *calls: Call) -> list[Outcome]:
    """Returns the outcomes of calls that are not charged to any budget."""
    return self.run([self.condition(PRIMARY, "candidate", call) for call in calls])

  def _stored(self, exec_id: str) -> Any:
    """Returns this run's stored entry, or copies the archive's entry into this run."""
    entry = self._store.get("outcomes", exec_id)
    if entry is None and self._archive is not None:
      entry = self._archive.get("outcomes", exec_id)
      if entry is not None:
        self._store.put("outcomes", exec_id, entry)
    return entry
