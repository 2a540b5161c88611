"""Resolves the outcomes of a packet into a finding and the response it requires.

Paper: Appendix "Controlled Experiments and Program Updates", Eq. residual-compile.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from mxjax.discovery.core import verdict
from mxjax.discovery.core.proposal import Demand
from mxjax.discovery.core.residual import (
  OTHER_TEXT,
  PRIMARY,
  Explanation,
  Residual,
  Symbol,
  bare,
  consistent,
  disagree,
  fate,
  of_edit,
  symbol,
)
from mxjax.discovery.core.task import Outcome, Status, Task
from mxjax.discovery.core.verdict import FORBIDDING, Finding, Response, Verdict
from mxjax.discovery.search import checkers, controls, registration, rivals, scopes
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.search.checkers import Check
from mxjax.discovery.search.frontier import ResidualFrontier
from mxjax.discovery.search.history import History, within_margin
from mxjax.discovery.search.registration import Attempt

NULL = "within_margins"
"""Reason of a verdict on an edit that executes differently and moves nothing."""
SMALL = "within_margin"
"""Reason of a verdict on a predicted gain that is smaller than the target's margin."""
MAX_LEFT = 2
"""Answers about something else after which a demand is dropped, which the log says."""
MAX_ATTEMPTS = 2
"""Number of failed checks of a response after which the log says it is abandoned.

Its question then stays unresolved; an intervention that is forbidden stays forbidden.
"""


def symbols(
  task: Task, before: Mapping[str, float], outcome: Outcome
) -> dict[str, Symbol]:
  """Returns the symbol of every observable with a margin, relative to `before`."""
  return {
    name: symbol(outcome.values[name] - before[name], margin)
    for name, margin in task.margins.items()
    if name in outcome.values and name in before
  }


def skip_pointless(task: Task, history: History, attempt: Attempt) -> None:
  """Skips controls that separate no explanations left by what has run.

  A candidate that executes or comes out as its parent has its verdict without any.
  """
  if attempt.packet.policy != "minimal":
    return
  if new := _pointless(task, attempt) - attempt.skipped:
    attempt.skipped |= new
    history.emit("skipped", packet=attempt.packet.hash, controls=sorted(new))


def _pointless(task: Task, attempt: Attempt) -> frozenset[str]:
  packet = attempt.packet
  registered = {c.name for c in packet.conditions if c.kind == "control"}
  waiting = registered - attempt.outcomes.keys()
  if not waiting:
    return frozenset()
  seen = observed(task, attempt)
  if _is_equivalent(attempt, seen.get(PRIMARY, {})):
    return frozenset(registered)
  left = [
    account
    for account in packet.explanations
    if all(consistent(account.predicts(name), seen[name]) for name in seen)
  ]
  running = registered - attempt.skipped
  allowed = [c for c in attempt.proposal.controls if c.name in running]
  theirs = [account for account in left if not account.rival]
  # The cheapest controls for the accounts that are left: fewer may do than for all.
  needed = {control.name for control in controls.minimal(theirs, allowed)}
  focal = packet.explanations[0]
  if focal in left and seen.get(PRIMARY, {}).get(task.target) == "down":
    # A gain that the focal account may claim: our rivals have their say.
    needed |= {
      name
      for account in left
      if account.rival
      for name in running
      if disagree(focal.predicts(name), account.predicts(name))
    }
  # With a control that is needed goes the run of the parent under it.
  return frozenset(waiting - needed - {registration.of_parent(name) for name in needed})


def observed(task: Task, attempt: Attempt) -> dict[str, dict[str, Symbol]]:
  """Returns the symbols of every condition of the candidate that succeeded, but probes.

  Directions are relative to the parent's primary run, and to what it shows under the
  same control where it ran under that as well. Under a control, the fate of the edit's
  own change stands beside them; where another text is scored, that of the target.
  """
  probes = {c.name for c in attempt.packet.conditions if c.kind == "probe"}
  seen: dict[str, dict[str, Symbol]] = {}
  for name, outcome in attempt.outcomes.items():
    if name in probes | attempt.of_parents or outcome.status != Status.OK:
      continue
    again = attempt.outcomes.get(registration.of_parent(name))
    before = {**attempt.parent.values, **(again.values if again else {})}
    seen[name] = symbols(task, before, outcome)
    if name != PRIMARY and attempt.outcome.status == Status.OK:
      seen[name] |= _fates(task, attempt, name, before)
  return seen


