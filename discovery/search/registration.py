"""From a proposal to a frozen packet: controls chosen, conditions addressed, priced."""

import dataclasses

from mxjax.discovery.core import identity
from mxjax.discovery.core.ledger import Ledger
from mxjax.discovery.core.packet import Condition, Packet, condition
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
from mxjax.discovery.sandbox.laboratory import Laboratory, Prepared
from mxjax.discovery.search import checkers, controls
from mxjax.discovery.search.settings import SearchConfig


@dataclasses.dataclass
class Attempt:
  """One registered packet on its way through a round.

  Attributes:
    proposal: What was proposed.
    prepared: The candidate, traced.
    parent: The program that it revises.
    required: The response that it owes, or None.
    packet: The registration.
    outcomes: Outcomes so far, by condition.
    skipped: Registered controls that will not run.
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
    """The primary condition, or the others that are to run."""
    return [
      c
      for c in self.packet.conditions
      if (c.name == PRIMARY) == primary and c.name not in self.skipped
    ]


def full_call(record: Record) -> Call:
  """The call of an executed program with every hook, active or not."""
  return Call(record.computation, record.plan, {})


def corrupted(
  account: Explanation, rate: float, seed: int, address: tuple[int, int]
) -> Explanation:
  """An explanation whose predicted symbols are redrawn at a rate: a placebo."""

  def redrawn(name: str, observable: str, predicted: Symbol) -> Symbol:
    where = (seed, *address, "corrupt", account.name, name, observable)
    is_kept = identity.draw(*where) >= rate
    return predicted if is_kept else identity.pick(SYMBOLS, *where, "symbol")

  table = {
    name: {o: redrawn(name, o, s) for o, s in predicted.items()}
    for name, predicted in account.predictions.items()
  }
  return dataclasses.replace(account, predictions=table)


def _chosen(
  config: SearchConfig,
  proposal: Proposal,
  required: Required | None,
  address: tuple[int, int],
) -> tuple[Control, ...]:
  policy = config.policy
  is_asked = required is not None and required.response == "add_discriminator"
  if is_asked and required is not None and required.survivors:
    # The minimal set left several accounts standing: run everything allowed.
    policy = "all"
  return controls.select(
    policy, proposal.explanations, proposal.controls, config.seed, *address
  )


def _intervened(lab: Laboratory, call: Call, control: Control, parent: Record) -> Call:
  """The call of a control; one that asks for the parent is told what it ran."""
  intervention = dict(control.intervention)
  if intervention.get("parent"):
    before = lab.effective(full_call(parent))
    intervention["parent"] = {
      "computation": dict(before.computation),
      "plan": dict(before.plan),
    }
  return call._replace(intervention=intervention)


def freeze(
  config: SearchConfig,
  lab: Laboratory,
  ledger: Ledger,
  proposal: Proposal,
  prepared: Prepared,
  parent: Record,
  residual: Residual | None,
  required: Required | None,
  address: tuple[int, int],
) -> Attempt:
  """The packet, in full or, where the budget's end is near, the candidate alone.

  Raises:
    ValueError: The allowed controls cannot separate the explanations.
  """
  assert prepared.call is not None
  is_asked = residual is not None and config.policy != "none"
  chosen = _chosen(config, proposal, required, address) if is_asked else ()
  make = lambda name, kind, call, cost=1: condition(
    name, kind, call, lab.evaluator, cost
  )
  conditions = [make(PRIMARY, "candidate", prepared.call)]
  conditions += [
    make(c.name, "control", _intervened(lab, prepared.call, c, parent), c.cost)
    for c in chosen
  ]
  is_checked = required is not None and config.checker != "none"
  if is_checked and checkers.needs_probe(config.checker):
    back = checkers.reverted(
      lab.full_call(prepared), full_call(parent), proposal.declared
    )
    conditions.append(make("probe", "probe", lab.effective(back)))
  alone = Packet(
    program=prepared.id,
    parent=parent.id,
    conditions=tuple(conditions[:1]),
    margins=lab.task.margins,
    evaluator=lab.evaluator,
  )
  packet = dataclasses.replace(
    alone,
    conditions=tuple(conditions),
    residual=residual if is_asked else None,
    explanations=proposal.explanations if is_asked else (),
    allowed=tuple(c.name for c in proposal.controls),
    policy=config.policy,
    response_to=required.packet if required else None,
    declared=proposal.declared,
    checker=config.checker if is_checked else "none",
  )
  if ledger.price(packet.prices) > ledger.left:
    return Attempt(proposal, prepared, parent, None, alone)
  return Attempt(proposal, prepared, parent, required, packet)
