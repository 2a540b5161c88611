"""The search; `Search.round` implements one round of Algorithm errata step by step.

A round depends only on the configuration, earlier events and counter-based draws, so a
run can be replayed. Programs are retained for their performance; whether an explanation
holds never changes a score.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from mxjax.discovery.core import identity, verdict
from mxjax.discovery.core.packet import Condition, Packet
from mxjax.discovery.core.proposal import (
  QUESTION_CALLS,
  Context,
  Evidence,
  ExhaustedError,
  OutageError,
  Proposal,
  Proposer,
  ProposerError,
  Record,
  Step,
  answer,
  strip,
)
from mxjax.discovery.core.residual import Residual
from mxjax.discovery.core.store import Store
from mxjax.discovery.core.task import Outcome, Status
from mxjax.discovery.search import (
  checkers,
  frontier,
  registration,
  resolution,
  scopes,
)
from mxjax.discovery.search.asking import FreeProxy
from mxjax.discovery.search.cached_evaluator import CachedEvaluator, Prepared
from mxjax.discovery.search.checkers import Check
from mxjax.discovery.search.history import History
from mxjax.discovery.search.registration import Attempt, Selection
from mxjax.discovery.search.settings import SearchConfig
from mxjax.errors import ValueRefusal


class Search:
  """One run; `programs` and `residuals` are its executable and residual frontiers."""

  def __init__(
    self,
    config: SearchConfig,
    evaluator: CachedEvaluator,
    proposer: Proposer,
    store: Store,
    transfer: frontier.Transfer | None = None,
    ask: FreeProxy | None = None,
  ) -> None:
    """Sets up a run; `transfer` judges improvements, `ask` is the free proxy."""
    self._config, self._evaluator = config, evaluator
    self._proposer, self._store, self._transfer = proposer, store, transfer
    self._task = evaluator.task
    self.ledger = config.ledger()
    self.programs = frontier.ExecutableFrontier(self._task.target, config.frontier)
    self.residuals = frontier.ResidualFrontier(self._task.margins)
    self.scopes = scopes.Scopes(self._task.interface, self._task.margins)
    rank = self.programs.rank
    self.history = History(
      store, self._task, rank, mark_every=config.mark_every, budget=config.budget
    )
    self._run = functools.partial(self.history.run, evaluator, self.ledger)
    self._ask_proxy = ask
    self._records: dict[str, Record] = {}
    self._steps: dict[str, Step] = {}
    self._resolved: dict[tuple[str, str, str], str] = {}
    self._findings: list[verdict.Finding] = []
    self._exhausted: set[str] = set()
    self._registered: set[str] = set()
    self._round = self._proposals = self._improved = 0

  def run(self, on_event: Callable[[dict[str, Any]], None] | None = None) -> Record:
    """Runs to the end of the budget; returns the champion.

    Raises:
      OutageError: The proposer gave no answer; the log stays open.
    """
    self.history.on_event = on_event
    self.begin()
    while not (reason := self.ended):
      try:
        self.round()
      except OutageError:
        self._store.close()
        raise
      except ProposerError as error:
        reason = f"proposer: {error}"
        break
    self.history.mark(self._config.budget, self._records.values())
    self.history.emit("closed", reason=reason, ledger=self.ledger.totals())
    self._store.close()
    return self.programs.best

  def record(self, program: str) -> Record:
    """Returns an executed program.

    Raises:
      KeyError: The program was never executed in this run.
    """
    return self._records[program]

  @property
  def is_spent(self) -> bool:
    """Whether nothing is left for a candidate: no call, or no token or money."""
    left = min(self.ledger.left, self.ledger.left_for("candidate"))
    return left <= 0 or bool(self.ledger.overspent)

  @property
  def ended(self) -> str:
    """The budget that ends the run now, or an empty string."""
    if self.is_spent:
      return self.ledger.overspent or "budget"
    most = self._config.budget * self._config.proposals_per_call
    return "proposals" if self._proposals >= most else ""

  def begin(self) -> None:
    """Logs the configuration and measures the initial program with the first call.

    Raises:
      ValueError: The initial program does not run.
    """
    self.history.emit(
      "open",
      config=self._config.to_dict(),
      task=dict(self._task.spec),
      evaluator=self._evaluator.fingerprint,
      target=self._task.target,
      proposer=self._proposer.name,
      margins=dict(self._task.margins),
    )
    start = self._config.start or self._task.interface.default_source()
    prepared = self._evaluator.prepare(start)
    ended: Prepared | Outcome = prepared
    if prepared.call is not None:
      packet = registration.alone(prepared, "", self._evaluator)
      self.history.emit("packet", id=packet.hash, packet=packet.to_dict())
      self.ledger.reserve(self.ledger.price(packet.conditions))
      (ended,) = self._run([(packet, packet.conditions[0])])
    if ended.status != Status.OK:
      raise ValueRefusal(
        "search",
        expected="an initial program that runs",
        got=f"{ended.status}: {ended.detail}",
        mend="mend the program",
      )
    assert isinstance(ended, Outcome)
    if self._transfer is not None:
      self._transfer.begin(packet.hash, prepared, self.ledger, self.history)
    self._record(packet, prepared, ended, is_accepted=True, label="the start")
    self.history.mark(self.ledger.spent, self._records.values())

  def round(self) -> None:
    """Runs one round: the steps of Algorithm errata in order."""
    attempts = []
    for position in range(self._config.width):
      if self.is_spent:
        break
      # Select a program and its residuals; propose an intervention and explanations.
      try:
        selection, proposal = self._propose((self._round, position))
      except ProposerError as error:
        if isinstance(error, OutageError) or not attempts:
          raise
        # What is registered runs; the next round meets the end again.
        break
      # Compile the cheapest controls that separate the explanations; freeze the packet.
      if (attempt := self._freeze(selection, proposal)) is not None:
        attempts.append(attempt)
    self._round += 1
    self._execute(attempts)
    for attempt in attempts:
      # Retain by measured performance, unless unsafe; measure its residuals anew.
      record = self._retain(attempt)
      self._adopt(attempt)
      # Resolve the residual and verify the required response.
      finding = self._resolve(attempt)
      checks = resolution.verify(self._evaluator, self.history, attempt, finding)
      # Open the next intervention space: the responses that later programs owe.
      self._compile(attempt, record, finding, checks)
    for residual in self.residuals.dropped(self.programs.records):
      resolution.move(self.residuals, self.history, residual, "left", "")
    # A mark holds for all that had run by then, so it waits for the whole round.
    self.history.mark(self.ledger.spent, self._records.values())
    self.ledger.release()

  # Select and propose.

  def _propose(self, address: tuple[int, int]) -> tuple[Selection, Proposal]:
    """Returns the first parent with something left to propose, and the proposal.

    Raises:
      ProposerError: There is no such parent.
    """
    for parent, why in self._parents(address):
      selection = self.select(address, parent, why)
      try:
        return selection, self._ask(selection)
      except ExhaustedError as error:
        if parent.id not in self._exhausted:
          self._exhausted.add(parent.id)
          self.history.emit("exhausted", program=parent.id, detail=str(error))
    raise ProposerError("nothing is left to propose from any executed program")

  def _parents(self, address: tuple[int, int]) -> list[tuple[Record, str]]:
    """Returns programs to revise, each with the reason why it is its turn."""
    executed = [record for record in self._records.values() if record.is_accepted]
    if self._config.parents == "initial":
      return [(executed[0], "every proposal revises the initial program")]
    ordered = self.programs.parents(
      executed,
      self._config.seed,
      address,
      self.residuals.holders if self._asks else (),
      margin=self._task.margins.get(self._task.target, 0.0),
    )
    if self._config.revise_retired:
      return ordered
    kept = {r.id for r in self.residuals.unretired(record for record, _ in ordered)}
    return [(record, why) for record, why in ordered if record.id in kept]

  @property
  def _asks(self) -> bool:
    """Whether demands are told and checked, so that owed ones choose the parent."""
    return self._config.evidence == "verdict" and self._config.checker != "none"

  def select(
    self, address: tuple[int, int], parent: Record, why: str = ""
  ) -> Selection:
    """Returns a parent with its actionable residuals and the responses it owes."""
    demands, open_ = (
      self.residuals.demands(parent.id),
      self.residuals.actionable(parent.id),
    )
    return Selection(address, parent, open_, demands, why)

  def _ask(self, selection: Selection) -> Proposal:
    # With leading zeros, so that files sort as the proposals came; the report reads
    # them in that order.
    key = f"{self._proposals:05d}-{selection.parent.id[:12]}"
    context = self.context(selection, self._config.evidence)
    proposal = answer(self._store, key, lambda: self._proposer.propose(context))
    self._proposals += 1
    self.ledger.proposer.update(proposal.usage)
    if proposal.models:
      self.history.emit("replies", proposal=key, models=list(proposal.models))
    if proposal.finished:
      raise ProposerError(f"finished: {proposal.note or 'without a reason'}")
    corruption = (self._config.corruption, self._config.seed, selection.address)
    accounts = (registration.corrupted(e, *corruption) for e in proposal.explanations)
    return dataclasses.replace(proposal, explanations=tuple(accounts))

  def paused(self, calls: int) -> "Search":
    """Returns the search in its state of now, with `calls` left, only to review in.

    Later rounds do not change what it knows, so it judges a proposal made from this
    state like a run that stands here.
    """
    still = copy.copy(self)
    still.ledger = copy.deepcopy(self.ledger)
    still.ledger.release()
    # Reservations of the round are given up, so that exactly these calls are left.
    still.ledger.budget = still.ledger.spent + calls
    still._records, still._resolved = dict(self._records), dict(self._resolved)
    still._registered = set(self._registered)
    return still

  def context(self, selection: Selection, evidence: Evidence) -> Context:
    """Returns what a proposer with this evidence would be told now."""
    parent, due = selection.parent, selection.due if self._asks else None
    return Context(
      seed=self._config.seed,
      address=selection.address,
      target=self._task.target,
      parent=parent,
      residuals=selection.residuals,
      demands=selection.demands,
      history=tuple(strip(e, evidence) for e in self.history.experiments),
      champion=self.programs.best,
      donors=tuple(r for r in self.programs.records if r.id != parent.id),
      evidence=evidence,
      stagnation=max(0, len(self.history.experiments) - self._improved),
      compiles=self._config.compile_verdicts,
      restarts=self._config.parents == "initial",
      overspends=self.ledger.overspends,
      checked=due,
      repeated=self._records.get(due.program)
      if due is not None and checkers.retests(due)
      else None,
      focus=selection.focus,
      why=selection.why,
      scopes=self.scopes.known(),
      joint_scopes=self.scopes.joint(),
      seconds=self._evaluator.processor(parent.exec_id)
      if self._task.tells_seconds
      else None,
      lineage=self._lineage(),
      budget=self.ledger.remaining(),
      review=functools.partial(self.review, selection),
      call_seconds=self._config.call_seconds,
      asks=self._config.asks,
      ask=functools.partial(self._asked, parent),
    )

  def _lineage(self) -> tuple[Step, ...]:
    """Returns the way from the initial program to the champion."""
    way, program = [], self.programs.best.id
    # A program may be proposed again by its own descendant: its way would be a circle.
    while program in self._steps and program not in {step.program for step in way}:
      way.append(self._steps[program])
      program = self._records[program].parent
    return tuple(way[::-1])

  def _asked(self, parent: Record, source: str, part: str) -> str:
    if self._ask_proxy is None:
      return "This run has no free proxy."
    return self._ask_proxy.answer(source, parent.source, part)

  def review(self, selection: Selection, proposal: Proposal) -> str:
    """Returns why a proposal would be refused before any call, or nothing."""
    asked, open_ = proposal.residual, selection.residual(proposal)
    if self._config.policy != "none" and asked is not None and open_ is None:
      names = sorted(
        {d.residual.observable for d in selection.demands if not d.forbids}
        | {r.observable for r in selection.residuals}
      )
      return (
        f"residual: {asked} is no open question of this parent; ask about "
        f"{', '.join(names) or 'none'}, or set it to null."
      )
    focus = selection.focus
    if self._config.policy != "none" and asked is None and focus is not None:
      if self.ledger.left >= QUESTION_CALLS:
        return (
          f"residual: this round is about {focus.observable}, which is open, and the "
          "program names no question. Register two accounts or more of why it should "
          "help, with a control that tells them apart, about that or another open "
          "residual. The program may stay as it is."
        )
    prepared = self._evaluator.prepare(proposal.source)
    refusal, _ = self._registered_as(selection, proposal, prepared)
    return "" if refusal is None else f"{refusal[0]}: {refusal[1]}"

  def _registered_as(
    self, selection: Selection, proposal: Proposal, prepared: Prepared
  ) -> tuple[tuple[str, str] | None, Attempt | None]:
    """Returns a status and why a proposal is refused, or the packet that it becomes."""
    known = (self._evaluator, self._records.values(), self._config.checker)
    if why := registration.unfit(selection, prepared, *known):
      return why, None
    if why := self._answered_before(selection, proposal, prepared):
      return ("resolved", why), None
    try:
      attempt = registration.freeze(
        selection,
        proposal,
        prepared,
        config=self._config,
        evaluator=self._evaluator,
        ledger=self.ledger,
      )
    except registration.RefusedQuestionError as error:
      return ("question", str(error)), None
    packet = attempt.packet
    # A packet is new by one condition, such as a new control of an edit that ran
    # before.
    is_old = all(self.ledger.ran(c.exec_id) for c in packet.conditions)
    if is_old or packet.hash in self._registered:
      return ("duplicate", "everything in it ran before"), None
    return None, attempt

  def _answered_before(
    self, selection: Selection, proposal: Proposal, prepared: Prepared
  ) -> str:
    """Returns the verdict of the same question, if one resolved it."""
    if (residual := selection.residual(proposal)) is None or prepared.call is None:
      return ""
    own = self._evaluator.condition("", "", prepared.call).exec_id
    found = self._resolved.get((own, selection.parent.exec_id, residual.observable))
    if found is None:
      return ""
    return (
      f"the same edit of this parent was asked about {residual.observable} and found "
      f"{found}; ask about something else, or change the edit"
    )

  # Freeze and execute.

  def _freeze(self, selection: Selection, proposal: Proposal) -> Attempt | None:
    """Registers and logs one packet; returns None when nothing is to run."""
    prepared = self._evaluator.prepare(proposal.source)
    told = (proposal, prepared.id, selection.parent)
    if proposal.unusable:
      return self.history.refuse(*told, "unusable", proposal.unusable)
    refusal, attempt = self._registered_as(selection, proposal, prepared)
    if attempt is None:
      assert refusal is not None
      return self.history.refuse(*told, *refusal)
    packet = attempt.packet
    self._registered.add(packet.hash)
    self.ledger.reserve(self.ledger.price(packet.conditions))
    self._store.put_bytes("programs", f"{prepared.id}.py", proposal.source.encode())
    words = {"label": proposal.label, "note": proposal.note}
    self.history.emit("packet", id=packet.hash, **words, packet=packet.to_dict())
    if left_out := registration.left_out(selection, proposal, attempt, self._config):
      told = {"detail": attempt.dropped} if attempt.dropped else {}
      self.history.emit("reduced", packet=packet.hash, left_out=left_out, **told)
    return attempt

  def _execute(self, attempts: list[Attempt]) -> None:
    """Runs all primaries; where they succeed, the other conditions in two stages."""
    self._run_conditions(attempts, "primary")
    alive = [a for a in attempts if a.outcome.status == Status.OK]
    # Our controls come last: they run only for a gain that the focal account may still
    # claim when the others have run.
    for stage in registration.LATER:
      if self._config.sequential:
        for attempt in alive:
          resolution.skip_pointless(self._task, self.history, attempt)
      self._run_conditions(alive, stage)

  def _run_conditions(self, attempts: list[Attempt], stage: registration.Stage) -> None:
    pairs = [(a, c) for a in attempts for c in a.conditions(stage)]
    outcomes = self._run([(attempt.packet, c) for attempt, c in pairs])
    for (attempt, condition), outcome in zip(pairs, outcomes, strict=True):
      attempt.outcomes[condition.name] = outcome

  # Retain, resolve, compile.

  def _retain(self, attempt: Attempt) -> Record | None:
    """Records a safe candidate and offers it to the frontier."""
    if not attempt.is_safe:
      self.history.emit(
        "rejected", program=attempt.packet.program, packet=attempt.packet.hash
      )
      return None
    attempt.transfers = self._judged(attempt.packet, attempt.prepared, attempt.outcome)
    is_accepted = self._transfer is None or attempt.transfers is True
    parent = attempt.parent
    self.scopes.learn(
      attempt.prepared.full_call,
      attempt.outcome.values,
      parent.full_call,
      parent.values,
    )
    return self._record(
      attempt.packet,
      attempt.prepared,
      attempt.outcome,
      is_accepted=is_accepted,
      label=attempt.proposal.label,
    )

  def _judged(
    self, packet: Packet, prepared: Prepared, outcome: Outcome
  ) -> bool | None:
    """Returns whether a gain holds on the transfer model; None if none was asked."""
    if self._transfer is None:
      return None
    before = self._records[packet.parent].values[self._task.target]
    change = {self._task.target: outcome.values[self._task.target] - before}
    is_gain = self.history.improves(change)
    return self._transfer.judge(packet, prepared, is_gain, self.ledger, self.history)

  def _adopt(self, attempt: Attempt) -> None:
    """Offers controls and probes that are whole programs and do better as candidates.

    They were paid for, and retention is by performance alone.
    """
    target, known = self._task.target, {r.exec_id for r in self._records.values()}
    for condition in attempt.packet.conditions[1:]:
      outcome = attempt.outcomes.get(condition.name)
      if condition.call.intervention or outcome is None or outcome.status != Status.OK:
        continue
      values, call = outcome.values, condition.call
      self.scopes.learn(call, values, attempt.parent.full_call, attempt.parent.values)
      self.scopes.learn(
        call, values, attempt.prepared.full_call, attempt.outcome.values
      )
      is_better = values[target] < attempt.parent.values[target]
      if not is_better or condition.exec_id in known or not attempt.is_safe:
        continue
      if not (source := self._source_of(attempt, condition)):
        continue
      prepared = self._evaluator.prepare(source)
      transfers = self._judged(attempt.packet, prepared, outcome)
      is_accepted = self._transfer is None or transfers is True
      label = f"{attempt.proposal.label}, as in {condition.name}"
      record = self._record(
        attempt.packet,
        prepared,
        outcome,
        is_accepted=is_accepted,
        label=label,
        condition=condition,
      )
      attempt.adopted.append(record)

  def _source_of(self, attempt: Attempt, condition: Condition) -> str:
    """Returns the source of a condition that is a program, or nothing."""
    if condition.name in attempt.sources:
      return attempt.sources[condition.name]
    for demand in attempt.demands:
      if condition.name == registration.probe_name(demand) and not demand.forbids:
        own, parent = attempt.prepared, attempt.parent
        parts = registration.answering(
          demand,
          attempt.packet.declared,
          own.full_call,
          parent.full_call,
          self._evaluator,
        )
        return registration.grafted(
          own.source, parent.source, parts, condition.call, self._evaluator
        )
    return ""

  def _record(
    self,
    packet: Packet,
    prepared: Prepared,
    outcome: Outcome,
    *,
    is_accepted: bool,
    label: str,
    condition: Condition | None = None,
  ) -> Record:
    """Records a program that ran, as the primary run or as another condition."""
    call = prepared.full_call
    exec_id = (condition or packet.conditions[0]).exec_id
    record = Record(
      id=prepared.id,
      source=prepared.source,
      parent=packet.parent,
      call=self.ledger.call_of(exec_id),
      computation=call.computation,
      plan=call.plan,
      exec_id=exec_id,
      values=outcome.values,
      outputs=outcome.outputs,
      is_accepted=is_accepted,
      parts=outcome.parts,
      control_of=packet.program if condition else "",
    )
    # Before any event names it: the held-out scorer reads the source once a mark does.
    self._store.put_bytes("programs", f"{prepared.id}.py", prepared.source.encode())
    before = self.programs.best.id if self.programs.records else ""
    is_retained = is_accepted and self.programs.retain(record)
    known = self._records.setdefault(record.id, record)
    if is_accepted and not known.is_accepted:
      # The step from this parent improved both models, that from another did not.
      self._records[record.id] = record
    self._remember_step(record, label)
    opened = self._measure_residuals(record)
    if before and self.programs.best.id != before:
      # The packet of this program becomes an experiment only at the end of its round.
      self._improved = len(self.history.experiments) + 1
    self.history.emit(
      "program",
      program=record.id,
      parent=packet.parent,
      call=record.call,
      kept=is_retained,
      champion=self.programs.best.id,
      value=record.values[self._task.target],
      residuals=[dataclasses.asdict(r) for r in opened],
      **({"origin": condition.name, "packet": packet.hash} if condition else {}),
    )
    self._close_residuals(packet, record)
    return record

  def _remember_step(self, record: Record, label: str) -> None:
    parent = self._records.get(record.parent)
    changed = ()
    if parent is not None:
      calls = (record.full_call, parent.full_call)
      changed = scopes.changed(self._task.interface, *calls)
    value = record.values[self._task.target]
    self._steps.setdefault(record.id, Step(record.id, label, value, changed))

  def _measure_residuals(self, record: Record) -> list[Residual]:
    """Opens the questions of a retained program, with the parts known to move them."""
    if not self.programs.holds(record.id):
      return []
    measured = self._task.residuals(record.id, record.values)
    return self.residuals.open(
      dataclasses.replace(r, computation=self.scopes.of(r.observable)) for r in measured
    )

  def _close_residuals(self, packet: Packet, record: Record) -> None:
    """Closes what this program shows to be answered, and what no program asks more."""
    if self.programs.holds(record.id):
      measured = self._task.residuals(record.id, record.values)
      for residual in self.residuals.closed_by(record, measured):
        resolution.move(self.residuals, self.history, residual, "measured", packet.hash)

  def _resolve(self, attempt: Attempt) -> verdict.Finding | None:
    """Returns the packet's finding; None if it has no question."""
    packet = attempt.packet
    if packet.residual is None or not packet.explanations:
      return None
    seen = resolution.observed(self._task, attempt)
    finding = resolution.resolve(self._task, attempt, seen)
    self._findings.append(finding)
    self.residuals.ask(packet.residual)
    if finding.verdict != verdict.Verdict.UNRESOLVED:
      steps = (packet.conditions[0].exec_id, attempt.parent.exec_id)
      self._resolved[(*steps, packet.residual.observable)] = str(finding.verdict)
    # After what is kept of the true finding, so that the placebo draws from true ones.
    if self._config.shuffled_verdicts:
      where = (self._config.seed, len(self._findings), "shuffled")
      finding = identity.pick(self._findings, *where)
    self.history.emit(
      "verdict",
      packet=packet.hash,
      residual=packet.residual.key,
      observed={name: dict(values) for name, values in seen.items()},
      response=finding.response,
      explicit=finding.explicit,
      **dataclasses.asdict(finding),
    )
    return finding

  def _compile(
    self,
    attempt: Attempt,
    record: Record | None,
    finding: verdict.Finding | None,
    checks: dict[str, Check],
  ) -> None:
    """Settles the answered demands; turns the verdict into new ones."""
    is_retained = record is not None and self.programs.holds(record.id)
    versions = [] if record is None else [record, *attempt.adopted]
    versions = [each for each in versions if self.programs.holds(each.id)]
    for demand in attempt.demands:
      resolution.settle(
        self.residuals,
        self.history,
        attempt,
        demand,
        is_met=checks[demand.packet].implemented,
        is_retained=is_retained,
      )
    resolution.leave(self.residuals, self.history, self._evaluator, attempt)
    if finding is not None:
      resolution.demand(
        self.residuals,
        self.history,
        attempt,
        finding,
        task=self._task,
        is_retained=is_retained,
        version=self._version(versions),
        compiles=self._config.compile_verdicts,
      )
    self._tell_asks(attempt, finding, checks)

  def _version(self, versions: Sequence[Record]) -> str:
    """Returns the best of a candidate, which comes first, and its controls; or nothing.

    A control within the margin of the candidate is no better than it.
    """
    if not versions:
      return ""
    best = min(versions, key=self.programs.rank)
    target, first = self._task.target, versions[0]
    level = best.values[target] + self._task.margins.get(target, 0.0)
    return (best if first.control_of or first.values[target] > level else first).id

  def _tell_asks(
    self,
    attempt: Attempt,
    finding: verdict.Finding | None,
    checks: dict[str, Check],
  ) -> None:
    """Adds a packet to the experiments, with what its verdict asks."""
    seen, asks = resolution.observed(self._task, attempt), ""
    if finding is not None and self._config.compile_verdicts:
      _, why = resolution.owes_nothing(self._task, attempt, finding)
      asks = f"nothing: {why}" if why else str(finding.response)
    self.history.remember(attempt, finding, checks, seen, asks)