def _fates(
  task: Task, attempt: Attempt, control: str, before: Mapping[str, float]
) -> dict[str, Symbol]:
  """Returns what a control left of the edit's change of each observable."""
  edit, found = attempt.changes, {}
  values = dict(attempt.outcomes[control].values)
  if OTHER_TEXT in values and OTHER_TEXT in before:
    # The target on another text, beside the parent there.
    values[task.target] = (
      attempt.parent.values[task.target] + values[OTHER_TEXT] - before[OTHER_TEXT]
    )
  kind = attempt.condition(control).call.intervention.get("kind")
  elsewhere = kind is not None and task.interventions[kind].elsewhere
  for name, margin in task.margins.items():
    if name in values and name in edit:
      change = values[name] - attempt.parent.values[name]
      symbol_ = fate(edit[name], change, margin, elsewhere=elsewhere)
      if symbol_ is not None:
        found[of_edit(name)] = symbol_
  return found


def _is_equivalent(attempt: Attempt, seen: dict[str, Symbol]) -> bool:
  """Tests for the same execution, or for an edit that moves nothing by its margin."""
  if attempt.packet.conditions[0].exec_id == attempt.parent.exec_id:
    return True
  # Without any symbol, as after a failed run, nothing is known to be the same.
  return bool(seen) and all(s == "same" for s in seen.values())


def resolve(
  task: Task, attempt: Attempt, seen: dict[str, dict[str, Symbol]]
) -> Finding:
  """Compares the observations with the registered predictions.

  An edit that moves no observable beyond its margin has no effect, whatever accounts
  had predicted: there is nothing that a control could tell apart. A gain that the focal
  account predicted and that is smaller than its margin is neither shown nor refuted.
  Paper: "Inconclusive controls leave the residual open." A focal account that
  says nothing of the target, and is borne out in all that it says, is not refuted by
  another part's gain: its part moves the observable and not the target.
  """
  finding = verdict.resolve(
    attempt.packet.explanations,
    seen,
    task.target,
    is_safe=attempt.is_safe,
    is_equivalent=_is_equivalent(attempt, seen.get(PRIMARY, {})),
    claims_gain=not _is_about_less(task, attempt.packet.explanations[0], seen),
  )
  is_same = attempt.packet.conditions[0].exec_id == attempt.parent.exec_id or (
    dict(attempt.outcome.outputs) == dict(attempt.parent.outputs)
  )
  if finding.reason == verdict.EQUIVALENT and not is_same:
    return dataclasses.replace(finding, reason=NULL)
  if not is_same and _is_small(task, attempt, seen, finding):
    return dataclasses.replace(finding, verdict=Verdict.UNRESOLVED, reason=SMALL)
  return finding


def _is_small(
  task: Task,
  attempt: Attempt,
  seen: Mapping[str, Mapping[str, Symbol]],
  finding: Finding,
) -> bool:
  """Returns whether an account failed for no more than a gain within the margin."""
  focal = attempt.packet.explanations[0]
  return (
    finding.verdict in (Verdict.UNRESOLVED, Verdict.NO_EFFECT)
    and attempt.changes.get(task.target, 0.0) < 0
    and focal.predicts(PRIMARY).get(task.target) == "down"
    and seen.get(PRIMARY, {}).get(task.target) == "same"
  )


def owes_nothing(task: Task, attempt: Attempt, finding: Finding) -> tuple[str, str]:
  """Returns why no later program owes a response to a verdict; or nothing.

  The first of the two is the status that the log has for it. What a run could not tell
  from its margin is not refuted, so it is neither forbidden nor to be explained; and
  what is at its floor cannot be extended.
  """
  residual = attempt.packet.residual
  assert residual is not None
  if finding.reason in (NULL, SMALL):
    change = attempt.changes.get(task.target, 0.0)
    return SMALL, within_margin(task, change) or finding.reason
  if finding.response == Response.EXTEND and (
    detail := at_floor(task, residual.observable, attempt.outcome.values)
  ):
    return "at_floor", detail
  return "", ""


def _is_about_less(
  task: Task, focal: Explanation, seen: Mapping[str, Mapping[str, Symbol]]
) -> bool:
  """Returns whether an account is borne out, but for a gain that it does not claim."""
  own = {k: row for k, row in focal.predictions.items() if k != rivals.WITHOUT_PART}
  return (
    task.target not in {bare(name) for row in own.values() for name in row}
    and seen.get(rivals.WITHOUT_PART, {}).get(of_edit(task.target)) == "kept"
    and all(consistent(row, seen[name]) for name, row in own.items() if name in seen)
  )


