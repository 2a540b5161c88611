"""Resolves the outcomes of a packet into a finding and the response it requires.

Paper: Appendix "Controlled Experiments and Program Updates", Eq. residual-compile.
"""

import dataclasses

from mxjax.discovery.core import verdict
from mxjax.discovery.core.proposal import Record, Required
from mxjax.discovery.core.residual import (
  PRIMARY,
  Residual,
  Symbol,
  consistent,
  symbol,
)
from mxjax.discovery.core.task import Outcome, Status, Task
from mxjax.discovery.core.verdict import Finding, Response, Verdict
from mxjax.discovery.search import checkers, controls
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.search.checkers import Check
from mxjax.discovery.search.frontier import ResidualFrontier
from mxjax.discovery.search.history import History
from mxjax.discovery.search.registration import Attempt

MAX_ATTEMPTS = 2
"""Number of failed checks of a response after which the demand is dropped."""


def symbols(task: Task, parent: Record, outcome: Outcome) -> dict[str, Symbol]:
  """Returns the symbol of every observable with a margin, relative to the parent."""
  return {
    name: symbol(outcome.values[name] - parent.values[name], margin)
    for name, margin in task.margins.items()
    if name in outcome.values and name in parent.values
  }


def pointless(task: Task, attempt: Attempt) -> frozenset[str]:
  """Returns controls that separate no explanations left by the primary run."""
  packet = attempt.packet
  registered = {c.name for c in packet.conditions if c.kind == "control"}
  if not registered:
    return frozenset()
  seen = symbols(task, attempt.parent, attempt.outcome)
  left = [e for e in packet.explanations if consistent(e.predicts(PRIMARY), seen)]
  allowed = [c for c in attempt.proposal.controls if c.name in registered]
  return frozenset(registered - {c.name for c in controls.minimal(left, allowed)})


def observed(task: Task, attempt: Attempt) -> dict[str, dict[str, Symbol]]:
  """Returns the symbols of every condition that succeeded, except the probe."""
  return {
    name: symbols(task, attempt.parent, outcome)
    for name, outcome in attempt.outcomes.items()
    if name != "probe" and outcome.status == Status.OK
  }


def _is_equivalent(attempt: Attempt, seen: dict[str, Symbol]) -> bool:
  """Tests for the same execution, or for observables and outputs that did not move."""
  if attempt.packet.conditions[0].exec_id == attempt.parent.exec_id:
    return True
  is_still = all(s == "same" for s in seen.values())
  outputs = dict(attempt.outcome.outputs)
  return bool(seen) and is_still and outputs == dict(attempt.parent.outputs)


def resolve(
  task: Task, attempt: Attempt, seen: dict[str, dict[str, Symbol]]
) -> Finding:
  """Compares the observations with the registered predictions."""
  ran = [attempt.outcomes[n] for n in (PRIMARY, "probe") if n in attempt.outcomes]
  return verdict.resolve(
    attempt.packet.explanations,
    seen,
    task.target,
    is_safe=all(outcome.status == Status.OK for outcome in ran),
    is_equivalent=_is_equivalent(attempt, seen.get(PRIMARY, {})),
  )


def check(evaluator: CachedEvaluator, attempt: Attempt) -> Check:
  """Checks for a response in the source, the lowered program or executed outputs."""
  packet, outcome, parent = attempt.packet, attempt.outcome, attempt.parent
  checker: checkers.Checker = packet.checker  # pyright: ignore[reportAssignmentType]
  if outcome.status != Status.OK:
    return Check(checker, False, f"the candidate ended {outcome.status}")
  if checker == "source":
    mine, before = attempt.prepared.admitted, evaluator.prepare(parent.source).admitted
    assert mine is not None and before is not None
    return checkers.by_source(mine, before, packet.declared)
  if checker == "lowered":
    call = attempt.prepared.full_call
    return checkers.by_lowering(call, parent.full_call, packet.declared)
  without = attempt.outcomes["probe"]
  if checker == "probe":
    return checkers.by_probe(outcome, without, packet.declared)
  return checkers.by_layer_output(outcome, without)


def answer(
  residuals: ResidualFrontier, history: History, attempt: Attempt, implemented: bool
) -> None:
  """Settles the demand that a packet answered: met, retried or dropped."""
  demanded = attempt.required
  assert demanded is not None
  residuals.required.pop(attempt.parent.id, None)
  tries = demanded.attempts + 1
  if not implemented and tries < MAX_ATTEMPTS:
    again = dataclasses.replace(demanded, attempts=tries)
    residuals.required[attempt.parent.id] = again
  elif implemented and demanded.verdict == Verdict.SUPPORTED:
    _move(residuals, history, demanded.residual, "closed", attempt.packet.hash)


def demand(
  residuals: ResidualFrontier,
  history: History,
  attempt: Attempt,
  finding: Finding,
  *,
  is_retained: bool,
  compiles: bool,
) -> None:
  """Records what a finding supports, and which program owes the response to it.

  `is_retained` tells whether the candidate is among the retained programs. `compiles`
  is False in the ablation in which verdicts create no demands.
  """
  packet = attempt.packet
  assert packet.residual is not None
  if finding.verdict == Verdict.SUPPORTED:
    _move(residuals, history, packet.residual, "supported", packet.hash)
  if compiles and finding.response in verdict.OWED:
    holder = holder_of(
      finding.response, packet.program, packet.parent, is_retained=is_retained
    )
    required = Required(
      packet.hash,
      finding.verdict,
      finding.response,
      attempt.proposal.label,
      finding.survivors,
      packet.residual,
    )
    residuals.required.setdefault(holder, required)


def holder_of(response: str, program: str, parent: str, *, is_retained: bool) -> str:
  """Returns the program whose next revision owes a response.

  A discriminator concerns the step from the parent, so the parent owes it.
  """
  asks_again = response == Response.ADD_DISCRIMINATOR
  return program if is_retained and not asks_again else parent


def _move(
  residuals: ResidualFrontier,
  history: History,
  residual: Residual,
  status: str,
  packet: str,
) -> None:
  if residuals.questions[residual.key].status not in (status, "closed"):
    residuals.move(residual, status, packet)
    history.emit("residual", key=residual.key, status=status, packet=packet)
