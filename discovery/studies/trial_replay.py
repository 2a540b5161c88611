"""Replays verdicts of a language model's runs in four ways, with the model's answers.

A transition is the state of a run right after the verdict of a packet in which a
control excluded an account, where the verdict is explicit about the focal account:
supported, or refuted. From that state, on the program that holds the response, the
model is asked for a successor in four ways that share the packets, the parent, the open
residuals and whatever else a prompt holds:

- `free` reads the packets with predictions, controls, exclusions and survivors. No
  verdict asks for anything.
- `bound` reads the same, the rules of how verdicts bind, and the demand compiled from
  this verdict, on which its answer is checked.
- `shuffled` reads the same as `bound`, but the demand says another verdict and response
  about the same edit: those of another transition of the run whose response differs,
  with its residual, or, where a run has none, `target_only` for what was supported and
  `supported` for what was refuted. The edit, its accounts, its place in the program and
  all evidence stay, so the demand is well formed and is not what the evidence says.
- `text` reads programs, values and values under controls as plain text, without
  predictions, symbols, verdicts, exclusions, rules of a question or a demand.

Successors are measured outside of any budget, on the visible task and on the held-out
one.

A plan may have answers returned. One that would be accepted is then measured at once,
and as long as the probe does not find the response in it, it goes back to the model
with what was measured, up to the number of times that the plan gives. Who is bound is
told that the demand is not met and stands; the others read the same numbers, found in
the same way, and may keep their program. The last accepted answer is the successor.
"""

import concurrent.futures
import dataclasses
import functools
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mxjax.discovery.core import identity
from mxjax.discovery.core.proposal import (
  Budget,
  Context,
  Demand,
  Experiment,
  OutageError,
  Proposal,
  ProposerError,
  strip,
)
from mxjax.discovery.core.residual import PRIMARY, Residual
from mxjax.discovery.core.store import Store, begun_events
from mxjax.discovery.core.task import Status, Task
from mxjax.discovery.core.verdict import FORBIDDING, RESPONSES, Response, Verdict
from mxjax.discovery.proposers import llm
from mxjax.discovery.proposers.endpoint import Cassette, Client, Reply
from mxjax.discovery.search import runs
from mxjax.discovery.search.asking import FreeProxy
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.search.registration import Selection
from mxjax.discovery.search.search import Search
from mxjax.discovery.studies import verdict_replay

CONDITIONS: tuple[str, ...] = ("free", "bound", "shuffled", "text")
BINDING = ("bound", "shuffled")
"""Conditions that are told a demand."""
CALLS_LEFT = 12
"""Calls that a replayed state is reviewed with, so that a question always fits.

A successor has one call: every condition is told so.
"""
OF_QUESTIONS = ("question", "resolved")
"""How refusals of a question ended, of which plain text knows nothing."""
Tell = Callable[[str], Any]
Outcome = dict[str, Any]
"""What a study keeps of a measured proposal."""


class Waiting:
  """A client that keeps its requests, and frees a lock while it waits for an answer.

  The server is told the number of the sample as `seed`.
  """

  def __init__(
    self, client: Client, store: Store, sample: int, lock: threading.Lock
  ) -> None:
    """Puts prompts into `prompts` of the store; whoever asks holds `lock`."""
    self._client, self._store = client, store
    self._sample, self._lock = sample, lock
    self.name: str = client.name

  def complete(self, request: Mapping[str, Any]) -> Reply:
    """See `Client.complete`."""
    key = identity.digest(dict(request))
    self._store.put("prompts", key, {"messages": request["messages"]})
    self._lock.release()
    try:
      return self._client.complete({**request, "seed": self._sample})
    finally:
      self._lock.acquire()


@dataclasses.dataclass(frozen=True)
class Transition:
  """The state right after a verdict, ready to be answered.

  Attributes:
    call: Evaluator calls that the run had spent.
    focal: `supported` or `refuted`.
    context: What all conditions are told, with no demand.
    demand: The demand compiled from the verdict.
    paused: The search in that state.
    told: What the controls of each experiment were, in words, by program and parent.
  """

  packet: str
  call: int
  verdict: str
  focal: str
  context: Context
  demand: Demand
  paused: Search
  told: Mapping[tuple[str, str], str]


_Asked = tuple[Transition, str, int, Context, Demand]
"""A transition, condition and sample; what it is told, and the demand."""
_Turn = tuple[_Asked, "concurrent.futures.Future[None]"]


class _Ended:
  """Stands in for the proposer of a run that has ended."""

  def __init__(self, name: str) -> None:
    self.name: str = name

  def propose(self, context: Context) -> Proposal:
    del context
    raise ProposerError("the run has ended")


