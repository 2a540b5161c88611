"""Regime audit: which stages of a quantizer a champion executes, by behaviour.

A stage counts when taking it back to the initial program changes what is executed;
whether it also pays is asked of the target. What the source says is not looked at.
"""

import pathlib
from typing import Any

from mxjax.discovery.core.packet import condition
from mxjax.discovery.core.residual import PRIMARY
from mxjax.discovery.core.store import read_events
from mxjax.discovery.core.task import Call, Outcome, Status
from mxjax.discovery.sandbox.laboratory import Laboratory
from mxjax.discovery.search import checkers


def champion_source(folder: pathlib.Path) -> str:
  """Source of the last champion of a closed run."""
  last = [e for e in read_events(folder) if e["event"] == "program"][-1]
  return (folder / "programs" / f"{last['champion']}.py").read_text()


def audit(lab: Laboratory, source: str) -> dict[str, Any]:
  """Takes each regime back, and builds the regimes up in order.

  Returns:
    For each regime `executed` and `pays`; `hierarchy`: all are executed; `ordered`:
    each one added to those before it improves the target by more than its margin.
  """
  task = lab.task
  champion = lab.full_call(lab.prepare(source))
  initial = lab.full_call(lab.prepare(task.interface.default_source()))
  regimes, margin = task.regimes, task.margins[task.target]
  calls = {"": champion}
  for name, members in regimes.items():
    calls[name] = checkers.reverted(champion, initial, members)
  names = list(regimes)
  for count in range(len(names)):
    later = [member for name in names[count:] for member in regimes[name]]
    calls[f"first {count}"] = checkers.reverted(champion, initial, later)
  outcomes = _run(lab, calls)
  whole = outcomes[""]
  executed = {n: _differs(outcomes[n], whole) for n in names}
  pays = {n: bool(_gain(outcomes[n], whole, task.target) > margin) for n in names}
  steps = [outcomes[f"first {count}"] for count in range(len(names))] + [whole]
  gains = [
    _gain(before, after, task.target)
    for before, after in zip(steps, steps[1:], strict=False)
  ]
  return {
    "executed": executed,
    "pays": pays,
    "hierarchy": all(executed.values()),
    "ordered": all(bool(gain > margin) for gain in gains),
  }


def _run(lab: Laboratory, calls: dict[str, Call]) -> dict[str, Outcome]:
  conditions = [
    condition(PRIMARY, "audit", lab.effective(call), lab.evaluator)
    for call in calls.values()
  ]
  return dict(zip(calls, lab.run(conditions), strict=True))


def _differs(without: Outcome, whole: Outcome) -> bool:
  return dict(without.outputs) != dict(whole.outputs)


def _gain(before: Outcome, after: Outcome, target: str) -> float:
  """How much lower the target is after; nothing for a condition that failed."""
  if before.status != Status.OK or after.status != Status.OK:
    return 0.0
  return before.values[target] - after.values[target]
