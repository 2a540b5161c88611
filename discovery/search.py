"""The search: one round of Algorithm errata, read top to bottom in `Search.round`.

Everything a round decides comes from the configuration, the events before it and
counter-based draws, so a run replays. Programs are kept for their performance; whether
an explanation holds is another matter and never moves a score.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from mxjax.discovery import checkers, controls, identity, verdict
from mxjax.discovery.frontier import ExecutableFrontier, ResidualFrontier
from mxjax.discovery.laboratory import Laboratory, Prepared
from mxjax.discovery.ledger import Ledger
from mxjax.discovery.packet import Packet, condition
from mxjax.discovery.proposer import (
  Context,
  Evidence,
  Experiment,
  Proposal,
  Proposer,
  ProposerError,
  Record,
  Required,
  strip,
)
from mxjax.discovery.residual import (
  PRIMARY,
  SYMBOLS,
  Control,
  Explanation,
  Residual,
  Symbol,
  consistent,
  symbol,
)
from mxjax.discovery.store import Store
from mxjax.discovery.task import Call, Outcome, Status

MAX_ATTEMPTS = 2
"""Responses that may fail their check before the demand is dropped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig:
  """What defines a run, with its arm; frozen into the log's first event.

  Attributes:
    seed: Seed of every draw.
    budget: Evaluator calls.
    evidence: What the proposer may condition on.
    policy: How controls are selected; `none` runs candidates alone.
    checker: How responses are checked.
    compile_verdicts: Whether a verdict requires a response of the next program.
    width: Proposals made from one state; their calls can run side by side.
    frontier: Programs retained.
    mark_every: Calls between two held-out observations.
    reuse: Whether a repeated execution identity is free.
    proposals_per_call: Proposer calls allowed for each evaluator call.
    sequential: Skip registered controls that the primary run has made pointless: those
      that separate no two explanations still standing. The paper runs them all.
    shuffled_verdicts: Placebo: each finding is replaced by one drawn from all so far.
    corruption: Placebo: rate at which a predicted symbol is redrawn.
  """

  seed: int = 0
  budget: int = 240
  evidence: Evidence = "verdict"
  policy: controls.Policy = "minimal"
  checker: checkers.Checker = "probe"
  compile_verdicts: bool = True
  width: int = 1
  frontier: int = 8
  mark_every: int = 20
  reuse: bool = True
  proposals_per_call: int = 6
  sequential: bool = True
  shuffled_verdicts: bool = False
  corruption: float = 0.0


@dataclasses.dataclass
class _Attempt:
  """One registered packet on its way through a round."""

  proposal: Proposal
  prepared: Prepared
  parent: Record
  residual: Residual | None
  required: Required | None
  packet: Packet
  outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)

  skipped: frozenset[str] = frozenset()

  def conditions(self, *, primary: bool) -> list[Any]:
    return [
      c
      for c in self.packet.conditions
      if (c.name == PRIMARY) == primary and c.name not in self.skipped
    ]


