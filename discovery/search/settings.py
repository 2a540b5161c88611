"""Configuration of a search."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from mxjax.discovery.core.ledger import Ledger
from mxjax.discovery.core.proposal import CALL_SECONDS, Evidence
from mxjax.discovery.search.checkers import Checker
from mxjax.discovery.search.controls import Policy

OPTIONAL = frozenset(
  ("max_tokens", "max_cost", "start", "call_seconds", "asks", "revise_retired")
)
"""Fields that a log has only where they are not the default: older logs lack them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig:
  """Configuration of a run and its arm, frozen into the first event of the log.

  Attributes:
    budget: Evaluator calls.
    evidence: Evidence that the proposer may condition on.
    policy: How controls are selected; `none` runs candidates alone.
    checker: How responses are checked.
    compile_verdicts: Whether a verdict requires a response of the next program.
    width: Proposals made from one state; their calls can run in parallel.
    frontier: Number of programs retained.
    mark_every: Calls between two held-out observations.
    reuse: Whether a repeated execution identity is free.
    proposals_per_call: Proposer calls allowed per evaluator call.
    sequential: Whether to skip registered controls that separate no two explanations
      left by the primary run. The paper runs them all.
    parents: `frontier`, or `initial`: every proposal revises the initial program.
    shuffled_verdicts: Placebo: replaces each finding by one drawn from all so far.
    allocation: Calls for each of `ledger.KINDS`, or None: any kind may use the budget.
    corruption: Placebo: rate at which predicted symbols are redrawn.
    revise_retired: Whether a program whose own change a verdict retired is revised
      further, or only what it came from. Such a revision must take the change back.
    start: Source of the initial program; the task's default program if empty.
    call_seconds: Processor seconds of a call with its compilation, then it has failed.
    asks: Whether a proposer may question the task's free proxy before it proposes.
    max_tokens: Of the proposer, in and out, after which nothing more is asked; or None.
    max_cost: The same in dollars.
  """

  seed: int = 0
  # These calls and the marks after every 20 are those of the paper's matched-budget
  # study.
  budget: int = 240
  evidence: Evidence = "verdict"
  policy: Policy = "minimal"
  checker: Checker = "probe"
  compile_verdicts: bool = True
  width: int = 1
  frontier: int = 8
  mark_every: int = 20
  reuse: bool = True
  proposals_per_call: int = 6
  sequential: bool = True
  parents: Literal["frontier", "initial"] = "frontier"
  shuffled_verdicts: bool = False
  allocation: Mapping[str, int] | None = None
  corruption: float = 0.0
  revise_retired: bool = True
  start: str = ""
  call_seconds: float = CALL_SECONDS
  asks: bool = True
  max_tokens: int | None = None
  max_cost: float | None = None

  @property
  def is_metered(self) -> bool:
    """Whether the proposer has a budget."""
    return not (self.max_tokens is None and self.max_cost is None)

  def ledger(self) -> Ledger:
    """Returns an empty ledger of these budgets."""
    return Ledger(
      self.budget,
      reuse=self.reuse,
      allocation=self.allocation,
      max_tokens=self.max_tokens,
      max_cost=self.max_cost,
    )

  def to_dict(self) -> dict[str, Any]:
    """Returns a JSON-ready form, without what is not set."""
    unset = {n for n in OPTIONAL if getattr(self, n) == getattr(SearchConfig, n)}
    return {k: v for k, v in dataclasses.asdict(self).items() if k not in unset}
