"""Forty injected implementation cases: twenty real, twenty only apparent.

The label is known by construction. An apparent edit is a wrapper around a hook that
changes its text and not the function it computes, or an edit of another hook than the
declared one; a real edit replaces what a hook computes. Among the real ones are some
that the evaluator's data hardly exercise, among the apparent ones some that differ in
the last bit.
"""

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.discovery.core import identity
from mxjax.discovery.core.candidate_source import admit, with_functions
from mxjax.discovery.core.packet import condition
from mxjax.discovery.core.residual import PRIMARY
from mxjax.discovery.core.task import Status
from mxjax.discovery.sandbox.laboratory import Laboratory
from mxjax.discovery.search import checkers

HALF = 20
CHECKERS: tuple[checkers.Checker, ...] = ("source", "lowered", "probe", "layer_output")

# What a wrapper does to the first array of a hook; `x` is that array.
APPARENT: Mapping[str, str] = {
  "renamed": "x",
  "dead code": "x",
  "times one": "x * 1",
  "plus nothing": "x + 0 * jnp.sum(x)",
  "reversed twice": "x[::-1][::-1]",
  "rolled and back": "jnp.roll(jnp.roll(x, 3, 0), -3, 0)",
  "overwritten": "x",
  "branch never taken": "jnp.where(jnp.sum(x * x) < 0, -x, x)",
  "turned and back": "{turn}",
  "other hook": "x",
}
"""Ten wrappers; each is tried on two hooks."""
TURN = "(q.T @ (q @ x.astype(jnp.float32))).astype(x.dtype)"
RARE = "jnp.where(jnp.abs(x) > 1e6, 0.5 * x, x)"
"""Halves values that the data do not contain: a real edit that nothing exercises."""


@dataclasses.dataclass(frozen=True)
class Case:
  """One injected edit.

  Attributes:
    name: What it does.
    declared: Where the response is said to be.
    source: The edited program.
    is_real: Whether the declared computation is another function than before.
  """

  name: str
  declared: tuple[str, ...]
  source: str
  is_real: bool


def make(task: Any) -> list[Case]:
  """Forty cases on the task's initial program, half of them real."""
  source = task.interface.default_source()
  hooks = [h.name for h in task.interface.hooks if h.active_when is None]
  apparent = [
    _apparent(task, source, kind, hooks[index % len(hooks)], hooks)
    for round_ in range(HALF // len(APPARENT))
    for index, kind in enumerate(APPARENT, start=round_ * 3)
  ]
  rare = [
    Case(f"rare values, {hook}", (hook,), _wrapped(task, source, hook, RARE), True)
    for hook in hooks[:2]
  ]
  return [*_real(task, source, HALF - len(rare)), *rare, *apparent]


def _real(task: Any, source: str, count: int) -> list[Case]:
  """Edits by the task's cards in an order drawn once, the same for every checker."""
  options = [(card, params) for card in task.cards for params in card.params]
  before = admit(source, task.interface).hooks
  cases: list[Case] = []
  for card, params in identity.shuffled(options, "checker cases"):
    edited = card.edit(source, dict(params))
    after = admit(edited, task.interface).hooks
    # A card that only sets the plan leaves the declared hook as it was.
    if any(after[hook] != before[hook] for hook in card.hooks):
      cases.append(Case(card.label(params), card.hooks, edited, True))
  return cases[:count]


def _apparent(
  task: Any, source: str, kind: str, hook: str, hooks: Sequence[str]
) -> Case:
  act = APPARENT[kind].replace("{turn}", TURN)
  where = hook
  if kind == "other hook":
    # Really changed, but not where it is declared.
    where = hooks[(hooks.index(hook) + 1) % len(hooks)]
    act = "-x"
  edited = _wrapped(task, source, where, act, kind)
  return Case(f"{kind}, {hook}", (hook,), edited, False)


def _wrapped(task: Any, source: str, hook: str, act: str, kind: str = "") -> str:
  """The program with a hook that calls its former self on `act` of its first array."""
  first, *others = list(task.interface.hook(hook).arguments)
  names = ", ".join([first, *others])
  size = task.interface.hook(hook).arguments[first].shape[0]
  before = _renamed(source, hook, f"{hook}_before")
  lines = [f"def {hook}({names}):", f"  x = {first}"]
  if "q" in act and "turn" in kind:
    lines.append(f"  q = jnp.linalg.qr(jnp.cos(jnp.arange({size * size}.0)")
    lines[-1] += f".reshape({size}, {size})).astype(jnp.float32))[0]"
  if kind == "dead code":
    lines.append("  unused = jnp.tanh(x).sum()")
  if kind == "overwritten":
    lines.append(f"  result = {hook}_before({', '.join(['-x', *others])})")
  lines.append(f"  result = {hook}_before({', '.join([act, *others])})")
  lines.append("  return result")
  return with_functions(source, before + "\n" + "\n".join(lines) + "\n")


def _renamed(source: str, hook: str, name: str) -> str:
  for node in ast.parse(source).body:
    if isinstance(node, ast.FunctionDef) and node.name == hook:
      node.name = name
      return ast.unparse(node)
  raise ValueError(f"cases: the program does not define {hook}.")


def judge_all(lab: Laboratory) -> list[dict[str, Any]]:
  """Every case before every checker; calls are outside any budget.

  Returns:
    For each case its name, label, status, and what each checker accepted.
  """
  task = lab.task
  parent = lab.prepare(task.interface.default_source())
  assert parent.program is not None
  before = lab.full_call(parent)
  rows = []
  for case in make(task):
    prepared = lab.prepare(case.source)
    row: dict[str, Any] = {"name": case.name, "is_real": case.is_real}
    if prepared.program is None or prepared.call is None:
      raise ValueError(f"cases: {case.name} does not run: {prepared.detail}")
    mine = lab.full_call(prepared)
    outcome, without = lab.run(
      [
        condition(PRIMARY, "case", lab.effective(call), lab.evaluator)
        for call in (mine, checkers.reverted(mine, before, case.declared))
      ]
    )
    names = checkers.output_names(case.declared, outcome.outputs)
    checks = (
      checkers.by_source(prepared.program, parent.program, case.declared),
      checkers.by_lowering(mine, before, case.declared),
      checkers.by_probe(outcome, without, names),
      checkers.by_layer_output(outcome, without),
    )
    row["status"] = str(outcome.status)
    row["accepted"] = {check.checker: check.implemented for check in checks}
    rows.append(row)
  return rows


def errors(rows: Sequence[Mapping[str, Any]], checker: str) -> dict[str, int]:
  """False accepts and false rejects of a checker, with their denominators.

  Real cases whose evaluation failed are left out: no checker can see their effect.
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
