"""The two frontiers: programs by performance, and questions with their status.

A task may have a second model, on which a gain must hold before it is built upon.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping

from mxjax.discovery.core import identity
from mxjax.discovery.core.ledger import Ledger
from mxjax.discovery.core.packet import Packet
from mxjax.discovery.core.proposal import Demand, Record
from mxjax.discovery.core.residual import Residual
from mxjax.discovery.core.task import Outcome, Status
from mxjax.discovery.search.cached_evaluator import CachedEvaluator, Prepared
from mxjax.discovery.search.history import History
from mxjax.errors import ValueRefusal

# The paper leaves the choice of parents open.
CHAMPION_SHARE = 0.75
"""Share of the rounds without a demand in which the champion is revised."""
TRANSFER = "transfer"
"""Name of the condition that runs on the second model; it is charged as a candidate."""


class ExecutableFrontier:
  """The best distinct programs by measured performance, whatever their explanation.

  `records` holds the retained programs, best first.
  """

  def __init__(self, target: str, size: int) -> None:
    """Retains at most `size` programs with the lowest `target`."""
    self._target = target
    self._size = size
    self.records: list[Record] = []

  @property
  def best(self) -> Record:
    """The best program; among equals, the earliest."""
    return self.records[0]

  def rank(self, record: Record) -> tuple[float, int]:
    """Returns what programs are sorted by; the lowest is the best."""
    return record.values[self._target], record.call

  def retain(self, record: Record) -> bool:
    """Retains a program if it is new and among the best; returns whether it did."""
    # What executes the same is one program, whatever its text.
    if any(known.exec_id == record.exec_id for known in self.records):
      return False
    self.records = self._ranked([*self.records, record])[: self._size]
    return record in self.records

  def holds(self, program: str) -> bool:
    """Returns whether a program is among the retained ones."""
    return any(record.id == program for record in self.records)

  def parents(
    self,
    executed: Iterable[Record],
    seed: int,
    address: tuple[int, int],
    holders: Iterable[str] = (),
    *,
    margin: float = 0.0,
  ) -> list[tuple[Record, str]]:
    """Returns candidates for revision with the reason, in the order to try them.

    Retained programs that owe a response come first, the best of them at the front;
    then the head of the best line, or in a quarter of the rounds another of the better
    half of the retained programs; then the others, and all executed ones, best first.
    See `_head`; no round turns to another program that equals the champion by `margin`.
    """
    executed = [*executed]
    owing = [record for record in self.records if record.id in {*holders}]
    equals = self._equals(margin)
    first, why = self._head(equals, executed, margin)
    if identity.draw(seed, *address, "champion") >= CHAMPION_SHARE:
      better = self.records[: max(1, (len(self.records) + 1) // 2)]
      better = [r for r in better if r is self.best or r not in equals]
      drawn = identity.pick(better, seed, *address, "parent")
      if drawn is not self.best:
        first = drawn
        why = "a round in four revises another of the better half, so that the search "
        why += "does not follow one program alone"
    others = "nothing was left to propose for the programs before it"
    ordered = [
      *((record, "it owes the response that is checked below") for record in owing),
      (first, why),
      *((record, others) for record in (*self.records, *self._ranked(executed))),
    ]
    found: dict[str, tuple[Record, str]] = {}
    for record, reason in ordered:
      # A program that is listed twice has its first place and reason.
      found.setdefault(record.id, (record, reason))
    return list(found.values())

  def _equals(self, margin: float) -> list[Record]:
    """Returns the retained programs that are as good as the best by a margin."""
    level = self.best.values[self._target] + margin
    return [r for r in self.records if margin and r.values[self._target] <= level]

  def _head(
    self, equals: Iterable[Record], executed: Iterable[Record], margin: float
  ) -> tuple[Record, str]:
    """Returns the newest program of the best line, and why, in words.

    The margin says that no difference among `equals` counts, so which of them happens
    to have the lowest value decides nothing: steps that are smaller than the margin
    would be thrown away one by one. The best line is the best program, or that of which
    it was a control if this is as good, and what descends from either and is as good.
    """
    best = self.best
    written = [r for r in equals if r.id == best.control_of]
    roots = {best.id, *(r.id for r in written)}
    parents = {r.id: r.parent for r in (*executed, *self.records)}

    def descends(record: Record) -> bool:
      seen, program = set(), record.id
      # A program may be proposed again by its own descendant, so parents may form a
      # circle.
      while program and program not in seen:
        if program in roots:
          return True
        seen.add(program)
        program = parents.get(program, "")
      return False

    line = [r for r in equals if descends(r)] or [best]
    # Of a program and its control, the program; a control is shown nowhere whole.
    ids = {r.id for r in line}
    line = [r for r in line if r.control_of not in ids]
    head = max(line, key=lambda r: r.call)
    if head is best:
      return best, "it is the best program"
    by = head.values[self._target] - best.values[self._target]
    told = f"{best.id[:8]} is better by {by:.3g} only, within the margin {margin:.3g}"
    if written and head is written[0]:
      return (
        head,
        f"it is the best program of those that were proposed: its control {told}",
      )
    return head, f"it is the newest that descends from the best program: {told}"

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
      raise ValueRefusal(
        "search",
        expected="an initial program that runs on the transfer model",
        got=f"{outcome.status}: {outcome.detail}",
        mend="mend the program, or name another model",
      )

  def judge(
    self,
    packet: Packet,
    prepared: Prepared,
    is_gain: bool,
    ledger: Ledger,
    history: History,
  ) -> bool | None:
    """Whether a gain on the visible model is accepted; None if there is none.

    Without a call left it is not.
    """
    if not is_gain:
      return None
    # The packets of the round have run: what they did not need may pay for this call.
    ledger.release()
    accepted = False
    if min(ledger.left, ledger.left_for("candidate")) > 0:
      self._run(packet.hash, prepared, ledger, history)
      accepted = self._improves(prepared.id, packet.parent)
    ids = {"program": prepared.id, "against": packet.parent}
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
    status: `open`; `supported` (the focal explanation holds, the response is
      outstanding); `closed` (supported and the response verified); `measured` (a
      retained revision has it below its threshold); or `left` (its program is not
      retained any more).
    closed_by: Hash of the packet that closed it.
    asked: Packets that addressed it.
  """

  residual: Residual
  status: str = "open"
  closed_by: str = ""
  asked: int = 0


