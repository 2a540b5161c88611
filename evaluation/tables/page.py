"""Writes tables as Markdown, CSV and one HTML page with charts."""

import pathlib
from collections.abc import Sequence

from mxjax.evaluation.measures import fitness
from mxjax.evaluation.report import svg, tables
from mxjax.evaluation.report.html import document, figure
from mxjax.evaluation.report.tables import Table
from mxjax.evaluation.results import FLOAT, Result, references
from mxjax.evaluation.tables.quantities import QUANTITIES
from mxjax.storage import atomic_io


def damage_chart(results: Sequence[Result], model: str) -> str:
  """Draws damage by task and method of one model; empty without a float reference."""
  reference = references(results).get(model)
  first: dict[str, Result] = {}
  # One draw of each method is drawn, that of the smallest seed.
  for result in sorted(results, key=lambda r: -1 if r.seed is None else r.seed):
    if result.model == model and result.method != FLOAT:
      first.setdefault(result.method, result)
  shown = list(first.values())
  bars: list[tuple[str, list[svg.Part]]] = []
  for task in fitness.TASKS:
    if reference is None or task not in reference.scores:
      continue
    exact = reference.scores[task]
    measured = [r for r in shown if task in r.scores]
    bars += [(QUANTITIES[task].head.rstrip("↓↑"), [])] if measured else []
    for result in measured:
      value = 100 * fitness.damage(task, result.scores[task], exact)
      color = shown.index(result) % svg.COLORS
      bars.append((result.method, [svg.Part(task, value, color)]))
  if not bars:
    return ""
  return figure(
    f"Damage on {model}, percent",
    svg.rows(bars, label=f"damage on {model}"),
    note="Against the float model; lower is better, a gain is drawn as nothing.",
  )


def page(built: Sequence[Table], results: Sequence[Result]) -> str:
  """Renders tables and charts as one self-contained HTML document."""
  models = dict.fromkeys(result.model for result in results)
  charts = [damage_chart(results, model) for model in models]
  parts = ["<header><h1>Results</h1></header>", *charts, *(t.html() for t in built)]
  return document("mxjax tables", "".join(parts))


def write(
  folder: pathlib.Path, built: Sequence[Table], results: Sequence[Result]
) -> list[pathlib.Path]:
  """Writes tables.md, tables.csv and tables.html; returns their paths."""
  folder.mkdir(parents=True, exist_ok=True)
  content = {
    "tables.md": tables.markdown(built),
    "tables.csv": tables.comma_separated(built),
    "tables.html": page(built, results),
  }
  for name, text in content.items():
    atomic_io.write_durably(folder / name, text.encode())
  return [folder / name for name in content]
