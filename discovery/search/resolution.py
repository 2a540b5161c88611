"""Resolves the outcomes of a packet into a finding and the response it requires.

Paper: Appendix "Controlled Experiments and Program Updates", Eq. residual-compile.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from mxjax.discovery.core import identity, verdict
from mxjax.discovery.core.proposal import Demand
from mxjax.discovery.core.residual import (
  OTHER_TEXT,
  PRIMARY,
  Residual,
  Symbol,
  consistent,
  symbol,
)
from mxjax.discovery.core.task import Call, Outcome, Status, Task
from mxjax.discovery.core.verdict import FORBIDDING, Finding, Response, Verdict
from mxjax.discovery.search import checkers, controls, registration
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.search.checkers import Check
from mxjax.discovery.search.frontier import ResidualFrontier
from mxjax.discovery.search.history import History
from mxjax.discovery.search.registration import Attempt

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
  needed = {control.name for control in controls.minimal(left, allowed)}
  return frozenset(waiting - needed - {registration.of_parent(name) for name in needed})


def observed(task: Task, attempt: Attempt) -> dict[str, dict[str, Symbol]]:
  """Returns the symbols of every condition of the candidate that succeeded, but probes.

  They are relative to the parent's primary run, and to what it shows under the same
  control where it ran under that as well.
  """
  probes = {c.name for c in attempt.packet.conditions if c.kind == "probe"}
  seen = {}
  for name, outcome in attempt.outcomes.items():
    if name not in probes | attempt.of_parents and outcome.status == Status.OK:
      again = attempt.outcomes.get(registration.of_parent(name))
      before = {**attempt.parent.values, **(again.values if again else {})}
      seen[name] = symbols(task, before, outcome)
  return seen


def shuffle_tests(attempts: Iterable[Attempt], history: History, seed: int) -> None:
  """Placebo: another text shows of a candidate a change drawn from all so far."""
  for attempt in attempts:
    ids, tested = (attempt.packet.parent, attempt.packet.program), attempt.tested
    if tested.keys() == {*ids}:
      before, after = (tested[program] for program in ids)
      history.shown.append(after - before)
      where = (seed, len(history.shown), "shuffled test")
      drawn = identity.pick(history.shown, *where)
      shown = {OTHER_TEXT: before + drawn}
      names = {c.name for c in attempt.conditions("test")} - attempt.of_parents
      for name in names:
        outcome = attempt.outcomes[name]
        attempt.outcomes[name] = dataclasses.replace(outcome, values=shown)


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
  return verdict.resolve(
    attempt.packet.explanations,
    seen,
    task.target,
    is_safe=attempt.is_safe,
    is_equivalent=_is_equivalent(attempt, seen.get(PRIMARY, {})),
  )


def check(evaluator: CachedEvaluator, attempt: Attempt, demand: Demand) -> Check:
  """Checks whether a candidate meets a demand, in the computation that it names."""
  packet, outcome = attempt.packet, attempt.outcome
  checker: checkers.Checker = packet.checker  # pyright: ignore[reportAssignmentType]
  if outcome.status != Status.OK:
    return Check(checker, False, f"the candidate ended {outcome.status}")
  if demand.forbids:
    return _kept_out(evaluator, attempt, demand, checker)
  target = evaluator.task.target
  if lacks := checkers.missing(demand, packet, attempt.outcomes, target):
    return Check(checker, False, lacks)
  own, scope = attempt.prepared.full_call, demand.computation
  if checkers.retests(demand):
    is_same = registration.carries(evaluator, own, demand.intervention)
    return Check(checker, is_same, f"the same intervention in {scope}: {is_same}")
  if not set(scope) & set(packet.declared):
    return Check(checker, False, f"declares {packet.declared}, nothing of {scope}")
  if demand.response == Response.EXTEND and registration.carries(
    evaluator, own, demand.before
  ):
    return Check(checker, False, f"{scope} is as before the supported intervention")
  return _changed(evaluator, attempt, demand, checker)


def verify(
  evaluator: CachedEvaluator, history: History, attempt: Attempt
) -> dict[str, bool]:
  """Checks and logs whether each demand reached the executed computation, by packet."""
  met = {}
  for demand in attempt.demands:
    made = check(evaluator, attempt, demand)
    about = {"response_to": demand.packet, "response": demand.response}
    fields = {"packet": attempt.packet.hash, **about, **dataclasses.asdict(made)}
    history.emit("check", **fields)
    met[demand.packet] = made.implemented
  return met


def _changed(
  evaluator: CachedEvaluator,
  attempt: Attempt,
  demand: Demand,
  checker: checkers.Checker,
) -> Check:
  """Checks that the demand's computation is not the parent's."""
  own, parent, scope = attempt.prepared, attempt.parent, demand.computation
  if checker == "source":
    before = evaluator.prepare(parent.source).admitted
    assert own.admitted is not None and before is not None
    return checkers.by_source(own.admitted, before, scope)
  if checker == "lowered":
    return checkers.by_lowering(own.full_call, parent.full_call, scope)
  without = attempt.outcomes.get(registration.probe_name(demand))
  if without is None:
    return Check(checker, False, f"{scope} executes as in the parent")
  if checker == "probe":
    return checkers.by_probe(attempt.outcome, without, scope)
  return checkers.by_layer_output(attempt.outcome, without)


def _kept_out(
  evaluator: CachedEvaluator,
  attempt: Attempt,
  demand: Demand,
  checker: checkers.Checker,
) -> Check:
  """Checks that a candidate does not execute an intervention under another name.

  A candidate that has its lowered program was refused before its first call.
  """
  own, scope = attempt.prepared.full_call, demand.computation
  if registration.carries(evaluator, own, demand.before):
    return Check(checker, True, f"{scope} is as before the intervention")
  if demand.response == Response.REJECT or not checkers.needs_probe(checker):
    return Check(checker, True, f"{scope} is not what was {demand.response}")
  name = registration.probe_name(demand)
  if (with_it := attempt.outcomes.get(name)) is None:
    # The run has paid for this execution before.
    call = registration.probed(demand, own, attempt.parent.full_call)
    (with_it,) = evaluator.measure(call)
  if with_it.status != Status.OK:
    return Check(checker, True, f"with the intervention it ends {with_it.status}")
  return checkers.by_probe(attempt.outcome, with_it, scope)


def settle(
  residuals: ResidualFrontier,
  history: History,
  attempt: Attempt,
  demand: Demand,
  *,
  is_met: bool,
  is_retained: bool,
) -> None:
  """Settles a demand that a packet answered: met, or owed again and by its program too.

  A response that failed `MAX_ATTEMPTS` times is abandoned, which the log says. What is
  forbidden stays so.
  """
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
  residuals.settle(parent, demand)
  _tell(history, demand, parent, "met" if is_met else "abandoned")
  if is_met and demand.verdict == Verdict.SUPPORTED:
    _move(residuals, history, demand.residual, "closed", attempt.packet.hash)


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
  is_retained: bool,
  compiles: bool,
) -> None:
  """Records what a finding supports, and which programs owe the response to it.

  `is_retained` tells whether the candidate is among the retained programs. `compiles`
  is False in the ablation in which verdicts create no demands.
  """
  packet = attempt.packet
  assert packet.residual is not None
  if finding.verdict == Verdict.SUPPORTED:
    _move(residuals, history, packet.residual, "supported", packet.hash)
  if not compiles:
    return
  mine, before = attempt.prepared.full_call, attempt.parent.full_call
  scope = _scope(finding.response, packet.residual.computation, mine, before)
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
  )
  holders = holders_of(
    finding.response, packet.program, packet.parent, is_retained=is_retained
  )
  _owe(residuals, history, required, holders, "owed")


def _scope(
  response: Response, asked: tuple[str, ...], mine: Call, before: Call
) -> tuple[str, ...]:
  """Returns the hooks and plan keys in which a response is looked for.

  A change is asked of the residual's computation. What is retired, rejected or tested
  again is the intervention: what it changed there, or else whatever it changed.
  """
  if response not in (*FORBIDDING, Response.ADD_DISCRIMINATOR):
    return asked
  names = sorted(mine.computation.keys() | mine.plan.keys())
  changed = tuple(n for n in names if mine.part([n]) != before.part([n]))
  within = tuple(n for n in changed if n in asked)
  return changed if response == Response.REJECT else within or changed or asked


def holders_of(
  response: str, program: str, parent: str, *, is_retained: bool
) -> tuple[str, ...]:
  """Returns the programs whose revisions owe a response, the one to revise first.

  A discriminator concerns the step from the parent, so the parent owes it. What is
  forbidden is forbidden to the parent's revisions, and must leave the program too.
  """
  if response in FORBIDDING:
    return (parent, program) if is_retained else (parent,)
  asks_again = response == Response.ADD_DISCRIMINATOR
  return (program,) if is_retained and not asks_again else (parent,)


def _tell(history: History, demand: Demand, holder: str, status: str) -> None:
  history.emit(
    "demand",
    packet=demand.packet,
    program=holder,
    response=demand.response,
    computation=list(demand.computation),
    status=status,
  )


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
