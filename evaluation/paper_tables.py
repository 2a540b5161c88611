"""Builds the paper's tables from whatever results exist; missing cells stay empty."""

import itertools
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mxjax.evaluation.measures import fitness
from mxjax.evaluation.measures.statistics import paired_interval
from mxjax.evaluation.report import svg, tables
from mxjax.evaluation.report.html import document, figure
from mxjax.evaluation.report.tables import Table
from mxjax.evaluation.results import FLOAT, Result, references
from mxjax.storage import atomic_io

HEADINGS = {
  "wikitext2": "WT2↓",
  "c4": "C4↓",
  "arc_challenge": "ARC-C↑",
  "arc_easy": "ARC-E↑",
  "hellaswag": "HS↑",
  "piqa": "PIQA↑",
  "winogrande": "Wino↑",
}
"""Column heads of the tasks, as the paper prints them."""
Against = Mapping[str, fitness.Scores]
"""Scores of the float model, by the model's name."""


def _or_none(summary: Callable[..., Any], *scores: fitness.Scores) -> Any:
  """Computes a summary, or returns None if a result is missing."""
  try:
    return summary(*scores)
  except ValueError:
    return None


def _cell(value: float | None, form: str) -> str:
  return "" if value is None else format(value, form)


def _fit7(result: Result, against: Against) -> float | None:
  return _or_none(fitness.fit7, result.scores, against.get(result.model, {}))


def _cells(result: Result) -> list[str]:
  cells: dict[str, str] = dict.fromkeys(fitness.TASKS, "")
  for task, score in result.scores.items():
    is_perplexity = task in fitness.PERPLEXITIES
    cells[task] = f"{score:.3f}" if is_perplexity else f"{100 * score:.2f}"
  return list(cells.values())


def _by_seed(results: Iterable[Result]) -> list[Result]:
  return sorted(results, key=lambda r: -1 if r.seed is None else r.seed)


def _first_seed(results: Sequence[Result]) -> list[Result]:
  """Keeps one result per model and method: that of the smallest seed."""
  first: dict[tuple[str, str], Result] = {}
  for result in _by_seed(results):
    first.setdefault((result.model, result.method), result)
  return [r for r in results if first[r.model, r.method] is r]


def _models(results: Iterable[Result]) -> list[str]:
  return list(dict.fromkeys(result.model for result in results))


def _complete(results: Sequence[Result], against: Against, model: str) -> Table:
  """Builds the table of all tasks and Fit-7 of one model, one row per method."""
  rows, notes = [], []
  for result in _first_seed([r for r in results if r.model == model]):
    fit = _cell(_fit7(result, against), ".4f")
    rows.append([result.method, *_cells(result), fit])
    notes += [f"{t}: first {n} of {of}" for t, (n, of) in result.partial.items()]
  head = ["Method", *HEADINGS.values(), "Fit-7↓"]
  partial = "; ".join(dict.fromkeys(notes))
  note = f"Part of the official set: {partial}." if partial else ""
  return Table(f"Complete results on {model}", head, rows, note)


def _cross_model(results: Sequence[Result], against: Against) -> Table:
  """Builds the table of Fit-7 by method and model, with its mean and Robust Fit."""
  models = _models(results)
  fits: dict[str, dict[str, float | None]] = {}
  for result in _first_seed(results):
    if result.method != FLOAT:
      fits.setdefault(result.method, {})[result.model] = _fit7(result, against)
  rows = []
  for method, by_model in fits.items():
    values = [by_model.get(model) for model in models]
    known = [value for value in values if value is not None]
    is_complete = len(known) == len(models)
    summaries = (np.mean(known), fitness.robust_fit(known)) if is_complete else ()
    cells = [f"{value:.5f}" for value in summaries] or ["", ""]
    rows.append([method, *(_cell(value, ".4f") for value in values), *cells])
  return Table("Fit-7 across models", ["Method", *models, "Mean↓", "Robust↓"], rows)


