"""A task made of two files in a folder: `initial.py` and `evaluate.py`.

`initial.py` is the program that the search starts from: imports and pure functions.
`evaluate.py` says which of them may change, and scores a program:

  DESCRIPTION = "Rows of 16 samples with noise; what is fixed and what may change."
  HOOKS = {"clean": {"arguments": {"x": ("float32", (16,))},
                     "outputs": [("float32", (16,))], "batched": ["x"],
                     "doc": "One row, cleaned."}}
  MARGINS = {"loss": 0.001}        # changes that count; the first is minimized
  OBSERVABLES = {"loss": "mean squared error, in squared units of a sample"}

  def evaluate(hooks, held_out=False):
    return {"loss": float(...)}    # hooks.clean maps rows [n, 16] to [n, 16]

`DESCRIPTION`, `OBSERVABLES` and the `doc` of each hook are what a language model or a
person is told; the embedded proposer needs none of them. It may also define
`RESIDUALS`, which maps an observable to the value above which it is an open question;
`PLAN`, which maps a key to the values that programs may give it and which `evaluate`
gets as `plan`, and `PLAN_DOCS`, what each key decides; `FLOORS`, which maps an
observable to the value below which it does not go, so that nobody is asked to lower it
further; `EXAMPLE`, a whole answer to a first prompt as the model's JSON has it; and
`EDITS`, a list of `EditTemplate`, without which the embedded proposer has nothing to
propose. A program is
traced in the jail like any other; `evaluate.py` is the user's own and runs in the run
worker.
"""

import ast
import functools
import hashlib
import importlib.util
import inspect
import os
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mxjax.discovery.core import identity
from mxjax.discovery.core.edit_templates import EditTemplate
from mxjax.discovery.core.interface import Aval, Hook, Interface, Tree
from mxjax.discovery.core.interventions import Interventions
from mxjax.discovery.core.residual import Residual
from mxjax.discovery.core.task import Artifacts, Call, ContractError, Defaults
from mxjax.errors import FileNotFoundRefusal, ValueRefusal

INITIAL, EVALUATE = "initial.py", "evaluate.py"
RUN = "run.json"
"""A file that every folder of a run has."""


def is_folder(path: str) -> bool:
  """Returns whether a path is a folder with both files."""
  folder = pathlib.Path(path)
  return all((folder / name).is_file() for name in (INITIAL, EVALUATE))


def _tree(value: Any) -> Tree:
  if isinstance(value, Mapping):
    return {name: _aval(*each) for name, each in value.items()}
  return _aval(*value)


def _aval(dtype: str, shape: Sequence[int]) -> Aval:
  """Returns a declared array.

  Raises:
    ValueError: There are no arrays of that dtype or shape.
  """
  np.dtype(dtype)
  # By `type`, because True is an integer to `isinstance`.
  if not all(type(size) is int and size > 0 for size in shape):
    raise ValueError(f"expected a shape of positive integers, got {shape!r}")
  return Aval(dtype, tuple(shape))


def _split(source: str, names: Sequence[str], path: pathlib.Path) -> tuple[str, Any]:
  """Returns what precedes the hooks (imports, helpers), and each hook's source."""
  rest, hooks = [], {}
  for node in ast.parse(source, str(path)).body:
    if isinstance(node, ast.FunctionDef) and node.name in names:
      hooks[node.name] = ast.unparse(node) + "\n"
    else:
      rest.append(ast.unparse(node))
  if missing := sorted(set(names) - set(hooks)):
    raise ValueRefusal(
      path,
      expected="a function for every name in HOOKS",
      got=f"none for {', '.join(missing)}",
      mend=f"define it, or leave it out of {EVALUATE}",
    )
  return "\n".join(rest) + "\n", hooks


