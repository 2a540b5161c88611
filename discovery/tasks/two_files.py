"""A task made of two files in a folder: `initial.py` and `evaluate.py`.

`initial.py` is the program that the search starts from: imports and pure functions.
`evaluate.py` says which of them may change, and scores a program:

  HOOKS = {"clean": {"arguments": {"x": ("float32", (16,))},
                     "outputs": [("float32", (16,))], "batched": ["x"]}}
  MARGINS = {"loss": 0.001}        # changes that count; the first is minimized

  def evaluate(hooks, held_out=False):
    return {"loss": float(...)}    # hooks.clean maps rows [n, 16] to [n, 16]

It may also define `RESIDUALS`, which maps an observable to the value above which it is
an open question, followed by the hooks and plan keys that it is about; `PLAN`, which
maps a key to the values that programs may give it and which `evaluate` gets as `plan`;
and `EDITS`, a list of `EditTemplate`, without which the embedded proposer has nothing
to propose. A program is traced in the jail like any other; `evaluate.py` is the user's
own and runs in the run worker.
"""

import ast
import functools
import importlib.util
import inspect
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mxjax.discovery.core import identity
from mxjax.discovery.core.edit_templates import EditTemplate
from mxjax.discovery.core.interface import Aval, Hook, Interface, Tree
from mxjax.discovery.core.residual import Residual
from mxjax.discovery.core.task import Artifacts, Call, ContractError

INITIAL, EVALUATE = "initial.py", "evaluate.py"
REVERT = "revert"


def is_folder(path: str) -> bool:
  """Returns whether a path is a folder with both files."""
  folder = pathlib.Path(path)
  return all((folder / name).is_file() for name in (INITIAL, EVALUATE))


def _tree(value: Any) -> Tree:
  if isinstance(value, Mapping):
    return {name: Aval(dtype, tuple(shape)) for name, (dtype, shape) in value.items()}
  dtype, shape = value
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
    raise ValueError(
      f"{path}: expected a function for every name in HOOKS, got none for "
      f"{', '.join(missing)}; define it, or leave it out of {EVALUATE}."
    )
  return "\n".join(rest) + "\n", hooks


class TwoFiles:
  """A `Task` from a folder; see the module."""

  phases: Sequence[str] = ("evaluate",)
  interventions: Mapping[str, str] = {
    REVERT: "{hook}: one hook of the edit stays the parent's; needs `parent: true`"
  }

  def __init__(self, folder: str, held_out: bool = False) -> None:
    """Reads both files; `held_out` is passed to `evaluate`.

    Raises:
      FileNotFoundError: A file is absent, for example because the folder moved.
      ValueError: The files lack something, or do not fit each other.
    """
    self.folder = pathlib.Path(folder).resolve()
    if not is_folder(folder):
      raise FileNotFoundError(
        f"discover: expected {INITIAL} and {EVALUATE} in {self.folder}, got "
        "one of them or none; write both, or move the folder back."
      )
    self._held_out = held_out
    self.module = self._load()
    self.spec = {"task": str(self.folder), **({"held_out": True} if held_out else {})}
    self.margins: Mapping[str, float] = self._need("MARGINS", Mapping)
    self.target = next(iter(self.margins))
    self.edit_templates: Sequence[EditTemplate] = getattr(self.module, "EDITS", ())
    self.interface = self._interface(self._need("HOOKS", Mapping))
    self.regimes = {"Program": self.interface.names}
    evaluate: Callable[..., Any] = self._need("evaluate", types.FunctionType)
    self._accepts = set(inspect.signature(evaluate).parameters)

  def _load(self) -> Any:
    path = self.folder / EVALUATE
    spec = importlib.util.spec_from_file_location(f"_task_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

  def _need(self, name: str, kind: Any) -> Any:
    value = getattr(self.module, name, None)
    if not isinstance(value, kind) or not value:
      raise ValueError(
        f"{self.folder / EVALUATE}: expected {name}, a nonempty {kind.__name__}, got "
        f"{value!r}; see mxjax.discovery.tasks.two_files."
      )
    return value

  def _interface(self, hooks: Mapping[str, Any]) -> Interface:
    path = self.folder / INITIAL
    header, sources = _split(path.read_text(), list(hooks), path)
    made = []
    for name, what in hooks.items():
      try:
        arguments = {key: _tree(value) for key, value in what["arguments"].items()}
        outputs = tuple(Aval(dtype, tuple(shape)) for dtype, shape in what["outputs"])
      except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
          f"{self.folder / EVALUATE}: HOOKS[{name!r}] needs arguments, a dict of "
          f"(dtype, shape), and outputs, a list of them, got {what!r}; mend it."
        ) from error
      hook = {"arguments": arguments, "outputs": outputs, "default": sources[name]}
      batched = tuple(what.get("batched", ()))
      made.append(Hook(name=name, batched=batched, doc=what.get("doc", ""), **hook))
    plan = {key: tuple(value) for key, value in self._plan.items()}
    return Interface(
      hooks=tuple(made), plan=plan or {"unused": (False,)}, header=header
    )

  @property
  def _plan(self) -> Mapping[str, Sequence[Any]]:
    return getattr(self.module, "PLAN", {})

  @functools.cached_property
  def contract(self) -> Mapping[str, Any]:
    """Digests of both files."""
    files = {n: (self.folder / n).read_bytes() for n in (INITIAL, EVALUATE)}
    return {name: identity.digest(data) for name, data in files.items()}

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
    default = {self.target: (self.ideal(), *self.interface.names)}
    return [
      Residual(program, name, values[name], limit, tuple(hooks))
      for name, (limit, *hooks) in getattr(self.module, "RESIDUALS", default).items()
      if values[name] > limit
    ]

  def run(
    self, call: Call, artifacts: Artifacts, before: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Runs `evaluate` on the hooks of a call; see `Session.run`."""
    del before
    computation = dict(call.computation)
    if change := dict(call.intervention):
      hook, parent = change.get("hook"), change.get("parent")
      if change.get("kind") != REVERT or hook not in computation or not parent:
        raise ContractError(f"two files: unknown {change}; use {self.interventions}.")
      computation[hook] = parent["computation"][hook]
    get = lambda hook: artifacts.batched if hook.batched else artifacts.unit
    hooks = types.SimpleNamespace(
      **{
        hook.name: jax.jit(get(hook)(computation[hook.name]))
        for hook in self.interface.hooks
      }
    )
    offered = {"held_out": self._held_out, "plan": dict(call.plan)}
    options = {key: offered[key] for key in offered if key in self._accepts}
    values = self.module.evaluate(hooks, **options)
    if missing := sorted(set(self.margins) - set(values)):
      raise ContractError(
        f"evaluate: expected {', '.join(missing)}, got {set(values)}."
      )
    return {"values": {name: float(value) for name, value in values.items()}}, b""
