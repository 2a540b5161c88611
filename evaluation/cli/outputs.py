"""Writes what commands produce: checkpoints, result.json, report.html, printed rows."""

import json
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax import models
from mxjax.evaluation.cli import arguments, console, inputs
from mxjax.evaluation.report import page
from mxjax.storage import atomic_io, checkpoint, sealed

Params = Mapping[str, Any]


def save_checkpoint(
  folder: pathlib.Path,
  params: Params,
  config: models.ModelConfig,
  tokenizer: models.Tokenizer,
  **facts: Any,
) -> None:
  """Writes a checkpoint and its tokenizer; `facts` are passed to `save_checkpoint`."""
  # On the disk of the result: the system's own place for such files may be full.
  with atomic_io.explaining(folder), scratch_folder(folder) as scratch:
    tokenizer.save(pathlib.Path(scratch))
    checkpoint.save_checkpoint(
      folder / inputs.CHECKPOINT,
      params,
      config,
      tokenizer_files=sorted(pathlib.Path(scratch).iterdir()),
      **facts,
    )


def scratch_folder(folder: pathlib.Path) -> "tempfile.TemporaryDirectory[str]":
  """Makes a folder below `folder` that `remove_unfinished` knows."""
  folder.mkdir(parents=True, exist_ok=True)
  return tempfile.TemporaryDirectory(
    dir=folder, prefix=f"tokenizer{atomic_io.PARTIAL}-"
  )


def remove_unfinished(folder: pathlib.Path) -> None:
  """Removes the unfinished files of a process that was killed while saving.

  The list of what it once finished goes too: the run that goes on writes a new one.
  """
  (folder / sealed.OUTPUTS).unlink(missing_ok=True)
  for place in folder.glob(f"*{atomic_io.PARTIAL}*"):
    if place.is_dir():
      shutil.rmtree(place)
    else:
      place.unlink()


def fresh_folder(path: pathlib.Path) -> pathlib.Path:
  """Returns the path, or the first free numbered variant of it."""
  candidate, number = path, 1
  while candidate.exists():
    number += 1
    candidate = path.with_name(f"{path.name}-{number}")
  return candidate


def check_resumable(folder: pathlib.Path, *ours: str) -> None:
  """Rejects a folder that is not empty and contains none of the folders `ours`."""
  if not any((folder / name).is_dir() for name in ours):
    atomic_io.check_output(folder)


def finish(
  folder: pathlib.Path, rows: Sequence[dict[str, Any]], what: str, model: str
) -> None:
  """Writes result.json, report.html, and the list of files that `verify` checks.

  The report's title is `what` and the last part of the model's name or path.
  """
  title = f"{what} {arguments.short_name(model)}"
  with atomic_io.explaining(folder):
    atomic_io.write_json(folder / "result.json", rows, indent=1)
    subtitle = f"{model}, strict MXFP4 W4A4"
    page.write_report(folder / "report.html", rows, title=title, subtitle=subtitle)
    sealed.write_outputs(folder)


def print_rows(
  rows: Sequence[dict[str, Any]], folder: pathlib.Path, *, as_json: bool = False
) -> None:
  """Prints rows as a table, or as JSON without the per-layer record."""
  if as_json:
    print(json.dumps([{k: v for k, v in row.items() if k != "record"} for row in rows]))
    return
  console.print_table(console.comparison_table(rows))
  console.say(f"report: {folder / 'report.html'}")