def check(
  evaluator: CachedEvaluator, attempt: Attempt, demand: Demand, finding: Finding | None
) -> Check:
  """Checks whether a candidate meets a demand, and whether its response matters."""
  packet, outcome = attempt.packet, attempt.outcome
  checker: checkers.Checker = packet.checker  # pyright: ignore[reportAssignmentType]
  if outcome.status != Status.OK:
    return Check(checker, False, f"the candidate ended {outcome.status}")
  if demand.forbids:
    return _kept_out(evaluator, attempt, demand, checker)
  own = attempt.prepared.full_call
  # Whether the candidate still has the edit that the verdict was about.
  is_same = registration.carries(evaluator, own, demand.intervention)
  if checkers.retests(demand) and is_same and finding is not None:
    if finding.verdict != Verdict.UNRESOLVED and finding.explicit == "control":
      return Check(checker, True, f"a control resolved the question: {finding.reason}")
  # What the packet registered is checked before what it executes.
  if lacks := checkers.missing(demand, packet, attempt.outcomes, evaluator.task.target):
    if attempt.dropped:
      # What it registered was not run, so it cannot be said to lack anything.
      return Check(checker, None, attempt.dropped)
    if broken := checkers.failed(packet, attempt.outcomes):
      told = f"{lacks}; {', '.join(broken)} could not be run, which is no evidence"
      return Check(checker, None, told)
    return Check(checker, False, lacks)
  if checkers.retests(demand):
    told = f"the intervention in {', '.join(demand.computation)} is "
    return Check(checker, is_same, told + ("the same" if is_same else "another one"))
  if demand.response == Response.EXTEND and registration.carries(
    evaluator, own, demand.before
  ):
    told = f"{', '.join(demand.computation)} is as before the supported intervention"
    return Check(checker, False, told)
  return _changed(evaluator, attempt, demand, checker)


def verify(
  evaluator: CachedEvaluator,
  history: History,
  attempt: Attempt,
  finding: Finding | None,
) -> dict[str, Check]:
  """Checks and logs whether each demand was met, by packet."""
  met = {}
  for demand in attempt.demands:
    made = check(evaluator, attempt, demand, finding)
    about = {"response_to": demand.packet, "response": demand.response}
    fields = {"packet": attempt.packet.hash, **about, **dataclasses.asdict(made)}
    history.emit("check", **fields)
    met[demand.packet] = made
  return met


def _changed(
  evaluator: CachedEvaluator,
  attempt: Attempt,
  demand: Demand,
  checker: checkers.Checker,
) -> Check:
  """Checks that what an edit declares changes something, and by enough."""
  own, parent = attempt.prepared, attempt.parent
  declared = attempt.packet.declared
  parts = registration.answering(
    demand, declared, own.full_call, parent.full_call, evaluator
  )
  if not parts:
    told = f"declares {', '.join(declared) or 'nothing'}, which executes as before"
    return Check(checker, False, told)
  if checker == "source":
    before = evaluator.prepare(parent.source).admitted
    assert own.admitted is not None and before is not None
    return checkers.by_source(own.admitted, before, parts)
  if checker == "lowered":
    return checkers.by_lowering(own.full_call, parent.full_call, parts)
  without = _counterpart(evaluator, attempt, demand, parts)
  if without.status != Status.OK:
    return Check(checker, False, f"without the response it ends {without.status}")
  if checker == "probe":
    margins = evaluator.task.margins
    return checkers.by_probe(attempt.outcome, without.values, demand.about, margins)
  return checkers.by_layer_output(attempt.outcome, without)


def _counterpart(
  evaluator: CachedEvaluator,
  attempt: Attempt,
  demand: Demand,
  parts: Iterable[str],
) -> Outcome:
  """Returns the outcome that a candidate is compared with, which was paid for."""
  name = registration.probe_name(demand)
  if (probe := attempt.outcomes.get(name)) is not None:
    return probe
  own, parent = attempt.prepared.full_call, attempt.parent.full_call
  (outcome,) = evaluator.measure(registration.probed(demand, own, parent, parts))
  return outcome


