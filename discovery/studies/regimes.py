"""Regime audit: which stages of a quantizer a champion uses, judged by behavior.

A stage is executed if reverting it to the initial program changes executed outputs; it
pays if that worsens the target by more than its margin. Source text is not examined.
"""

import itertools
import pathlib
from typing import Any

from mxjax.discovery.core.store import read_events
from mxjax.discovery.core.task import Outcome, Status
from mxjax.discovery.search import checkers
from mxjax.discovery.search.cached_evaluator import CachedEvaluator


def champion_source(folder: pathlib.Path) -> str:
  """Returns the source of the last champion of a closed run."""
  last = [e for e in read_events(folder) if e["event"] == "program"][-1]
  return (folder / "programs" / f"{last['champion']}.py").read_text()


def audit(evaluator: CachedEvaluator, source: str) -> dict[str, Any]:
  """Reverts each regime of a champion, and adds the regimes one by one in order.

  Returns:
    `executed` and `pays` by regime; `hierarchy`: all are executed; `ordered`: each
    regime added to the earlier ones improves the target by more than its margin.
  """
  task = evaluator.task
  regimes = list(task.regimes.items())
  champion = evaluator.prepare(source).full_call
  initial = evaluator.prepare(task.interface.default_source()).full_call
  without = [checkers.reverted(champion, initial, members) for _, members in regimes]
  # The champion with the first n regimes alone: the later ones are as in the initial
  # program.
  first = [
    checkers.reverted(champion, initial, [m for _, later in regimes[n:] for m in later])
    for n in range(len(regimes))
  ]
  whole, *outcomes = evaluator.measure(champion, *without, *first)
  reverted, steps = outcomes[: len(regimes)], [*outcomes[len(regimes) :], whole]

  def pays(before: Outcome, after: Outcome) -> bool:
    """Tells whether the target improves by more than its margin."""
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
