"""Turns a proposal into a frozen packet with selected controls and priced calls."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from mxjax.discovery.core import identity, interventions
from mxjax.discovery.core.candidate_source import (
  RejectedError,
  changed_definitions,
  definitions,
  graft,
  with_functions,
  with_plan,
)
from mxjax.discovery.core.interface import Interface
from mxjax.discovery.core.ledger import Ledger
from mxjax.discovery.core.packet import Condition, Packet
from mxjax.discovery.core.proposal import Demand, Proposal, Record
from mxjax.discovery.core.residual import (
  FATES,
  OF_EDIT,
  OF_PARENT,
  OTHER_TEXT,
  PRIMARY,
  SYMBOLS,
  Control,
  Explanation,
  Residual,
  Symbol,
  bare,
)
from mxjax.discovery.core.task import Call, Outcome, Status, Task
from mxjax.discovery.core.verdict import Response
from mxjax.discovery.search import checkers, controls, rivals, scopes
from mxjax.discovery.search.cached_evaluator import CachedEvaluator, Prepared
from mxjax.discovery.search.settings import SearchConfig

Stage = Literal["primary", "own", "rival"]
"""When a condition runs: candidates, their controls and probes, then our controls."""
LATER: tuple[Stage, ...] = ("own", "rival")


class RefusedQuestionError(ValueError):
  """Raised for a question or a control that must be mended before anything is paid."""


def _stage(condition: Condition) -> Stage:
  if condition.name == PRIMARY:
    return "primary"
  return "rival" if condition.name.startswith(rivals.PREFIX) else "own"


@dataclasses.dataclass(frozen=True)
class Selection:
  """Starting point of a proposal.

  Attributes:
    address: Round and position within it; draws depend on the seed and this address.
    residuals: The parent's open questions, the one to address first.
    demands: What revisions of the parent must carry, oldest first.
    why: Why the parent is this one, in words.
  """

  address: tuple[int, int]
  parent: Record
  residuals: tuple[Residual, ...]
  demands: tuple[Demand, ...]
  why: str = ""

  @property
  def due(self) -> Demand | None:
    """The demand for a change that the next proposal is to answer."""
    return next((d for d in self.demands if not d.forbids), None)

  @property
  def focus(self) -> Residual | None:
    """The question that the next proposal is to address."""
    if self.due is not None:
      return self.due.residual
    return self.residuals[0] if self.residuals else None

  def residual(self, proposal: Proposal) -> Residual | None:
    """Returns the residual that a proposal addresses; an owed one takes precedence."""
    named = (r for r in self.questions if r.observable == proposal.residual)
    return next(named, None)

  @property
  def questions(self) -> tuple[Residual, ...]:
    """The residuals that a proposal may ask about: those owed, then the open ones."""
    return (*(d.residual for d in self.demands if not d.forbids), *self.residuals)

  def checked(self, proposal: Proposal) -> tuple[Demand, ...]:
    """Returns the demands that a proposal must meet, the owed response first.

    It answers one of those that ask for a change: the first about its own residual, or
    else the oldest, so naming no residual evades none. It must keep out every
    intervention that is forbidden.
    """
    asking = [d for d in self.demands if not d.forbids]
    # False sorts first, and equals stay in their order, the oldest first.
    asking.sort(key=lambda d: d.residual.observable != proposal.residual)
    return (*asking[:1], *(d for d in self.demands if d.forbids))


@dataclasses.dataclass
class Attempt:
  """One registered packet on its way through a round.

  `demands` are checked on it. `outcomes` are by condition; `skipped` names registered
  controls that will not run. `transfers` is that of `Experiment`. `sources` holds the
  programs that conditions amount to, as far as they are known. `dropped` says why the
  question of the proposal is not in the packet, or nothing. `adopted` are conditions
  that did better than the parent, as programs of their own. `due` is the demand that
  the proposal was asked to meet.
  """

  proposal: Proposal
  prepared: Prepared
  parent: Record
  demands: tuple[Demand, ...]
  packet: Packet
  outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)
  skipped: frozenset[str] = frozenset()
  transfers: bool | None = None
  sources: dict[str, str] = dataclasses.field(default_factory=dict)
  dropped: str = ""
  adopted: list[Record] = dataclasses.field(default_factory=list)
  due: Demand | None = None

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

  def condition(self, name: str) -> Condition:
    """Returns the condition of a name."""
    return next(c for c in self.packet.conditions if c.name == name)

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
    return identity.pick(FATES if predicted in FATES else SYMBOLS, *where, "symbol")

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


def probed(demand: Demand, candidate: Call, parent: Call, parts: Iterable[str]) -> Call:
  """Returns the counterpart that a candidate must differ from to meet a demand.

  A demand for a change takes the answering parts back to the parent's; one that forbids
  an intervention puts that intervention in.
  """
  if demand.forbids:
    return candidate.replaced(demand.intervention)
  return checkers.reverted(candidate, parent, parts)


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
    RefusedQuestionError: The allowed controls cannot separate the explanations, or
      there is only one, or one predicts what is not measured, or a control has no form.
  """
  first = alone(prepared, selection.parent.id, evaluator)
  residual = selection.residual(proposal) if config.policy != "none" else None
  demands = selection.checked(proposal) if config.checker != "none" else ()
  # If the minimal set left several explanations, run every allowed control.
  policy = "all" if any(map(checkers.retests, demands)) else config.policy
  asks, accounts, sources = (), (), {}
  if residual is not None:
    proposal = _checked(proposal, evaluator.task)
    question = _question(selection, proposal, prepared, policy, config.seed, evaluator)
    asks, accounts, sources = question
  probes = _probes(selection, proposal, prepared, demands, config, evaluator, ledger)
  # The largest form of the packet that the budget allows.
  attempt, whole = None, 0
  for has_question, has_demands in FALLBACKS:
    packet = dataclasses.replace(
      first,
      conditions=(
        *first.conditions,
        *(asks if has_question else ()),
        *(probes if has_demands else ()),
      ),
      declared=proposal.declared,
    )
    if has_question and residual is not None:
      packet = dataclasses.replace(
        packet,
        residual=residual,
        explanations=accounts,
        allowed=tuple(c.name for c in proposal.controls),
        policy=policy,
      )
    if has_demands and demands:
      answered = tuple(d.packet for d in demands)
      packet = dataclasses.replace(packet, response_to=answered, checker=config.checker)
    checked = demands if packet.response_to else ()
    attempt = Attempt(proposal, prepared, selection.parent, checked, packet)
    charges = ledger.price(packet.conditions)
    # The first that is tried is the whole packet, whose price a prompt tells.
    whole = whole or charges.total()
    if ledger.fits(charges):
      break
  # The last form is the candidate alone, for which the search had a call left.
  assert attempt is not None
  attempt.sources = sources
  attempt.due = selection.due if config.checker != "none" else None
  if residual is not None and attempt.packet.residual is None:
    left, of_controls = max(ledger.left, 0), ledger.left_for("control")
    attempt.dropped = (
      f"its question was dropped: with our controls it needs up to {whole} calls, and "
      f"{left} are left"
      + (f", {max(of_controls, 0)} of them for controls" if of_controls < left else "")
    )
  return attempt