def _kept_out(
  evaluator: CachedEvaluator,
  attempt: Attempt,
  demand: Demand,
  checker: checkers.Checker,
) -> Check:
  """Checks that a candidate does not execute an intervention under another name.

  A candidate that has its lowered program was refused before its first call. One that
  differs from it by less than every margin has it, whatever its text.
  """
  own, scope = attempt.prepared.full_call, ", ".join(demand.computation)
  if registration.carries(evaluator, own, demand.before):
    return Check(checker, True, f"{scope} is as before the intervention")
  if demand.response == Response.REJECT or not checkers.needs_probe(checker):
    return Check(checker, True, f"{scope} is not what was {demand.response}")
  with_it = _counterpart(evaluator, attempt, demand, demand.computation)
  if with_it.status != Status.OK:
    return Check(checker, True, f"with the intervention it ends {with_it.status}")
  margins = evaluator.task.margins
  return checkers.by_probe(attempt.outcome, with_it.values, [*margins], margins)


def settle(
  residuals: ResidualFrontier,
  history: History,
  attempt: Attempt,
  demand: Demand,
  *,
  is_met: bool | None,
  is_retained: bool,
) -> None:
  """Settles a demand that a packet answered: met, or owed again and by its program too.

  A response that failed `MAX_ATTEMPTS` times is abandoned, which the log says. What is
  forbidden stays so. What could not be told uses up no attempt.
  """
  if is_met is None:
    return
  parent, program = attempt.parent.id, attempt.packet.program
  holders = [program] if is_retained else []
  if demand.forbids:
    if not is_met:
      _owe(residuals, history, demand, holders, "failed")
    return
  # Another packet of the same round may have settled it.
  if (standing := residuals.standing(parent, demand.packet)) is None:
    return
  again = dataclasses.replace(demand, attempts=standing.attempts + 1)
  if not is_met and again.attempts < MAX_ATTEMPTS:
    _owe(residuals, history, again, [parent, *holders], "failed")
    return
  residuals.settle(parent, demand, is_abandoned=not is_met)
  _tell(history, demand, parent, "met" if is_met else "abandoned")
  if is_met and demand.verdict == Verdict.SUPPORTED:
    move(residuals, history, demand.residual, "closed", attempt.packet.hash)


def _owe(
  residuals: ResidualFrontier,
  history: History,
  demand: Demand,
  holders: Iterable[str],
  status: str,
) -> None:
  for holder in holders:
    residuals.owe(holder, demand)
    _tell(history, demand, holder, status)


def demand(
  residuals: ResidualFrontier,
  history: History,
  attempt: Attempt,
  finding: Finding,
  *,
  task: Task,
  is_retained: bool,
  version: str,
  compiles: bool,
) -> None:
  """Records what a finding supports, and which programs owe the response to it.

  `is_retained` tells whether the candidate is among the retained programs. `version` is
  the best retained program of the candidate and its controls, from which what is
  demanded goes on, or nothing. `compiles` is False in the ablation in which verdicts
  create no demands.
  """
  packet = attempt.packet
  assert packet.residual is not None
  if finding.verdict == Verdict.SUPPORTED:
    move(residuals, history, packet.residual, "supported", packet.hash)
  if not compiles:
    return
  mine, before = attempt.prepared.full_call, attempt.parent.full_call
  changed = scopes.changed(task.interface, mine, before)
  # An edit that executes as its parent changes no part: then what is known to move the
  # question, or else every hook.
  scope = changed or packet.residual.computation or task.interface.names
  controls_ = {c.name: c.call for c in packet.conditions if c.kind == "control"}
  required = Demand(
    packet.hash,
    finding.verdict,
    finding.response,
    attempt.proposal.label,
    finding.survivors,
    packet.residual,
    scope,
    before.part(scope),
    mine.part(scope),
    packet.explanations,
    tuple(
      call.intervention or call.computation
      for name, call in controls_.items()
      if name in attempt.outcomes and attempt.outcomes[name].status == Status.OK
    ),
    about=_about(finding.response, packet.residual.observable, task.target),
    program=packet.program,
  )
  # What is forbidden is about the edit itself; what is asked for goes on from the best
  # version of it.
  is_taken_back = finding.response in FORBIDDING
  holders = holders_of(
    finding.response,
    packet.program if is_taken_back else version,
    packet.parent,
    finding.survivors,
    is_retained=is_retained if is_taken_back else bool(version),
  )
  status, detail = owes_nothing(task, attempt, finding)
  if status:
    for holder in holders:
      _tell(history, required, holder, status, detail)
    if status == "at_floor":
      # Nobody could meet it: the question is answered as far as it can be.
      move(residuals, history, packet.residual, "closed", packet.hash)
    return
  if finding.verdict != Verdict.UNRESOLVED:
    _decided(residuals, history, required, (packet.parent, packet.program))
  for holder in holders:
    if residuals.gave_up(holder, required):
      continue
    if (known := residuals.alike(holder, required)) is None:
      _owe(residuals, history, required, [holder], "owed")
      continue
    # The same question again: what is left of it is asked, with the attempts so far.
    again = dataclasses.replace(required, attempts=known.attempts)
    residuals.settle(holder, known)
    _tell(history, known, holder, "superseded")
    _owe(residuals, history, again, [holder], "owed")


