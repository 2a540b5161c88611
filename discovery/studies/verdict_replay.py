"""Verdict replay: one piece of evidence, two successors.

Each transition is a packet whose controls left an explanation excluded. From the state
right after it, on the program that holds its response, one successor is proposed by
free reflection and one under the verdict's constraint, from the same draws, and both
are evaluated outside any budget.
"""

import dataclasses
import pathlib
from typing import Any

from mxjax.discovery.core.packet import condition
from mxjax.discovery.core.proposal import (
  Evidence,
  Proposal,
  ProposerError,
  Record,
  Required,
)
from mxjax.discovery.core.residual import PRIMARY
from mxjax.discovery.core.store import Store
from mxjax.discovery.core.task import Status, Task
from mxjax.discovery.core.verdict import OWED
from mxjax.discovery.sandbox.laboratory import Executor, Laboratory
from mxjax.discovery.search import checkers, compilation, registration, runs
from mxjax.discovery.search.search import Search

PER_TRAJECTORY = 6
REFUTED = ("no_effect", "target_only", "mediator_only", "unsafe")


@dataclasses.dataclass(frozen=True)
class Successor:
  """What came of the evidence under one condition.

  Attributes:
    label: The edit.
    status: How its evaluation ended; `none` when nothing was proposed.
    change: Visible target minus the parent's, or None.
    improves: Whether it fell by more than its margin.
    implemented: Whether a probe finds the declared change in executed outputs.
    repeats: Whether the edit was refuted before.
  """

  label: str
  status: str
  change: float | None = None
  improves: bool = False
  implemented: bool = False
  repeats: bool = False


@dataclasses.dataclass(frozen=True)
class Transition:
  """One replayed packet.

  Attributes:
    packet: Its hash.
    call: Calls spent when its verdict was reached.
    verdict: The verdict.
    focal: `supported`, `refuted` or `open`: what became of the focal explanation.
    free: The successor under free reflection.
    constrained: The successor under the verdict constraint.
  """

  packet: str
  call: int
  verdict: str
  focal: str
  free: Successor
  constrained: Successor


def replay(
  folder: pathlib.Path,
  options: runs.RunOptions,
  task: Task,
  bench: Executor,
  lab: Laboratory,
) -> list[Transition]:
  """Replays the first six eligible transitions of a finished run.

  Args:
    folder: The run; its log is replayed, and nothing is added to it.
    options: Of the run.
    task: Its task.
    bench: Workers for the task.
    lab: Where successors are evaluated.

  Returns:
    Up to six transitions in the order of evaluator calls.
  """
  store = Store(folder)
  search = runs.make_search(options, task, bench, store)
  seen: list[dict[str, Any]] = []
  search.history.on_event = seen.append
  proposer = runs.make_proposer(options, task)
  found: list[Transition] = []
  search.begin()
  try:
    while len(found) < PER_TRAJECTORY and not search.is_spent and store.replaying:
      seen.clear()
      search.round()
      verdict = next((e for e in seen if e["event"] == "verdict"), None)
      if verdict is not None and _is_eligible(verdict):
        found.append(_transition(search, proposer, lab, seen, verdict))
  except ProposerError:
    # The run itself ended here: no card was left.
    pass
  store.close()
  return found


def _is_eligible(verdict: dict[str, Any]) -> bool:
  controls = set(verdict["observed"]) - {PRIMARY}
  return bool(verdict["excluded"]) and bool(controls)


def _transition(
  search: Search,
  proposer: Any,
  lab: Laboratory,
  seen: list[dict[str, Any]],
  verdict: dict[str, Any],
) -> Transition:
  packet = next(e for e in seen if e["event"] == "packet")["packet"]
  focal = packet["explanations"][0]["name"]
  holder = _holder(search, packet, verdict)
  required = search.residuals.required.get(holder.id)
  if required is not None and required.packet != verdict["packet"]:
    required = None
  grown = lambda evidence, owed: _successor(
    search, proposer, lab, holder, evidence, owed
  )
  outcome = "open"
  if verdict["verdict"] == "supported":
    outcome = "supported"
  elif focal in verdict["excluded"]:
    outcome = "refuted"
  return Transition(
    packet=verdict["packet"],
    call=search.ledger.spent,
    verdict=verdict["verdict"],
    focal=outcome,
    free=grown("reflect", None),
    constrained=grown("verdict", required),
  )


def _holder(search: Search, packet: Any, verdict: dict[str, Any]) -> Record:
  """The program that both successors revise; the parent where nothing is owed."""
  if verdict["response"] not in OWED:
    return search.record(packet["parent"])
  by_id = {record.id: record for record in search.programs.records}
  name = compilation.holder_of(
    verdict["response"],
    packet["program"],
    packet["parent"],
    is_kept=packet["program"] in by_id,
  )
  return search.record(name)


def _successor(
  search: Search,
  proposer: Any,
  lab: Laboratory,
  parent: Record,
  evidence: Evidence,
  required: Required | None,
) -> Successor:
  questions = search.residuals.actionable(parent.id)
  address = (len(search.history.experiments), 0)
  context = search.context(address, parent, questions, required, evidence)
  try:
    proposal: Proposal = proposer.propose(context)
  except ProposerError:
    return Successor("", "none")
  prepared = lab.prepare(proposal.source)
  if prepared.call is None:
    return Successor(proposal.label, str(prepared.status))
  back = checkers.reverted(
    lab.full_call(prepared), registration.full_call(parent), proposal.declared
  )
  calls = (prepared.call, lab.effective(back))
  mine, without = lab.run(
    [condition(PRIMARY, "replay", call, lab.evaluator) for call in calls]
  )
  card = proposal.label.split("(")[0]
  repeats = any(
    e.verdict in REFUTED and e.label.split("(")[0] == card
    for e in search.history.experiments
  )
  if mine.status != Status.OK:
    return Successor(proposal.label, str(mine.status), repeats=repeats)
  target = lab.task.target
  change = mine.values[target] - parent.values[target]
  names = checkers.output_names(proposal.declared, mine.outputs)
  return Successor(
    label=proposal.label,
    status=str(mine.status),
    change=change,
    improves=bool(change < -lab.task.margins[target]),
    implemented=checkers.by_probe(mine, without, names).implemented,
    repeats=repeats,
  )