FINAL = frozenset(("closed", "measured", "left"))
"""States of a question that nothing reopens on its program."""
PATIENCE = 2
"""Packets about one question after which the next largest has its turn."""


class ResidualFrontier:
  """The questions of the retained programs, and the demands on their revisions.

  Measuring a program again keeps the questions of other programs. A question that was
  resolved is opened again on a later program only if that has more of it.
  """

  def __init__(self, margins: Mapping[str, float]) -> None:
    """Starts empty."""
    self.questions: dict[str, Question] = {}
    self._margins = margins
    self._closed: dict[str, float] = {}
    self._demands: defaultdict[str, dict[str, Demand]] = defaultdict(dict)
    self._abandoned: defaultdict[str, list[Demand]] = defaultdict(list)

  def open(self, residuals: Iterable[Residual]) -> list[Residual]:
    """Adds residuals measured on a retained program; returns the new ones."""
    new = [
      r for r in residuals if r.key not in self.questions and not self._is_resolved(r)
    ]
    for residual in new:
      self.questions[residual.key] = Question(residual)
    return new

  def _is_resolved(self, residual: Residual) -> bool:
    name = residual.observable
    margin = self._margins.get(name, 0.0)
    return name in self._closed and residual.value <= self._closed[name] + margin

  def closed_by(self, record: Record, residuals: Iterable[Residual]) -> list[Residual]:
    """Returns the questions of a program's parent that it has below the threshold."""
    still = {residual.observable for residual in residuals}
    return [
      q.residual
      for q in self.questions.values()
      if q.residual.program == record.parent
      and q.status not in FINAL
      and q.residual.observable not in still
    ]

  def dropped(self, retained: Iterable[Record]) -> list[Residual]:
    """Returns the open questions of programs that are not retained any more."""
    kept = {record.id for record in retained}
    return [
      q.residual
      for q in self.questions.values()
      if q.status == "open" and q.residual.program not in kept
    ]

  def actionable(self, program: str) -> tuple[Residual, ...]:
    """Returns the open questions of a program, the one to address first.

    That is the one with the largest excess, unless `PATIENCE` packets were spent on it.
    """
    mine = [
      q
      for q in self.questions.values()
      if q.residual.program == program and q.status == "open"
    ]
    order = lambda q: (q.asked // PATIENCE, -q.residual.excess, q.residual.observable)
    return tuple(q.residual for q in sorted(mine, key=order))

  def ask(self, residual: Residual) -> None:
    """Counts a packet about a question."""
    if residual.key in self.questions:
      self.questions[residual.key].asked += 1

  def demands(self, program: str) -> tuple[Demand, ...]:
    """Returns the demands that revisions of a program must meet, oldest first."""
    return tuple(self._demands[program].values())

  @property
  def holders(self) -> list[str]:
    """Programs of which a revision owes a change."""
    return [
      program
      for program, owed in self._demands.items()
      if any(not demand.forbids for demand in owed.values())
    ]

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

  def alike(self, program: str, demand: Demand) -> Demand | None:
    """Returns a standing demand of another packet that asks the same, or None."""
    return next(
      (
        known
        for known in self._demands[program].values()
        if known.response == demand.response
        and known.packet != demand.packet
        and known.same_question(demand)
      ),
      None,
    )

  def gave_up(self, program: str, demand: Demand) -> bool:
    """Returns whether the same was asked of a program's revisions and abandoned."""
    return any(
      known.response == demand.response and known.same_question(demand)
      for known in self._abandoned[program]
    )

  def holder(self, parent: str, packet: str) -> str:
    """Returns the program that is revised to answer a packet's verdict, or nothing.

    What is forbidden is owed by the parent of the packet and by its program.
    """
    owing = self.owing(packet)
    return parent if parent in owing else "".join(owing[:1])

  def owing(self, packet: str) -> list[str]:
    """Returns the programs whose revisions owe what the verdict of a packet asks."""
    return [program for program, owed in self._demands.items() if packet in owed]

  def standing(self, program: str, packet: str) -> Demand | None:
    """Returns the demand of a packet as it stands, or None if it was settled."""
    return self._demands[program].get(packet)

  def settle(self, program: str, demand: Demand, *, is_abandoned: bool = False) -> None:
    """Takes a demand away."""
    self._demands[program].pop(demand.packet, None)
    if is_abandoned:
      self._abandoned[program].append(demand)

  def move(self, residual: Residual, status: str, packet: str) -> bool:
    """Changes the status of a question; returns whether it was another one."""
    question = self.questions.get(residual.key)
    if question is None or question.status in (status, "closed"):
      return False
    if question.status in FINAL and status != "closed":
      return False
    question.status, question.closed_by = status, packet
    if status == "closed":
      # The lowest at which it was answered: a program with more of it is asked again.
      value = min(self._closed.get(residual.observable, residual.value), residual.value)
      self._closed[residual.observable] = value
    return True
