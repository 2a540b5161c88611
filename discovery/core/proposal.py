"""The protocol of proposers: templates, language models and people use the same one."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from mxjax.discovery.core import identity
from mxjax.discovery.core.residual import (
  Control,
  Explanation,
  Residual,
  Symbol,
)
from mxjax.discovery.core.task import Call, Parts
from mxjax.discovery.core.verdict import FORBIDDING

if TYPE_CHECKING:
  # The store imports numpy, and help of a command must not wait for it.
  from mxjax.discovery.core.store import Store

Evidence = Literal["none", "score", "text", "reflect", "controls", "verdict"]
"""What an arm may read: nothing, or as Score-only, TextMem, ReflectMem, QuantForge.

`controls` is what ReflectMem reads and what the controls measured, in free text: the
arm asks the questions of QuantForge, at the same price, and is told no verdict.
"""
CALL_SECONDS = 600
"""Processor seconds of one evaluator call, all its phases and its compilation included:
seconds of one core, so that a busy machine fails no program. A run may have less."""
WITH_QUESTIONS: tuple[Evidence, ...] = ("controls", "verdict")
"""The evidence of arms whose proposals register questions."""


@dataclasses.dataclass(frozen=True)
class Record:
  """An executed program.

  Attributes:
    id: Identity of its source.
    parent: Identity of its parent, or an empty string.
    call: Evaluator calls spent when it was measured.
    computation: Lowered identity of every hook, active or not.
    exec_id: Identity of its primary execution.
    outputs: Digests of named outputs.
    parts: The observables part by part; see `Outcome`.
    control_of: The program of the packet that it was a control or a probe of, or
      nothing, if it was proposed itself.
    is_accepted: Whether later programs may revise it: not, where a task has a second
      model, if it is no improvement of both.
  """

  id: str
  source: str
  parent: str
  call: int
  computation: Mapping[str, str]
  plan: Mapping[str, Any]
  exec_id: str
  values: Mapping[str, float]
  outputs: Mapping[str, str]
  is_accepted: bool = True
  parts: Parts = dataclasses.field(default_factory=dict)
  control_of: str = ""

  @property
  def full_call(self) -> Call:
    """The program's call with every hook, active or not."""
    return Call(self.computation, self.plan, {})


class Ran(NamedTuple):
  """What became of one condition of a packet beside its primary run.

  Attributes:
    condition: Its name.
    status: How it ended, or `not needed`.
    detail: What execution said, or why it was not needed.
  """

  condition: str
  status: str
  detail: str = ""
  values: Mapping[str, float] = {}


class Answered(NamedTuple):
  """Whether a packet met a demand, and why the check says so; None if it cannot."""

  response: str
  about: str
  implemented: bool | None
  detail: str


class Winner(NamedTuple):
  """A control that did better than the edit it was taken from, as a program.

  Attributes:
    program: The identity of its source.
    condition: Its name.
    code: Its functions and constants that the edit's program has not, whole, by name.
    plan: Its values of PLAN that differ from those of the edit's program.
  """

  program: str
  condition: str
  code: Mapping[str, str]
  plan: Mapping[str, Any]


class Step(NamedTuple):
  """One program of a lineage: the edit that made it, and its target."""

  program: str
  label: str
  value: float
  changed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
  """What is left of a run; None where there is no limit.

  `is_single` tells that the program alone is measured: controls of its question do not
  run, and nothing follows.
  """

  calls_left: int
  calls: int
  tokens_left: int | None = None
  dollars_left: float | None = None
  is_single: bool = False


@dataclasses.dataclass(frozen=True)
class Experiment:
  """History entry of one packet; an arm sees only the fields that `strip` leaves it.

  Attributes:
    label: The proposer's name of the edit, such as a template and its parameters.
    note: The proposer's own words.
    status: How the primary run ended, or `duplicate`.
    changes: Change of each observable from the parent.
    gain: Whether the target improved by more than its margin, and the step was not
      refused by the transfer model.
    transfers: Whether that model improved as well, or None if it was not asked.
    score: The measured target, or None.
    feedback: What execution said: an error, or why the proposal was refused.
    diff: Unified difference from the parent's source.
    code: Its functions and constants that the parent has not, whole, by name.
    winner: The control that had the lowest target, if that is lower than its own.
    explanations: The registered accounts with their predictions, the focal one first.
    observed: Symbols of every condition that ran, by condition and observable.
    excluded: Excluded accounts, each with the condition that contradicts it.
    survivors: Remaining explanations.
    implemented: Whether every demand on it was met, or None without one.
    values: The measured observables.
    ran: Its controls and probes, with their values or what went wrong.
    answered: The demands that were checked on it, and why they count as met or not.
    dropped: Why its question is not in its packet, or nothing.
    asks: What its verdict asks of later programs, or why it asks nothing.
    short: How far the target's change is within its margin, in words, or nothing.
  """

  program: str
  parent: str
  label: str
  note: str
  status: str
  changes: Mapping[str, float]
  gain: bool
  score: float | None = None
  feedback: str = ""
  diff: str = ""
  verdict: str = ""
  reason: str = ""
  explanations: tuple[Explanation, ...] = ()
  observed: Mapping[str, Mapping[str, Symbol]] = dataclasses.field(default_factory=dict)
  excluded: Mapping[str, str] = dataclasses.field(default_factory=dict)
  survivors: tuple[str, ...] = ()
  implemented: bool | None = None
  transfers: bool | None = None
  values: Mapping[str, float] = dataclasses.field(default_factory=dict)
  ran: tuple[Ran, ...] = ()
  answered: tuple[Answered, ...] = ()
  dropped: str = ""
  asks: str = ""
  short: str = ""
  code: Mapping[str, str] = dataclasses.field(default_factory=dict)
  winner: Winner | None = None


