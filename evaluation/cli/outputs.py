"""Writes what commands produce: checkpoints, result.json, report.html, printed rows."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from mxjax.evaluation.builds import finish as finish
from mxjax.evaluation.builds import save_checkpoint as save_checkpoint
from mxjax.evaluation.cli import console


def fresh_folder(path: pathlib.Path) -> pathlib.Path:
  """Returns the path, or the first free numbered variant of it."""
  candidate, number = path, 1
  while candidate.exists():
    number += 1
    candidate = path.with_name(f"{path.name}-{number}")
  return candidate


def print_rows(
  rows: Sequence[dict[str, Any]], folder: pathlib.Path, *, as_json: bool = False
) -> None:
  """Prints rows as a table, or as JSON without the per-layer record."""
  if as_json:
    print(json.dumps([{k: v for k, v in row.items() if k != "record"} for row in rows]))
    return
  console.print_table(console.comparison_table(rows))
  console.say(f"report: {folder / 'report.html'}")
