"""Regime audit: which stages of a quantizer a champion executes, by behaviour.

A stage counts when taking it back to the initial program changes what is executed;
whether it also pays is asked of the target. What the source says is not looked at.
"""

import itertools
import pathlib
from typing import Any

from mxjax.discovery.core.store import read_events
from mxjax.discovery.core.task import Outcome, Status
from mxjax.discovery.search import checkers
from mxjax.discovery.search.cached_evaluator import CachedEvaluator


def champion_source(folder: pathlib.Path) -> str:
  """Source of the last champion of a closed run."""
  last = [e for e in read_events(folder) if e["event"] == "program"][-1]
  return (folder / "programs" / f"{last['champion']}.py").read_text()


def audit(evaluator: CachedEvaluator, source: str) -> dict[str, Any]:
  """Takes each regime back, and builds the regimes up in order.

  Returns:
    For each regime `executed` and `pays`; `hierarchy`: all are executed; `ordered`:
    each one added to those before it improves the target by more than its margin.
  """
  task = evaluator.task
  regimes = list(task.regimes.items())
  champion = evaluator.prepare(source).full_call
  initial = evaluator.prepare(task.interface.default_source()).full_call
  without = [checkers.reverted(champion, initial, members) for _, members in regimes]
  first = [
    checkers.reverted(champion, initial, [m for _, later in regimes[n:] for m in later])
    for n in range(len(regimes))
  ]
  whole, *outcomes = evaluator.measure(champion, *without, *first)
  reverted, steps = outcomes[: len(regimes)], [*outcomes[len(regimes) :], whole]

  def pays(before: Outcome, after: Outcome) -> bool:
    """A condition that failed gains nothing."""
    if before.status != Status.OK or after.status != Status.OK:
      return False
    gain = before.values[task.target] - after.values[task.target]
    return bool(gain > task.margins[task.target])

  executed = {
    name: dict(outcome.outputs) != dict(whole.outputs)
    for (name, _), outcome in zip(regimes, reverted, strict=True)
  }
  return {
    "executed": executed,
    "pays": {
      name: pays(outcome, whole)
      for (name, _), outcome in zip(regimes, reverted, strict=True)
    },
    "hierarchy": all(executed.values()),
    "ordered": all(itertools.starmap(pays, itertools.pairwise(steps))),
  }
