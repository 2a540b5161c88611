"""Verdict replay: compares two successors that respond to the same evidence.

Each transition is a packet whose controls excluded an explanation. From the state right
after it, on the program that holds its response, one successor is proposed by free
reflection and one under the verdict's constraint, from the same draws; both are
evaluated outside any budget.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from mxjax.discovery.core.edit_templates import id_of
from mxjax.discovery.core.proposal import Evidence, Proposer, ProposerError, Record
from mxjax.discovery.core.residual import PRIMARY
from mxjax.discovery.core.store import Store
from mxjax.discovery.core.task import Status, Task
from mxjax.discovery.core.verdict import OWED
from mxjax.discovery.sandbox.executor import Executor
from mxjax.discovery.search import checkers, runs
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.search.registration import Selection
from mxjax.discovery.search.resolution import holder_of
from mxjax.discovery.search.search import Search

PER_TRAJECTORY = 6
REFUTED = ("no_effect", "target_only", "mediator_only", "unsafe")


@dataclasses.dataclass(frozen=True)
class Successor:
  """The successor proposed under one condition, and its evaluation.

  Attributes:
    label: The edit.
    status: How its evaluation ended; `none` if nothing was proposed.
    change: Visible target minus the parent's, or None.
    improves: Whether the target fell by more than its margin.
    implemented: Whether a probe finds the declared change in executed outputs.
    repeats: Whether the edit had been refuted before.
  """

  label: str
  status: str
  change: float | None = None
  improves: bool = False
  implemented: bool = False
  repeats: bool = False


@dataclasses.dataclass(frozen=True)
class Transition:
  """One replayed packet, by its hash, and the call at which its verdict was reached.

  `focal` is the fate of the focal explanation: `supported`, `refuted` or `open`. `free`
  is the successor under free reflection, `constrained` under the verdict's constraint.
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
  executor: Executor,
  evaluator: CachedEvaluator,
) -> list[Transition]:
  """Replays the first six eligible transitions of a finished run.

  The run folder stays unchanged; `options` and `task` are those of the run. The
  transitions are in the order of evaluator calls.
  """
  store = Store(folder)
  search = runs.make_search(options, task, executor, store)
  events: list[dict[str, Any]] = []
  search.history.on_event = events.append
  proposer = runs.make_proposer(options, task)
  transitions: list[Transition] = []
  search.begin()
  try:
    while len(transitions) < PER_TRAJECTORY and not search.is_spent and store.replaying:
      events.clear()
      search.round()
      verdict = next((e for e in events if e["event"] == "verdict"), None)
      if verdict is not None and _is_eligible(verdict):
        packet = next(e for e in events if e["event"] == "packet")["packet"]
        successor = functools.partial(_successor, search, proposer, evaluator)
        transitions.append(_transition(search, packet, verdict, successor))
  except ProposerError:
    # The original run also ended here, because no edit was left.
    pass
  store.close()
  return transitions


def _is_eligible(verdict: dict[str, Any]) -> bool:
  controls = set(verdict["observed"]) - {PRIMARY}
  return bool(verdict["excluded"]) and bool(controls)


def _transition(
  search: Search,
  packet: dict[str, Any],
  verdict: dict[str, Any],
  successor: Callable[[Selection, Evidence], Successor],
) -> Transition:
  address = (len(search.history.experiments), 0)
  selection = search.select(address, _holder(search, packet, verdict))
  required = selection.required
  if required is not None and required.packet != verdict["packet"]:
    required = None
  focal = "open"
  if verdict["verdict"] == "supported":
    focal = "supported"
  elif packet["explanations"][0]["name"] in verdict["excluded"]:
    focal = "refuted"
  owing = lambda required: dataclasses.replace(selection, required=required)
  return Transition(
    packet=verdict["packet"],
    call=search.ledger.spent,
    verdict=verdict["verdict"],
    focal=focal,
    free=successor(owing(None), "reflect"),
    constrained=successor(owing(required), "verdict"),
  )


def _holder(search: Search, packet: Any, verdict: dict[str, Any]) -> Record:
  """Returns the program that both successors revise; the parent if nothing is owed."""
  program, parent = packet["program"], packet["parent"]
  if verdict["response"] not in OWED:
    return search.record(parent)
  is_retained = any(record.id == program for record in search.programs.records)
  holder = holder_of(verdict["response"], program, parent, is_retained=is_retained)
  return search.record(holder)


def _successor(
  search: Search,
  proposer: Proposer,
  evaluator: CachedEvaluator,
  selection: Selection,
  evidence: Evidence,
) -> Successor:
  """Proposes a successor for the selection from this evidence, and measures it."""
  try:
    proposal = proposer.propose(search.context(selection, evidence))
  except ProposerError:
    return Successor("", "none")
  prepared = evaluator.prepare(proposal.source)
  if prepared.call is None:
    return Successor(proposal.label, str(prepared.status))
  parent, declared = selection.parent, proposal.declared
  back = checkers.reverted(prepared.full_call, parent.full_call, declared)
  mine, without = evaluator.measure(prepared.call, back)
  repeats = any(
    e.verdict in REFUTED and id_of(e.label) == id_of(proposal.label)
    for e in search.history.experiments
  )
  if mine.status != Status.OK:
    return Successor(proposal.label, str(mine.status), repeats=repeats)
  target = evaluator.task.target
  change = mine.values[target] - parent.values[target]
  return Successor(
    label=proposal.label,
    status=str(mine.status),
    change=change,
    improves=bool(change < -evaluator.task.margins[target]),
    implemented=checkers.by_probe(mine, without, declared).implemented,
    repeats=repeats,
  )
