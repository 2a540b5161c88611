"""History of a run: events for the log, experiments for the proposer, and marks."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mxjax.discovery.core import candidate_source, verdict
from mxjax.discovery.core.ledger import Ledger
from mxjax.discovery.core.packet import Condition, Packet
from mxjax.discovery.core.proposal import (
  Answered,
  Experiment,
  Proposal,
  Ran,
  Record,
  Winner,
)
from mxjax.discovery.core.residual import Explanation, Symbol
from mxjax.discovery.core.store import Store, read_events
from mxjax.discovery.core.task import Outcome, Status, Task
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.search.checkers import Check
from mxjax.discovery.search.registration import Attempt

OnEvent = Callable[[dict[str, Any]], None]


class History:
  """The experiments of a run; `on_event`, if set, receives every logged event."""

  def __init__(
    self,
    store: Store,
    task: Task,
    rank: Callable[[Record], Any],
    *,
    mark_every: int,
    budget: int,
  ) -> None:
    """Starts empty; the champion has the lowest `rank`."""
    self.experiments: list[Experiment] = []
    self.on_event: OnEvent | None = None
    self._store, self._task, self._rank = store, task, rank
    self._every, self._budget = mark_every, budget
    self._marked, self._champion = 0, ""
    # Edits share their accounts, which a long run would hold thousands of times.
    self._accounts: dict[str, tuple[Explanation, ...]] = {}

  def emit(self, name: str, /, **fields: Any) -> None:
    """Logs an event."""
    event = self._store.emit(name, **fields)
    if self.on_event:
      self.on_event(event)

  def run(
    self,
    evaluator: CachedEvaluator,
    ledger: Ledger,
    conditions: Sequence[tuple[Packet, Condition]],
  ) -> list[Outcome]:
    """Runs conditions in parallel and books them in the order of the packets."""
    outcomes = evaluator.run([condition for _, condition in conditions])
    for (packet, condition), outcome in zip(conditions, outcomes, strict=True):
      self.book(ledger, packet.hash, condition, outcome)
    return outcomes

  def book(
    self, ledger: Ledger, packet: str, condition: Condition, outcome: Outcome
  ) -> None:
    """Books a condition of a reserved packet, and logs how it ended."""
    entry = ledger.settle(packet, condition, outcome.status)
    self.emit(
      "outcome",
      **dataclasses.asdict(entry),
      values=dict(outcome.values),
      outputs=dict(outcome.outputs),
      detail=outcome.detail,
    )

  def remember(
    self,
    attempt: Attempt,
    finding: verdict.Finding | None,
    checks: Mapping[str, Check],
    observed: Mapping[str, Mapping[str, Symbol]],
    asks: str = "",
  ) -> None:
    """Adds an executed packet to the experiments; `asks` is what its verdict asks."""
    outcome, changes = attempt.outcome, attempt.changes
    accounts = attempt.packet.explanations
    # By their text, because accounts hold mappings and have no hash.
    accounts = self._accounts.setdefault(repr(accounts), accounts)
    self.experiments.append(
      Experiment(
        program=attempt.prepared.id,
        parent=attempt.parent.id,
        label=attempt.proposal.label,
        note=attempt.proposal.note,
        status=outcome.status,
        changes=changes,
        gain=self.improves(changes) and attempt.transfers is not False,
        score=outcome.values.get(self._task.target),
        feedback=outcome.detail,
        diff=candidate_source.diff(attempt.parent.source, attempt.prepared.source),
        code=candidate_source.changed_definitions(
          attempt.parent.source, attempt.prepared.source
        ),
        winner=_winner(attempt, self._task),
        verdict=finding.verdict if finding else "",
        reason=finding.reason if finding else "",
        explanations=accounts,
        observed=observed,
        excluded=finding.excluded if finding else {},
        survivors=finding.survivors if finding else (),
        implemented=_all_met(checks),
        transfers=attempt.transfers,
        values=outcome.values,
        short=within_margin(self._task, changes.get(self._task.target)),
        ran=_ran(attempt),
        dropped=attempt.dropped,
        asks=asks,
        answered=tuple(
          Answered(
            demand.response,
            demand.label,
            checks[demand.packet].implemented,
            checks[demand.packet].detail,
          )
          for demand in attempt.demands
        ),
      )
    )

  def improves(self, changes: Mapping[str, float]) -> bool:
    """Whether the target's change is a gain by more than its margin."""
    target = self._task.target
    return changes.get(target, 0.0) < -self._task.margins.get(target, 0.0)

  def refuse(
    self, proposal: Proposal, program: str, parent: Record, status: str, detail: str
  ) -> None:
    """Logs a proposal refused before any evaluator call, and adds an experiment."""
    self.emit(
      "refused",
      label=proposal.label,
      program=program,
      parent=parent.id,
      status=str(status),
      detail=detail,
    )
    self.experiments.append(
      Experiment(
        program=program,
        parent=parent.id,
        label=proposal.label,
        note=proposal.note,
        status=str(status),
        changes={},
        gain=False,
        feedback=detail,
        # An unusable answer has no program; its difference would take the parent away.
        diff=""
        if proposal.unusable
        else candidate_source.diff(parent.source, proposal.source),
      )
    )

  def mark(self, spent: int, records: Iterable[Record]) -> None:
    """Logs the champion at every multiple of `mark_every` calls that was passed.

    It has the lowest rank of the programs that had run by then.

    When a run ends, `spent` is its whole budget: one that ends early is compared with
    the others, at each of their marks, by the champion that it had. If the last of them
    has another champion than the run, or there is none, a mark at the budget follows:
    what a run ends with is always scored on held-out data.
    """
    measured = [record for record in records if record.is_accepted]
    # A packet may pass several marks at once; each has the champion of its own call.
    while self._marked + self._every <= spent:
      self._marked += self._every
      self._mark(self._marked, [r for r in measured if r.call <= self._marked])
    if spent >= self._budget:
      best = min(measured, key=self._rank)
      if best.id != self._champion and not self._ended_before():
        self._mark(self._budget, measured)

  def _mark(self, call: int, known: Iterable[Record]) -> None:
    best = min(known, key=self._rank)
    self._champion = best.id
    value = best.values[self._task.target]
    self.emit("mark", call=call, champion=best.id, value=value)

  def _ended_before(self) -> bool:
    """Returns whether a log is replayed that ended when such marks were not made."""
    if not self._store.replaying:
      return False
    logged = read_events(self._store.path)
    marks = [event["call"] for event in logged if event["event"] == "mark"]
    return logged[-1]["event"] == "closed" and self._budget not in marks


