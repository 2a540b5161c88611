"""Numbers of study tables, computed from the summaries of runs."""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from mxjax.discovery.studies.arms import ARMS
from mxjax.evaluation.measures.statistics import compare_seeds

NONE = "---"
Column = Callable[[str], str]
"""Formats a table cell of an arm."""


def title(arm: str) -> str:
  """Returns an arm's name in tables."""
  return ARMS[arm].title


class Results:
  """The stored results of `study.conduct`, with the statistics that tables print.

  `arms` begins with the study's own; `seeds` are the paired seeds.
  """

  def __init__(self, values: Mapping[str, Any]) -> None:
    """Wraps the results of one study."""
    self.values = values
    self.arms: list[str] = list(values["runs"])
    self.seeds: list[int] = list(values["seeds"])

  def runs(self, arm: str) -> list[dict[str, Any]]:
    """Returns the summaries of an arm's runs, by seed."""
    return list(self.values["runs"][arm].values())

  def shown(self, value: float) -> float:
    """Converts a target to its printed form: log-perplexity to perplexity."""
    return math.exp(value) if self.values["target"] == "log_ppl" else value

  def finals(self, arm: str) -> list[float]:
    """Returns the held-out target at the last mark, by seed."""
    # By seed in one order for all arms, because differences are paired.
    return [self.shown(self._run(arm, s)["marks"][-1][2]) for s in self.seeds]

  def _run(self, arm: str, seed: int) -> dict[str, Any]:
    return self.values["runs"][arm][str(seed)]

  def _gate(self, seed: int, name: str = "gate") -> float:
    return self.values["landmarks"][str(seed)][name]

  def crossing(self, arm: str, seed: int) -> tuple[int, int] | None:
    """Returns generation and call of the first champion past the relative gate."""
    for call, _, hidden, generation in self._run(arm, seed)["marks"]:
      if hidden is not None and hidden <= self._gate(seed):
        return generation, call
    return None

  def median(self, arm: str) -> str:
    """Formats the median held-out target at the last mark."""
    return f"{statistics.median(self.finals(arm)):.3f}"

  def gate(self, arm: str) -> str:
    """Formats the seeds that end past the relative gate, and past an absolute one."""
    at = self.values.get("gate_at")
    names = ["gate", *(["absolute"] if at is not None else [])]
    final = {s: self._run(arm, s)["marks"][-1][2] for s in self.seeds}
    counts = [sum(final[s] <= self._gate(s, n) for s in self.seeds) for n in names]
    told = [f"{count}/{len(self.seeds)}" for count in counts]
    return told[0] if at is None else f"{told[0]}, {told[1]} at {at:g}"

  def generation(self, arm: str) -> str:
    """Formats the median generation index among seeds that cross the gate."""
    return self._median_crossing(arm, 0)

  def confirmation(self, arm: str) -> str:
    """Formats the median confirmation call among seeds that cross the gate."""
    return self._median_crossing(arm, 1)

  def _median_crossing(self, arm: str, place: int) -> str:
    calls = [c[place] for s in self.seeds if (c := self.crossing(arm, s))]
    return f"{statistics.median(calls):g}" if calls else NONE

  def mean(self, arm: str, read: Callable[[dict[str, Any]], float]) -> float:
    """Averages what `read` returns for an arm's summaries."""
    return statistics.fmean(map(read, self.runs(arm)))

  def calls(self, kind: str) -> Column:
    """Returns a column with the mean number of calls of a kind."""
    return lambda arm: f"{self.mean(arm, lambda run: run['ledger'][kind]):.0f}"

  def invalid_successors(self, arm: str) -> str:
    """Formats the share of followed demands that the successor did not implement."""
    followed, effective = (
      sum(run[key] for run in self.runs(arm)) for key in ("followed", "effective")
    )
    return f"{1 - effective / followed:.2f}" if followed else NONE

  def effective_verdicts(self, arm: str) -> str:
    """Formats mean and spread over seeds of verdicts whose demand was implemented."""
    counts = [run["effective"] for run in self.runs(arm)]
    if len(counts) == 1:
      return f"{counts[0]}"
    return f"{statistics.fmean(counts):.1f} ± {statistics.stdev(counts):.1f}"

  def difference(self, first: str, second: str) -> str:
    """Describes the paired difference of two arms; an interval needs two seeds."""
    pair = f"{title(first)} minus {title(second)}"
    if len(self.seeds) < 2:
      (one,), (other,) = self.finals(first), self.finals(second)
      return f"{pair}: {one - other:+.4f} in one seed."
    compared = compare_seeds(self.finals(first), self.finals(second))
    (low, high), exact = compared.t_interval, compared.exact_interval
    return (
      f"{pair}: mean {compared.mean:+.4f}, SD {compared.deviation:.4f}, 95 % t "
      f"interval [{low:+.4f}, {high:+.4f}], signed-rank interval [{exact[0]:+.4f}, "
      f"{exact[1]:+.4f}] (coverage {compared.exact_coverage:.3f}), sign-flip p "
      f"{compared.sign_flip_p:.3f}; lower in {compared.wins}, higher in "
      f"{compared.losses} of {len(compared.differences)} seeds."
    )
