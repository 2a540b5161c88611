"""Maps the observations of a packet to one of six verdicts.

Paper: Appendix "Controlled Experiments and Program Updates", the verdict table. Where
the paper leaves the precedence open, `decide` fixes it; a test covers the whole truth
table.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Literal

from mxjax.discovery.core.residual import (
  PRIMARY,
  Explanation,
  Predicted,
  Symbol,
  consistent,
  disagree,
)

Survivors = Literal["focal", "competitor", "several", "none"]


class Verdict(enum.StrEnum):
  """Conclusion of a packet about its residual."""

  SUPPORTED = "supported"
  TARGET_ONLY = "target_only"
  MEDIATOR_ONLY = "mediator_only"
  NO_EFFECT = "no_effect"
  UNRESOLVED = "unresolved"
  UNSAFE = "unsafe"


class Response(enum.StrEnum):
  """What the next relevant program must do."""

  EXTEND = "extend"
  REPAIR_EXPLANATION = "repair_explanation"
  REPAIR_TRANSFER = "repair_transfer"
  RETIRE = "retire"
  ADD_DISCRIMINATOR = "add_discriminator"
  REJECT = "reject"


RESPONSES: Mapping[Verdict, Response] = {
  Verdict.SUPPORTED: Response.EXTEND,
  Verdict.TARGET_ONLY: Response.REPAIR_EXPLANATION,
  Verdict.MEDIATOR_ONLY: Response.REPAIR_TRANSFER,
  Verdict.NO_EFFECT: Response.RETIRE,
  Verdict.UNRESOLVED: Response.ADD_DISCRIMINATOR,
  Verdict.UNSAFE: Response.REJECT,
}


FORBIDDING = frozenset({Response.RETIRE, Response.REJECT})
"""Responses that keep an intervention out of later programs; the others ask for one."""


EQUIVALENT = "parent_equivalent"
"""Reason of a verdict on an edit that leaves its parent as it is."""


@dataclasses.dataclass(frozen=True)
class Finding:
  """A verdict with its grounds.

  Attributes:
    reason: Cell of the truth table.
    survivors: Explanations that no observation contradicts, in registered order.
    excluded: The other explanations, each with the first condition that contradicts it.
    rivals: The focal explanation, and those that predict its primary outcome too. Any
      other account is a straw man: whatever a run shows, it excludes that account or
      the focal one.
  """

  verdict: Verdict
  reason: str
  survivors: tuple[str, ...]
  excluded: Mapping[str, str]
  rivals: tuple[str, ...] = ()

  @property
  def response(self) -> Response:
    """The required program response."""
    return RESPONSES[self.verdict]

  @property
  def explicit(self) -> Literal["", "primary", "control"]:
    """What made the verdict explicit; empty if only straw men were excluded.

    A verdict is explicit if it excludes a rival: by a control, or all of them already
    by the primary run.
    """
    by = {self.excluded[name] for name in self.rivals if name in self.excluded}
    return "control" if by - {PRIMARY} else "primary" if by else ""


def decide(
  *,
  is_safe: bool,
  is_equivalent: bool,
  gains: bool,
  shows_signature: bool,
  survivors: Survivors,
) -> tuple[Verdict, str]:
  """Returns the verdict and its reason from the truth table.

  Every combination has exactly one verdict. The precedence is: unsafe,
  parent-equivalent, unresolved, supported, target-only, mediator-only. The remaining
  case has one surviving explanation, no gain and no signature: nothing that was
  registered for the intervention happened, so it is retired as well.

  Args:
    is_safe: Every condition ran within the contract, and the rollback restores the
      parent.
    is_equivalent: The candidate computes what its parent computes, or moves no
      observable beyond its margin.
    gains: The target improved by more than its margin.
    shows_signature: The focal predictions for observables other than the target hold.
    survivors: Which explanations no observation contradicts.
  """
  if not is_safe:
    return Verdict.UNSAFE, "contract_or_rollback"
  if is_equivalent:
    return Verdict.NO_EFFECT, EQUIVALENT
  if survivors == "several":
    return Verdict.UNRESOLVED, "several_left"
  if survivors == "none":
    return Verdict.UNRESOLVED, "none_left"
  # One account is left. A gain supports it only if it is the focal one; otherwise the
  # gain is real and its explanation is not.
  if survivors == "focal" and gains:
    return Verdict.SUPPORTED, "focal_alone"
  if gains:
    return Verdict.TARGET_ONLY, "focal_excluded"
  if shows_signature:
    return Verdict.MEDIATOR_ONLY, "signature_without_gain"
  return Verdict.NO_EFFECT, "neither_gain_nor_signature"


def resolve(
  explanations: Sequence[Explanation],
  observed: Mapping[str, Mapping[str, Symbol]],
  target: str,
  *,
  is_safe: bool,
  is_equivalent: bool,
  claims_gain: bool = True,
) -> Finding:
  """Compares registered predictions with observations.

  The focal explanation comes first. `observed` holds symbols by condition and
  observable: directions from the parent, and under controls the fate of the edit's own
  change. `decide` describes the flags; a gain that the focal account does not claim, as
  another part of the edit made it, counts for nothing. A rival that is ours and was
  never told from the focal account leaves the question open, like any competitor.
  """
  focal = explanations[0]
  # The primary run first, so that `excluded` names a control only for an account that
  # the primary run had left.
  order = sorted(observed, key=lambda name: name != PRIMARY)
  against = lambda e: [n for n in order if not consistent(e.predicts(n), observed[n])]
  gone = {e.name: names[0] for e in explanations if (names := against(e))}
  standing = [e for e in explanations if e.name not in gone]
  if focal not in standing:
    # A rival of ours is an account only of what its own control has shown.
    standing = [e for e in standing if not e.rival or _is_tested(e, observed)]
  left = [e.name for e in standing]
  if not left:
    survivors: Survivors = "none"
  elif len(left) > 1:
    survivors = "several"
  else:
    survivors = "focal" if left[0] == focal.name else "competitor"
  primary = observed.get(PRIMARY, {})
  # The row "mediator-only" of the table: what the focal account predicts beside the
  # target. An account without such a prediction has no signature.
  signature: Predicted = {
    k: s for k, s in focal.predicts(PRIMARY).items() if k != target
  }
  verdict, reason = decide(
    is_safe=is_safe,
    is_equivalent=is_equivalent,
    gains=primary.get(target) == "down" and claims_gain,
    shows_signature=bool(signature) and consistent(signature, primary),
    survivors=survivors,
  )
  first = focal.predicts(PRIMARY)
  rivals = tuple(
    e.name for e in explanations if not disagree(first, e.predicts(PRIMARY))
  )
  # These two verdicts come before any account, so no exclusion is their ground.
  known = is_safe and not is_equivalent
  return Finding(verdict, reason, tuple(left), gone if known else {}, rivals)


def _is_tested(
  account: Explanation, observed: Mapping[str, Mapping[str, Symbol]]
) -> bool:
  """Returns whether a condition other than the primary run bore on an account."""
  return any(
    name != PRIMARY and set(account.predicts(name)) & set(observed[name])
    for name in observed
  )
