"""Forty injected implementation cases: twenty real edits and twenty apparent ones.

The label is known by construction. An apparent edit either wraps a hook so that its
text changes but not the function it computes, or changes another hook than the one
demanded; a real edit changes what that hook computes. Some real edits are hardly
exercised by the evaluator's data, and some apparent edits differ in the last bit.
"""

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.discovery.core import identity
from mxjax.discovery.core.candidate_source import admit, with_functions
from mxjax.discovery.core.interface import Aval
from mxjax.discovery.core.task import Status, Task
from mxjax.discovery.search import checkers
from mxjax.discovery.search.cached_evaluator import CachedEvaluator, Prepared
from mxjax.errors import ValueRefusal

HALF = 20
CHECKERS: tuple[checkers.Checker, ...] = ("source", "lowered", "probe", "layer_output")

# Expressions that a wrapper applies to the first array of a hook, `x`.
APPARENT: Mapping[str, str] = {
  "renamed": "x",
  "dead code": "x",
  "times one": "x * 1",
  "plus nothing": "x + 0 * jnp.sum(x)",
  "reversed twice": "x[::-1][::-1]",
  "rolled and back": "jnp.roll(jnp.roll(x, 3, 0), -3, 0)",
  "overwritten": "x",
  "branch never taken": "jnp.where(jnp.sum(x * x) < 0, -x, x)",
  "turned and back": "(q.T @ (q @ x.astype(jnp.float32))).astype(x.dtype)",
  "other hook": "x",
}
"""Ten wrappers, each tried on two hooks."""
RARE = "jnp.where(jnp.abs(x) > 1e6, 0.5 * x, x)"
"""Halves values that do not occur in the data: a real edit that nothing exercises."""


@dataclasses.dataclass(frozen=True)
class Case:
  """One injected edit: its description, the hooks that a demand names and the program.

  `is_real` tells whether these hooks compute another function than before.
  """

  name: str
  computation: tuple[str, ...]
  source: str
  is_real: bool


def make(task: Task) -> list[Case]:
  """Builds forty cases on the task's initial program, half of them real."""
  source = task.interface.default_source()
  plan = task.interface.default_plan
  hooks = [h.name for h in task.interface.hooks if h.is_active(plan)]
  apparent = [
    _apparent(task, source, kind, hooks[index % len(hooks)], hooks)
    for round_ in range(HALF // len(APPARENT))
    # Shifted by three, so that the second round meets other hooks than the first.
    for index, kind in enumerate(APPARENT, start=round_ * 3)
  ]
  rare = [
    Case(f"rare values, {hook}", (hook,), _wrapped(task, source, hook, RARE), True)
    for hook in hooks[:2]
  ]
  return [*_real(task, source, HALF - len(rare)), *rare, *apparent]


def _real(task: Task, source: str, count: int) -> list[Case]:
  """Applies the task's own edits in one fixed random order for every checker."""
  options = [(edit, params) for edit in task.edit_templates for params in edit.params]
  before = admit(source, task.interface).hooks
  cases: list[Case] = []
  for template, params in identity.shuffled(options, "checker cases"):
    edited = template.edit(source, dict(params))
    after = admit(edited, task.interface).hooks
    # Edits that only change the plan leave those hooks unchanged.
    if any(after[hook] != before[hook] for hook in template.hooks):
      cases.append(Case(template.label(params), template.hooks, edited, True))
  return cases[:count]


def _apparent(
  task: Task, source: str, kind: str, hook: str, hooks: Sequence[str]
) -> Case:
  where, act = hook, APPARENT[kind]
  if kind == "other hook":
    # A real change, but in another hook than the demanded one.
    where, act = hooks[(hooks.index(hook) + 1) % len(hooks)], "-x"
  edited = _wrapped(task, source, where, act, kind)
  return Case(f"{kind}, {hook}", (hook,), edited, False)


def _wrapped(task: Task, source: str, hook: str, act: str, kind: str = "") -> str:
  """Replaces a hook by one that calls the original on `act` of its first array."""
  (first, array), *others = task.interface.hook(hook).arguments.items()
  names = [name for name, _ in others]
  before = lambda value: f"{hook}_before({', '.join([value, *names])})"
  lines = [f"def {hook}({', '.join([first, *names])}):", f"  x = {first}"]
  if kind == "turned and back":
    assert isinstance(array, Aval)
    # An orthogonal matrix and its transpose cancel but for rounding: the text and the
    # lowered program differ, the function hardly.
    size = array.shape[0]
    lines.append(
      f"  q = jnp.linalg.qr(jnp.cos(jnp.arange({size * size}.0).reshape({size}, {size}"
      ")).astype(jnp.float32))[0]"
    )
  if kind == "dead code":
    lines.append("  unused = jnp.tanh(x).sum()")
  if kind == "overwritten":
    lines.append(f"  result = {before('-x')}")
  lines += [f"  result = {before(act)}", "  return result"]
  former = _renamed(source, hook, f"{hook}_before")
  return with_functions(source, former + "\n" + "\n".join(lines) + "\n")


def _renamed(source: str, hook: str, name: str) -> str:
  for node in ast.parse(source).body:
    if isinstance(node, ast.FunctionDef) and node.name == hook:
      node.name = name
      return ast.unparse(node)
  raise ValueRefusal(
    "cases",
    expected=f"a program that defines {hook}",
    got="none",
    mend="write the hook into the program",
  )


def judge_all(evaluator: CachedEvaluator) -> list[dict[str, Any]]:
  """Runs every checker on every case; its calls are outside any budget.

  Returns each case's name, label, status, and what each checker accepted.
  """
  parent = evaluator.prepare(evaluator.task.interface.default_source())
  return [_judge(evaluator, case, parent) for case in make(evaluator.task)]


def _judge(evaluator: CachedEvaluator, case: Case, parent: Prepared) -> dict[str, Any]:
  prepared = evaluator.prepare(case.source)
  if prepared.admitted is None or prepared.call is None:
    raise ValueRefusal(
      "cases",
      expected=f"a program of {case.name} that runs",
      got=f"{prepared.status}: {prepared.detail}",
      mend="mend the case",
    )
  assert parent.admitted is not None
  mine, before = prepared.full_call, parent.full_call
  margins = evaluator.task.margins
  back = checkers.reverted(mine, before, case.computation)
  outcome, without = evaluator.measure(mine, back)
  checks = (
    checkers.by_source(prepared.admitted, parent.admitted, case.computation),
    checkers.by_lowering(mine, before, case.computation),
    checkers.by_probe(outcome, without.values, [*margins], margins),
    checkers.by_layer_output(outcome, without),
  )
  return {
    "name": case.name,
    "is_real": case.is_real,
    "status": str(outcome.status),
    "accepted": {check.checker: check.implemented for check in checks},
  }


def errors(rows: Sequence[Mapping[str, Any]], checker: str) -> dict[str, int]:
  """Counts false accepts and false rejects of a checker, with their denominators.

  Cases whose evaluation failed are left out, because no checker can see their effect.
  """
  ran = [row for row in rows if row["status"] == Status.OK]
  real = [row for row in ran if row["is_real"]]
  apparent = [row for row in ran if not row["is_real"]]
  return {
    "false_accepts": sum(row["accepted"][checker] for row in apparent),
    "apparent": len(apparent),
    "false_rejects": sum(not row["accepted"][checker] for row in real),
    "real": len(real),
  }
