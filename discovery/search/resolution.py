"""From a packet's outcomes to its finding, and the check of a demanded response."""

from mxjax.discovery.core import verdict
from mxjax.discovery.core.proposal import Record
from mxjax.discovery.core.residual import PRIMARY, Symbol, consistent, symbol
from mxjax.discovery.core.task import Outcome, Status, Task
from mxjax.discovery.sandbox.laboratory import Laboratory
from mxjax.discovery.search import checkers, controls
from mxjax.discovery.search.checkers import Check
from mxjax.discovery.search.registration import Attempt, full_call


def symbols(task: Task, parent: Record, outcome: Outcome) -> dict[str, Symbol]:
  """What every observable with a margin did, relative to the parent."""
  return {
    name: symbol(outcome.values[name] - parent.values[name], margin)
    for name, margin in task.margins.items()
    if name in outcome.values and name in parent.values
  }


def pointless(task: Task, attempt: Attempt) -> frozenset[str]:
  """Controls that separate no two explanations which the primary run left standing."""
  packet = attempt.packet
  chosen = {c.name for c in packet.conditions if c.kind == "control"}
  if not chosen:
    return frozenset()
  seen = symbols(task, attempt.parent, attempt.outcome)
  left = [e for e in packet.explanations if consistent(e.predicts(PRIMARY), seen)]
  registered = [c for c in attempt.proposal.controls if c.name in chosen]
  needed = controls.minimal(left, registered)
  return frozenset(chosen - {c.name for c in needed})


def observed(task: Task, attempt: Attempt) -> dict[str, dict[str, Symbol]]:
  """Symbols of every condition that ran well, the probe aside."""
  return {
    name: symbols(task, attempt.parent, outcome)
    for name, outcome in attempt.outcomes.items()
    if name != "probe" and outcome.status == Status.OK
  }


def _is_equivalent(attempt: Attempt, seen: dict[str, Symbol]) -> bool:
  """The same execution, or nothing moved: neither observables nor outputs."""
  if attempt.packet.conditions[0].exec_id == attempt.parent.exec_id:
    return True
  is_still = all(s == "same" for s in seen.values())
  outputs = dict(attempt.outcome.outputs)
  return bool(seen) and is_still and outputs == dict(attempt.parent.outputs)


def resolve(
  task: Task, attempt: Attempt, seen: dict[str, dict[str, Symbol]]
) -> verdict.Finding:
  """Compares what was observed with the registered predictions."""
  statuses = [
    attempt.outcomes[n].status for n in (PRIMARY, "probe") if n in attempt.outcomes
  ]
  return verdict.resolve(
    attempt.packet.explanations,
    seen,
    task.target,
    is_safe=all(status == Status.OK for status in statuses),
    is_equivalent=_is_equivalent(attempt, seen.get(PRIMARY, {})),
  )


def check(lab: Laboratory, attempt: Attempt) -> Check:
  """Looks for a response in source, lowered program or executed outputs."""
  packet, outcome = attempt.packet, attempt.outcome
  checker: checkers.Checker = packet.checker  # pyright: ignore[reportAssignmentType]
  if outcome.status != Status.OK:
    return Check(checker, False, f"the candidate ended {outcome.status}")
  if checker == "source":
    program, parent = attempt.prepared.program, lab.prepare(attempt.parent.source)
    assert program is not None and parent.program is not None
    return checkers.by_source(program, parent.program, packet.declared)
  if checker == "lowered":
    mine, before = lab.full_call(attempt.prepared), full_call(attempt.parent)
    return checkers.by_lowering(mine, before, packet.declared)
  without = attempt.outcomes["probe"]
  if checker == "probe":
    names = checkers.output_names(packet.declared, outcome.outputs)
    return checkers.by_probe(outcome, without, names)
  return checkers.by_layer_output(outcome, without)