class TwoFiles(Defaults):
  """A `Task` from a folder; see the module."""

  phases: Sequence[str] = ("evaluate",)
  interventions: Interventions = {}
  """None of its own: the control `program` takes one hook of an edit back."""

  def __init__(self, folder: str, held_out: bool = False) -> None:
    """Reads both files; `held_out` is passed to `evaluate`.

    Raises:
      FileNotFoundError: A file is absent, for example because the folder moved.
      ValueError: The files lack something, or do not fit each other.
    """
    self.folder = pathlib.Path(folder).resolve()
    if not is_folder(folder):
      raise FileNotFoundRefusal(
        self.folder,
        expected=f"{INITIAL} and {EVALUATE}",
        got="one of them or none",
        mend="write both, or move the folder back",
      )
    self._held_out = held_out
    self.module = self._load()
    self.spec = {"task": str(self.folder), **({"held_out": True} if held_out else {})}
    self.margins: Mapping[str, float] = self._need("MARGINS", Mapping)
    if wrong := [k for k, v in self.margins.items() if not identity.finite(v) or v < 0]:
      raise ValueRefusal(
        self.folder / EVALUATE,
        expected="finite margins of at least 0",
        got=[(k, self.margins[k]) for k in wrong],
        mend="mend MARGINS",
      )
    self.target = next(iter(self.margins))
    self.edit_templates: Sequence[EditTemplate] = getattr(self.module, "EDITS", ())
    self.interface = self._interface(self._need("HOOKS", Mapping))
    self.description = str(getattr(self.module, "DESCRIPTION", ""))
    self.observables = dict(getattr(self.module, "OBSERVABLES", {}))
    self.regimes = {"Program": self.interface.names}
    self.example = dict(getattr(self.module, "EXAMPLE", {}))
    self.floors = {k: (v,) for k, v in getattr(self.module, "FLOORS", {}).items()}
    evaluate: Callable[..., Any] = self._need("evaluate", types.FunctionType)
    self._accepts = set(inspect.signature(evaluate).parameters)

  def _load(self) -> Any:
    path = self.folder / EVALUATE
    spec = importlib.util.spec_from_file_location(f"_task_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
      spec.loader.exec_module(module)
    # The module is the user's and may raise anything; `exit()` raises no Exception.
    except (Exception, SystemExit) as error:
      raise ValueRefusal(
        path,
        expected="a module that can be imported",
        got=f"{type(error).__name__}: {error}",
        mend="mend it",
      ) from error
    return module

  def _need(self, name: str, kind: Any) -> Any:
    value = getattr(self.module, name, None)
    if not isinstance(value, kind) or not value:
      raise ValueRefusal(
        self.folder / EVALUATE,
        expected=f"{name}, a nonempty {kind.__name__}",
        got=repr(value),
        mend="see mxjax.discovery.tasks.two_files",
      )
    return value

  def _interface(self, hooks: Mapping[str, Any]) -> Interface:
    path = self.folder / INITIAL
    header, sources = _split(path.read_text(), list(hooks), path)
    made = []
    for name, what in hooks.items():
      try:
        arguments = {key: _tree(value) for key, value in what["arguments"].items()}
        outputs = tuple(_aval(dtype, shape) for dtype, shape in what["outputs"])
      except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueRefusal(
          f"{self.folder / EVALUATE}: HOOKS[{name!r}]",
          expected="arguments, a dict of (dtype, shape), and outputs, a list of them",
          got=repr(what),
          mend="mend it",
        ) from error
      hook = {"arguments": arguments, "outputs": outputs, "default": sources[name]}
      batched = tuple(what.get("batched", ()))
      made.append(Hook(name=name, batched=batched, doc=what.get("doc", ""), **hook))
    plan = {key: tuple(value) for key, value in self._plan.items()}
    return Interface(
      hooks=tuple(made),
      plan=plan or {"unused": (False,)},
      plan_docs=self._plan_docs if plan else {"unused": "nothing"},
      header=header,
    )

  @property
  def _plan(self) -> Mapping[str, Sequence[Any]]:
    return getattr(self.module, "PLAN", {})

  @property
  def _plan_docs(self) -> Mapping[str, str]:
    return getattr(self.module, "PLAN_DOCS", {})

  @functools.cached_property
  def contract(self) -> Mapping[str, Any]:
    """Digests of the files in the folder, on any of which a score may depend.

    Left out are hidden files, caches of Python, and folders of runs, which grow.
    """
    found = {}
    for folder, names, files in os.walk(self.folder):
      here = pathlib.Path(folder)
      names[:] = [
        name
        for name in names
        if name[0] != "."
        and name != "__pycache__"
        and not any((here / name).rglob(RUN))
      ]
      for name in files:
        if name[0] != ".":
          with (here / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
          found[(here / name).relative_to(self.folder).as_posix()] = digest
    return found

  def readable(self, phase: str) -> Sequence[str]:
    """Returns the folder, so that `evaluate` may keep data beside the files."""
    del phase
    return (str(self.folder),)

  def open(self, phase: str) -> "TwoFiles":
    """Returns the task; `evaluate.py` loads its data when it is imported."""
    del phase
    return self

  def ideal(self) -> float:
    """Returns `IDEAL` of `evaluate.py`, by default 0."""
    return float(getattr(self.module, "IDEAL", 0.0))

  def holdout(self) -> "TwoFiles | None":
    """Returns the task on held-out data if `evaluate` takes `held_out`."""
    if "held_out" not in self._accepts:
      return None
    return TwoFiles(str(self.folder), held_out=True)

  def residuals(self, program: str, values: Mapping[str, float]) -> list[Residual]:
    """Returns the observables above their value in `RESIDUALS`."""
    limits = getattr(self.module, "RESIDUALS", {self.target: self.ideal()})
    return [
      Residual(program, name, values[name], limit)
      for name, limit in limits.items()
      if values[name] > limit
    ]

  def run(
    self, call: Call, artifacts: Artifacts, before: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Runs `evaluate` on the hooks of a call; see `Session.run`."""
    del before
    computation = dict(call.computation)
    if call.intervention:
      raise ContractError(f"two files: unknown control {dict(call.intervention)}.")
    get = lambda hook: artifacts.batched if hook.batched else artifacts.unit
    hooks = types.SimpleNamespace(
      **{
        hook.name: jax.jit(get(hook)(computation[hook.name]))
        for hook in self.interface.hooks
      }
    )
    offered = {"held_out": self._held_out, "plan": dict(call.plan)}
    # Only what `evaluate` asks for, so that the shortest one takes the hooks alone.
    options = {key: offered[key] for key in offered if key in self._accepts}
    values = self.module.evaluate(hooks, **options)
    if missing := sorted(set(self.margins) - set(values)):
      raise ContractError(
        f"evaluate: expected {', '.join(missing)}, got {set(values)}."
      )
    return {"values": {name: float(value) for name, value in values.items()}}, b""
