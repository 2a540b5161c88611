"""Turns a proposal into a frozen packet with selected controls and priced calls."""

import dataclasses

from mxjax.discovery.core import identity
from mxjax.discovery.core.ledger import Ledger
from mxjax.discovery.core.packet import Condition, Packet
from mxjax.discovery.core.proposal import Proposal, Record, Required
from mxjax.discovery.core.residual import (
  PRIMARY,
  SYMBOLS,
  Control,
  Explanation,
  Residual,
  Symbol,
)
from mxjax.discovery.core.task import Call, Outcome
from mxjax.discovery.core.verdict import Response
from mxjax.discovery.search import checkers, controls
from mxjax.discovery.search.cached_evaluator import CachedEvaluator, Prepared
from mxjax.discovery.search.settings import SearchConfig


@dataclasses.dataclass(frozen=True)
class Selection:
  """Starting point of a proposal.

  Attributes:
    address: Round and position within it; draws depend on the seed and this address.
    residuals: The parent's actionable residuals, largest excess first.
    required: The response that the parent owes, or None.
  """

  address: tuple[int, int]
  parent: Record
  residuals: tuple[Residual, ...]
  required: Required | None

  def residual(self, proposal: Proposal) -> Residual | None:
    """Returns the residual that a proposal addresses; an owed one takes precedence."""
    owed = (self.required.residual,) if self.required else ()
    named = (r for r in (*owed, *self.residuals) if r.observable == proposal.residual)
    return next(named, None)


@dataclasses.dataclass
class Attempt:
  """One registered packet on its way through a round.

  `outcomes` are by condition; `skipped` names registered controls that will not run.
  """

  proposal: Proposal
  prepared: Prepared
  parent: Record
  required: Required | None
  packet: Packet
  outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)
  skipped: frozenset[str] = frozenset()

  @property
  def outcome(self) -> Outcome:
    """Outcome of the primary run."""
    return self.outcomes[PRIMARY]

  def conditions(self, *, primary: bool) -> list[Condition]:
    """Returns the primary condition, or the other conditions that are to run."""
    return [
      c
      for c in self.packet.conditions
      if (c.name == PRIMARY) == primary and c.name not in self.skipped
    ]


def corrupted(
  account: Explanation, rate: float, seed: int, address: tuple[int, int]
) -> Explanation:
  """Redraws the predicted symbols of an explanation at a rate, as a placebo."""

  def redrawn(name: str, observable: str, predicted: Symbol) -> Symbol:
    where = (seed, *address, "corrupt", account.name, name, observable)
    if identity.draw(*where) >= rate:
      return predicted
    return identity.pick(SYMBOLS, *where, "symbol")

  predictions = {
    name: {o: redrawn(name, o, s) for o, s in predicted.items()}
    for name, predicted in account.predictions.items()
  }
  return dataclasses.replace(account, predictions=predictions)


def alone(prepared: Prepared, parent: str, evaluator: CachedEvaluator) -> Packet:
  """Returns the packet of a candidate without a question: its primary run only."""
  assert prepared.call is not None
  return Packet(
    program=prepared.id,
    parent=parent,
    conditions=(evaluator.condition(PRIMARY, "candidate", prepared.call),),
    margins=evaluator.task.margins,
    evaluator=evaluator.fingerprint,
  )


def freeze(
  selection: Selection,
  proposal: Proposal,
  prepared: Prepared,
  *,
  config: SearchConfig,
  evaluator: CachedEvaluator,
  ledger: Ledger,
) -> Attempt:
  """Freezes a proposal into a packet; near the end of the budget, the candidate alone.

  Raises:
    ValueError: The allowed controls cannot separate the explanations.
  """
  assert prepared.call is not None
  parent, required = selection.parent, selection.required
  packet = alone(prepared, parent.id, evaluator)
  first = Attempt(proposal, prepared, parent, None, packet)
  conditions = list(packet.conditions)
  residual = selection.residual(proposal) if config.policy != "none" else None
  if residual is not None:
    for control in _controls(selection, proposal, config):
      call = prepared.call._replace(
        intervention=_intervention(control, parent, evaluator)
      )
      conditions.append(
        evaluator.condition(control.name, "control", call, control.cost)
      )
  is_checked = required is not None and config.checker != "none"
  if is_checked and checkers.needs_probe(config.checker):
    call = checkers.reverted(prepared.full_call, parent.full_call, proposal.declared)
    conditions.append(evaluator.condition("probe", "probe", call))
  packet = dataclasses.replace(
    packet,
    conditions=tuple(conditions),
    residual=residual,
    explanations=proposal.explanations if residual is not None else (),
    allowed=tuple(c.name for c in proposal.controls),
    policy=config.policy,
    response_to=required.packet if required else None,
    declared=proposal.declared,
    checker=config.checker if is_checked else "none",
  )
  if ledger.price(packet.prices) > ledger.left:
    return first
  return dataclasses.replace(first, required=required, packet=packet)


def _controls(
  selection: Selection, proposal: Proposal, config: SearchConfig
) -> tuple[Control, ...]:
  policy, required = config.policy, selection.required
  if required and required.response == Response.ADD_DISCRIMINATOR:
    # If the minimal set left several explanations, run every allowed control.
    policy = "all" if required.survivors else policy
  return controls.select(
    policy,
    proposal.explanations,
    proposal.controls,
    config.seed,
    *selection.address,
  )


def _intervention(
  control: Control, parent: Record, evaluator: CachedEvaluator
) -> dict[str, object]:
  """Returns a control's intervention, with the parent's call filled in if requested."""
  intervention = dict(control.intervention)
  if intervention.get("parent"):
    before: Call = parent.full_call.active(evaluator.task.interface)
    intervention["parent"] = {
      "computation": dict(before.computation),
      "plan": dict(before.plan),
    }
  return intervention