def leave(
  residuals: ResidualFrontier,
  history: History,
  evaluator: CachedEvaluator,
  attempt: Attempt,
) -> None:
  """Counts an answer that left the matter of the demand that it was asked to meet.

  It did so if its question is about another observable or it has none; or, where the
  same edit is to have a new control, if it is another edit. After `MAX_LEFT` such
  answers the demand is dropped, which the log says, and the same is not asked again.
  """
  if (due := attempt.due) is None:
    return
  asked, own = attempt.proposal.residual, attempt.prepared.full_call
  is_same = asked == due.residual.observable and (
    not checkers.retests(due) or registration.carries(evaluator, own, due.intervention)
  )
  if is_same:
    return
  # What failed is owed by several programs, and given up on one of them at a time.
  for holder in residuals.owing(due.packet):
    standing = residuals.standing(holder, due.packet)
    assert standing is not None
    again = dataclasses.replace(standing, left=standing.left + 1)
    if again.left < MAX_LEFT:
      residuals.owe(holder, again)
      continue
    residuals.settle(holder, again, is_abandoned=True)
    told = f"{again.left} answers were not about {due.residual.observable} as asked"
    _tell(history, again, holder, "left", f"{told}; the last asked about {asked}")


def at_floor(task: Task, observable: str, values: Mapping[str, float]) -> str:
  """Returns why an observable cannot go down any further, or an empty string."""
  margin, value = task.margins.get(observable, 0.0), values.get(observable)
  for floor in task.floors.get(observable, ()):
    if value is not None and abs(value - floor) <= margin:
      return f"{observable} is {value:.4g}, and its floor is {floor:.4g}"
  return ""


def _about(response: Response, observable: str, target: str) -> tuple[str, ...]:
  """Returns the observables in one of which a response must show."""
  match response:
    case Response.EXTEND:
      return (observable,)
    case Response.REPAIR_TRANSFER:
      return (target,)
  return tuple(dict.fromkeys((observable, target)))


def _decided(
  residuals: ResidualFrontier,
  history: History,
  about: Demand,
  holders: Iterable[str],
) -> None:
  """Settles the demands for a discriminator of a question that is now resolved."""
  for holder in holders:
    for known in residuals.demands(holder):
      if known.response == Response.ADD_DISCRIMINATOR and known.same_question(about):
        residuals.settle(holder, known)
        _tell(history, known, holder, "resolved")


def holders_of(
  response: str,
  program: str,
  parent: str,
  survivors: Sequence[str],
  *,
  is_retained: bool,
) -> tuple[str, ...]:
  """Returns the programs whose revisions owe a response, the one to revise first.

  A new control, which tells the surviving accounts of an edit apart, concerns the step
  from the parent, so the parent owes it. Where no account is left, a new one of a
  further edit is asked, which like any other goes on from the program that the edit led
  to, if that is retained.
  What is forbidden is forbidden to the parent's revisions, and must leave the program
  too.
  """
  if response in FORBIDDING:
    return (parent, program) if is_retained else (parent,)
  asks_again = response == Response.ADD_DISCRIMINATOR and survivors
  return (program,) if is_retained and not asks_again else (parent,)


def _tell(
  history: History, demand: Demand, holder: str, status: str, detail: str = ""
) -> None:
  history.emit(
    "demand",
    packet=demand.packet,
    program=holder,
    response=demand.response,
    computation=list(demand.computation),
    status=status,
    **({"detail": detail} if detail else {}),
  )


def move(
  residuals: ResidualFrontier,
  history: History,
  residual: Residual,
  status: str,
  packet: str,
) -> None:
  """Changes the status of a question and logs it, unless it has that or is final."""
  if residuals.move(residual, status, packet):
    history.emit("residual", key=residual.key, status=status, packet=packet)
