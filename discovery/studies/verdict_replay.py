"""Verdict replay: compares two successors that respond to the same evidence.

Each transition is a packet in which a control excluded an explanation that the primary
run had left. From the state right after it, on the program that holds its response, one
successor is proposed by free reflection and one under the verdict's constraint. Both
proposers read the same packets with predictions, verdicts, exclusions and survivors;
only the compiled demand differs. Both are evaluated outside any budget.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from mxjax.discovery.core.edit_templates import id_of
from mxjax.discovery.core.proposal import (
  Context,
  Demand,
  OutageError,
  Proposal,
  Proposer,
  ProposerError,
)
from mxjax.discovery.core.residual import PRIMARY
from mxjax.discovery.core.store import Store
from mxjax.discovery.core.task import Status, Task
from mxjax.discovery.sandbox.executor import Executor
from mxjax.discovery.search import checkers, registration, runs
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
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
    implemented: Whether a probe finds the response in the residual's computation.
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
  executors: Sequence[Executor],
  evaluator: CachedEvaluator,
) -> list[Transition]:
  """Replays the first six eligible transitions of a finished run.

  The run folder stays unchanged; `options` and `task` are those of the run. The
  transitions are in the order of evaluator calls.
  """
  store = Store(folder)
  search = runs.make_search(options, task, executors, store)
  events: list[dict[str, Any]] = []
  search.history.on_event = events.append
  proposer = runs.make_proposer(options, task)
  transitions: list[Transition] = []
  search.begin()
  try:
    while len(transitions) < PER_TRAJECTORY and not search.ended and store.replaying:
      events.clear()
      search.round()
      verdict = next((e for e in events if e["event"] == "verdict"), None)
      if verdict is not None and _is_eligible(verdict, events):
        packet = next(e for e in events if e["event"] == "packet")["packet"]
        successor = functools.partial(_successor, proposer, evaluator)
        transitions.append(_transition(search, packet, verdict, successor))
  except OutageError:
    raise
  except ProposerError:
    # The original run also ended here, because no edit was left.
    pass
  store.close()
  return transitions


def _is_eligible(verdict: dict[str, Any], events: list[dict[str, Any]]) -> bool:
  """Tells whether a control excluded something, and a response is owed for it.

  None is where the observable is at its floor.
  """
  by_control = any(name != PRIMARY for name in verdict["excluded"].values())
  return by_control and any(
    e["event"] == "demand"
    and e["packet"] == verdict["packet"]
    and e["status"] == "owed"
    for e in events
  )


def _transition(
  search: Search,
  packet: dict[str, Any],
  verdict: dict[str, Any],
  successor: Callable[[Context, Demand], Successor],
) -> Transition:
  # As many experiments, so that each replayed state draws on its own.
  address = (len(search.history.experiments), 0)
  holder = search.record(search.residuals.holder(packet["parent"], verdict["packet"]))
  selection = search.select(address, holder)
  (demand,) = (d for d in selection.demands if d.packet == verdict["packet"])
  constrained = dataclasses.replace(
    search.context(selection, "verdict"),
    demands=(demand,),
    checked=None if demand.forbids else demand,
    # Both successors are made of one program, the holder.
    repeated=None,
  )
  free = dataclasses.replace(constrained, demands=(), checked=None, compiles=False)
  focal = "open"
  if verdict["verdict"] == "supported":
    focal = "supported"
  elif packet["explanations"][0]["name"] in verdict["excluded"]:
    focal = "refuted"
  return Transition(
    packet=verdict["packet"],
    call=search.ledger.spent,
    verdict=verdict["verdict"],
    focal=focal,
    free=successor(free, demand),
    constrained=successor(constrained, demand),
  )


def _successor(
  proposer: Proposer, evaluator: CachedEvaluator, context: Context, demand: Demand
) -> Successor:
  """Proposes a successor in a context, measures it and probes it for the demand."""
  try:
    proposal = proposer.propose(context)
  except OutageError:
    raise
  except ProposerError:
    return Successor("", "none")
  return measured(proposal, evaluator, context, demand)


def measured(
  proposal: Proposal, evaluator: CachedEvaluator, context: Context, demand: Demand
) -> Successor:
  """Measures a proposal outside of any budget and probes it for a demand."""
  return probed(proposal, evaluator, context, demand)[0]


def probed(
  proposal: Proposal, evaluator: CachedEvaluator, context: Context, demand: Demand
) -> tuple[Successor, str]:
  """Returns what `measured` does, and in words what the probe saw, or how it ended."""
  prepared = evaluator.prepare(proposal.source)
  if prepared.call is None:
    return Successor(proposal.label, str(prepared.status)), prepared.detail
  own, parent = prepared.full_call, context.parent
  parts = registration.answering(
    demand, proposal.declared, own, parent.full_call, evaluator
  )
  call = registration.probed(demand, own, parent.full_call, parts)
  mine, without = evaluator.measure(prepared.call, call)
  repeats = any(
    e.verdict in REFUTED and id_of(e.label) == id_of(proposal.label)
    for e in context.history
  )
  is_out = demand.forbids and registration.carries(evaluator, own, demand.before)
  if mine.status != Status.OK:
    failed = Successor(proposal.label, str(mine.status), repeats=repeats)
    return failed, mine.detail
  target, margins = evaluator.task.target, evaluator.task.margins
  # What keeps an intervention out may differ from it in anything that is measured.
  about = [*margins] if demand.forbids else demand.about
  probe = checkers.by_probe(mine, without.values, about, margins)
  change = mine.values[target] - parent.values[target]
  found = Successor(
    label=proposal.label,
    status=str(mine.status),
    change=change,
    improves=bool(change < -margins[target]),
    implemented=is_out or bool(probe.implemented),
    repeats=repeats,
  )
  return found, probe.detail