def _seeds(results: Sequence[Result], against: Against) -> Table:
  """Builds the table of calibration seeds, for methods that have several."""
  rows = []
  for model, method in dict.fromkeys((r.model, r.method) for r in results):
    group = [r for r in results if (r.model, r.method) == (model, method)]
    for result in _by_seed(group) if len(group) > 1 else ():
      fit = _cell(_fit7(result, against), ".6f")
      rows.append([model, method, str(result.seed), *_cells(result), fit])
  head = ["Model", "Method", "Seed", *HEADINGS.values(), "Fit-7↓"]
  return Table("Calibration seeds", head, rows)


def _paired(results: Sequence[Result], against: Against) -> Table:
  """Builds the table of paired Fit-7 differences over seeds shared by two methods."""
  fits: dict[tuple[str, str], dict[int, float]] = {}
  for result in results:
    fit = _fit7(result, against)
    if result.seed is not None and result.method != FLOAT and fit is not None:
      fits.setdefault((result.model, result.method), {})[result.seed] = fit
  rows = []
  for ((model, first), ours), ((other_model, second), theirs) in itertools.permutations(
    fits.items(), 2
  ):
    shared = sorted(ours.keys() & theirs.keys())
    if other_model != model or len(shared) < 2:
      continue
    interval = paired_interval([ours[s] for s in shared], [theirs[s] for s in shared])
    # Each pair appears once, as the difference that favors its first method.
    if interval.mean < 0 or (interval.mean == 0 and first < second):
      seeds = ", ".join(map(str, shared))
      ends = f"[{interval.low:.6f}, {interval.high:.6f}]"
      rows.append([model, f"{first} − {second}", seeds, f"{interval.mean:.6f}", ends])
  head = ["Model", "Difference", "Seeds", "Mean↓", "95% CI"]
  return Table("Paired differences of Fit-7", head, rows)


def _aggregates(results: Sequence[Result], against: Against) -> Table:
  """Builds the table of Fit-7, Fit-3, MeanDamage, Acc5 and worst task, by method."""
  rows = []
  for result in _first_seed(results):
    pair = result.scores, against.get(result.model, {})
    summaries = (fitness.fit7, fitness.fit3, fitness.mean_damage)
    row = [result.model, result.method]
    row += [_cell(_or_none(summary, *pair), ".6f") for summary in summaries]
    row.append(_cell(_or_none(fitness.acc5, result.scores), ".4f"))
    worst = None if result.method == FLOAT else _or_none(fitness.worst_damage, *pair)
    rows.append([*row, f"{worst[0]} {worst[1]:.5f}" if worst else ""])
  head = ["Model", "Method", "Fit-7↓", "Fit-3↓", "MeanDamage↓", "Acc5 (%)↑", "Worst"]
  return Table("Alternative aggregates", head, rows)


def build(results: Sequence[Result]) -> list[Table]:
  """Builds all tables that have at least one row."""
  against = {model: exact.scores for model, exact in references(results).items()}
  built = [_complete(results, against, model) for model in _models(results)]
  built += [
    table(results, against) for table in (_cross_model, _seeds, _paired, _aggregates)
  ]
  return [table for table in built if table.rows]


def damage_chart(results: Sequence[Result], model: str) -> str:
  """Draws damage by task and method of one model; empty without a float reference."""
  reference = references(results).get(model)
  shown = [r for r in _first_seed(results) if r.model == model and r.method != FLOAT]
  bars: list[tuple[str, list[svg.Part]]] = []
  for task in fitness.TASKS:
    if reference is None or task not in reference.scores:
      continue
    exact = reference.scores[task]
    measured = [r for r in shown if task in r.scores]
    bars += [(HEADINGS[task][:-1], [])] if measured else []
    for result in measured:
      value = 100 * fitness.damage(task, result.scores[task], exact)
      bars.append((result.method, [svg.Part(task, value, shown.index(result))]))
  if not bars:
    return ""
  return figure(
    f"Damage on {model}, percent",
    svg.rows(bars, label=f"damage on {model}"),
    note="Against the float model; lower is better, a gain is drawn as nothing.",
  )


def page(built: Sequence[Table], results: Sequence[Result]) -> str:
  """Renders tables and charts as one self-contained HTML document."""
  charts = [damage_chart(results, model) for model in _models(results)]
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
