"""The anytime figure of a study, beside the paper's medians."""

import statistics
from collections.abc import Mapping
from typing import Any

from mxjax.discovery.studies.results import Results, title
from mxjax.discovery.studies.tables import PAPER
from mxjax.evaluation.report import html, svg

AXIS = "evaluator calls"


def anytime(values: Mapping[str, Any]) -> str:
  """Draws held-out targets over the budget, as a page of its own.

  Lines are medians over seeds, and bands reach from the best to the worst seed.

  Paper: Figure errata-anytime and Table anytime-values.

  Args:
    values: Results of `study.conduct`, of a study that compares arms.
  """
  results = Results(values)
  ours = [_series(results, arm, color) for color, arm in enumerate(results.arms)]
  head, *rows = PAPER["anytime_values"]
  calls = list(map(float, head[1:]))
  theirs = [
    svg.Series(arm, list(zip(calls, map(float, cells), strict=True)), color)
    for color, (arm, *cells) in enumerate(rows)
  ]
  note = "Median of the champions' held-out target; lower is better. Band: all seeds."
  figures = [
    html.lines(f"Here, {len(results.seeds)} seeds", ours, note, x_label=AXIS),
    html.lines(
      "The paper's medians",
      theirs,
      "Llama-3.1-8B, WikiText-2 perplexity; the dashed line is the target of 8.0.",
      x_label=AXIS,
      reference=(8.0, "8.0"),
    ),
  ]
  return html.document("Held-out target over the budget", html.grid(figures))


def _series(results: Results, arm: str, color: int) -> svg.Series:
  by_call: dict[int, list[float]] = {}
  for run in results.runs(arm):
    for call, _, hidden, _ in run["marks"]:
      if hidden is not None:
        by_call.setdefault(call, []).append(results.shown(hidden))
  points = [(float(c), statistics.median(v)) for c, v in sorted(by_call.items())]
  band = [(float(c), min(v), max(v)) for c, v in sorted(by_call.items())]
  return svg.Series(title(arm), points, color, band)
