"""The two frontiers: programs by performance, and questions with their status."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from mxjax.discovery.core import identity
from mxjax.discovery.core.proposal import Demand, Record
from mxjax.discovery.core.residual import Residual


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

  def retain(self, record: Record) -> bool:
    """Retains a program if it is new and among the best; returns whether it did."""
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
    return sorted(records, key=lambda r: (r.values[self._target], r.call))


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
