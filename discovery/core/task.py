"""The protocol of a task: an interface, an evaluator, observables and edits.

A specification identifies a task, and any process can rebuild the task from it. It is
a small JSON object: `{"task": "world", ...}`, `{"task": "ptq", ...}`, or, for a user's
own task, `{"task": "package.module:function", ...}` or `{"task": FOLDER}` with the two
files of `discovery.tasks.two_files`. `path` beside `task` is the folder of the module.
"""

import dataclasses
import enum
import importlib
import inspect
import pathlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mxjax.discovery.core import identity
from mxjax.discovery.core.edit_templates import EditTemplate
from mxjax.discovery.core.interface import Interface, Literal
from mxjax.discovery.core.interventions import Interventions
from mxjax.discovery.core.residual import Residual, Rival
from mxjax.errors import ValueRefusal


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


Parts = Mapping[str, Mapping[str, float]]
"""Numbers by observable and part."""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Result of one evaluator call; a failed call has no values and so no score.

  Attributes:
    values: Finite observables by name.
    outputs: Digests of named intermediate outputs.
    parts: The same observables part by part, such as by linear, for people and
      prompts; nothing is decided by them.
  """

  status: Status
  values: Mapping[str, float] = dataclasses.field(default_factory=dict)
  outputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
  detail: str = ""
  parts: Parts = dataclasses.field(default_factory=dict)

  def to_dict(self) -> dict[str, Any]:
    """Returns a JSON-ready form."""
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> "Outcome":
    """Builds an outcome from the form of `to_dict` and checks it.

    Raises:
      ValueError: An observable or a part of one is not finite, or values and status do
        not match.
    """
    bad = [k for k, v in values["values"].items() if not identity.finite(v)]
    if bad or (values["status"] == Status.OK) != bool(values["values"]):
      raise ValueError(
        f"Outcome: expected finite observables exactly when the status is ok, got "
        f"status {values['status']!r} and bad values of {bad}."
      )
    parts = values.get("parts", {})
    # What is no dict becomes a row that is none, which the next line refuses.
    rows = [*parts.values()] if isinstance(parts, dict) else [None]
    if not all(isinstance(row, dict) for row in rows) or not all(
      identity.finite(number) for row in rows for number in row.values()
    ):
      raise ValueError(
        f"Outcome: expected finite numbers by observable and part, got {parts!r:.200}."
      )
    return cls(
      Status(values["status"]),
      values["values"],
      values["outputs"],
      values["detail"],
      parts,
    )


class Call(NamedTuple):
  """One condition as the evaluator sees it.

  Attributes:
    computation: Lowered identity of the program that runs as each hook.
    intervention: Change made by the condition; empty for the unchanged candidate.
  """

  computation: Mapping[str, str]
  plan: Mapping[str, Literal]
  intervention: Mapping[str, Any]

  def active(self, interface: Interface) -> "Call":
    """Returns this call without the hooks that its plan never runs."""
    hooks = {
      name: computation
      for name, computation in self.computation.items()
      if name in interface.names and interface.hook(name).is_active(self.plan)
    }
    return self._replace(computation=hooks)

  def part(self, names: Iterable[str]) -> "Call":
    """Returns the hooks and plan values of this call that `names` covers."""
    chosen = set(names)
    cut = lambda values: {k: v for k, v in values.items() if k in chosen}
    return Call(cut(self.computation), cut(self.plan), {})

  def replaced(self, part: "Call") -> "Call":
    """Returns the call without intervention that has the part of another program."""
    hooks = {**self.computation, **part.computation}
    return Call(hooks, {**self.plan, **part.plan}, {})


class Artifacts(Protocol):
  """Executable hooks by lowered identity."""

  def unit(self, computation: str) -> Callable[..., Any]:
    """Returns the hook for one unit."""

  def batched(self, computation: str) -> Callable[..., Any]:
    """Returns the hook for a leading batch axis."""


class Session(Protocol):
  """An evaluator phase with its data loaded; lives in a worker."""

  def run(
    self, call: Call, artifacts: Artifacts, before: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Runs the phase on a call, given the bytes from the previous phase.

    Returns:
      JSON results (`values`, `outputs`), and bytes for the next phase.

    Raises:
      ContractError: The candidate broke the task's contract.
      FloatingPointError: A result is not finite.
    """


class RefusedError(ValueError):
  """Raised for an artifact that must not run."""


class ContractError(ValueError):
  """Raised when a candidate's result violates the frozen contract."""


