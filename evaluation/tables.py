"""The paper's table forms for whatever has results: a missing cell stays empty."""

import csv
import html
import io
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mxjax.evaluation.measures import metrics
from mxjax.evaluation.report import page as report
from mxjax.evaluation.report import svg
from mxjax.evaluation.report.html import figure, legend
from mxjax.evaluation.report.html import table as html_table
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


class Table(NamedTuple):
  """A table of text cells.

  Attributes:
    title: Heading.
    head: Column heads.
    rows: Cells; the empty string where there is no result.
    note: A sentence below it, or empty.
  """

  title: str
  head: list[str]
  rows: list[list[str]]
  note: str = ""


def _or_empty(compute: Callable[[], float], form: str) -> str:
  """A formatted summary, or nothing where a result that it needs is missing."""
  try:
    return format(compute(), form)
  except ValueError:
    return ""


def _score(result: Result, task: str) -> str:
  if task not in result.scores:
    return ""
  value = result.scores[task]
  return f"{value:.3f}" if task in metrics.PERPLEXITIES else f"{100 * value:.2f}"


def _unique(values: Sequence[str]) -> list[str]:
  return list(dict.fromkeys(values))


def _first_seed(results: Sequence[Result]) -> list[Result]:
  """One result a model and method: that of the smallest seed."""
  ordered = sorted(results, key=lambda r: -1 if r.seed is None else r.seed)
  chosen: dict[tuple[str, str], Result] = {}
  for result in ordered:
    chosen.setdefault((result.model, result.method), result)
  return [r for r in results if chosen[r.model, r.method] is r]


def _fit7(result: Result, floats: Mapping[str, Result]) -> float:
  """Fit-7 of a result; 0 for the float model.

  Raises:
    ValueError: A task, or the float model's result, is missing.
  """
  if result.model not in floats:
    raise ValueError(f"tables: no {FLOAT} result of {result.model}.")
  return metrics.fit7(result.scores, floats[result.model].scores)


def complete(results: Sequence[Result], model: str) -> Table:
  """Every task and Fit-7 of one model, a row a method."""
  floats = references(results)
  rows, notes = [], []
  for result in _first_seed([r for r in results if r.model == model]):
    cells = [_score(result, task) for task in metrics.TASKS]
    fit = _or_empty(lambda result=result: _fit7(result, floats), ".4f")
    rows.append([result.method, *cells, fit])
    notes += [f"{t}: first {n} of {of}" for t, (n, of) in result.partial.items()]
  head = ["Method", *HEADINGS.values(), "Fit-7↓"]
  note = f"Part of the official set: {'; '.join(_unique(notes))}." if notes else ""
  return Table(f"Complete results on {model}", head, rows, note)


def cross_model(results: Sequence[Result]) -> Table:
  """Fit-7 of every method on every model, their mean and Robust Fit."""
  floats = references(results)
  models = _unique([r.model for r in results])
  by_pair = {(r.method, r.model): r for r in _first_seed(results)}
  rows = []
  for method in _unique([r.method for r in results if r.method != FLOAT]):
    fits = []
    for model in models:
      result = by_pair.get((method, model))
      try:
        fits.append(None if result is None else _fit7(result, floats))
      except ValueError:
        fits.append(None)
    known = [fit for fit in fits if fit is not None]
    is_whole = len(known) == len(models)
    rows.append(
      [
        method,
        *("" if fit is None else f"{fit:.4f}" for fit in fits),
        f"{np.mean(known):.5f}" if is_whole else "",
        f"{metrics.robust_fit(known):.5f}" if is_whole else "",
      ]
    )
  head = ["Method", *models, "Mean↓", "Robust↓"]
  return Table("Fit-7 across models", head, rows)


def seeds(results: Sequence[Result]) -> Table:
  """Every calibration seed of methods that have several."""
  floats = references(results)
  rows = []
  for model, method in dict.fromkeys((r.model, r.method) for r in results):
    group = [r for r in results if (r.model, r.method) == (model, method)]
    if len(group) < 2:
      continue
    for result in sorted(group, key=lambda r: -1 if r.seed is None else r.seed):
      cells = [_score(result, task) for task in metrics.TASKS]
      fit = _or_empty(lambda result=result: _fit7(result, floats), ".6f")
      rows.append([model, method, str(result.seed), *cells, fit])
  head = ["Model", "Method", "Seed", *HEADINGS.values(), "Fit-7↓"]
  return Table("Calibration seeds", head, rows)


