"""Renders a declared table from what was measured, beside the paper's numbers."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from mxjax.evaluation.measures import fitness
from mxjax.evaluation.measures.statistics import Comparison, compare
from mxjax.evaluation.report.tables import Table
from mxjax.evaluation.tables import paper
from mxjax.evaluation.tables.declared import Declared
from mxjax.evaluation.tables.quantities import QUANTITIES, Measured, Quantity

Key = tuple[str, str, int | None]
"""Model, label of the row, and calibration seed."""
Cells = Mapping[Key, Measured]
FAILED = "failed"
PAPER = "{} (paper)"
SUMMARIES = ("Mean", "Robust")
"""What the paper's table of models ends in; see `fitness.robust_fit`."""
DIFFERENCES = (
  "Paired by calibration draw, with the t interval over draws, or for one draw the "
  "bootstrap interval over the same items and windows. A tie: the interval holds zero, "
  "or the difference is at most {least} or what perturbed replicates differ by."
)
NO_TIME = (
  "A build that took linears or statistics of another has no time; remove its folder "
  "to time it."
)


def build(
  declared: Declared,
  cells: Cells,
  *,
  extra: Sequence[str] = (),
  reduced: Sequence[str] = (),
) -> list[Table]:
  """Builds a table and its paired differences; none without a measured cell.

  `cells` are by model, label and seed; `extra` are columns beside the declared ones,
  and `reduced` says in the title what is less than in the paper.
  """
  cells = {
    key: cell for key, cell in cells.items() if cell.tasks or cell.facts or cell.failure
  }
  if not cells:
    return []
  title = f"{declared.title} (reduced)" if reduced else declared.title
  whole = title.replace("(reduced)", f"(reduced: {', '.join(reduced)})")
  form = _by_model if declared.is_by_model else _by_row
  source = f"Paper: {declared.label}." if declared.label else "Not in the paper."
  failures = filter(None, (cell.failure for cell in cells.values()))
  untimed = "build_minutes" in declared.columns and any(
    "build" in cell.facts and not QUANTITIES["build_minutes"].values(cell)
    for cell in cells.values()
  )
  note = " ".join([source, *[NO_TIME] * untimed, *dict.fromkeys(failures)])
  built = [form(declared, cells, extra, whole)._replace(note=note)]
  if declared.reference:
    # Comparisons call less better, so that accuracies have none.
    falling = [name for name in declared.columns if QUANTITIES[name].head.endswith("↓")]
    names = dict.fromkeys([*falling[-1:], *extra])
    built += [_differences(declared, cells, name, title) for name in names]
  return [table for table in built if table.rows]


def _by_row(
  declared: Declared, cells: Cells, extra: Sequence[str], title: str
) -> Table:
  printed = paper.printed(declared)
  columns = [QUANTITIES[name] for name in (*declared.columns, *extra)]
  has_seeds = len({key[2] for key in cells} - {None}) > 1 or len(declared.draws) > 1
  # Accuracies in the unit of most of the paper's rows.
  accuracies = [row.cells.get("arc_challenge", "") for row in printed]
  shares = [paper.value(text) < 1 for text in accuracies if text]
  percent = sum(shares) * 2 <= len(shares)
  head = ["Model", "Row", *["Seed"] * has_seeds]
  head += [c.head if percent else c.head.replace(" (%)", "") for c in columns]
  rows = []
  for (model, label, seed), cell in cells.items():
    values = [column.text(cell, percent=percent) for column in columns]
    if cell.failure:
      values = [text or FAILED for text in values]
    rows.append([model, label, *[_seed(seed)] * has_seeds, *values])
  for row in printed:
    values = [row.cells.get(name, "") for name in (*declared.columns, *extra)]
    place = [PAPER.format(row.model), row.label, *[_seed(row.seed)] * has_seeds]
    rows.append([*place, *values])
  return Table(title, head, rows)


def _seed(seed: int | None) -> str:
  return "" if seed is None else str(seed)


def _by_model(
  declared: Declared, cells: Cells, extra: Sequence[str], title: str
) -> Table:
  del extra
  quantity = QUANTITIES[declared.columns[0]]
  models = list(dict.fromkeys(model for model, _, _ in cells))
  printed = {(row.model, row.label): row for row in paper.printed(declared)}
  theirs = list(dict.fromkeys(model for model, _ in printed))
  summaries = [name for name in theirs if name in SUMMARIES]
  rows = []
  for label in dict.fromkeys([*(key[1] for key in cells), *(k[1] for k in printed)]):
    own = [
      [cell for (of, at, _), cell in cells.items() if (of, at) == (model, label)]
      for model in models
    ]
    texts = [_cell(quantity, draws) for draws in own]
    by_model = [[v for cell in draws for v in quantity.values(cell)] for draws in own]
    values = [float(np.mean(draws)) for draws in by_model if draws]
    means = ["", ""]
    # Means over models are told only where every model has a value.
    if len(values) == len(models):
      means = [f"{v:.5f}" for v in (np.mean(values), fitness.robust_fit(values))]
    beside = [printed.get((model, label)) for model in theirs]
    cells_ = [next(iter(row.cells.values())) if row else "" for row in beside]
    rows.append([label, *texts, *means[: len(summaries)], *cells_])
  head = ["Row", *models, *summaries, *map(PAPER.format, theirs)]
  return Table(f"{title}: {quantity.head}", head, rows)