def transitions(
  folder: pathlib.Path,
  options: runs.RunOptions,
  task: Task,
  executors: Sequence[Any],
  proxy: FreeProxy | None,
  limit: int,
) -> list[Transition]:
  """Returns the first eligible transitions of a closed run, in the order of calls.

  `folder` is a copy of the run's, which keeps what tracing finds out.
  """
  store, events = Store(folder), []
  proposer = _Ended(begun_events(folder)[0]["proposer"])
  search = runs.make_search(
    options, task, executors, store, ask=proxy, proposer=proposer
  )
  search.history.on_event = events.append
  told = _controls(begun_events(folder))
  found: list[Transition] = []
  search.begin()
  try:
    while len(found) < limit and not search.ended and store.replaying:
      first = len(events)
      search.round()
      for verdict in [e for e in events[first:] if e["event"] == "verdict"]:
        packet = next(
          e["packet"]
          for e in events[first:]
          if e["event"] == "packet" and e["id"] == verdict["packet"]
        )
        if focal := eligible(verdict, packet, events[first:]):
          found.append(_transition(search, packet, verdict, focal, told))
  except OutageError:
    raise
  except ProposerError:
    # The run was closed here.
    pass
  store.close()
  return found[:limit]


def eligible(
  verdict: Mapping[str, Any],
  packet: Mapping[str, Any],
  events: Sequence[Mapping[str, Any]],
) -> str:
  """Returns what became of the focal account, or nothing if a verdict is not replayed.

  A control must have excluded an account, the verdict must support or refute the focal
  one, and a response must be owed: none is where the observable is at its floor.
  """
  by_control = any(name != PRIMARY for name in verdict["excluded"].values())
  owed = any(
    e["event"] == "demand"
    and e["packet"] == verdict["packet"]
    and e["status"] == "owed"
    for e in events
  )
  if not (by_control and owed):
    return ""
  if verdict["verdict"] == Verdict.SUPPORTED:
    return "supported"
  is_open = verdict["verdict"] in (Verdict.UNRESOLVED, Verdict.UNSAFE)
  is_gone = packet["explanations"][0]["name"] in verdict["excluded"]
  return "refuted" if is_gone and not is_open else ""


