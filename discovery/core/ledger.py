"""Three ledgers that are never mixed: evaluator calls, proposer use, time.

A packet reserves all its calls before it starts and settles them as they end. What
started in the run worker is charged, however it ended; what was refused before costs
nothing; a repeated execution identity costs nothing and is recorded as reused.
"""

import dataclasses
from collections import Counter
from typing import Any

KINDS = ("candidate", "control", "probe")


@dataclasses.dataclass(frozen=True)
class Entry:
  """One settled condition.

  Attributes:
    call: Calls spent once it is settled.
    kind: `candidate`, `control` or `probe`.
    charged: Calls it cost; 0 when reused.
    exec_id: Its execution identity.
    packet: Hash of its packet.
    condition: Its name there.
    status: How it ended.
  """

  call: int
  kind: str
  charged: int
  exec_id: str
  packet: str
  condition: str
  status: str


class Ledger:
  """The evaluator calls of one run.

  Attributes:
    budget: Calls in all.
    entries: Settled conditions in order.
    proposer: Calls, tokens and cost of the proposer.
  """

  def __init__(self, budget: int, *, reuse: bool = True) -> None:
    """Opens a ledger.

    Args:
      budget: Calls in all.
      reuse: Whether a repeated execution identity is free within this run.
    """
    self.budget = budget
    self.entries: list[Entry] = []
    self.proposer: Counter[str] = Counter()
    self._reuse = reuse
    self._reserved = 0
    self._known: set[str] = set()

  @property
  def spent(self) -> int:
    """Calls charged so far."""
    return self.entries[-1].call if self.entries else 0

  @property
  def left(self) -> int:
    """Calls neither charged nor reserved."""
    return self.budget - self.spent - self._reserved

  def price(self, conditions: list[tuple[str, int]]) -> int:
    """What `(exec_id, cost)` conditions would be charged now."""
    return sum(cost for exec_id, cost in self._fresh(conditions))

  def _fresh(self, conditions: list[tuple[str, int]]) -> list[tuple[str, int]]:
    if not self._reuse:
      return conditions
    return [c for c in dict.fromkeys(conditions) if c[0] not in self._known]

  def reserve(self, calls: int) -> None:
    """Sets calls aside for a packet.

    Raises:
      ValueError: The packet does not fit; it must not start.
    """
    if calls > self.left:
      raise ValueError(f"ledger: {calls} calls do not fit into the {self.left} left.")
    self._reserved += calls

  def settle(
    self, kind: str, exec_id: str, cost: int, packet: str, condition: str, status: str
  ) -> Entry:
    """Books one condition of a reserved packet, whatever its status."""
    reused = self._reuse and exec_id in self._known
    charged = 0 if reused else cost
    self._known.add(exec_id)
    self._reserved -= charged
    entry = Entry(
      self.spent + charged, kind, charged, exec_id, packet, condition, status
    )
    self.entries.append(entry)
    return entry

  def release(self) -> None:
    """Gives back what a finished packet reserved but did not need."""
    self._reserved = 0

  def totals(self) -> dict[str, Any]:
    """Charged calls by kind, reused conditions, and proposer use."""
    charged = {kind: 0 for kind in KINDS}
    for entry in self.entries:
      charged[entry.kind] += entry.charged
    return {
      **charged,
      "total": sum(charged.values()),
      "budget": self.budget,
      "reused": sum(entry.charged == 0 for entry in self.entries),
      "failed": sum(e.status != "ok" and e.charged > 0 for e in self.entries),
      "proposer": dict(sorted(self.proposer.items())),
    }
