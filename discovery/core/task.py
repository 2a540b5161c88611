"""What discovery needs of a task: an interface, an evaluator, observables, edits.

A task is known by its specification, a small JSON object from which any process can
build it again: `{"task": "world", ...}`, `{"task": "ptq", ...}`, or
`{"task": "package.module:function", ...}` for a user's own.
"""

import dataclasses
import enum
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mxjax.discovery.core import identity
from mxjax.discovery.core.edit_templates import EditTemplate
from mxjax.discovery.core.interface import Interface, Literal
from mxjax.discovery.core.residual import Residual


class Status(enum.StrEnum):
  """How an admission, a trace or an evaluator call ended."""

  OK = "ok"
  REJECTED = "rejected"
  TRACE_FAILED = "trace_failed"
  REFUSED = "refused"
  TIMEOUT = "timeout"
  MEMORY = "memory"
  CRASHED = "crashed"
  CONTRACT = "contract"
  NOT_FINITE = "not_finite"


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What one evaluator call measured. A failure has no values, and so no score.

  Attributes:
    status: `OK`, or why there are no values.
    values: Observables by name, finite.
    outputs: Digests of named intermediate outputs.
    detail: One sentence about a failure.
  """

  status: Status
  values: Mapping[str, float] = dataclasses.field(default_factory=dict)
  outputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
  detail: str = ""

  def to_dict(self) -> dict[str, Any]:
    """A JSON-ready form."""
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> "Outcome":
    """The inverse of `to_dict`, checked.

    Raises:
      ValueError: Anything but finite numbers among the observables.
    """
    bad = [k for k, v in values["values"].items() if not identity.finite(v)]
    if bad or (values["status"] == Status.OK) != bool(values["values"]):
      raise ValueError(
        f"Outcome: expected finite observables exactly when the status is ok, got "
        f"status {values['status']!r} and bad values of {bad}."
      )
    return cls(
      Status(values["status"]), values["values"], values["outputs"], values["detail"]
    )


class Call(NamedTuple):
  """One condition as the evaluator sees it.

  Attributes:
    computation: Hook name to the lowered identity of what runs there.
    plan: The plan.
    intervention: What the condition changes; empty for the candidate as it is.
  """

  computation: Mapping[str, str]
  plan: Mapping[str, Literal]
  intervention: Mapping[str, Any]

  def active(self, interface: Interface) -> "Call":
    """This call without the hooks that its plan never runs."""
    hooks = {
      name: computation
      for name, computation in self.computation.items()
      if name in interface.names and interface.hook(name).is_active(self.plan)
    }
    return self._replace(computation=hooks)


class Artifacts(Protocol):
  """Executable hooks by lowered identity."""

  def unit(self, computation: str) -> Callable[..., Any]:
    """The hook on one unit."""

  def batched(self, computation: str) -> Callable[..., Any]:
    """The hook on a leading batch axis."""


class Session(Protocol):
  """An evaluator phase with its data loaded; lives in a worker."""

  def run(
    self, call: Call, artifacts: Artifacts, before: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Runs the phase on a call and the bytes of the phase before.

    Returns:
      JSON results (`values`, `outputs`), and bytes for the next phase.

    Raises:
      ContractError: The candidate broke the task's contract.
      FloatingPointError: A result is not finite.
    """


class RefusedError(ValueError):
  """An artifact that may not run."""


class ContractError(ValueError):
  """A candidate's result that the frozen contract does not allow."""


class Task(Protocol):
  """A search problem."""

  @property
  def spec(self) -> Mapping[str, Any]:
    """JSON from which `load` builds the task again."""

  @property
  def interface(self) -> Interface:
    """Hooks and plan."""

  @property
  def target(self) -> str:
    """The observable that search minimizes."""

  @property
  def margins(self) -> Mapping[str, float]:
    """Registered margin of every observable a prediction may name."""

  @property
  def contract(self) -> Mapping[str, Any]:
    """Everything but the program that fixes an outcome, JSON."""

  @property
  def edit_templates(self) -> Sequence[EditTemplate]:
    """What the embedded proposer chooses from."""

  @property
  def interventions(self) -> Mapping[str, str]:
    """Kinds of control the evaluator can run, with what each changes."""

  @property
  def call_seconds(self) -> float:
    """Rough length of an evaluator call, for `plan`."""

  @property
  def phases(self) -> Sequence[str]:
    """Phases of an evaluator call; no phase holds another's data."""

  def readable(self, phase: str) -> Sequence[str]:
    """Paths that a phase's worker may read."""

  def open(self, phase: str) -> Session:
    """Loads a phase's data."""

  def residuals(self, program: str, values: Mapping[str, float]) -> list[Residual]:
    """Open questions that a program's observables show."""

  @property
  def regimes(self) -> Mapping[str, tuple[str, ...]]:
    """Stages of a whole quantizer in order: hooks and plan keys of each."""

  def ideal(self) -> float:
    """The target of a program that loses nothing; gates are shares of the way there."""

  def holdout(self) -> "Task | None":
    """The same task on data that search never sees, or None."""


def load(spec: Mapping[str, Any]) -> Task:
  """Builds a task from its specification.

  Raises:
    ValueError: An unknown task.
  """
  options = dict(spec)
  name: str = options.pop("task")
  known = {
    "world": "mxjax.discovery.tasks.world:World",
    "ptq": "mxjax.discovery.tasks.ptq.task:PtqTask",
  }
  module, _, function = str(known.get(name, name)).partition(":")
  if not function:
    raise ValueError(
      f"task: unknown task {name!r}; use one of {', '.join(known)} or "
      "package.module:function."
    )
  return getattr(importlib.import_module(module), function)(**options)
