"""Accounting of a run's evaluator calls and, separately, of its proposer's use.

A packet reserves all its calls before it starts and settles them as they end. A call
that started in the run worker is charged however it ended. A proposal that is refused
before execution is free, and so is a repeated execution identity, which is recorded as
reused.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.discovery.core.packet import Condition
from mxjax.discovery.core.proposal import Budget
from mxjax.errors import ValueRefusal

KINDS = ("candidate", "control", "probe")


@dataclasses.dataclass(frozen=True)
class Entry:
  """One settled condition.

  Attributes:
    call: Total calls spent once this entry is settled.
    charged: Calls that it cost; 0 when reused.
    packet: Hash of its packet.
    condition: Name of the condition within the packet.
  """

  call: int
  kind: str
  charged: int
  exec_id: str
  packet: str
  condition: str
  status: str


class Ledger:
  """Evaluator calls of one run; `entries` holds the settled conditions in order."""

  def __init__(
    self,
    budget: int,
    *,
    reuse: bool = True,
    allocation: Mapping[str, int] | None = None,
    max_tokens: int | None = None,
    max_cost: float | None = None,
  ) -> None:
    """Opens a ledger; with `reuse`, a repeated execution identity is free.

    `allocation` divides the budget by kind of call; without it, any kind may use all.
    `max_tokens` and `max_cost`, in dollars, are the proposer's budgets.

    Raises:
      ValueError: The allocation does not name every kind or does not add up.
    """
    if allocation and (
      set(allocation) != set(KINDS) or sum(allocation.values()) != budget
    ):
      raise ValueRefusal(
        "ledger",
        expected=f"an allocation of {budget} calls to {', '.join(KINDS)}",
        got=dict(allocation),
        mend="make the parts add up",
      )
    self.budget = budget
    self.entries: list[Entry] = []
    self.proposer: Counter[str] = Counter()
    self._reuse, self._allocation = reuse, allocation
    self._max_tokens, self._max_cost = max_tokens, max_cost
    self._reserved: Counter[str] = Counter()
    self._charged: Counter[str] = Counter()
    self._charged_calls: dict[str, int] = {}

  @property
  def spent(self) -> int:
    """Calls charged so far."""
    return self.entries[-1].call if self.entries else 0

  @property
  def left(self) -> int:
    """Calls that are neither charged nor reserved."""
    return self.budget - self.spent - self._reserved.total()

  @property
  def overspent(self) -> str:
    """The proposer's budget that is used up, with its sum, or an empty string."""
    tokens = self.proposer["input_tokens"] + self.proposer["output_tokens"]
    dollars = self.proposer["micro_dollars"] / 1e6
    if self._max_tokens is not None and tokens >= self._max_tokens:
      return f"max-tokens: {tokens} of {self._max_tokens}"
    if self._max_cost is not None and dollars >= self._max_cost:
      return f"max-cost: {dollars:.6f} of {self._max_cost:.6f} dollars"
    return ""

  def overspends(self, usage: Mapping[str, int]) -> bool:
    """Returns whether one more use of the proposer uses its budget up."""
    after = Ledger(self.budget, max_tokens=self._max_tokens, max_cost=self._max_cost)
    after.proposer = self.proposer + Counter(usage)
    return bool(after.overspent)

  def remaining(self) -> Budget:
    """Returns what is left, as a proposer is told it."""
    tokens = self.proposer["input_tokens"] + self.proposer["output_tokens"]
    dollars = self.proposer["micro_dollars"] / 1e6
    left = lambda most, used: None if most is None else max(most - used, 0)
    return Budget(
      calls_left=max(self.left, 0),
      calls=self.budget,
      tokens_left=left(self._max_tokens, tokens),
      dollars_left=left(self._max_cost, dollars),
    )

  def left_for(self, kind: str) -> int:
    """Calls of a kind that are neither charged nor reserved."""
    if self._allocation is None:
      return self.left
    return self._allocation[kind] - self._charged[kind] - self._reserved[kind]

  def ran(self, exec_id: str) -> bool:
    """Returns whether this execution was settled before."""
    return exec_id in self._charged_calls

  def call_of(self, exec_id: str) -> int:
    """Returns the calls spent when this execution was first settled."""
    return self._charged_calls[exec_id]

  def price(self, conditions: Sequence[Condition]) -> Counter[str]:
    """Returns the charge of each kind for conditions if they were run now."""
    if self._reuse:
      # Of conditions that execute the same, the first is charged: in reverse it is the
      # one that is written last.
      first = {c.exec_id: c for c in reversed(conditions)}
      conditions = [c for c in first.values() if not self.ran(c.exec_id)]
    charges: Counter[str] = Counter()
    for condition in conditions:
      charges[condition.kind] += condition.cost
    return charges

  def fits(self, charges: Counter[str]) -> bool:
    """Returns whether these calls are left, in all and of each kind."""
    # Without an allocation each kind alone may fit into what is left, and all together
    # not.
    each = all(count <= self.left_for(kind) for kind, count in charges.items())
    return each and charges.total() <= self.left

  def reserve(self, charges: Counter[str]) -> None:
    """Reserves calls for a packet.

    Raises:
      ValueError: The packet does not fit into the budget and must not start.
    """
    if not self.fits(charges):
      raise ValueRefusal(
        "ledger",
        expected=f"at most the {self.left} calls that are left, each kind within its "
        "own",
        got=dict(charges),
        mend="do not start this packet",
      )
    self._reserved += charges

  def settle(self, packet: str, condition: Condition, status: str) -> Entry:
    """Books one condition of a reserved packet, whatever its status."""
    is_reused = self._reuse and self.ran(condition.exec_id)
    charged = 0 if is_reused else condition.cost
    call = self.spent + charged
    # Without `reuse` an execution is settled again, and keeps its first call.
    self._charged_calls.setdefault(condition.exec_id, call)
    # Nothing was reserved for what is reused, so what it would have cost must not be
    # given back.
    self._reserved[condition.kind] -= charged
    self._charged[condition.kind] += charged
    entry = Entry(
      call,
      condition.kind,
      charged,
      condition.exec_id,
      packet,
      condition.name,
      status,
    )
    self.entries.append(entry)
    return entry

  def release(self) -> None:
    """Releases calls that finished packets reserved but did not need."""
    self._reserved.clear()

  def totals(self) -> dict[str, Any]:
    """Returns charged calls by kind, reused and failed conditions, and proposer use."""
    return {
      **{kind: self._charged[kind] for kind in KINDS},
      "total": self._charged.total(),
      "budget": self.budget,
      "reused": sum(entry.charged == 0 for entry in self.entries),
      "failed": sum(e.status != "ok" and e.charged > 0 for e in self.entries),
      "proposer": dict(sorted(self.proposer.items())),
    }