@dataclasses.dataclass(frozen=True)
class Demand:
  """A response that later revisions of a program must carry.

  Attributes:
    packet: Hash of the packet with the verdict.
    label: The edit that the verdict was about.
    survivors: Remaining explanations.
    computation: Hooks and plan keys in which a check looks for the response.
    before: The computation in the parent of the program that the verdict is about.
    intervention: The computation in that program.
    accounts: The accounts that its packet registered, the focal one first.
    ran: The interventions of its controls that succeeded, or the computations of those
      that are programs.
    attempts: Responses that have failed their check so far.
    left: Answers so far that were about something else.
    about: The observables in one of which a response must show.
    program: The program that the verdict is about.
  """

  packet: str
  verdict: str
  response: str
  label: str
  survivors: tuple[str, ...]
  residual: Residual
  computation: tuple[str, ...]
  before: Call
  intervention: Call
  accounts: tuple[Explanation, ...] = ()
  ran: tuple[Mapping[str, Any], ...] = ()
  attempts: int = 0
  about: tuple[str, ...] = ()
  program: str = ""
  left: int = 0

  def same_question(self, other: "Demand") -> bool:
    """Returns whether two demands are about one intervention and one observable."""
    mine, theirs = ((d.residual.observable, d.intervention) for d in (self, other))
    return mine == theirs

  @property
  def forbids(self) -> bool:
    """Whether it keeps an intervention out, instead of asking for a change."""
    return self.response in FORBIDDING


QUESTION_CALLS = 3
"""Fewest calls of a question: the candidate, a control of its own, and a rival's."""


@dataclasses.dataclass(frozen=True)
class Context:
  """Everything that a proposer is told; nothing else reaches a prompt.

  Attributes:
    address: Round and position within it; draws depend on the seed and this address.
    residuals: Open questions measured on the parent.
    demands: Responses that revisions of the parent must carry, oldest first.
    history: Experiments in order, reduced to the arm's evidence.
    champion: The best program so far.
    donors: Other retained programs, best first.
    stagnation: Packets since the best program last improved.
    compiles: Whether verdicts become demands; otherwise they are reflected on freely.
    restarts: Whether every proposal revises the initial program, as in best-of-N.
    overspends: Whether a use, like that of `Proposal`, ends the proposer's budget.
    checked: The demand that the next proposal is checked on, or None.
    repeated: The program of that demand, if it asks for a new control of the same edit:
      the edit is made already, and an answer adds to it.
    focus: The open question that this round is about, or None.
    why: Why this parent is revised now, in words.
    scopes: Hooks and plan keys whose change alone has moved each observable.
    joint_scopes: For observables that nothing has moved alone, the sets of parts whose
      change together has.
    seconds: Processor seconds of the parent's call by part, where the task tells them,
      or None; see `mxjax.discovery.sandbox.processor`.
    lineage: The way from the initial program to the champion.
    budget: What is left of the run.
    review: Says why a proposal would be refused before it costs a call, or nothing.
    tried: Called with an answer that would be accepted; says what a model is told
      before it answers again, or nothing to take the answer as it is.
    call_seconds: Processor seconds after which a call has failed.
    asks: Whether the task's free proxy may be asked in this run.
    ask: What it says of a source and of the part named, in words.
  """

  seed: int
  address: tuple[int, int]
  target: str
  parent: Record
  residuals: tuple[Residual, ...]
  demands: tuple[Demand, ...]
  history: tuple[Experiment, ...]
  champion: Record
  donors: tuple[Record, ...]
  evidence: Evidence
  stagnation: int
  compiles: bool = True
  restarts: bool = False
  overspends: Callable[[Mapping[str, int]], bool] = lambda usage: False
  checked: Demand | None = None
  repeated: Record | None = None
  focus: Residual | None = None
  why: str = ""
  scopes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  joint_scopes: Mapping[str, tuple[tuple[str, ...], ...]] = dataclasses.field(
    default_factory=dict
  )
  seconds: Mapping[str, float] | None = None
  lineage: tuple[Step, ...] = ()
  budget: Budget | None = None
  review: "Callable[[Proposal], str]" = lambda proposal: ""
  tried: "Callable[[Proposal], str]" = lambda proposal: ""
  call_seconds: float = CALL_SECONDS
  asks: bool = True
  ask: Callable[[str, str], str] = lambda source, part: "this task has no free proxy"

  @property
  def base(self) -> Record:
    """The program into which the functions of an answer are merged."""
    return self.repeated or self.parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
  """A candidate with its registered experiment.

  Attributes:
    label: Short name of the edit.
    residual: Observable of the residual addressed, or None.
    explanations: Competing explanations, the focal one first.
    declared: Hooks or plan keys that were changed, among them those of any response.
    usage: Proposer calls, tokens and cost in micro-dollars, as integers by name.
    models: The model that each reply says it is of, for those of a language model.
    unusable: Why there is no program in it, for an answer that was none.
    finished: Whether the proposer gives up, as it knows no edit that would lower the
      target by more than its margin; the run ends.
  """

  source: str
  label: str
  note: str = ""
  residual: str | None = None
  explanations: tuple[Explanation, ...] = ()
  controls: tuple[Control, ...] = ()
  declared: tuple[str, ...] = ()
  usage: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"calls": 1})
  models: tuple[str, ...] = ()
  unusable: str = ""
  finished: bool = False

  def __post_init__(self) -> None:
    """Rejects what the log cannot hold: NaN, infinities and broken Unicode."""
    # Unescaped, because as an escape half a surrogate pair would pass, and fail where a
    # source is written as text.
    text = json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False)
    text.encode()

  def to_dict(self) -> dict[str, Any]:
    """Returns a JSON-ready form."""
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> "Proposal":
    """Builds a proposal from the form of `to_dict`."""
    return cls(
      **{
        **values,
        "explanations": tuple(Explanation(**e) for e in values["explanations"]),
        "controls": tuple(Control(**c) for c in values["controls"]),
        "declared": tuple(values["declared"]),
        # Absent while an answer becomes a proposal: its replies are named afterwards.
        "models": tuple(values.get("models", ())),
      }
    )


