"""Builds the paper's tables from whatever results exist; missing cells stay empty."""

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from mxjax.evaluation.measures import fitness
from mxjax.evaluation.measures.statistics import paired_interval
from mxjax.evaluation.report import svg, tables
from mxjax.evaluation.report.html import WIDE, document, figure, legend
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


def _or_empty(compute: Callable[[], float], form: str) -> str:
  """Formats a summary, or returns "" if a result is missing."""
  try:
    return format(compute(), form)
  except ValueError:
    return ""


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


def _fit7(result: Result, floats: Mapping[str, Result]) -> float:
  """Computes Fit-7 of a result, 0 for the float model; raises if a score is missing."""
  if result.model not in floats:
    raise ValueError(f"tables: no {FLOAT} result of {result.model}.")
  return fitness.fit7(result.scores, floats[result.model].scores)


def complete(results: Sequence[Result], model: str) -> Table:
  """Builds the table of all tasks and Fit-7 of one model, one row per method."""
  floats = references(results)
  rows, notes = [], []
  for result in _first_seed([r for r in results if r.model == model]):
    fit = _or_empty(lambda result=result: _fit7(result, floats), ".4f")
    rows.append([result.method, *_cells(result), fit])
    notes += [f"{t}: first {n} of {of}" for t, (n, of) in result.partial.items()]
  head = ["Method", *HEADINGS.values(), "Fit-7↓"]
  partial = "; ".join(dict.fromkeys(notes))
  note = f"Part of the official set: {partial}." if partial else ""
  return Table(f"Complete results on {model}", head, rows, note)


def cross_model(results: Sequence[Result]) -> Table:
  """Builds the table of Fit-7 by method and model, with its mean and Robust Fit."""
  floats = references(results)
  models = _models(results)
  fits: dict[str, dict[str, float]] = {}
  for result in _first_seed(results):
    if result.method == FLOAT:
      continue
    by_model = fits.setdefault(result.method, {})
    try:
      by_model[result.model] = _fit7(result, floats)
    except ValueError:
      continue
  rows = []
  for method, by_model in fits.items():
    row = [method, *(f"{by_model[m]:.4f}" if m in by_model else "" for m in models)]
    if len(by_model) == len(models):
      values = [by_model[model] for model in models]
      row += [f"{np.mean(values):.5f}", f"{fitness.robust_fit(values):.5f}"]
    else:
      row += ["", ""]
    rows.append(row)
  return Table("Fit-7 across models", ["Method", *models, "Mean↓", "Robust↓"], rows)


def seeds(results: Sequence[Result]) -> Table:
  """Builds the table of calibration seeds, for methods that have several."""
  floats = references(results)
  rows = []
  for model, method in dict.fromkeys((r.model, r.method) for r in results):
    group = [r for r in results if (r.model, r.method) == (model, method)]
    for result in _by_seed(group) if len(group) > 1 else ():
      fit = _or_empty(lambda result=result: _fit7(result, floats), ".6f")
      rows.append([model, method, str(result.seed), *_cells(result), fit])
  head = ["Model", "Method", "Seed", *HEADINGS.values(), "Fit-7↓"]
  return Table("Calibration seeds", head, rows)


def paired(results: Sequence[Result]) -> Table:
  """Builds the table of paired Fit-7 differences over seeds shared by two methods."""
  floats = references(results)
  fits: dict[tuple[str, str], dict[int, float]] = {}
  for result in results:
    if result.seed is None or result.method == FLOAT:
      continue
    try:
      fit = _fit7(result, floats)
    except ValueError:
      continue
    fits.setdefault((result.model, result.method), {})[result.seed] = fit
  rows = []
  for (model, first), ours in fits.items():
    for (other_model, second), theirs in fits.items():
      shared = sorted(ours.keys() & theirs.keys())
      if other_model != model or first == second or len(shared) < 2:
        continue
      interval = paired_interval([ours[s] for s in shared], [theirs[s] for s in shared])
      # Each pair appears once, as the difference that favors its first method.
      if interval.mean < 0 or (interval.mean == 0 and first < second):
        rows.append(
          [
            model,
            f"{first} − {second}",
            ", ".join(map(str, shared)),
            f"{interval.mean:.6f}",
            f"[{interval.low:.6f}, {interval.high:.6f}]",
          ]
        )
  head = ["Model", "Difference", "Seeds", "Mean↓", "95% CI"]
  return Table("Paired differences of Fit-7", head, rows)


def aggregates(results: Sequence[Result]) -> Table:
  """Builds the table of Fit-7, Fit-3, MeanDamage, Acc5 and worst task.

  It has one row per model and method.
  """
  floats = references(results)
  rows = []
  for result in _first_seed(results):
    scores = result.scores
    against = floats[result.model].scores if result.model in floats else {}
    row = [result.model, result.method]
    for summary in (fitness.fit7, fitness.fit3, fitness.mean_damage):
      row.append(_or_empty(lambda f=summary, s=scores, a=against: f(s, a), ".6f"))
    row.append(_or_empty(lambda s=scores: fitness.acc5(s), ".4f"))
    rows.append([*row, _worst(result, against)])
  head = ["Model", "Method", "Fit-7↓", "Fit-3↓", "MeanDamage↓", "Acc5 (%)↑", "Worst"]
  return Table("Alternative aggregates", head, rows)


def _worst(result: Result, against: Mapping[str, float]) -> str:
  if result.method == FLOAT:
    return ""
  try:
    task, damage = fitness.worst_damage(result.scores, against)
  except ValueError:
    return ""
  return f"{task} {damage:.5f}"


def build(results: Sequence[Result]) -> list[Table]:
  """Builds all tables that have at least one row."""
  built = [complete(results, model) for model in _models(results)]
  built += [cross_model(results), seeds(results), paired(results), aggregates(results)]
  return [table for table in built if table.rows]


def damage_chart(results: Sequence[Result], model: str) -> str:
  """Draws damage by task and method of one model; empty without a float reference."""
  reference = references(results).get(model)
  shown = [r for r in _first_seed(results) if r.model == model and r.method != FLOAT]
  if reference is None:
    return ""
  groups = []
  for task in fitness.TASKS:
    parts = []
    for color, result in enumerate(shown):
      if task in result.scores and task in reference.scores:
        scores = result.scores[task], reference.scores[task]
        damage = 100 * fitness.damage(task, *scores)
        parts.append(svg.Part(result.method, damage, color))
    if parts:
      groups.append((HEADINGS[task][:-1], parts))
  if not groups:
    return ""
  return figure(
    f"Damage on {model}, percent",
    svg.bar_groups(groups, label=f"damage on {model}", width=WIDE),
    keys=legend((result.method, color) for color, result in enumerate(shown)),
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