class Task(Protocol):
  """A search problem; `Defaults` has what a task may leave out."""

  @property
  def spec(self) -> Mapping[str, Any]:
    """JSON from which `load` rebuilds the task."""

  @property
  def places(self) -> Sequence[str]:
    """Keys of `spec` that name files; what outcomes need of them is in `contract`."""

  @property
  def interface(self) -> Interface:
    """Hooks and plan grammar."""

  @property
  def target(self) -> str:
    """The observable that the search minimizes."""

  @property
  def margins(self) -> Mapping[str, float]:
    """Registered margin of every observable that a prediction may name."""

  @property
  def contract(self) -> Mapping[str, Any]:
    """Everything that determines an outcome, except the program, as JSON."""

  @property
  def edit_templates(self) -> Sequence[EditTemplate]:
    """Edit templates for the embedded proposer."""

  @property
  def interventions(self) -> Interventions:
    """Kinds of control that the evaluator can run, beside `program`."""

  @property
  def phases(self) -> Sequence[str]:
    """Phases of an evaluator call; no phase holds another's data."""

  def readable(self, phase: str) -> Sequence[str]:
    """Returns the paths that the worker of a phase may read."""

  def open(self, phase: str) -> Session:
    """Loads the data of a phase."""

  def residuals(self, program: str, values: Mapping[str, float]) -> list[Residual]:
    """Returns the open questions shown by a program's observables."""

  @property
  def regimes(self) -> Mapping[str, tuple[str, ...]]:
    """Stages of a complete quantizer in order, with the hooks and plan keys of each."""

  def ideal(self) -> float:
    """Returns a lossless program's target; gates are fractions of the way to it."""

  def holdout(self) -> "Task | None":
    """Returns the same task on data that the search never sees, or None."""

  @property
  def description(self) -> str:
    """What the task is about and what is fixed, in a few sentences for a prompt."""

  @property
  def observables(self) -> Mapping[str, str]:
    """What each observable means, with its unit; `layer_N` stands for every layer."""

  def refuses(self, intervention: Mapping[str, Any], own: Call, parent: Call) -> str:
    """Returns why an intervention cannot be made in a candidate, or an empty string."""

  def rivals(self, own: Call, parent: Call) -> Sequence[Rival]:
    """Returns accounts of a gain that stand beside a proposer's own."""

  def price(self, intervention: Mapping[str, Any]) -> int:
    """Returns the calls that a condition is charged, by the tokens that it scores."""

  @property
  def rivals_told(self) -> Sequence[str]:
    """Says of each account of `rivals` when it stands there and what it costs."""

  @property
  def floors(self) -> Mapping[str, tuple[float, ...]]:
    """Values below which an observable does not go, where that is known.

    There are several where it depends on the rest of the program.
    """

  @property
  def references(self) -> Mapping[str, float]:
    """The target of programs that a proposer knows, by what they are."""

  @property
  def example(self) -> Mapping[str, Any]:
    """A whole answer to a first prompt, which the search accepts; or nothing."""

  def units(self, plan: Mapping[str, Any]) -> Mapping[str, int]:
    """Returns how many units a primary run calls each hook on, or nothing."""

  @property
  def tells_seconds(self) -> bool:
    """Whether a proposer is told how long calls took, which no replay repeats."""

  def proxy(self) -> "Task | None":
    """Returns the task of a free stand-in for the target, or None."""


class Defaults:
  """What a task may leave out; every task of a user's own class can inherit it."""

  # Class attributes are shared by all tasks, so mappings among them are read-only.
  description = ""
  places: Sequence[str] = ()
  observables: Mapping[str, str] = types.MappingProxyType({})
  interventions: Interventions = types.MappingProxyType({})
  regimes: Mapping[str, tuple[str, ...]] = types.MappingProxyType({})
  phases: Sequence[str] = ("measure",)
  rivals_told: Sequence[str] = ()
  floors: Mapping[str, tuple[float, ...]] = types.MappingProxyType({})
  references: Mapping[str, float] = types.MappingProxyType({})
  example: Mapping[str, Any] = types.MappingProxyType({})
  tells_seconds = False

  def readable(self, phase: str) -> Sequence[str]:
    """Returns no files."""
    del phase
    return ()

  def open(self, phase: str) -> Any:
    """Returns the task, which is its own session."""
    del phase
    return self

  def ideal(self) -> float:
    """Returns 0."""
    return 0.0

  def refuses(self, intervention: Mapping[str, Any], own: Call, parent: Call) -> str:
    """Refuses nothing."""
    del intervention, own, parent
    return ""

  def rivals(self, own: Call, parent: Call) -> Sequence[Rival]:
    """Has none."""
    del own, parent
    return ()

  def units(self, plan: Mapping[str, Any]) -> Mapping[str, int]:
    """Says nothing."""
    del plan
    return {}

  def price(self, intervention: Mapping[str, Any]) -> int:
    """Charges a call for every condition."""
    del intervention
    return 1

  def proxy(self) -> "Task | None":
    """Has none."""
    return None