def _cell(quantity: Quantity, draws: Sequence[Measured]) -> str:
  """Formats the value of one draw, or the mean and deviation of several."""
  values = [value for cell in draws for value in quantity.values(cell)]
  if len(values) > 1:
    return (
      f"{np.mean(values):{quantity.form}} ± {np.std(values, ddof=1):{quantity.form}}"
    )
  texts = [quantity.text(cell) for cell in draws]
  failed = FAILED if any(cell.failure for cell in draws) else ""
  return next(filter(None, texts), failed)


def _differences(declared: Declared, cells: Cells, name: str, title: str) -> Table:
  """Compares every row with the reference row, draw by draw."""
  quantity, printed = QUANTITIES[name], paper.printed(declared)
  labels = [label for label in declared.rows if label != declared.reference]
  found: dict[tuple[str, str], tuple[list[float], Comparison]] = {}
  models = dict.fromkeys(model for model, _, _ in cells)
  for model, label in itertools.product(models, labels):
    pairs = [
      (cell, cells[model, declared.reference, seed])
      for (of, at, seed), cell in cells.items()
      if (of, at) == (model, label) and (model, declared.reference, seed) in cells
    ]
    # A draw counts where both rows were measured.
    pairs = [p for p in pairs if all(quantity.values(side) for side in p)]
    if pairs:
      found[model, label] = _compare(quantity, pairs)
  # Before the paper's join them: signs are counted among ours.
  ours = {key: comparison for key, (_, comparison) in found.items()}
  for model in dict.fromkeys(row.model for row in printed):
    by_label = {
      label: {
        row.seed: paper.value(row.cells[name])
        for row in printed
        if (row.model, row.label) == (model, label) and name in row.cells
      }
      for label in declared.rows
    }
    theirs = by_label[declared.reference]
    for label in labels:
      # Paired by seed: `printed` sorts by it, so that both sides have one order.
      if by_label[label] and theirs.keys() == by_label[label].keys():
        pair = [[[v] for v in side.values()] for side in (by_label[label], theirs)]
        each = [a[0] - b[0] for a, b in zip(*pair, strict=True)]
        comparison = compare(*pair, least=quantity.least)
        found[PAPER.format(model), label] = each, comparison
  rows = [
    [model, label, ", ".join(f"{each:+{quantity.form}}" for each in differences)]
    + [str(comparison), _agrees(ours, model, label, comparison)]
    for (model, label), (differences, comparison) in found.items()
  ]
  head = ["Model", f"Row − {declared.reference}", "by draw", "mean [95 % interval]"]
  share = f"{quantity.least:.1%}" if quantity.is_relative else f"{quantity.least:g}"
  note = DIFFERENCES.format(least=share)
  return Table(
    f"{title}: differences of {quantity.head}",
    [*head, "models with this sign"],
    rows,
    note,
  )


def _agrees(
  ours: Mapping[tuple[str, str], Comparison],
  model: str,
  label: str,
  theirs: Comparison,
) -> str:
  """Counts our models whose difference has the sign of the paper's, and the ties."""
  if (model, label) in ours:
    return ""
  here = [comparison for (_, of), comparison in ours.items() if of == label]
  ties = sum(comparison.verdict == "tie" for comparison in here)
  same = sum(comparison.mean * theirs.mean > 0 for comparison in here)
  return f"{same} of {len(here)}" + (f", {ties} ties" if ties else "")


def _compare(
  quantity: Quantity, pairs: Sequence[tuple[Measured, Measured]]
) -> tuple[list[float], Comparison]:
  values = [[quantity.values(side) for side in pair] for pair in pairs]
  ours, theirs = zip(*values, strict=True)
  differences = [float(np.mean(a) - np.mean(b)) for a, b in values]
  samples = np.zeros(0)
  if len(pairs) == 1:
    both = [quantity.samples(side) for side in pairs[0]]
    # Samples are pairs only where none is missing of either; see `Quantity.samples`.
    if len(both[0]) == len(both[1]):
      samples = both[0] - both[1]
  least = quantity.least * (np.mean(theirs) if quantity.is_relative else 1.0)
  return differences, compare(ours, theirs, least=float(least), samples=samples)
