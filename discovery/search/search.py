"""The search; `Search.round` implements one round of Algorithm errata step by step.

A round depends only on the configuration, earlier events and counter-based draws, so a
run can be replayed. Programs are retained for their performance; whether an explanation
holds never changes a score.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from mxjax.discovery.core import identity, verdict
from mxjax.discovery.core.packet import Packet
from mxjax.discovery.core.proposal import (
  Context,
  Evidence,
  ExhaustedError,
  OutageError,
  Proposal,
  Proposer,
  ProposerError,
  Record,
  answer,
  strip,
)
from mxjax.discovery.core.store import Store
from mxjax.discovery.core.task import Outcome, Status
from mxjax.discovery.search import frontier, registration, resolution
from mxjax.discovery.search.cached_evaluator import CachedEvaluator, Prepared, Screen
from mxjax.discovery.search.history import History
from mxjax.discovery.search.registration import Attempt, Selection
from mxjax.discovery.search.settings import SearchConfig


class Search:
  """One run; `programs` and `residuals` are its executable and residual frontiers."""

  def __init__(
    self,
    config: SearchConfig,
    evaluator: CachedEvaluator,
    proposer: Proposer,
    store: Store,
    transfer: frontier.Transfer | None = None,
    proxy: CachedEvaluator | None = None,
  ) -> None:
    """Sets up a run; `transfer` judges improvements, `proxy` measures for a screen."""
    self._config, self._evaluator = config, evaluator
    self._proposer, self._store, self._transfer = proposer, store, transfer
    self._task = evaluator.task
    self.ledger = config.ledger()
    self.programs = frontier.ExecutableFrontier(self._task.target, config.frontier)
    self.residuals = frontier.ResidualFrontier()
    rank = self.programs.rank
    self.history = History(store, self._task, config.mark_every, rank)
    self._run = functools.partial(self.history.run, evaluator, self.ledger)
    self._screen = Screen(proxy, config.screen, self.history.proxies)
    self._records: dict[str, Record] = {}
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
      raise ValueError(
        f"search: the initial program must run, got {ended.status}: {ended.detail}"
      )
    assert isinstance(ended, Outcome)
    if self._transfer is not None:
      self._transfer.begin(packet.hash, prepared, self.ledger, self.history)
    self._screen.check(prepared, "", self.history.emit)
    self._record(packet, prepared, ended, True)
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
      # Resolve the residual and verify the required response.
      finding = self._resolve(attempt)
      checks = resolution.verify(self._evaluator, self.history, attempt)
      # Open the next intervention space: the responses that later programs owe.
      self._compile(attempt, record, finding, checks)
    # A mark holds for all that had run by then, so it waits for the whole round.
    self.history.mark(self.ledger.spent, self._records.values())
    self.ledger.release()

  # Select and propose.

  def _propose(self, address: tuple[int, int]) -> tuple[Selection, Proposal]:
    """Returns the first parent with something left to propose, and the proposal.

    Raises:
      ProposerError: There is no such parent.
    """
    for parent in self._parents(address):
      selection = self.select(address, parent)
      try:
        return selection, self._ask(selection)
      except ExhaustedError as error:
        if parent.id not in self._exhausted:
          self._exhausted.add(parent.id)
          self.history.emit("exhausted", program=parent.id, detail=str(error))
    raise ProposerError("nothing is left to propose from any executed program")

  def _parents(self, address: tuple[int, int]) -> list[Record]:
    executed = [record for record in self._records.values() if record.is_accepted]
    if self._config.parents == "initial":
      return executed[:1]
    ordered = self.programs.parents(executed, self._config.seed, address)
    return ordered if self._config.revise_retired else self.residuals.unretired(ordered)

  def select(self, address: tuple[int, int], parent: Record) -> Selection:
    """Returns a parent with its actionable residuals and the responses it owes."""
    demands = self.residuals.demands(parent.id)
    return Selection(address, parent, self.residuals.actionable(parent.id), demands)

  def _ask(self, selection: Selection) -> Proposal:
    key = f"{self._proposals:05d}-{selection.parent.id[:12]}"
    context = self.context(selection, self._config.evidence)
    proposal = answer(self._store, key, lambda: self._proposer.propose(context))
    self._proposals += 1
    self.ledger.proposer.update(proposal.usage)
    if proposal.replies:
      self.history.emit("replies", proposal=key, replies=list(proposal.replies))
    corruption = (self._config.corruption, self._config.seed, selection.address)
    accounts = (registration.corrupted(e, *corruption) for e in proposal.explanations)
    return dataclasses.replace(proposal, explanations=tuple(accounts))

  def context(self, selection: Selection, evidence: Evidence) -> Context:
    """Returns what a proposer with this evidence would be told now."""
    parent = selection.parent
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
    )

  # Freeze and execute.

  def _freeze(self, selection: Selection, proposal: Proposal) -> Attempt | None:
    """Registers and logs one packet; returns None when nothing is to run."""
    prepared = self._evaluator.prepare(proposal.source)
    told = (proposal, prepared.id, selection.parent)
    refuse = lambda status, detail: self.history.refuse(*told, status, detail)
    known = (self._evaluator, self._records.values(), self._config.checker)
    if why := registration.unfit(selection, prepared, *known):
      return refuse(*why)
    if why := self._screen.check(prepared, selection.parent.id, self.history.emit):
      return refuse("screened", why)
    try:
      attempt = registration.freeze(
        selection,
        proposal,
        prepared,
        config=self._config,
        evaluator=self._evaluator,
        ledger=self.ledger,
      )
    except ValueError as error:
      return refuse("indistinguishable", str(error))
    packet = attempt.packet
    is_old = all(self.ledger.ran(c.exec_id) for c in packet.conditions)
    if is_old or packet.hash in self._registered:
      return refuse("duplicate", "everything in it ran before")
    self._registered.add(packet.hash)
    self.ledger.reserve(self.ledger.price(packet.conditions))
    self._store.put_bytes("programs", f"{prepared.id}.py", proposal.source.encode())
    words = {"label": proposal.label, "note": proposal.note}
    self.history.emit("packet", id=packet.hash, **words, packet=packet.to_dict())
    if left_out := registration.left_out(selection, proposal, attempt, self._config):
      self.history.emit("reduced", packet=packet.hash, left_out=left_out)
    return attempt

  def _execute(self, attempts: list[Attempt]) -> None:
    """Runs all primaries; where they succeed, other texts, then other conditions."""
    self._run_conditions(attempts, "primary")
    alive = [a for a in attempts if a.outcome.status == Status.OK]
    for stage in registration.LATER:
      if self._config.sequential:
        for attempt in alive:
          resolution.skip_pointless(self._task, self.history, attempt)
      self._run_conditions(alive, stage)
      if self._config.shuffled_verdicts and stage == "test":
        resolution.shuffle_tests(alive, self.history, self._config.seed)
    for attempt in alive:
      self.programs.test(attempt.tested)

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
    is_accepted = True
    if self._transfer is not None:
      attempt.transfers = self._transfer.judge(attempt, self.ledger, self.history)
      is_accepted = attempt.transfers is True
    return self._record(attempt.packet, attempt.prepared, attempt.outcome, is_accepted)

  def _record(
    self, packet: Packet, prepared: Prepared, outcome: Outcome, is_accepted: bool
  ) -> Record:
    call, exec_id = prepared.full_call, packet.conditions[0].exec_id
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
    )
    self._store.put_bytes("programs", f"{prepared.id}.py", prepared.source.encode())
    before = self.programs.best.id if self.programs.records else ""
    is_retained = is_accepted and self.programs.retain(record)
    known = self._records.setdefault(record.id, record)
    if is_accepted and not known.is_accepted:
      # The step from this parent improved both models, that from another did not.
      self._records[record.id] = record
    self._screen.executed(record.id)
    opened = self.residuals.open(self._task.residuals(record.id, record.values))
    if self.programs.best.id != before:
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
    )
    return record

  def _resolve(self, attempt: Attempt) -> verdict.Finding | None:
    """Returns the packet's finding; None if it has no question."""
    packet = attempt.packet
    if packet.residual is None or not packet.explanations:
      return None
    seen = resolution.observed(self._task, attempt)
    finding = resolution.resolve(self._task, attempt, seen)
    self._findings.append(finding)
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
    checks: dict[str, bool],
  ) -> None:
    """Settles the answered demands; turns the verdict into new ones."""
    is_retained = record is not None and self.programs.holds(record.id)
    for demand in attempt.demands:
      resolution.settle(
        self.residuals,
        self.history,
        attempt,
        demand,
        is_met=checks[demand.packet],
        is_retained=is_retained,
      )
    if finding is not None:
      resolution.demand(
        self.residuals,
        self.history,
        attempt,
        finding,
        is_retained=is_retained,
        compiles=self._config.compile_verdicts,
      )
    seen = resolution.observed(self._task, attempt)
    self.history.remember(attempt, finding, checks, seen)