FALLBACKS = (
  # With its question; with the demands that it answers.
  (True, True),
  (False, True),
  (True, False),
  (False, False),
)
"""What a packet holds, in the order in which it is tried against the budget."""


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
  interface = evaluator.task.interface
  before = selection.parent.source
  # Most tasks freeze nothing, and need no second look at both sources.
  made = changed_definitions(before, prepared.source) if interface.frozen else ()
  if idle := _frozen(made, interface):
    return Status.REJECTED, f"program: {idle}"
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


def _frozen(names: Iterable[str], interface: Interface) -> str:
  """Says which of some functions have names of hooks that the task decides itself."""
  if not (idle := [name for name in interface.frozen if name in {*names}]):
    return ""
  told = ", ".join(idle)
  return f"{told} is no hook of this task and would never be called; leave it out."


def _checked(proposal: Proposal, task: Task) -> Proposal:
  """Returns a proposal with its controls in their registered form and at our price.

  Raises:
    RefusedQuestionError: A control has no form that the evaluator can run.
  """
  known = interventions.of_task(task.interface, task.interventions)
  controls_ = []
  for control in proposal.controls:
    if control.name.startswith(rivals.PREFIX):
      raise RefusedQuestionError(
        f"control {control.name}: names that begin with {rivals.PREFIX!r} are ours; "
        "rename it."
      )
    try:
      change = interventions.checked(known, control.intervention)
    except ValueError as error:
      raise RefusedQuestionError(f"control {control.name}: {error}") from error
    cost = task.price(change)
    controls_.append(dataclasses.replace(control, intervention=change, cost=cost))
  return dataclasses.replace(proposal, controls=tuple(controls_))