def paired(results: Sequence[Result]) -> Table:
  """Paired Fit-7 differences over the seeds that two methods share."""
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
      interval = metrics.paired_interval(
        [ours[s] for s in shared], [theirs[s] for s in shared]
      )
      # Each pair once, as the difference that favors its first method.
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
  """Fit-7, Fit-3, MeanDamage, Acc5 and the worst task of every model and method."""
  floats = references(results)
  rows = []
  for result in _first_seed(results):
    reference = floats.get(result.model)
    against = reference.scores if reference else {}
    worst = _worst(result, against)
    summaries = (
      _or_empty(lambda s=result.scores, a=against: metrics.fit7(s, a), ".6f"),
      _or_empty(lambda s=result.scores, a=against: metrics.fit3(s, a), ".6f"),
      _or_empty(lambda s=result.scores, a=against: metrics.mean_damage(s, a), ".6f"),
      _or_empty(lambda s=result.scores: metrics.acc5(s), ".4f"),
    )
    rows.append([result.model, result.method, *summaries, worst])
  head = ["Model", "Method", "Fit-7↓", "Fit-3↓", "MeanDamage↓", "Acc5 (%)↑", "Worst"]
  return Table("Alternative aggregates", head, rows)


def _worst(result: Result, against: Mapping[str, float]) -> str:
  if result.method == FLOAT:
    return ""
  try:
    task, damage = metrics.worst_damage(result.scores, against)
  except ValueError:
    return ""
  return f"{task} {damage:.5f}"


def build(results: Sequence[Result]) -> list[Table]:
  """All tables that have a row."""
  models = _unique([r.model for r in results])
  tables = [complete(results, model) for model in models]
  tables += [cross_model(results), seeds(results), paired(results), aggregates(results)]
  return [table for table in tables if table.rows]


def markdown(tables: Sequence[Table]) -> str:
  """The tables in Markdown."""
  parts = []
  for table in tables:
    line = lambda cells: f"| {' | '.join(cells)} |"
    rule = line(["---"] * len(table.head))
    body = "\n".join(line(row) for row in table.rows)
    note = f"\n\n{table.note}" if table.note else ""
    parts.append(f"## {table.title}\n\n{line(table.head)}\n{rule}\n{body}{note}\n")
  return "\n".join(parts)


def comma_separated(tables: Sequence[Table]) -> str:
  """The tables in one CSV: each row begins with the table's title."""
  text = io.StringIO()
  writer = csv.writer(text, lineterminator="\n")
  for table in tables:
    writer.writerow(["table", *table.head])
    writer.writerows([table.title, *row] for row in table.rows)
  return text.getvalue()


def damage_chart(results: Sequence[Result], model: str) -> str:
  """Bars of the damage by task and method of one model; empty without a reference."""
  reference = references(results).get(model)
  chosen = [r for r in _first_seed(results) if r.model == model and r.method != FLOAT]
  if reference is None or not chosen:
    return ""
  groups = []
  for task in metrics.TASKS:
    parts = [
      svg.Part(
        r.method, 100 * metrics.damage(task, r.scores[task], reference.scores[task]), i
      )
      for i, r in enumerate(chosen)
      if task in r.scores and task in reference.scores
    ]
    if parts:
      groups.append((HEADINGS[task][:-1], parts))
  if not groups:
    return ""
  chart = svg.bar_groups(groups, label=f"damage on {model}", width=1086)
  return figure(
    f"Damage on {model}, percent",
    chart,
    keys=legend(r.method for r in chosen),
    note="Against the float model; lower is better, a gain is drawn as nothing.",
  )


def page(tables: Sequence[Table], results: Sequence[Result]) -> str:
  """Tables and plots as one self-contained HTML document."""
  charts = [damage_chart(results, m) for m in _unique([r.model for r in results])]
  sections = "".join(
    f"<h2>{html.escape(table.title)}</h2>"
    + html_table(table.head, [[html.escape(c) for c in row] for row in table.rows])
    + (f"<p>{html.escape(table.note)}</p>" if table.note else "")
    for table in tables
  )
  style = report.STYLE.read_text(encoding="utf-8")
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    f"<title>mxjax tables</title><style>{style}</style></head>"
    f"<body><main><header><h1>Results</h1></header>{''.join(charts)}{sections}"
    "</main></body></html>\n"
  )


def write(
  folder: pathlib.Path, tables: Sequence[Table], results: Sequence[Result]
) -> list[pathlib.Path]:
  """Writes tables.md, tables.csv and tables.html; returns the files."""
  folder.mkdir(parents=True, exist_ok=True)
  content = {
    "tables.md": markdown(tables),
    "tables.csv": comma_separated(tables),
    "tables.html": page(tables, results),
  }
  for name, text in content.items():
    atomic_io.write_durably(folder / name, text.encode())
  return [folder / name for name in content]
