"""The two frontiers: programs by performance, and questions with their status.

A task may have a second model, on which a gain must hold before it is built upon.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from mxjax.discovery.core import identity
from mxjax.discovery.core.ledger import Ledger
from mxjax.discovery.core.proposal import Demand, Record
from mxjax.discovery.core.residual import Residual
from mxjax.discovery.core.task import Outcome, Status
from mxjax.discovery.search.cached_evaluator import CachedEvaluator, Prepared
from mxjax.discovery.search.history import History
from mxjax.discovery.search.registration import Attempt

TRANSFER = "transfer"
"""Name of the condition that runs on the second model; it is charged as a candidate."""


class ExecutableFrontier:
  """The best distinct programs by measured performance, whatever their explanation.

  A program that a control scored on another text counts as what it shows there. One
  that none did counts as the last of its ancestors that was: a gain that was not tested
  is no gain yet. Without such controls, all count as their score.

  `records` holds the retained programs, best first.
  """

  def __init__(self, target: str, size: int) -> None:
    """Retains at most `size` programs with the lowest `target`."""
    self._target = target
    self._size = size
    self._tested: dict[str, float] = {}
    self._parents: dict[str, str] = {}
    self.records: list[Record] = []

  @property
  def best(self) -> Record:
    """The best program; among equals, the earliest."""
    return self.records[0]

  def test(self, shown: Mapping[str, float]) -> None:
    """Learns what programs show on another text."""
    self._tested |= shown
    self.records = self._ranked(self.records)

  def rank(self, record: Record) -> tuple[float, bool, float, int]:
    """Returns what programs are sorted by; the lowest is the best."""
    tested = record.id
    while tested and tested not in self._tested:
      tested = self._parents.get(tested, "")
    credit = self._tested.get(tested, math.inf)
    is_own = record.id in self._tested
    return credit, not is_own, record.values[self._target], record.call

  def retain(self, record: Record) -> bool:
    """Retains a program if it is new and among the best; returns whether it did."""
    self._parents.setdefault(record.id, record.parent)
    if any(known.exec_id == record.exec_id for known in self.records):
      return False
    self.records = self._ranked([*self.records, record])[: self._size]
    return record in self.records

  def holds(self, program: str) -> bool:
    """Returns whether a program is among the retained ones."""
    return any(record.id == program for record in self.records)

  def parents(
    self, executed: Iterable[Record], seed: int, address: tuple[int, int]
  ) -> list[Record]:
    """Returns candidates for revision, in the order in which to try them.

    The first is the champion in half of the rounds and a random retained program
    otherwise. The other retained programs follow, then all executed ones, best first.
    """
    first = self.best
    if identity.draw(seed, *address, "champion") >= 0.5:
      first = identity.pick(self.records, seed, *address, "parent")
    ordered = [first, *self.records, *self._ranked(executed)]
    return list({record.id: record for record in ordered}.values())

  def _ranked(self, records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=self.rank)


class Transfer:
  """Accepts an improvement only if the transfer-validation model improves as well.

  Paper: appendix "Discovery protocols", algorithm discovery. The comparison program is
  the parent, so every step to a champion improved both models. The proposer is told
  whether a step was accepted, and nothing else that the second model shows.
  """

  def __init__(self, evaluator: CachedEvaluator) -> None:
    """Binds the evaluator of the task on that model."""
    self._evaluator = evaluator
    self._targets: dict[str, float] = {}

  def begin(
    self, packet: str, prepared: Prepared, ledger: Ledger, history: History
  ) -> None:
    """Measures the initial program.

    Raises:
      ValueError: It does not run on the second model.
    """
    outcome = self._run(packet, prepared, ledger, history)
    if outcome.status != Status.OK:
      raise ValueError(
        f"search: the initial program must run on the transfer model, got "
        f"{outcome.status}: {outcome.detail}"
      )

  def judge(self, attempt: Attempt, ledger: Ledger, history: History) -> bool | None:
    """Whether a gain on the visible model is accepted; None if there is none.

    Without a call left it is not.
    """
    if not history.improves(attempt.changes):
      return None
    ledger.release()
    packet, accepted = attempt.packet, False
    if min(ledger.left, ledger.left_for("candidate")) > 0:
      self._run(packet.hash, attempt.prepared, ledger, history)
      accepted = self._improves(packet.program, packet.parent)
    ids = {"program": packet.program, "against": packet.parent}
    history.emit(TRANSFER, packet=packet.hash, **ids, accepted=accepted)
    return accepted

  def _run(
    self, packet: str, prepared: Prepared, ledger: Ledger, history: History
  ) -> Outcome:
    """Runs a program and books the call, without its values."""
    call = self._evaluator.prepare(prepared.source).call
    assert call is not None, "it was traced for the visible model"
    condition = self._evaluator.condition(TRANSFER, "candidate", call)
    (outcome,) = self._evaluator.run([condition])
    if outcome.status == Status.OK:
      self._targets[prepared.id] = outcome.values[self._evaluator.task.target]
    ledger.reserve(ledger.price([condition]))
    bare = dataclasses.replace(outcome, values={}, outputs={})
    history.book(ledger, packet, condition, bare)
    return outcome

  def _improves(self, program: str, parent: str) -> bool:
    if program not in self._targets:
      return False
    task = self._evaluator.task
    change = self._targets[program] - self._targets[parent]
    return change < -task.margins.get(task.target, 0.0)


@dataclasses.dataclass
class Question:
  """A residual and its status.

  Attributes:
    status: `open`, `supported` (the focal explanation holds, the response is
      outstanding), `closed` (supported and the response verified) or `retired`.
    closed_by: Hash of the packet that closed it.
  """

  residual: Residual
  status: str = "open"
  closed_by: str = ""


class ResidualFrontier:
  """All questions by key, and the demands that revisions of a program must meet.

  Measuring a program again keeps the questions of other programs.
  """

  def __init__(self) -> None:
    """Starts empty."""
    self.questions: dict[str, Question] = {}
    self._demands: defaultdict[str, dict[str, Demand]] = defaultdict(dict)

  def open(self, residuals: Iterable[Residual]) -> list[Residual]:
    """Adds residuals measured on a program; returns the new ones."""
    new = [r for r in residuals if r.key not in self.questions]
    for residual in new:
      self.questions[residual.key] = Question(residual)
    return new

  def actionable(self, program: str) -> tuple[Residual, ...]:
    """Returns the open questions of a program, largest excess first."""
    mine = [
      q.residual
      for q in self.questions.values()
      if q.residual.program == program and q.status == "open"
    ]
    return tuple(sorted(mine, key=lambda r: (-r.excess, r.observable)))

  def demands(self, program: str) -> tuple[Demand, ...]:
    """Returns the demands that revisions of a program must meet, oldest first."""
    return tuple(self._demands[program].values())

  def unretired(self, programs: Iterable[Record]) -> list[Record]:
    """Returns the programs that do not hold a change that they must take back."""
    return [
      record
      for record in programs
      if not any(
        demand.forbids
        and record.full_call.part(demand.computation) == demand.intervention
        for demand in self.demands(record.id)
      )
    ]

  def owe(self, program: str, demand: Demand) -> None:
    """Adds a demand; one about the same packet is replaced in its place."""
    self._demands[program][demand.packet] = demand

  def standing(self, program: str, packet: str) -> Demand | None:
    """Returns the demand of a packet as it stands, or None if it was settled."""
    return self._demands[program].get(packet)

  def settle(self, program: str, demand: Demand) -> None:
    """Takes a demand away."""
    del self._demands[program][demand.packet]

  def move(self, residual: Residual, status: str, packet: str) -> None:
    """Changes the status of a question."""
    question = self.questions[residual.key]
    question.status, question.closed_by = status, packet
