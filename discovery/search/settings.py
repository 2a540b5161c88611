"""What defines a run."""

import dataclasses
from typing import Literal

from mxjax.discovery.core.proposal import Evidence
from mxjax.discovery.search.checkers import Checker
from mxjax.discovery.search.controls import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig:
  """What defines a run, with its arm; frozen into the log's first event.

  Attributes:
    seed: Seed of every draw.
    budget: Evaluator calls.
    evidence: What the proposer may condition on.
    policy: How controls are selected; `none` runs candidates alone.
    checker: How responses are checked.
    compile_verdicts: Whether a verdict requires a response of the next program.
    width: Proposals made from one state; their calls can run side by side.
    frontier: Programs retained.
    mark_every: Calls between two held-out observations.
    reuse: Whether a repeated execution identity is free.
    proposals_per_call: Proposer calls allowed for each evaluator call.
    sequential: Skip registered controls that the primary run has made pointless: those
      that separate no two explanations still standing. The paper runs them all.
    parents: `frontier`, or `initial`: every proposal revises the initial program.
    shuffled_verdicts: Placebo: each finding is replaced by one drawn from all so far.
    corruption: Placebo: rate at which a predicted symbol is redrawn.
  """

  seed: int = 0
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
  corruption: float = 0.0