def _winner(attempt: Attempt, task: Task) -> Winner | None:
  """Returns the best control that is a program, if it did better than the edit."""
  target, own = task.target, attempt.outcome.values.get(task.target)
  found = [
    (outcome.values[target], name)
    for name, outcome in attempt.outcomes.items()
    if attempt.sources.get(name) and target in outcome.values
  ]
  if not found or own is None or min(found)[0] >= own:
    return None
  _, condition = min(found)
  mine, source = attempt.prepared.source, attempt.sources[condition]
  before = attempt.prepared.full_call.plan
  plan = attempt.condition(condition).call.plan
  return Winner(
    candidate_source.CandidateSource(source, {}, {}).id,
    condition,
    candidate_source.changed_definitions(mine, source),
    {key: value for key, value in plan.items() if value != before.get(key)},
  )


def within_margin(task: Task, change: float | None) -> str:
  """Returns in words how far a change of the target is within its margin, or nothing.

  It says by how much an improvement falls short of the margin.
  """
  target, margin = task.target, task.margins.get(task.target, 0.0)
  if change is None or abs(change) > margin:
    return ""
  if change < 0:
    return (
      f"{target} is better by {-change:.3g}, which is {margin + change:.3g} short of "
      f"its margin {margin:.3g}"
    )
  return f"{target} moved by {change:+.3g}, which is within its margin {margin:.3g}"


def _all_met(checks: Mapping[str, Check]) -> bool | None:
  """Returns whether every demand was met; None if none was, or could be, decided."""
  decided = [c.implemented for c in checks.values() if c.implemented is not None]
  return all(decided) if decided else None


def _ran(attempt: Attempt) -> tuple[Ran, ...]:
  """Returns what became of the conditions beside the primary run, in their order."""
  shown = []
  for condition in attempt.packet.conditions[1:]:
    outcome = attempt.outcomes.get(condition.name)
    if outcome is not None:
      said = (outcome.status, outcome.detail, outcome.values)
    elif attempt.outcome.status == Status.OK:
      said = ("not needed", "it tells nothing apart that the others left", {})
    else:
      said = ("not run", "the primary run failed", {})
    shown.append(Ran(condition.name, *said))
  return tuple(shown)
