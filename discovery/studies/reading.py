"""What study tables are made of: one table, and the numbers read off summaries."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.discovery.studies import paired
from mxjax.discovery.studies.arms import ARMS
from mxjax.discovery.studies.paper_numbers import PAPER
from mxjax.evaluation.report.tables import markdown_rows

Results = Mapping[str, Any]
NONE = "---"


@dataclasses.dataclass(frozen=True)
class Table:
  """One table.

  Attributes:
    title: What it shows.
    header: Column names.
    rows: Cells as printed.
    paper: Rows of the paper's table, with a header of their own, or empty.
    notes: Sentences below it.
  """

  title: str
  header: tuple[str, ...]
  rows: tuple[tuple[str, ...], ...]
  paper: tuple[tuple[str, ...], ...] = ()
  notes: tuple[str, ...] = ()

  def markdown(self) -> str:
    """The table, then the paper's, then the notes."""
    parts = [f"**{self.title}**", markdown_rows(self.header, self.rows)]
    if self.paper:
      parts += ["The paper's, with a language model on Qwen3-4B and Llama-3.1-8B:"]
      parts += [markdown_rows(self.paper[0], self.paper[1:])]
    return "\n\n".join([*parts, *self.notes])


def shown(results: Results, value: float) -> float:
  """A target as it is printed: perplexity for its logarithm."""
  return math.exp(value) if results["target"] == "log_ppl" else value


def finals(results: Results, arm: str) -> list[float]:
  """Held-out target at the last mark, by seed."""
  runs = results["runs"][arm]
  return [shown(results, runs[str(s)]["marks"][-1][2]) for s in results["seeds"]]


def crossing(results: Results, arm: str, seed: int) -> tuple[int, int] | None:
  """Generation index and confirmation call of the first champion past the gate."""
  gate = results["landmarks"][str(seed)]["gate"]
  for call, _, hidden, found in results["runs"][arm][str(seed)]["marks"]:
    if hidden is not None and hidden <= gate:
      return found, call
  return None


def gate(results: Results, arm: str) -> str:
  """How many seeds end past the gate."""
  passed = sum(_passes(results, arm, seed) for seed in results["seeds"])
  return f"{passed}/{len(results['seeds'])}"


def _passes(results: Results, arm: str, seed: int) -> bool:
  final = results["runs"][arm][str(seed)]["marks"][-1][2]
  return final <= results["landmarks"][str(seed)]["gate"]


def generation(results: Results, arm: str, place: int) -> str:
  """Median generation index (0) or confirmation call (1) among crossing seeds."""
  found = [c[place] for s in results["seeds"] if (c := crossing(results, arm, s))]
  return f"{statistics.median(found):g}" if found else NONE


def mean(results: Results, arm: str, read: Any) -> float:
  """Mean of what `read` finds in an arm's summaries."""
  return statistics.fmean(read(r) for r in results["runs"][arm].values())


def ledger(results: Results, arm: str, kind: str) -> str:
  """Mean calls of a kind."""
  return f"{mean(results, arm, lambda r: r['ledger'][kind]):.0f}"


def median(results: Results, arm: str) -> str:
  """Median held-out target at the last mark."""
  return f"{statistics.median(finals(results, arm)):.3f}"


def title(arm: str) -> str:
  """An arm's name in tables."""
  return ARMS[arm].title


def difference(results: Results, first: str, second: str) -> str:
  """One sentence about two arms over paired seeds; an interval needs two seeds."""
  if len(results["seeds"]) < 2:
    (one,), (other,) = finals(results, first), finals(results, second)
    return f"{title(first)} minus {title(second)}: {one - other:+.4f} in one seed."
  found = paired.compare(finals(results, first), finals(results, second))
  low, high = found.t_interval
  exact = found.exact_interval
  return (
    f"{title(first)} minus {title(second)}: mean {found.mean:+.4f}, SD "
    f"{found.deviation:.4f}, 95 % t interval [{low:+.4f}, {high:+.4f}], signed-rank "
    f"interval [{exact[0]:+.4f}, {exact[1]:+.4f}] (coverage "
    f"{found.exact_coverage:.3f}), sign-flip p {found.sign_flip_p:.3f}; lower in "
    f"{found.wins}, higher in {found.losses} of {len(found.differences)} seeds."
  )


def by_seed(results: Results, paper: str, others: Sequence[str]) -> Table:
  """Held-out target by seed, one row an arm, QuantForge compared with `others`."""
  values = {arm: finals(results, arm) for arm in results["runs"]}
  return Table(
    "Held-out target by seed",
    ("Arm / seed", *map(str, results["seeds"])),
    tuple((title(arm), *(f"{v:.3f}" for v in row)) for arm, row in values.items()),
    PAPER[paper],
    tuple(difference(results, "quantforge", other) for other in others),
  )
