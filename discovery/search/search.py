"""The search: one round of Algorithm errata, read top to bottom in `Search.round`.

Everything a round decides comes from the configuration, the events before it and
counter-based draws, so a run replays. Programs are kept for their performance; whether
an explanation holds is another matter and never moves a score.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from mxjax.discovery.core import identity, verdict
from mxjax.discovery.core.ledger import Ledger
from mxjax.discovery.core.packet import Condition, Packet, condition
from mxjax.discovery.core.proposal import (
  Context,
  Evidence,
  ExhaustedError,
  Proposal,
  Proposer,
  ProposerError,
  Record,
  Required,
  answer,
  strip,
)
from mxjax.discovery.core.residual import PRIMARY, Residual
from mxjax.discovery.core.store import Store
from mxjax.discovery.core.task import Outcome, Status
from mxjax.discovery.sandbox.laboratory import Laboratory, Prepared
from mxjax.discovery.search import compilation, registration, resolution
from mxjax.discovery.search.frontier import ExecutableFrontier, ResidualFrontier
from mxjax.discovery.search.history import History
from mxjax.discovery.search.registration import Attempt
from mxjax.discovery.search.settings import SearchConfig


class Search:
  """One run.

  Attributes:
    programs: The executable frontier.
    residuals: The residual frontier.
    history: What happened, in order.
    ledger: What was paid.
  """

  def __init__(
    self, config: SearchConfig, lab: Laboratory, proposer: Proposer, store: Store
  ) -> None:
    """Sets up a run; nothing is executed yet."""
    self._config, self._lab, self._proposer, self._store = config, lab, proposer, store
    self._task = lab.task
    self.ledger = Ledger(config.budget, reuse=config.reuse)
    self.programs = ExecutableFrontier(self._task.target, config.frontier)
    self.residuals = ResidualFrontier()
    self.history = History(store, self._task, config.mark_every)
    self._records: dict[str, Record] = {}
    self._findings: list[verdict.Finding] = []
    self._exhausted: set[str] = set()
    self._round = self._proposals = self._improved = 0

  def run(self, on_event: Callable[[dict[str, Any]], None] | None = None) -> Record:
    """Runs to the end of the budget; returns the champion."""
    self.history.on_event = on_event
    self.begin()
    reason = "budget"
    while not self.is_spent:
      if self._proposals >= self._config.budget * self._config.proposals_per_call:
        reason = "proposals"
        break
      try:
        self.round()
      except ProposerError as error:
        reason = f"proposer: {error}"
        break
    self.history.emit("closed", reason=reason, ledger=self.ledger.totals())
    self._store.close()
    return self.programs.best

  def record(self, program: str) -> Record:
    """An executed program.

    Raises:
      KeyError: It was never executed in this run.
    """
    return self._records[program]

  @property
  def is_spent(self) -> bool:
    """Whether no evaluator call is left."""
    return self.ledger.left <= 0

  def begin(self) -> None:
    """Freezes the configuration and measures the initial program: the first call."""
    self.history.emit(
      "open",
      config=dataclasses.asdict(self._config),
      task=dict(self._task.spec),
      evaluator=self._lab.evaluator,
      target=self._task.target,
      proposer=self._proposer.name,
      margins=dict(self._task.margins),
    )
    source = self._task.interface.default_source()
    prepared = self._lab.prepare(source)
    if prepared.call is None:
      raise ValueError(
        f"search: the initial program must run, got {prepared.status}: "
        f"{prepared.detail}"
      )
    first = condition(PRIMARY, "candidate", prepared.call, self._lab.evaluator)
    packet = Packet(
      program=prepared.id,
      parent="",
      conditions=(first,),
      margins=self._task.margins,
      evaluator=self._lab.evaluator,
    )
    self.history.emit("packet", id=packet.hash, packet=packet.to_dict())
    self.ledger.reserve(1)
    outcome = self._lab.run([first])[0]
    self._settle(packet, first, outcome)
    if outcome.status != Status.OK:
      raise ValueError(
        f"search: the initial program must run, got {outcome.status}: {outcome.detail}"
      )
    self._retain(prepared, "", first.exec_id, outcome)
    self.history.mark(self.ledger.spent, self._records.values())

  def round(self) -> None:
    """One round: the steps of Algorithm errata in order."""
    # Select programs and residuals, propose, compile controls, freeze the packets.
    attempts = [
      attempt
      for position in range(self._config.width)
      if (attempt := self._register(position)) is not None
    ]
    self._round += 1
    # Execute: all primaries, then what the surviving packets registered beside them.
    self._execute(attempts, primary=True)
    alive = [a for a in attempts if a.outcomes[PRIMARY].status == Status.OK]
    for attempt in alive:
      self._skip(attempt)
    self._execute(alive, primary=False)
    for attempt in attempts:
      # Retain programs by measured performance.
      record = self._conclude(attempt)
      # Resolve the residual and verify the required response.
      finding = self._resolve(attempt)
      implemented = self._verify(attempt)
      self._compile(attempt, record, finding, implemented)
      self.history.mark(self.ledger.spent, self._records.values())
    self.ledger.release()

  # Select and propose.

  def _register(self, position: int) -> Attempt | None:
    """Selects, proposes and freezes one packet; None when nothing is to be run."""
    if self.is_spent:
      return None
    address = (self._round, position)
    parent, questions, required, proposal = self._proposed(address)
    prepared = self._lab.prepare(proposal.source)
    if prepared.call is None:
      self.history.note(proposal, prepared, parent, prepared.status, prepared.detail)
      return None
    known = {e.exec_id for e in self.ledger.entries}
    residual = next((q for q in questions if q.observable == proposal.residual), None)
    if required and required.residual.observable == proposal.residual:
      residual = required.residual
    try:
      attempt = registration.freeze(
        self._config,
        self._lab,
        self.ledger,
        proposal,
        prepared,
        parent,
        residual,
        required,
        address,
      )
    except ValueError as error:
      self.history.note(proposal, prepared, parent, "indistinguishable", str(error))
      return None
    fresh = [c for c in attempt.packet.conditions if c.exec_id not in known]
    if not fresh:
      self.history.note(
        proposal, prepared, parent, "duplicate", "everything in it ran before"
      )
      return None
    self.ledger.reserve(self.ledger.price(attempt.packet.prices))
    self._store.put_bytes("programs", f"{prepared.id}.py", proposal.source.encode())
    self.history.emit(
      "packet",
      id=attempt.packet.hash,
      label=proposal.label,
      note=proposal.note,
      packet=attempt.packet.to_dict(),
    )
    return attempt

  def _proposed(
    self, address: tuple[int, int]
  ) -> tuple[Record, tuple[Residual, ...], Required | None, Proposal]:
    """The first parent from which there is something to propose, and the proposal."""
    parents = list(self._records.values())[:1]
    if self._config.parents == "frontier":
      executed = self._records.values()
      parents = self.programs.parents(executed, self._config.seed, address)
    for parent in parents:
      required = self.residuals.required.get(parent.id)
      questions = self.residuals.actionable(parent.id)
      try:
        proposal = self._ask(address, parent, questions, required)
      except ExhaustedError as error:
        if parent.id not in self._exhausted:
          self._exhausted.add(parent.id)
          self.history.emit("exhausted", program=parent.id, detail=str(error))
        continue
      return parent, questions, required, proposal
    raise ProposerError("nothing is left to propose from any executed program")

  def _ask(
    self,
    address: tuple[int, int],
    parent: Record,
    questions: tuple[Residual, ...],
    required: Required | None,
  ) -> Proposal:
    evidence = self._config.evidence
    proposal = answer(
      self._store,
      f"{self._proposals:05d}-{parent.id[:12]}",
      lambda: self._proposer.propose(
        self.context(address, parent, questions, required, evidence)
      ),
    )
    self._proposals += 1
    self.ledger.proposer.update(proposal.usage)
    return dataclasses.replace(
      proposal,
      explanations=tuple(
        registration.corrupted(e, self._config.corruption, self._config.seed, address)
        for e in proposal.explanations
      ),
    )

  def context(
    self,
    address: tuple[int, int],
    parent: Record,
    questions: tuple[Residual, ...],
    required: Required | None,
    evidence: Evidence,
  ) -> Context:
    """What a proposer with this evidence would be told now."""
    return Context(
      seed=self._config.seed,
      address=address,
      target=self._task.target,
      parent=parent,
      residuals=questions,
      required=required,
      history=tuple(strip(e, evidence) for e in self.history.experiments),
      donors=tuple(r for r in self.programs.records if r.id != parent.id),
      evidence=evidence,
      stagnation=len(self.history.experiments) - self._improved,
      restarts=self._config.parents == "initial",
    )

  # Execute.

  def _skip(self, attempt: Attempt) -> None:
    """Drops controls that the primary run has made pointless, and says so."""
    if self._config.sequential and attempt.packet.policy == "minimal":
      attempt.skipped = resolution.pointless(self._task, attempt)
    if attempt.skipped:
      names = sorted(attempt.skipped)
      self.history.emit("skipped", packet=attempt.packet.hash, controls=names)

  def _execute(self, attempts: list[Attempt], *, primary: bool) -> None:
    """Runs conditions side by side and books them in the packets' order."""
    todo = [(a, c) for a in attempts for c in a.conditions(primary=primary)]
    outcomes = self._lab.run([c for _, c in todo])
    for (attempt, cond), outcome in zip(todo, outcomes, strict=True):
      attempt.outcomes[cond.name] = outcome
      self._settle(attempt.packet, cond, outcome)

  def _settle(self, packet: Packet, cond: Condition, outcome: Outcome) -> None:
    entry = self.ledger.settle(
      cond.kind, cond.exec_id, cond.cost, packet.hash, cond.name, outcome.status
    )
    self.history.emit(
      "outcome",
      **dataclasses.asdict(entry),
      values=dict(outcome.values),
      outputs=dict(outcome.outputs),
      detail=outcome.detail,
    )

  # Retain, resolve, verify, remeasure.

  def _retain(
    self, prepared: Prepared, parent: str, exec_id: str, outcome: Outcome
  ) -> Record:
    """Makes the record of an executed program, keeps it, opens what it shows."""
    record = Record(
      id=prepared.id,
      source=prepared.source,
      parent=parent,
      call=next(e.call for e in self.ledger.entries if e.exec_id == exec_id),
      computation=self._lab.full_call(prepared).computation,
      plan=prepared.program.plan if prepared.program else {},
      exec_id=exec_id,
      values=outcome.values,
      outputs=outcome.outputs,
    )
    self._store.put_bytes("programs", f"{prepared.id}.py", prepared.source.encode())
    before = self.programs.best.id if self.programs.records else ""
    kept = self.programs.retain(record)
    self._records.setdefault(record.id, record)
    opened = self.residuals.open(self._task.residuals(record.id, record.values))
    if self.programs.best.id != before:
      self._improved = len(self.history.experiments) + 1
    self.history.emit(
      "program",
      program=record.id,
      parent=parent,
      call=record.call,
      kept=kept,
      champion=self.programs.best.id,
      value=record.values[self._task.target],
      residuals=[dataclasses.asdict(r) for r in opened],
    )
    return record

  def _conclude(self, attempt: Attempt) -> Record | None:
    outcome = attempt.outcomes[PRIMARY]
    if outcome.status != Status.OK:
      return None
    exec_id = attempt.packet.conditions[0].exec_id
    return self._retain(attempt.prepared, attempt.parent.id, exec_id, outcome)

  def _resolve(self, attempt: Attempt) -> verdict.Finding | None:
    """The packet's finding; None without a question."""
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
      **dataclasses.asdict(finding),
    )
    return finding

  def _verify(self, attempt: Attempt) -> bool | None:
    """Whether a demanded response was found; None where none was demanded."""
    packet = attempt.packet
    if packet.checker == "none":
      return None
    check = resolution.check(self._lab, attempt)
    self.history.emit(
      "check",
      packet=packet.hash,
      response_to=packet.response_to,
      **dataclasses.asdict(check),
    )
    return check.implemented

  def _compile(
    self,
    attempt: Attempt,
    record: Record | None,
    finding: verdict.Finding | None,
    implemented: bool | None,
  ) -> None:
    """Turns the verdict into what later programs owe, and closes what was answered."""
    if attempt.required is not None and implemented is not None:
      compilation.answer(self.residuals, self.history, attempt, implemented)
    if finding is not None and attempt.packet.residual is not None:
      compilation.demand(
        self.residuals,
        self.history,
        attempt,
        finding,
        is_kept=record is not None and record in self.programs.records,
        compiles=self._config.compile_verdicts,
      )
    self.history.remember(attempt, finding, implemented)
