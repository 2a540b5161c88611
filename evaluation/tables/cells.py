"""What a declared table needs, and its cells from what was measured."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mxjax.evaluation.results import FLOAT, Result
from mxjax.evaluation.tables.declared import Declared
from mxjax.evaluation.tables.quantities import QUANTITIES, Measured
from mxjax.evaluation.tables.rendering import Key


def needs(declared: Declared, extra: Sequence[str] = ()) -> set[str]:
  """Returns the names of the jobs that a table's columns need."""
  named = (QUANTITIES[name].needs for name in (*declared.columns, *extra))
  return {need for each in named for need in each}


def selected(
  declared: Declared, left_out: Iterable[str], instead: Mapping[str, str]
) -> Declared:
  """Returns the table without rows of these labels and columns of these jobs.

  A table of seven tasks that keeps those of Fit-3 has that in the place of Fit-7.
  `instead` has methods by the labels of rows that are of another method.
  """
  absent = {*left_out}
  rows = {
    label: instead.get(label, row)
    for label, row in declared.rows.items()
    if label not in absent
  }
  is_left = lambda name: not {*QUANTITIES[name].needs} & absent
  kept = [name for name in declared.columns if is_left(name)]
  if "fit7" in declared.columns and not is_left("fit7") and is_left("fit3"):
    kept.append("fit3")
  return declared._replace(rows=rows, columns=tuple(kept))


def seeds(declared: Declared, draws: Sequence[int] | None) -> tuple[int, ...]:
  """Returns the calibration seeds of a table: `draws`, or the paper's."""
  return tuple(draws or declared.draws)


def table_cells(
  declared: Declared,
  found: Sequence[Result],
  facts: Mapping[tuple[str, str, int | None], Mapping[str, Any]],
  failures: Mapping[tuple[str, str, int | None], str],
  draws: Sequence[int] | None,
) -> dict[Key, Measured]:
  """Collects the cells of a table in the order of model, seed and row.

  `found` are results; `facts` and `failures` are by model, method and seed. A result
  without a seed, or of another one, stands in a table of a single draw.
  """
  used = seeds(declared, draws)
  by_key: dict[tuple[str, str, int | None], Result] = {}
  # By seed, so that of several the first stands for a single draw.
  for result in sorted(found, key=lambda r: -1 if r.seed is None else r.seed):
    method = _label(declared, result.method)
    by_key.setdefault((result.model, method, result.seed), result)
    if not facts and len(used) == 1:
      by_key.setdefault((result.model, method, used[0]), result)
  models = dict.fromkeys([*(r.model for r in found), *(key[0] for key in facts)])
  rows = dict(declared.rows)
  if declared.takes_others:
    others = dict.fromkeys(_label(declared, r.method) for r in found)
    rows |= {name: name for name in others if name not in {*rows, FLOAT}}
  if len(used) > 1 and not draws:
    extra = {r.seed for r in found if r.seed is not None} - set(used)
    used = (*used, *sorted(extra)) if declared.takes_others else used
  cells: dict[Key, Measured] = {}
  for model in models:
    exact = by_key.get((model, FLOAT, None))
    for seed in used:
      for label, method in rows.items():
        own = None if method == FLOAT else seed
        result = by_key.get((model, label, own))
        key = model, method, own
        cells[model, label, own] = Measured(
          result.tasks if result else {},
          exact.tasks if exact else {},
          facts.get(key, {}),
          # Without the float model's results no damage can be told.
          failures.get(key) or failures.get((model, FLOAT, None), ""),
        )
  return cells


def _label(declared: Declared, method: str) -> str:
  """Returns the label of a method's row; a result may bear either name."""
  by_method = {name: label for label, name in declared.rows.items()}
  return by_method.get(method, method)
