"""What commands leave: checkpoints, result.json, report.html and printed rows."""

import argparse
import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax import models
from mxjax.evaluation.cli import cli_inputs, console
from mxjax.evaluation.report import page
from mxjax.storage import atomic_io, checkpoint


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a value so that a crash leaves the old file or the new one."""
  atomic_io.write_durably(path, json.dumps(value, indent=1).encode())


def save(
  folder: pathlib.Path,
  row: Mapping[str, Any],
  params: Mapping[str, Any],
  model: models.CausalLM,
  tokenizer: models.Tokenizer,
) -> None:
  """Writes the checkpoint of a run, with its tokenizer."""
  with tempfile.TemporaryDirectory() as scratch:
    tokenizer.save(pathlib.Path(scratch))
    checkpoint.save_checkpoint(
      folder / cli_inputs.CHECKPOINT,
      params,
      model.config,
      calibration=row["record"]["calibration"],
      program=row["record"]["program"],
      tokenizer_files=sorted(pathlib.Path(scratch).iterdir()),
    )


def fresh_folder(path: pathlib.Path) -> pathlib.Path:
  """The path, or the first free numbered one beside it."""
  candidate, number = path, 1
  while candidate.exists():
    number += 1
    candidate = path.with_name(f"{path.name}-{number}")
  return candidate


def finish(folder: pathlib.Path, rows: Sequence[dict[str, Any]], title: str) -> None:
  """Writes result.json and report.html."""
  write_json(folder / "result.json", rows)
  page.write_report(
    folder / "report.html", list(rows), title=title, subtitle="strict MXFP4 W4A4"
  )


def print_rows(
  options: argparse.Namespace, rows: Sequence[dict[str, Any]], folder: pathlib.Path
) -> None:
  """Prints rows as a table, or as JSON where asked for."""
  if options.json:
    print(json.dumps([_slim(row) for row in rows]))
    return
  console.STDOUT.print(console.comparison_table(rows))
  console.STDOUT.print(f"report: {folder / 'report.html'}")


def _slim(row: Mapping[str, Any]) -> dict[str, Any]:
  """A row without the per-layer record, for printing."""
  return {key: value for key, value in row.items() if key != "record"}