def _question(
  selection: Selection,
  proposal: Proposal,
  prepared: Prepared,
  policy: controls.Policy,
  seed: int,
  evaluator: CachedEvaluator,
) -> tuple[tuple[Condition, ...], tuple[Explanation, ...], dict[str, str]]:
  """Returns the conditions of a question, its accounts, and programs among them.

  The selected controls of the proposer come first, then those of our rivals.
  """
  task, parent = evaluator.task, selection.parent
  mine, theirs = prepared.full_call, parent.full_call
  _check_accounts(proposal.explanations, proposal.controls, task.margins)
  try:
    address = (seed, *selection.address)
    chosen = controls.select(policy, proposal.explanations, proposal.controls, *address)
  except ValueError as error:
    raise RefusedQuestionError(str(error)) from error
  # Controls were selected for the proposer's accounts alone, as in Eq.
  # control-compiler; each of ours brings its own, which runs in a later stage.
  accounts, ours = rivals.of(task, proposal, mine, theirs)
  conditions: list[Condition] = []
  sources: dict[str, str] = {}
  for control in (*chosen, *ours):
    try:
      call, source = _controlled(control, parent, prepared, evaluator)
    except RefusedQuestionError:
      if control in chosen:
        raise
      # Ours has nothing to take away: it is the parent or the candidate itself.
      accounts = _without(accounts, control.name)
      continue
    if control.intervention.get("kind") == OTHER_TEXT:
      before = theirs._replace(intervention=dict(control.intervention))
      # Another text has another level, so the parent is measured there too.
      name = of_parent(control.name)
      conditions.append(evaluator.condition(name, "control", before, control.cost))
    conditions.append(evaluator.condition(control.name, "control", call, control.cost))
    if source:
      sources[control.name] = source
  gain = {k for k, v in accounts[0].predicts(PRIMARY).items() if v == "down"}
  denies = lambda e: any(e.predicts(PRIMARY).get(k) == "same" for k in gain)
  if all(map(denies, accounts[1:])):
    raise RefusedQuestionError(
      "explanations: every other account denies under `primary` what "
      f"{accounts[0].name!r} predicts there, and no account of ours applies to this "
      "edit, so whatever makes the change would support yours; register another cause "
      "of the same change, and a control under which the two differ."
    )
  return tuple(conditions), accounts, sources


def _without(
  accounts: tuple[Explanation, ...], control: str
) -> tuple[Explanation, ...]:
  """Takes a rival and its control out of the accounts."""
  left = [e for e in accounts if not (e.rival and e.predicts(control))]
  rows = lambda e: {k: v for k, v in e.predictions.items() if k != control}
  return tuple(dataclasses.replace(e, predictions=rows(e)) for e in left)


def _check_accounts(
  accounts: Sequence[Explanation],
  allowed: Sequence[Control],
  margins: Mapping[str, float],
) -> None:
  """Refuses a question that no run could answer.

  Without a competitor, whatever happens supports the focal account. What has no margin
  has no symbol, so a prediction of it separates accounts on paper only; and a condition
  that is no control never runs.
  """
  if len(accounts) < 2:
    alone_ = f"{accounts[0].name!r} alone" if accounts else "none"
    raise RefusedQuestionError(
      f"explanations: expected a focal account and a competitor, got {alone_}; "
      "register what else would explain the outcome, or set `residual` to null for a "
      "candidate without a question."
    )
  names = {PRIMARY, *(control.name for control in allowed)}
  for account in accounts:
    rows = account.predictions.values()
    # A fate is about the same observable as a direction, and needs the same margin.
    asked = {bare(name) for row in rows for name in row}
    if unknown := sorted(asked - {*margins}):
      raise RefusedQuestionError(
        f"explanations: {account.name} predicts {', '.join(unknown)}, which no margin "
        f"is registered for; predict some of {', '.join(margins)}."
      )
    if absent := sorted({*account.predictions} - names):
      raise RefusedQuestionError(
        f"explanations: {account.name} predicts under {', '.join(absent)}, which is no "
        f"control of this proposal; use {', '.join(sorted(names))}."
      )
    if fates := [n for n in account.predicts(PRIMARY) if n.endswith(OF_EDIT)]:
      raise RefusedQuestionError(
        f"explanations: {account.name} predicts {', '.join(fates)} under primary, "
        "where nothing is taken from the edit; predict down, same or up there."
      )


