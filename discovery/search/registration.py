"""Turns a proposal into a frozen packet with selected controls and priced calls."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from mxjax.discovery.core import identity
from mxjax.discovery.core.candidate_source import RejectedError, with_functions
from mxjax.discovery.core.ledger import Ledger
from mxjax.discovery.core.packet import Condition, Packet
from mxjax.discovery.core.proposal import Demand, Proposal, Record
from mxjax.discovery.core.residual import (
  OF_PARENT,
  OTHER_TEXT,
  PRIMARY,
  SYMBOLS,
  Control,
  Explanation,
  Residual,
  Symbol,
)
from mxjax.discovery.core.task import Call, Outcome, Status
from mxjax.discovery.core.verdict import Response
from mxjax.discovery.search import checkers, controls
from mxjax.discovery.search.cached_evaluator import CachedEvaluator, Prepared
from mxjax.discovery.search.settings import SearchConfig

Stage = Literal["primary", "test", "other"]
"""When a condition runs: candidates, then other texts, then controls and probes."""
LATER: tuple[Stage, ...] = ("test", "other")


def _stage(condition: Condition) -> Stage:
  if condition.name == PRIMARY:
    return "primary"
  is_test = condition.call.intervention.get("kind") == OTHER_TEXT
  return "test" if is_test else "other"


@dataclasses.dataclass(frozen=True)
class Selection:
  """Starting point of a proposal.

  Attributes:
    address: Round and position within it; draws depend on the seed and this address.
    residuals: The parent's actionable residuals, largest excess first.
    demands: What revisions of the parent must carry, oldest first.
  """

  address: tuple[int, int]
  parent: Record
  residuals: tuple[Residual, ...]
  demands: tuple[Demand, ...]

  def residual(self, proposal: Proposal) -> Residual | None:
    """Returns the residual that a proposal addresses; an owed one takes precedence."""
    owed = [d.residual for d in self.demands if not d.forbids]
    named = (r for r in (*owed, *self.residuals) if r.observable == proposal.residual)
    return next(named, None)

  def checked(self, proposal: Proposal) -> tuple[Demand, ...]:
    """Returns the demands that a proposal must meet, the owed response first.

    It answers one of those that ask for a change: the first about its own residual, or
    else the oldest, so naming no residual evades none. It must keep out every
    intervention that is forbidden.
    """
    asking = [d for d in self.demands if not d.forbids]
    asking.sort(key=lambda d: d.residual.observable != proposal.residual)
    return (*asking[:1], *(d for d in self.demands if d.forbids))


@dataclasses.dataclass
class Attempt:
  """One registered packet on its way through a round.

  `demands` are checked on it. `outcomes` are by condition; `skipped` names registered
  controls that will not run. `transfers` is that of `Experiment`.
  """

  proposal: Proposal
  prepared: Prepared
  parent: Record
  demands: tuple[Demand, ...]
  packet: Packet
  outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)
  skipped: frozenset[str] = frozenset()
  transfers: bool | None = None

  @property
  def is_safe(self) -> bool:
    """Whether the candidate ran within the contract, and its rollback did."""
    rollback = {probe_name(d) for d in self.demands if not d.forbids} | {PRIMARY}
    ended = [o.status for name, o in self.outcomes.items() if name in rollback]
    return all(status == Status.OK for status in ended)

  @property
  def outcome(self) -> Outcome:
    """Outcome of the primary run."""
    return self.outcomes[PRIMARY]

  @property
  def changes(self) -> dict[str, float]:
    """Change of each observable of the primary run from the parent."""
    before = self.parent.values
    return {k: v - before[k] for k, v in self.outcome.values.items() if k in before}

  @property
  def of_parents(self) -> set[str]:
    """Names of the conditions in which the parent runs under a control."""
    names = {condition.name for condition in self.packet.conditions}
    return names & {of_parent(name) for name in names}

  @property
  def tested(self) -> dict[str, float]:
    """What the parent and the candidate show on another text, if they ran on it."""
    shown = {}
    for condition in self.conditions("test"):
      is_parent = condition.name in self.of_parents
      program = self.packet.parent if is_parent else self.packet.program
      if self.outcomes[condition.name].status == Status.OK:
        shown[program] = self.outcomes[condition.name].values[OTHER_TEXT]
    return shown

  def conditions(self, stage: Stage) -> list[Condition]:
    """Returns the conditions of a stage that are to run."""
    mine = lambda c: c.name not in self.skipped and _stage(c) == stage
    return [c for c in self.packet.conditions if mine(c)]


def corrupted(
  account: Explanation, rate: float, seed: int, address: tuple[int, int]
) -> Explanation:
  """Redraws the predicted symbols of an explanation at a rate, as a placebo."""
  if not rate:
    return account

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


def probe_name(demand: Demand) -> str:
  """Returns the name of the condition that probes a demand."""
  return f"probe {demand.packet[:12]}"


def of_parent(control: str) -> str:
  """Returns the name of the condition in which the parent runs under a control."""
  return control + OF_PARENT


def probed(demand: Demand, candidate: Call, parent: Call) -> Call:
  """Returns the counterpart that a candidate must differ from to meet a demand.

  A demand for a change takes the computation back to the parent's; one that forbids an
  intervention puts that intervention in.
  """
  if demand.forbids:
    return candidate.replaced(demand.intervention)
  return checkers.reverted(candidate, parent, demand.computation)


def carries(evaluator: CachedEvaluator, call: Call, part: Call) -> bool:
  """Returns whether a program executes the same with this part of another one."""
  before, after = _identities(evaluator, call, call.replaced(part))
  return before.exec_id == after.exec_id


def forbidden(
  selection: Selection, prepared: Prepared, evaluator: CachedEvaluator
) -> Demand | None:
  """Returns a demand that a candidate breaks by its lowered program, before any call.

  An intervention whose lowered program is the parent's needs no ban.
  """
  has = lambda part: carries(evaluator, prepared.full_call, part)
  broken = (d for d in selection.demands if d.forbids)
  return next((d for d in broken if has(d.intervention) and not has(d.before)), None)


def freeze(
  selection: Selection,
  proposal: Proposal,
  prepared: Prepared,
  *,
  config: SearchConfig,
  evaluator: CachedEvaluator,
  ledger: Ledger,
) -> Attempt:
  """Freezes a proposal into a packet; near the end of the budget, with less in it.

  If the packet does not fit, it goes without its question, then without its demands,
  which stay owed, then without both.

  Raises:
    ValueError: The allowed controls cannot separate the explanations, or there is only
      one, or one predicts what is not measured.
  """
  first = alone(prepared, selection.parent.id, evaluator)
  residual = selection.residual(proposal) if config.policy != "none" else None
  demands = selection.checked(proposal) if config.checker != "none" else ()
  # If the minimal set left several explanations, run every allowed control.
  policy = "all" if any(map(checkers.retests, demands)) else config.policy
  asks: tuple[Condition, ...] = ()
  if residual is not None:
    asks = _question(selection, proposal, prepared, policy, config.seed, evaluator)
  probes = _probes(selection, prepared, demands, config, evaluator, ledger)
  for has_question, has_demands in ((1, 1), (0, 1), (1, 0), (0, 0)):
    packet = dataclasses.replace(
      first,
      conditions=first.conditions + asks * has_question + probes * has_demands,
      declared=proposal.declared,
    )
    if has_question and residual is not None:
      packet = dataclasses.replace(
        packet,
        residual=residual,
        explanations=proposal.explanations,
        allowed=tuple(c.name for c in proposal.controls),
        policy=policy,
      )
    if has_demands and demands:
      answered = tuple(d.packet for d in demands)
      packet = dataclasses.replace(packet, response_to=answered, checker=config.checker)
    if ledger.fits(ledger.price(packet.conditions)):
      break
  checked = demands if packet.response_to else ()
  return Attempt(proposal, prepared, selection.parent, checked, packet)


def unfit(
  selection: Selection,
  prepared: Prepared,
  evaluator: CachedEvaluator,
  programs: Iterable[Record],
  checker: str,
) -> tuple[str, str] | None:
  """Returns a status and why a candidate is refused before any measurement, or None.

  Experiments on what executes the same as another program than the parent would ask
  again what that program has answered. An edit that leaves its parent as it is has a
  verdict of its own, and costs no call.
  """
  if prepared.call is None:
    return prepared.status, prepared.detail
  banned = forbidden(selection, prepared, evaluator)
  if banned is not None and checker != "none":
    told = f"{banned.label} was {banned.verdict}: {banned.response} it"
    return banned.response, told
  (own,) = _identities(evaluator, prepared.call)
  known = {prepared.id, selection.parent.id}
  for other in programs:
    if other.exec_id == own.exec_id and other.id not in known:
      return "duplicate", f"it executes the same as {other.id[:12]}"
  return None


def _question(
  selection: Selection,
  proposal: Proposal,
  prepared: Prepared,
  policy: controls.Policy,
  seed: int,
  evaluator: CachedEvaluator,
) -> tuple[Condition, ...]:
  """Returns the conditions of the selected controls, and of the parent under one."""
  accounts, address = proposal.explanations, (seed, *selection.address)
  _check_accounts(accounts, evaluator.task.margins)
  conditions = []
  for control in controls.select(policy, accounts, proposal.controls, *address):
    if control.intervention.get("kind") == OTHER_TEXT:
      before = selection.parent.full_call._replace(intervention=control.intervention)
      name = of_parent(control.name)
      conditions.append(evaluator.condition(name, "control", before, control.cost))
    call = _controlled(control, selection.parent, prepared, evaluator)
    conditions.append(evaluator.condition(control.name, "control", call, control.cost))
  return tuple(conditions)


def _check_accounts(
  accounts: Sequence[Explanation], margins: Mapping[str, float]
) -> None:
  """Refuses a question that no run could answer.

  Without a competitor, whatever happens supports the focal account. What has no margin
  has no symbol, so a prediction of it separates accounts on paper only.
  """
  if len(accounts) == 1:
    raise ValueError(
      f"explanations: expected a focal account and a competitor, got "
      f"{accounts[0].name!r} alone; register what else would explain the outcome."
    )
  for account in accounts:
    rows = account.predictions.values()
    if unknown := sorted({name for row in rows for name in row} - set(margins)):
      raise ValueError(
        f"explanations: {account.name} predicts {', '.join(unknown)}, which no margin "
        f"is registered for; predict some of {', '.join(margins)}."
      )


def _probes(
  selection: Selection,
  prepared: Prepared,
  demands: tuple[Demand, ...],
  config: SearchConfig,
  evaluator: CachedEvaluator,
  ledger: Ledger,
) -> tuple[Condition, ...]:
  """Returns the probes that demands need beyond what identities and records tell."""
  own, conditions = prepared.full_call, []
  needing = demands if checkers.needs_probe(config.checker) else ()
  for demand in needing:
    call = probed(demand, own, selection.parent.full_call)
    condition = evaluator.condition(probe_name(demand), "probe", call)
    is_told = demand.forbids and (
      demand.response == Response.REJECT
      or ledger.ran(condition.exec_id)
      or carries(evaluator, own, demand.before)
    )
    is_same = carries(evaluator, own, call.part(demand.computation))
    if not (is_told or is_same or checkers.retests(demand)):
      conditions.append(condition)
  return tuple(conditions)


def _controlled(
  control: Control, parent: Record, prepared: Prepared, evaluator: CachedEvaluator
) -> Call:
  """Returns the call of a control, with the parent's call filled in if requested.

  A control of kind `program` is the candidate with the functions of its `code` in the
  place of its own, and so has the identity of the program that it amounts to.

  Raises:
    ValueError: The control's program does not trace, or is the candidate or its parent.
  """
  own, intervention = prepared.full_call, dict(control.intervention)
  told = f"control {control.name}"
  if not intervention:
    raise ValueError(f"{told}: expected an intervention, got none; name one.")
  if intervention.get("kind") == "program":
    try:
      source = with_functions(prepared.source, str(intervention.get("code", "")))
    except RejectedError as error:
      raise ValueError(f"{told}: {error}") from error
    other = evaluator.prepare(source)
    same = {c.exec_id for c in _identities(evaluator, own, parent.full_call)}
    if other.call is None or _identities(evaluator, other.call)[0].exec_id in same:
      raise ValueError(
        f"{told}: expected a program that is neither the candidate nor "
        f"its parent, got {other.detail or 'one that executes the same'}."
      )
    return other.full_call
  if intervention.get("parent"):
    before: Call = parent.full_call.active(evaluator.task.interface)
    intervention["parent"] = {
      "computation": dict(before.computation),
      "plan": dict(before.plan),
    }
  return own._replace(intervention=intervention)


def _identities(evaluator: CachedEvaluator, *calls: Call) -> list[Condition]:
  return [evaluator.condition("", "", call) for call in calls]


def left_out(
  selection: Selection, proposal: Proposal, attempt: Attempt, config: SearchConfig
) -> list[str]:
  """Names what a proposal asked for and its packet does not hold."""
  asked = {
    "question": config.policy != "none"
    and selection.residual(proposal) is not None
    and attempt.packet.residual is None,
    "demands": config.checker != "none"
    and len(selection.checked(proposal)) > len(attempt.demands),
  }
  return [name for name, is_left_out in asked.items() if is_left_out]
