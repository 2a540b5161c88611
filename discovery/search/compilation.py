"""Residual compilation: what a verdict demands of the next program.

Paper: Eq. residual-compile.
"""

import dataclasses

from mxjax.discovery.core import verdict
from mxjax.discovery.core.proposal import Required
from mxjax.discovery.core.residual import Residual
from mxjax.discovery.core.verdict import Finding, Response, Verdict
from mxjax.discovery.search.frontier import ResidualFrontier
from mxjax.discovery.search.history import History
from mxjax.discovery.search.registration import Attempt

MAX_ATTEMPTS = 2
"""Responses that may fail their check before the demand is dropped."""


def answer(
  residuals: ResidualFrontier, history: History, attempt: Attempt, implemented: bool
) -> None:
  """Settles the demand that a packet answered: met, to be tried again, or dropped."""
  demand, owed = attempt.required, residuals.required
  assert demand is not None
  owed.pop(attempt.parent.id, None)
  tries = demand.attempts + 1
  if not implemented and tries < MAX_ATTEMPTS:
    owed[attempt.parent.id] = dataclasses.replace(demand, attempts=tries)
  elif implemented and demand.verdict == Verdict.SUPPORTED:
    _move(residuals, history, demand.residual, "closed", attempt.packet.hash)


def demand(
  residuals: ResidualFrontier,
  history: History,
  attempt: Attempt,
  finding: Finding,
  *,
  is_kept: bool,
  compiles: bool,
) -> None:
  """Marks what a finding supports, and says who owes the response to it.

  Args:
    residuals: The questions and the demands.
    history: Where moves are logged.
    attempt: The packet.
    finding: What it showed.
    is_kept: Whether the candidate is among the retained programs.
    compiles: Whether verdicts are demands at all; not in the ablation without.
  """
  packet = attempt.packet
  assert packet.residual is not None
  if finding.verdict == Verdict.SUPPORTED:
    _move(residuals, history, packet.residual, "supported", packet.hash)
  if compiles and finding.response in verdict.OWED:
    holder = holder_of(
      finding.response, attempt.prepared.id, attempt.parent.id, is_kept=is_kept
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


def holder_of(response: str, program: str, parent: str, *, is_kept: bool) -> str:
  """The program whose next revision owes a response.

  A discriminator is about the step from the parent, so it is asked again there.
  """
  asks_again = response == Response.ADD_DISCRIMINATOR
  return program if is_kept and not asks_again else parent


def _move(
  residuals: ResidualFrontier,
  history: History,
  residual: Residual,
  status: str,
  packet: str,
) -> None:
  if residuals.questions[residual.key].status in (status, "closed"):
    return
  residuals.move(residual, status, packet)
  history.emit("residual", key=residual.key, status=status, packet=packet)