class Search:
  """One run.

  Attributes:
    programs: The executable frontier.
    residuals: The residual frontier.
    history: Experiments in order.
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
    self.history: list[Experiment] = []
    self._records: dict[str, Record] = {}
    self._findings: list[verdict.Finding] = []
    self._round = self._proposals = self._marked = self._improved = 0

  def run(self, on_event: Callable[[dict[str, Any]], None] | None = None) -> Record:
    """Runs to the end of the budget; returns the champion."""
    self._on_event = on_event
    self._begin()
    reason = "budget"
    limit = self._config.budget * self._config.proposals_per_call
    while self.ledger.left > 0:
      if self._proposals >= limit:
        reason = "proposals"
        break
      try:
        self.round()
      except ProposerError as error:
        reason = f"proposer: {error}"
        break
    self._emit("closed", reason=reason, ledger=self.ledger.totals())
    self._store.close()
    return self.programs.best

  def _begin(self) -> None:
    """Freezes the configuration and measures the initial program: the first call."""
    self._emit(
      "open",
      config=dataclasses.asdict(self._config),
      task=dict(self._task.spec),
      evaluator=self._lab.evaluator,
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
    self._emit("packet", id=packet.hash, packet=packet.to_dict())
    self.ledger.reserve(1)
    outcome = self._lab.run([first])[0]
    self._settle(packet, first, outcome)
    if outcome.status != Status.OK:
      raise ValueError(
        f"search: the initial program must run, got {outcome.status}: {outcome.detail}"
      )
    self._retain(prepared, "", first.exec_id, outcome)
    self._mark()

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
      self._trim(attempt)
    self._execute(alive, primary=False)
    for attempt in attempts:
      # Retain programs by measured performance.
      record = self._conclude(attempt)
      # Resolve the residual and verify the required response.
      finding = self._resolve(attempt)
      implemented = self._verify(attempt)
      self._compile(attempt, record, finding, implemented)
      self._mark()
    self.ledger.release()

  def _emit(self, name: str, /, **fields: Any) -> None:
    event = self._store.emit(name, **fields)
    if self._on_event:
      self._on_event(event)

  # Select and propose.

  def _register(self, position: int) -> _Attempt | None:
    """Selects, proposes and freezes one packet; None when nothing is to be run."""
    if self.ledger.left <= 0:
      return None
    address = (self._round, position)
    parent = self._select(address)
    required = self.residuals.required.get(parent.id)
    questions = self.residuals.actionable(parent.id)
    proposal = self._ask(address, parent, questions, required)
    prepared = self._lab.prepare(proposal.source)
    if prepared.call is None:
      self._note(proposal, prepared, parent, prepared.status, prepared.detail)
      return None
    known = {e.exec_id for e in self.ledger.entries}
    residual = next((q for q in questions if q.observable == proposal.residual), None)
    if required and required.residual.observable == proposal.residual:
      residual = required.residual
    attempt = self._freeze(proposal, prepared, parent, residual, required, address)
    if attempt is None:
      return None
    fresh = [c for c in attempt.packet.conditions if c.exec_id not in known]
    if not fresh and self._config.reuse:
      self._note(proposal, prepared, parent, "duplicate", "everything in it ran before")
      return None
    self.ledger.reserve(self.ledger.price(attempt.packet.prices))
    self._store.put_bytes("programs", f"{prepared.id}.py", proposal.source.encode())
    self._emit(
      "packet",
      id=attempt.packet.hash,
      label=proposal.label,
      note=proposal.note,
      packet=attempt.packet.to_dict(),
    )
    return attempt

  def _select(self, address: tuple[int, int]) -> Record:
    """The champion in half of the rounds, any retained program in the others."""
    seed, kept = self._config.seed, self.programs.records
    if identity.draw(seed, *address, "champion") < 0.5:
      return self.programs.best
    return identity.pick(kept, seed, *address, "parent")

  def _ask(
    self,
    address: tuple[int, int],
    parent: Record,
    questions: tuple[Residual, ...],
    required: Required | None,
  ) -> Proposal:
    """The proposer's answer: from the store when it was paid for already."""
    key = f"{self._proposals:05d}"
    self._proposals += 1
    kept = self._store.get("proposals", key)
    if kept is None:
      evidence = self._config.evidence
      context = Context(
        seed=self._config.seed,
        address=address,
        target=self._task.target,
        parent=parent,
        residuals=questions,
        required=required,
        history=tuple(strip(e, evidence) for e in self.history),
        donors=tuple(r for r in self.programs.records if r.id != parent.id),
        evidence=evidence,
        stagnation=len(self.history) - self._improved,
      )
      kept = self._proposer.propose(context).to_dict()
      self._store.put("proposals", key, kept)
    proposal = Proposal.from_dict(kept)
    self.ledger.proposer.update(proposal.usage)
    return dataclasses.replace(
      proposal,
      explanations=tuple(self._corrupted(e, address) for e in proposal.explanations),
    )

  def _corrupted(self, account: Explanation, address: tuple[int, int]) -> Explanation:
    """An explanation whose predicted symbols are redrawn at the placebo's rate."""
    rate, seed = self._config.corruption, self._config.seed

    def redrawn(name: str, observable: str, predicted: Symbol) -> Symbol:
      where = (seed, *address, "corrupt", account.name, name, observable)
      is_kept = identity.draw(*where) >= rate
      return predicted if is_kept else identity.pick(SYMBOLS, *where, "symbol")

    table = {
      name: {o: redrawn(name, o, s) for o, s in predicted.items()}
      for name, predicted in account.predictions.items()
    }
    return dataclasses.replace(account, predictions=table)

  # Compile controls and freeze.

  def _freeze(
    self,
    proposal: Proposal,
    prepared: Prepared,
    parent: Record,
    residual: Residual | None,
    required: Required | None,
    address: tuple[int, int],
  ) -> _Attempt | None:
    """The packet, in full or, where the budget's end is near, the candidate alone."""
    assert prepared.call is not None
    config = self._config
    chosen: tuple[Control, ...] = ()
    if residual is not None and config.policy != "none":
      policy = config.policy
      if required is not None and required.response == "add_discriminator":
        # The minimal set left several accounts standing: run everything allowed.
        policy = "all"
      try:
        chosen = controls.select(
          policy, proposal.explanations, proposal.controls, config.seed, *address
        )
      except ValueError as error:
        self._note(proposal, prepared, parent, "indistinguishable", str(error))
        return None
    is_checked = required is not None and config.checker != "none"
    make = lambda name, kind, call, cost=1: condition(
      name, kind, call, self._lab.evaluator, cost
    )
    conditions = [make(PRIMARY, "candidate", prepared.call)]
    conditions += [
      make(c.name, "control", self._intervened(prepared.call, c, parent), c.cost)
      for c in chosen
    ]
    if is_checked and checkers.needs_probe(config.checker):
      back = checkers.reverted(
        self._lab.full_call(prepared), self._full_parent(parent), proposal.declared
      )
      conditions.append(make("probe", "probe", self._lab.effective(back)))
    common = {
      "program": prepared.id,
      "parent": parent.id,
      "margins": self._task.margins,
      "evaluator": self._lab.evaluator,
    }
    packet = Packet(
      **common,
      conditions=tuple(conditions),
      residual=residual if config.policy != "none" else None,
      explanations=proposal.explanations if config.policy != "none" else (),
      allowed=tuple(c.name for c in proposal.controls),
      policy=config.policy,
      response_to=required.packet if required else None,
      declared=proposal.declared,
      checker=config.checker if is_checked else "none",
    )
    if self.ledger.price(packet.prices) > self.ledger.left:
      packet = Packet(**common, conditions=tuple(conditions[:1]))
      residual = required = None
    return _Attempt(proposal, prepared, parent, packet.residual, required, packet)

  def _intervened(self, call: Call, control: Control, parent: Record) -> Call:
    """The call of a control; one that asks for the parent is told what it ran."""
    intervention = dict(control.intervention)
    if intervention.get("parent"):
      before = self._lab.effective(self._full_parent(parent))
      intervention["parent"] = {
        "computation": dict(before.computation),
        "plan": dict(before.plan),
      }
    return call._replace(intervention=intervention)

  def _full_parent(self, parent: Record) -> Call:
    return Call(parent.computation, parent.plan, {})

  # Execute.

  def _trim(self, attempt: _Attempt) -> None:
    """Drops controls that cannot tell the explanations still standing apart."""
    packet = attempt.packet
    if not self._config.sequential or packet.policy != "minimal":
      return
    seen = self._symbols(attempt.parent, attempt.outcomes[PRIMARY])
    left = [e for e in packet.explanations if consistent(e.predicts(PRIMARY), seen)]
    chosen = {c.name for c in packet.conditions if c.kind == "control"}
    registered = [c for c in attempt.proposal.controls if c.name in chosen]
    needed = controls.minimal(left, registered) if chosen else ()
    attempt.skipped = frozenset(chosen - {c.name for c in needed})
    if attempt.skipped:
      self._emit("skipped", packet=packet.hash, controls=sorted(attempt.skipped))

  def _execute(self, attempts: list[_Attempt], *, primary: bool) -> None:
    """Runs conditions side by side and books them in the packets' order."""
    todo = [(a, c) for a in attempts for c in a.conditions(primary=primary)]
    outcomes = self._lab.run([c for _, c in todo])
    for (attempt, cond), outcome in zip(todo, outcomes, strict=True):
      attempt.outcomes[cond.name] = outcome
      self._settle(attempt.packet, cond, outcome)

  def _settle(self, packet: Packet, cond: Any, outcome: Outcome) -> None:
    entry = self.ledger.settle(
      cond.kind, cond.exec_id, cond.cost, packet.hash, cond.name, outcome.status
    )
    self._emit(
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
      self._improved = len(self.history) + 1
    self._emit(
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

  def _conclude(self, attempt: _Attempt) -> Record | None:
    outcome = attempt.outcomes[PRIMARY]
    if outcome.status != Status.OK:
      return None
    exec_id = attempt.packet.conditions[0].exec_id
    return self._retain(attempt.prepared, attempt.parent.id, exec_id, outcome)

  def _resolve(self, attempt: _Attempt) -> verdict.Finding | None:
    """Compares the packet's outcomes with its registered predictions."""
    packet = attempt.packet
    if packet.residual is None or not packet.explanations:
      return None
    observed = {
      name: self._symbols(attempt.parent, outcome)
      for name, outcome in attempt.outcomes.items()
      if name != "probe" and outcome.status == Status.OK
    }
    statuses = [
      attempt.outcomes[n].status for n in (PRIMARY, "probe") if n in attempt.outcomes
    ]
    finding = verdict.resolve(
      packet.explanations,
      observed,
      self._task.target,
      is_safe=all(status == Status.OK for status in statuses),
      is_equivalent=self._is_equivalent(attempt, observed.get(PRIMARY, {})),
    )
    self._findings.append(finding)
    if self._config.shuffled_verdicts:
      where = (self._config.seed, len(self._findings), "shuffled")
      finding = identity.pick(self._findings, *where)
    self._emit(
      "verdict",
      packet=packet.hash,
      residual=packet.residual.key,
      observed={k: dict(v) for k, v in observed.items()},
      response=finding.response,
      **dataclasses.asdict(finding),
    )
    return finding

  def _symbols(self, parent: Record, outcome: Outcome) -> dict[str, Symbol]:
    return {
      name: symbol(outcome.values[name] - parent.values[name], margin)
      for name, margin in self._task.margins.items()
      if name in outcome.values and name in parent.values
    }

  def _is_equivalent(self, attempt: _Attempt, seen: dict[str, Symbol]) -> bool:
    """The same execution, or nothing moved: neither observables nor outputs."""
    if attempt.packet.conditions[0].exec_id == attempt.parent.exec_id:
      return True
    outputs = attempt.outcomes[PRIMARY].outputs
    is_still = all(s == "same" for s in seen.values())
    return bool(seen) and is_still and dict(outputs) == dict(attempt.parent.outputs)

  def _verify(self, attempt: _Attempt) -> bool | None:
    """Checks a response against source, lowered program or probe; None without one."""
    packet, checker = attempt.packet, attempt.packet.checker
    if checker == "none" or attempt.outcomes[PRIMARY].status != Status.OK:
      return None if checker == "none" else False
    program, outcome = attempt.prepared.program, attempt.outcomes[PRIMARY]
    assert program is not None
    if checker == "source":
      parent = self._lab.prepare(attempt.parent.source).program
      assert parent is not None
      check = checkers.by_source(program, parent, packet.declared)
    elif checker == "lowered":
      check = checkers.by_lowering(
        self._lab.full_call(attempt.prepared),
        self._full_parent(attempt.parent),
        packet.declared,
      )
    elif checker == "probe":
      names = checkers.output_names(packet.declared, outcome.outputs)
      check = checkers.by_probe(outcome, attempt.outcomes["probe"], names)
    else:
      check = checkers.by_layer_output(outcome, attempt.outcomes["probe"])
    self._emit(
      "check",
      packet=packet.hash,
      response_to=packet.response_to,
      **dataclasses.asdict(check),
    )
    return check.implemented

  def _compile(
    self,
    attempt: _Attempt,
    record: Record | None,
    finding: verdict.Finding | None,
    implemented: bool | None,
  ) -> None:
    """Turns the verdict into what later programs owe, and closes what was answered."""
    owed, packet = self.residuals.required, attempt.packet
    if attempt.required is not None and implemented is not None:
      owed.pop(attempt.parent.id, None)
      tries = attempt.required.attempts + 1
      if not implemented and tries < MAX_ATTEMPTS:
        owed[attempt.parent.id] = dataclasses.replace(attempt.required, attempts=tries)
      elif implemented and attempt.required.verdict == verdict.Verdict.SUPPORTED:
        self._move(attempt.required.residual, "closed", packet.hash)
    if finding is not None and packet.residual is not None:
      if finding.verdict == verdict.Verdict.SUPPORTED:
        self._move(packet.residual, "supported", packet.hash)
      is_owed = finding.response not in (
        verdict.Response.RETIRE,
        verdict.Response.REJECT,
      )
      if is_owed and self._config.compile_verdicts:
        is_kept = record is not None and record in self.programs.records
        holder = attempt.prepared.id if is_kept else attempt.parent.id
        if finding.response == verdict.Response.ADD_DISCRIMINATOR:
          # The question is about the step from this parent: it is asked again there.
          holder = attempt.parent.id
        owed.setdefault(
          holder,
          Required(
            packet.hash,
            finding.verdict,
            finding.response,
            attempt.proposal.label,
            finding.survivors,
            packet.residual,
          ),
        )
    self._remember(attempt, finding, implemented)

  def _move(self, residual: Residual, status: str, packet: str) -> None:
    self.residuals.move(residual, status, packet)
    self._emit("residual", key=residual.key, status=status, packet=packet)

  # History and marks.

  def _remember(
    self,
    attempt: _Attempt,
    finding: verdict.Finding | None,
    implemented: bool | None,
  ) -> None:
    outcome = attempt.outcomes[PRIMARY]
    changes = {
      name: value - attempt.parent.values[name]
      for name, value in outcome.values.items()
      if name in attempt.parent.values
    }
    target = self._task.target
    gain = changes.get(target, 0.0) < -self._task.margins.get(target, 0.0)
    self.history.append(
      Experiment(
        program=attempt.prepared.id,
        parent=attempt.parent.id,
        label=attempt.proposal.label,
        note=attempt.proposal.note,
        status=outcome.status,
        changes=changes,
        gain=gain,
        verdict=finding.verdict if finding else "",
        reason=finding.reason if finding else "",
        excluded=finding.excluded if finding else (),
        survivors=finding.survivors if finding else (),
        implemented=implemented,
        source=attempt.prepared.source,
      )
    )

  def _note(
    self,
    proposal: Proposal,
    prepared: Prepared,
    parent: Record,
    status: str,
    detail: str,
  ) -> None:
    """Records a proposal that cost no evaluator call."""
    self._emit(
      "refused",
      label=proposal.label,
      program=prepared.id,
      parent=parent.id,
      status=str(status),
      detail=detail,
    )
    self.history.append(
      Experiment(
        program=prepared.id,
        parent=parent.id,
        label=proposal.label,
        note=detail,
        status=str(status),
        changes={},
        gain=False,
        source=proposal.source,
      )
    )

  def _mark(self) -> None:
    """Names the champion at every multiple of `mark_every` calls that was passed."""
    every, target = self._config.mark_every, self._task.target
    while self._marked + every <= self.ledger.spent:
      self._marked += every
      measured = [r for r in self._records.values() if r.call <= self._marked]
      best = min(measured, key=lambda r: (r.values[target], r.call))
      self._emit("mark", call=self._marked, champion=best.id, value=best.values[target])