class Proposer(Protocol):
  """Suggests one program at a time."""

  @property
  def name(self) -> str:
    """Name in every result: `embedded-v1`, `cassette:<hash>`, `llm:<model>`."""

  def propose(self, context: Context) -> Proposal:
    """Returns one proposal.

    Raises:
      ExhaustedError: Nothing is left for this parent; the search asks for the next one.
      OutageError: There is no answer now; the run stops and can be resumed.
      ProposerError: The proposer cannot continue; the run ends.
    """


class ProposerError(RuntimeError):
  """Raised when a proposer cannot continue: no answer, no credit or no edit left."""


class OutageError(ProposerError, ConnectionError):
  """Raised when there is no answer now; the run stays open and can be resumed."""


class ExhaustedError(ProposerError):
  """Raised when nothing is left for this parent; another parent may still work."""


def answer(store: "Store", key: str, ask: Callable[[], Proposal]) -> Proposal:
  """Returns a proposer's answer, from the run folder if it was given before.

  `key` identifies the answer within the run, and its parent. An exhausted parent is
  stored as an answer too, so a resumed run meets it again at the same point.

  Raises:
    ExhaustedError: The proposer has, or had, nothing left for this parent.
  """
  stored = store.get("proposals", key)
  if stored is None:
    try:
      stored = ask().to_dict()
    except ExhaustedError as error:
      stored = {"exhausted": str(error)}
    store.put("proposals", key, stored)
    # As a resumed run reads it, so that both send a proposer the same prompts.
    stored = json.loads(identity.canonical(stored))
  if "exhausted" in stored:
    raise ExhaustedError(stored["exhausted"])
  return Proposal.from_dict(stored)


def strip(experiment: Experiment, evidence: Evidence) -> Experiment:
  """Removes the fields of an experiment that an arm may not see.

  Score-only sees code, scores, execution feedback and whether gains transfer.
  TextMem adds free-form summaries and the free observables; ReflectMem has the same
  diagnostics. Only QuantForge sees predictions, control outcomes, what they exclude and
  leave, and whether a response reached the code. With `controls`, ReflectMem sees the
  words of the accounts and what their controls measured. Without evidence, only the
  edit and how it ended remain.
  """
  if evidence == "verdict":
    return experiment
  # A list of what is allowed: a field that nobody names here reaches no arm but the
  # last.
  seen = {"program", "parent", "label", "status", "gain"}
  if evidence != "none":
    seen |= {"score", "feedback", "diff", "code", "transfers"}
  if evidence in ("text", "reflect", "controls"):
    seen |= {"note", "changes", "values", "short"}
  if evidence == "controls":
    seen |= {"ran", "winner"}
  bare = Experiment("", "", "", "", "", {}, gain=False)
  shown = {name: getattr(experiment, name) for name in seen}
  accounts = [account for account in experiment.explanations if not account.rival]
  if evidence == "controls" and accounts:
    ideas = "; ".join(f"{each.name}: {each.statement}" for each in accounts)
    shown["note"] = f"{experiment.note} Ideas of why it may help: {ideas}".strip()
  return dataclasses.replace(bare, **shown)