def transfer(task: Task) -> Task | None:
  """Returns the task on the model that must improve too, by its method `transfer`.

  None if the task has no such method or no such model.
  """
  return getattr(task, "transfer", lambda: None)()


def with_transfer(task: Task) -> list[Task]:
  """Returns the task and, if it has a model that must improve too, the task on it."""
  return [each for each in (task, transfer(task)) if each is not None]


class _Located:
  """A task from a module in a folder of the user's, which `load` finds again."""

  def __init__(self, task: Any, path: str) -> None:
    self._task, self._path = task, path
    self.spec = {**task.spec, "path": path}

  def __getattr__(self, name: str) -> Any:
    return getattr(self._task, name)

  def holdout(self) -> "Task | None":
    """Returns the task on held-out data, or None."""
    return self._located(self._task.holdout())

  def transfer(self) -> "Task | None":
    """Returns the task on the model that must improve too, or None."""
    return self._located(transfer(self._task))

  def _located(self, task: "Task | None") -> "Task | None":
    return None if task is None else _Located(task, self._path)


def module_file(task: Task) -> str:
  """Returns the file that defines the class of a task."""
  return inspect.getfile(type(task._task if isinstance(task, _Located) else task))


WORLDS: Mapping[str, str] = {
  "world": "mxjax.discovery.tasks.world:World",
}
"""The synthetic task, drawn by a seed."""


BUILT_IN = (*WORLDS, "ptq")
"""Tasks whose code is the library's own; any other runs code of somebody else."""


def check_trusted(spec: Mapping[str, Any], given: Mapping[str, Any] | None) -> None:
  """Refuses a task of a folder that would execute what only the folder names.

  `given` is the specification that the caller was asked for, such as by `--task`.

  Raises:
    ValueError: The task is no built-in one, and not the one that was given.
  """
  if spec.get("task") in BUILT_IN and "path" not in spec:
    return
  # These two say what code is executed; other options only parametrize it.
  place = lambda each: {k: each[k] for k in ("task", "path") if k in each}
  if given is None or place(spec) != place(given):
    where = f" of {spec['path']}" if "path" in spec else ""
    raise ValueRefusal(
      "task",
      expected="a task of the library's own",
      got=f"{spec.get('task')!r}{where} with code of its own, which would be executed",
      mend="if you trust it, name it yourself by --task",
    )


def load(spec: Mapping[str, Any]) -> Task:
  """Builds a task from its specification.

  Raises:
    ValueError: The task or an option of it is unknown, or its module is not found.
  """
  options = dict(spec)
  name: str = options.pop("task")
  known = {
    **WORLDS,
    "ptq": "mxjax.discovery.tasks.ptq.task:PtqTask",
  }
  path = options.pop("path", None)
  if path is not None and path not in sys.path:
    sys.path.insert(0, path)
  module, _, function = str(known.get(name, name)).partition(":")
  # A built-in task has a function by now, so no folder of its name can take its place.
  if not function and pathlib.Path(name).is_dir():
    module, function = "mxjax.discovery.tasks.two_files", "TwoFiles"
    options["folder"] = name
  if not function:
    raise ValueRefusal(
      "task",
      expected=f"one of {', '.join(known)}, a folder with initial.py and "
      "evaluate.py, or package.module:function",
      got=repr(name),
      mend="name one of these",
    )
  try:
    make = getattr(importlib.import_module(module), function)
  except (ModuleNotFoundError, AttributeError) as error:
    raise ValueRefusal(
      "task",
      expected=f"{function} in a module {module}",
      got=f"none ({error})",
      mend="run in the folder of the module, or install its package",
    ) from error
  try:
    # Bound before it is called, so that a TypeError of the task's own code is not taken
    # for an option that does not fit.
    inspect.signature(make).bind(**options)
  except TypeError as error:
    raise ValueRefusal(
      f"task: {name}",
      expected=f"options that fit {inspect.signature(make)}",
      got=f"{sorted(options)} ({error})",
      mend="correct them",
    ) from error
  task = make(**options)
  return task if path is None else _Located(task, path)