def _controls(events: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
  """Returns what ran beside each program, in words, by program and parent."""
  told = {}
  for packet in (e["packet"] for e in events if e["event"] == "packet"):
    lines = [
      f"{c['name']} is the program with {_intervention(c['call']['intervention'])}"
      for c in packet["conditions"]
      if c["kind"] == "control"
    ]
    ideas = [f"{e['name']}: {e['statement']}" for e in packet["explanations"]]
    parts = [f"Ideas of why it may help: {'; '.join(ideas)}."] if ideas else []
    parts += [f"Also measured: {'; '.join(lines)}."] if lines else []
    told[packet["program"], packet["parent"]] = " ".join(parts)
  return told


def _intervention(change: Mapping[str, Any]) -> str:
  values = {k: v for k, v in change.items() if k != "parent"}
  return identity.canonical(values) if values else "other code in a part of the edit"


def _transition(
  search: Search,
  packet: Mapping[str, Any],
  verdict: Mapping[str, Any],
  focal: str,
  told: Mapping[tuple[str, str], str],
) -> Transition:
  address = (len(search.history.experiments), 0)
  holder = search.record(search.residuals.holder(packet["parent"], verdict["packet"]))
  selection = search.select(address, holder)
  (demand,) = (d for d in selection.demands if d.packet == verdict["packet"])
  asked = (r for r in selection.residuals if r.observable != demand.residual.observable)
  context = search.context(selection, "verdict")
  # The question may have been asked of a program long before this one.
  value = context.parent.values[demand.residual.observable]
  question = dataclasses.replace(demand.residual, value=value)
  context = dataclasses.replace(
    context,
    # The question of the verdict is open in every condition.
    residuals=(question, *asked),
    demands=(),
    checked=None,
    repeated=None,
    focus=None,
    compiles=False,
    budget=Budget(calls_left=1, calls=1, is_single=True),
    overspends=lambda usage: False,
    # Nor are refusals told that verdicts had bound the run to.
    history=tuple(_unbound(e) for e in context.history if e.status not in FORBIDDING),
  )
  return Transition(
    packet=verdict["packet"],
    call=search.ledger.spent,
    verdict=verdict["verdict"],
    focal=focal,
    context=context,
    demand=demand,
    paused=search.paused(CALLS_LEFT),
    told=told,
  )


def _unbound(experiment: Experiment) -> Experiment:
  """Returns an experiment without what verdicts asked and what answered them."""
  return dataclasses.replace(experiment, asks="", answered=(), implemented=None)


def as_text(experiment: Experiment, told: str) -> Experiment:
  """Returns an experiment as plain text: what was measured, and under which control."""
  plain = strip(experiment, "text")
  note = " ".join(part for part in (plain.note, told) if part)
  return dataclasses.replace(plain, note=note, ran=experiment.ran)


def shuffled(
  demand: Demand, others: Sequence[Demand], seed: int, target: str
) -> Demand:
  """Returns the demand of another verdict about the same edit; see the module."""
  # One that asks for the same would be no other demand.
  known = [d for d in others if d.response != demand.response]
  residual: Residual = demand.residual
  if known:
    other = identity.pick(known, seed, demand.packet, "shuffled")
    verdict, residual = other.verdict, other.residual
  elif demand.verdict == Verdict.SUPPORTED:
    verdict = str(Verdict.TARGET_ONLY)
  else:
    verdict = str(Verdict.SUPPORTED)
  response = RESPONSES[Verdict(verdict)]
  names = [account.name for account in demand.accounts]
  observable = residual.observable
  about = {Response.EXTEND: (observable,), Response.REPAIR_TRANSFER: (target,)}
  return dataclasses.replace(
    demand,
    verdict=verdict,
    response=response,
    # The focal account alone is left of what was supported, and a rival of the rest.
    survivors=tuple(names[:1] if verdict == Verdict.SUPPORTED else names[1:2]),
    residual=dataclasses.replace(residual, program=demand.residual.program),
    about=about.get(response, tuple(dict.fromkeys((observable, target)))),
  )


def contexts(
  transition: Transition, others: Sequence[Demand], seed: int
) -> dict[str, tuple[Context, Demand]]:
  """Returns what each condition is told, and the demand that it is about."""
  free, demand = transition.context, transition.demand
  wrong = shuffled(demand, others, seed, free.target)
  history = tuple(
    as_text(e, transition.told.get((e.program, e.parent), ""))
    for e in free.history
    if e.status not in OF_QUESTIONS
  )

  def under(asked: Demand | None, context: Context) -> Context:
    made = dataclasses.replace(
      context,
      demands=() if asked is None else (asked,),
      checked=None if asked is None or asked.forbids else asked,
      compiles=asked is not None,
    )
    review = functools.partial(transition.paused.review, _selection(made))
    return dataclasses.replace(made, review=review)

  text = dataclasses.replace(free, evidence="text", history=history, residuals=())
  return {
    "free": (under(None, free), demand),
    "bound": (under(demand, free), demand),
    "shuffled": (under(wrong, free), wrong),
    "text": (under(None, text), demand),
  }


class Tries:
  """The accepted answers of one successor, each measured before the next is asked for.

  Attributes:
    made: The answers so far, each with its outcome.
  """

  def __init__(
    self,
    returns: int,
    context: Context,
    task: Task,
    demand: Demand | None,
    measure: Callable[[Proposal], Outcome],
  ) -> None:
    """Returns answers up to `returns` times; `demand` is what they are told to meet."""
    self._returns, self._context, self._task = returns, context, task
    self._demand, self._measure = demand, measure
    self.made: list[tuple[Proposal, Outcome]] = []

  def __call__(self, proposal: Proposal) -> str:
    """Measures an answer; returns what the model is told, or nothing to take it."""
    found = self._measure(proposal)
    self.made.append((proposal, found))
    is_met = found.get("obeyed", found["implemented"])
    if is_met or len(self.made) > self._returns:
      return ""
    return self._told(found)

  def _told(self, found: Outcome) -> str:
    target, seen = self._task.target, found.get("obeyed_probe", found["probe"])
    if found["change"] is None:
      measured = f"ended with {found['status']}: {seen}."
    else:
      before = self._context.parent.values[target]
      margin = self._task.margins[target]
      measured = (
        f"has {target} {before + found['change']:.6g}, its parent {before:.6g}, "
      )
      measured += f"and the margin is {margin:.3g}. Without and with the parts that it "
      measured += f"declares: {seen}."
    asked = "You may keep this program or write another one: answer again with the "
    asked += "whole object."
    if self._demand is not None:
      about = f"{self._demand.response} about {', '.join(self._demand.about)}"
      asked = "The execution probe does not find the response that the demand asks "
      asked += f"for, {about}. The demand stands: answer again with the whole object "
      asked += "and a program that meets it."
    return f"That was run, and is not counted as a call yet: it {measured} {asked}"


def _of_try(proposal: Proposal, found: Outcome) -> Outcome:
  return {"source": proposal.source, "note": proposal.note, **found}


@dataclasses.dataclass
class Replay:
  """The replay of one run: its folder, what it is about, and who answers.

  Attributes:
    folder: Keeps prompts, a cassette of each condition, outcomes and successors; the
      run's own stays as it is.
    heldout: The task on held-out data, or None.
    conditions: Those that are asked, of `CONDITIONS`.
    returns: Times that an answer in which the probe finds no response goes back.
    client: Returns a new client for a condition, or None to ask nobody.
    compiled: Where jailed workers share what they compiled, or None.
    lock: Held while anything is traced or measured.
  """

  folder: pathlib.Path
  run: pathlib.Path
  options: runs.RunOptions
  task: Task
  heldout: Task | None
  samples: int
  limit: int
  conditions: Sequence[str]
  returns: int
  client: Callable[[str], Client] | None
  compiled: pathlib.Path | None
  lock: threading.Lock
  tell: Tell

  def __post_init__(self) -> None:
    """Copies the run, so that its replay changes nothing in it."""
    state = self.folder / "state"
    if not state.exists():
      self.folder.mkdir(parents=True, exist_ok=True)
      part = self.folder / "state.part"
      shutil.rmtree(part, ignore_errors=True)
      shutil.copytree(self.run, part)
      # Under its name only once it is whole: a copy that was cut short is made again.
      part.rename(state)
    self._state, self._store = Store(state), Store(self.folder)
    # Both read a log; the search opens it anew.
    self._state.close()
    self._executor = self._make_executor(self.task, self._state)
    self._evaluator = CachedEvaluator(self.task, self._executor, self._state)
    self._proxy = runs.free_proxy(self.options, self.task, self._state)
    self._asked: list[_Asked] = []
    self._cassettes = {name: self._cassette(name) for name in self.conditions}

  def _cassette(self, condition: str) -> Cassette:
    """Opens the recorded replies of a condition, and asks for none without a client."""
    file = self.folder / "cassettes" / f"{condition}.jsonl"
    file.parent.mkdir(exist_ok=True)
    # An empty cassette can be replayed: each of its requests is then without an answer.
    file.touch()
    return Cassette(file, "replay" if self.client is None else "record")

  def _make_executor(self, task: Task, store: Store) -> Any:
    level, shared = self.options.sandbox, self.compiled
    limit = self.options.search.call_seconds
    return runs.make_executor(task, store, level, compiled=shared, call_seconds=limit)

  def close(self) -> None:
    """Ends the workers."""
    for ending in filter(None, (self._executor, self._proxy)):
      ending.close()

  def prepare(self) -> int:
    """Finds the transitions and what each condition is told; returns their number."""
    found = transitions(
      self._state.path,
      self.options,
      self.task,
      [self._executor],
      self._proxy,
      self.limit,
    )
    seed = self.options.search.seed
    for each in found:
      others = [t.demand for t in found if t is not each]
      made = contexts(each, others, seed)
      wrong = made["shuffled"][1]
      self._store.put(
        "transitions",
        each.packet,
        {
          "packet": each.packet,
          "call": each.call,
          "verdict": each.verdict,
          "focal": each.focal,
          "label": each.demand.label,
          "response": each.demand.response,
          "observable": each.demand.residual.observable,
          "parent": each.context.parent.id,
          "shuffled": [wrong.verdict, wrong.response, wrong.residual.observable],
          "margin": self.task.margins[self.task.target],
        },
      )
      for condition in self.conditions:
        context, demand = made[condition]
        for sample in range(self.samples):
          self._asked.append((each, condition, sample, context, demand))
    return len(found)

  def start(
    self, pool: concurrent.futures.Executor
  ) -> Iterator["concurrent.futures.Future[None]"]:
    """Asks for every successor that is not recorded, and records it once it is there.

    Those of one condition and sample follow each other in the order of the run, and
    conditions do not wait for each other. Whoever answers for a condition therefore
    reads no later state of the run before the answer is accepted, repairs included.

    A future ends with `OutageError` where there is no answer, and so do those that
    would have followed; the next replay asks again.
    """
    turns: dict[tuple[str, int], list[_Turn]] = {}
    for asked in self._asked:
      if self._store.get("successors", _key(*asked[:3])) is None:
        turn = asked, concurrent.futures.Future[None]()
        turns.setdefault(asked[1:3], []).append(turn)
    for each in turns.values():
      pool.submit(self._answer_in_turn, each)
      yield from (future for _, future in each)

  def _answer_in_turn(self, turns: Sequence["_Turn"]) -> None:
    failed: BaseException | None = None
    for asked, future in turns:
      try:
        if failed is None:
          self._answer(*asked)
      except BaseException as error:  # The future tells it.
        failed = error
      if failed is None:
        future.set_result(None)
      else:
        future.set_exception(failed)

  def _answer(
    self,
    transition: Transition,
    condition: str,
    sample: int,
    made: Context,
    demand: Demand,
  ) -> None:
    cassette = self._cassettes[condition].sampled(sample)
    if self.client is not None:
      client = self.client(condition)
      cassette = cassette.asking(Waiting(client, self._store, sample, self.lock))
    # Python 3.11 parses programs in one thread at a time, and workers serve one.
    with self.lock:
      wanted = demand if condition in BINDING else None
      measure = lambda proposal: self._measured(
        proposal, made, transition.demand, demand
      )
      tries = Tries(self.returns, made, self.task, wanted, measure)
      asked = dataclasses.replace(made, tried=tries) if self.returns else made
      proposal = llm.LlmProposer(cassette, self.task).propose(asked)
      refused = proposal.unusable or made.review(proposal)
      usage, earlier = dict(proposal.usage), {}
      if tries.made:
        # An answer that was returned may be followed by one that stays refused.
        (proposal, found), refused = tries.made[-1], ""
        earlier = {"tries": [_of_try(*each) for each in tries.made]}
      else:
        found = measure(proposal)
    entry = {
      **{"packet": transition.packet, "condition": condition, "sample": sample},
      **{"refused": refused, "usage": usage, "note": proposal.note},
      **{"source": proposal.source, **found, **earlier},
    }
    self._store.put("successors", _key(transition, condition, sample), entry)
    shown = f"refused: {refused[:200]}" if refused else found["change"]
    shown = found["status"] if shown is None else shown
    self.tell(f"{self.folder.name} {transition.packet[:8]} {condition}: {shown}")

  def _measured(
    self, proposal: Proposal, context: Context, own: Demand, demand: Demand
  ) -> Outcome:
    """Returns a successor's outcome as the study keeps it.

    `own` is the demand of the verdict, and `demand` the one that it was asked for.
    """
    if proposal.unusable:
      return {"label": "", "status": "unusable", "change": None}
    found, seen = verdict_replay.probed(proposal, self._evaluator, context, own)
    values = {**dataclasses.asdict(found), "probe": seen}
    if own != demand:
      # Whether the wrong demand was obeyed, beside the right one.
      obeyed, seen = verdict_replay.probed(proposal, self._evaluator, context, demand)
      values |= {"obeyed": obeyed.implemented, "obeyed_probe": seen}
    return values

  def score(self, least: int) -> None:
    """Scores successors that ran on held-out data, if at least `least` wait for it.

    A score is the target minus the parent's, or None if one of the two did not run.
    """
    if self.heldout is None:
      return
    waiting = [
      (_key(each, condition, sample), each.context.parent.source)
      for each, condition, sample, *_ in self._asked
      if self._waits(_key(each, condition, sample))
    ]
    if len(waiting) < least:
      return
    kept = Store(self.folder / "heldout")
    executor = self._make_executor(self.heldout, kept)
    hidden = CachedEvaluator(self.heldout, executor, kept)
    try:
      for key, parent in waiting:
        found: dict[str, Any] = self._store.get("successors", key) or {}
        mine, theirs = (self._target(hidden, t) for t in (found["source"], parent))
        change = None if mine is None or theirs is None else mine - theirs
        self._store.put("scores", key, {"successor": key, "change": change})
        self.tell(f"{self.folder.name} {key} held out: {change}")
    finally:
      executor.close()

  def _target(self, evaluator: CachedEvaluator, source: str) -> float | None:
    """Returns the target of a program, or None if it does not run."""
    with self.lock:
      prepared = evaluator.prepare(source)
    if prepared.call is None:
      return None
    (outcome,) = evaluator.measure(prepared.call)
    return outcome.values.get(evaluator.task.target)

  def _waits(self, key: str) -> bool:
    found = self._store.get("successors", key)
    is_ok = found is not None and found["status"] == Status.OK
    return is_ok and self._store.get("scores", key) is None


def _selection(context: Context) -> Selection:
  """Returns what a context's proposal is reviewed for."""
  return Selection(context.address, context.parent, context.residuals, context.demands)


def _key(transition: Transition, condition: str, sample: int) -> str:
  return f"{transition.packet[:16]}-{condition}-{sample}"