def _probes(
  selection: Selection,
  proposal: Proposal,
  prepared: Prepared,
  demands: tuple[Demand, ...],
  config: SearchConfig,
  evaluator: CachedEvaluator,
  ledger: Ledger,
) -> tuple[Condition, ...]:
  """Returns the probes for demands that no outcome paid for can tell.

  That the whole edit answers a demand, or that only other parts are as before, shows in
  the primary run beside the parent's; and what is not declared, or executes as before,
  fails without one.
  """
  own, parent = prepared.full_call, selection.parent
  conditions = []
  needing = demands if checkers.needs_probe(config.checker) else ()
  for demand in needing:
    # A new control is checked by what it tells apart, and what was unsafe is not put
    # back to be run.
    if checkers.retests(demand) or demand.response == Response.REJECT:
      continue
    parts = answering(demand, proposal.declared, own, parent.full_call, evaluator)
    call = probed(demand, own, parent.full_call, parts)
    condition = evaluator.condition(probe_name(demand), "probe", call)
    is_told = ledger.ran(condition.exec_id) or (
      carries(evaluator, own, demand.before) if demand.forbids else not parts
    )
    if not is_told:
      conditions.append(condition)
  return tuple(conditions)


def answering(
  demand: Demand,
  declared: Sequence[str],
  own: Call,
  parent: Call,
  evaluator: CachedEvaluator,
) -> tuple[str, ...]:
  """Returns the parts of an edit that are to answer a demand: what it declares.

  Plan keys that switch a declared hook on go with it. For what forbids, they are the
  parts of the forbidden intervention.
  """
  if demand.forbids:
    return demand.computation
  interface = evaluator.task.interface
  changed = scopes.changed(interface, own, parent)
  hooks = [name for name in changed if name in declared]
  if {*changed} - {*hooks} <= {*interface.plan}:
    # Plan keys alone are left, such as the tables of a declared hook.
    return changed if hooks else ()
  return scopes.with_keys(interface, hooks, changed)


def _controlled(
  control: Control, parent: Record, prepared: Prepared, evaluator: CachedEvaluator
) -> tuple[Call, str]:
  """Returns the call of a control, and its source if it is a program of its own.

  A control of kind `program` is the candidate with some parts as in the parent, or with
  the functions of its `code` in the place of its own, and so has the identity of the
  program that it amounts to.

  Raises:
    RefusedQuestionError: The control's program does not trace, or is the candidate or
      its parent; or the task says that the control would change nothing.
  """
  own, intervention = prepared.full_call, dict(control.intervention)
  task, told = evaluator.task, f"control {control.name}"
  if intervention["kind"] == interventions.PROGRAM:
    call, source = _program(intervention, told, parent, prepared, evaluator)
    mine, *same = _identities(evaluator, call, own, parent.full_call)
    if mine.exec_id in {condition.exec_id for condition in same}:
      raise RefusedQuestionError(
        f"{told}: expected a program that is neither the candidate nor its parent, got "
        "one that executes the same; take another part away."
      )
    return call, source
  if why := task.refuses(intervention, own, parent.full_call):
    raise RefusedQuestionError(f"{told}: {why}; use another control.")
  if task.interventions[intervention["kind"]].of_parent:
    before: Call = parent.full_call.active(task.interface)
    intervention["parent"] = {
      "computation": dict(before.computation),
      "plan": dict(before.plan),
    }
  return own._replace(intervention=intervention), ""


def _program(
  intervention: Mapping[str, Any],
  told: str,
  parent: Record,
  prepared: Prepared,
  evaluator: CachedEvaluator,
) -> tuple[Call, str]:
  """Returns the call and the source of a control of kind `program`."""
  if parts := intervention.get("without"):
    call = prepared.full_call.replaced(parent.full_call.part(parts))
    return call, grafted(prepared.source, parent.source, parts, call, evaluator)
  try:
    source = prepared.source
    if code := intervention.get("code"):
      source = with_functions(source, code)
      if idle := _frozen(definitions(code), evaluator.task.interface):
        raise RefusedQuestionError(f"{told}: {idle}")
    if plan := intervention.get("plan"):
      source = with_plan(source, plan)
  except (RejectedError, ValueError, SyntaxError, RecursionError) as error:
    raise RefusedQuestionError(f"{told}: {error}") from error
  other = evaluator.prepare(source)
  if other.call is None:
    raise RefusedQuestionError(f"{told}: its program is {other.status}: {other.detail}")
  return other.full_call, source


def grafted(
  source: str,
  donor: str,
  parts: Iterable[str],
  call: Call,
  evaluator: CachedEvaluator,
) -> str:
  """Returns a source that executes as a call: with parts of a donor; or nothing.

  Both are admitted programs. What cannot be put together as text stays a measurement.
  """
  try:
    text = graft(source, donor, parts, evaluator.task.interface)
  except (RejectedError, SyntaxError, RecursionError):
    return ""
  other = evaluator.prepare(text)
  if other.call is None:
    return ""
  one, two = _identities(evaluator, other.full_call, call)
  return text if one.exec_id == two.exec_id else ""


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
