"""What the paper prints, as strings, by table."""

import importlib.resources
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mxjax.evaluation.tables.declared import Declared
from mxjax.evaluation.tables.quantities import QUANTITIES

PAPER: Mapping[str, Any] = json.loads(
  (importlib.resources.files(str(__package__)) / "paper.json").read_text("utf-8")
)
"""Rows by table, each a dict of the printed cells; `Declared.label` says where."""
LABELS = ("Method", "Config", "Program", "Statistics")
"""Heads of the column that names a row."""


class Printed(NamedTuple):
  """A printed row: its model and label, its seed or None, and cells by quantity."""

  model: str
  label: str
  seed: int | None
  cells: Mapping[str, str]


def _rows(key: str) -> Iterator[Mapping[str, str]]:
  table = PAPER[key]
  if isinstance(table, dict):  # The raw tables, one for each model.
    for model, part in table.items():
      yield from ({"Model": model, **row} for row in part["rows"])
  for row in table if isinstance(table, list) else ():
    if "Pre Fit-3" not in row:
      yield row
      continue
    # Both sides of the boundary in one row; what it leaves out of one stands elsewhere.
    place = {name: row[name] for name in ("Model", "Seed")}
    pre = {n.removeprefix("Pre "): v for n, v in row.items() if n.startswith("Pre ")}
    yield {**place, "Statistics": "pre-encoding", **pre}
    yield {**place, "Statistics": "post-encoding", "Fit-3": row["Post Fit-3"]}


def printed(declared: Declared) -> list[Printed]:
  """Returns the paper's rows of a table in its order; none for a table of ours."""
  found: dict[tuple[str, str, int | None], dict[str, str]] = {}
  for row in (row for key in declared.paper for row in _rows(key)):
    # A table of one method may have no column that names it.
    label = next(
      (row[head] for head in LABELS if head in row), next(iter(declared.rows))
    )
    if declared.is_by_model:
      for model in [head for head in row if head not in LABELS]:
        found[model, label, None] = {declared.columns[0]: row[model]}
      continue
    seed = int(row["Seed"]) if "Seed" in row else None
    cells = found.setdefault((row["Model"], label, seed), {})
    for name in declared.columns:
      head = QUANTITIES[name].printed
      cells |= {name: row[head]} if head in row else {}
  rows = [Printed(*key, cells) for key, cells in found.items()]
  models = list(dict.fromkeys(row.model for row in rows))
  # A row may be left out of ours.
  labels = list(dict.fromkeys([*declared.rows, *(row.label for row in rows)]))
  place = lambda row: (models.index(row.model), row.seed or 0, labels.index(row.label))
  return sorted(rows, key=place)


def value(text: str) -> float:
  """Returns the number that a printed cell begins with; a percentage as a share."""
  number = text.partition("+-")[0].replace(",", "")
  return float(number[:-1]) / 100 if number.endswith("%") else float(number)
