"""Runs ablation studies: every row of a study on every calibration draw.

Each row gets its perplexity over perturbed replicates and its operator error, which
rounding chaos does not affect. `ablation_table` compares the rows.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mxjax.calibration.calibration import Params, token_fingerprint
from mxjax.evaluation import study
from mxjax.methods.hires import ablations
from mxjax.methods.program import Program
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.running import pipeline
from mxjax.storage import atomic_io

_LINEAR_KEYS = ("edit_rate", "local_sensitivity", "local_mismatch", "error_final")
OnRow = Callable[[str], pipeline.OnProgress | None]


def _summary(record: Mapping[str, Any]) -> dict[str, float]:
  """Averages the per-linear values of the run report over all linears."""
  linears = [line for layer in record["layers"] for line in layer["linears"].values()]
  means = {
    key: float(np.mean([line[key] for line in linears if key in line]))
    for key in _LINEAR_KEYS
    if any(key in line for line in linears)
  }
  scales = [
    scale
    for layer in record["layers"]
    for scale in layer["recovery"].get("attention", {}).get("scale", [])
  ]
  return means | ({"value_scale": float(np.mean(scales))} if scales else {})


def _row(
  subject: study.Subject,
  tokens: np.ndarray,
  program: Program,
  builds: dict[str, Params],
  **options: Any,
) -> dict[str, Any]:
  """Builds and measures one row; rows with the same build key share their linears."""
  key = ablations.build_key(program)
  used = program
  if key is not None and key in builds:
    used = ablations.reuse(program, builds[key])
  # A row that collapses is a valid result: the sanity gate reports it and does not
  # stop.
  row, params = study.run_method(subject, tokens, used, check=False, **options)
  if key is not None:
    builds[key] = params
  record = row.pop("record")
  summary = _summary(record)
  record["layers"] = []
  reused = used is not program
  return row | {"record": record, "linears": summary, "reused_build": reused}


def run(
  name: str,
  subject: study.Subject,
  draws: Mapping[int, np.ndarray],
  folder: str | os.PathLike[str],
  *,
  contract: Contract = PAPER_CONTRACT,
  on_row: OnRow | None = None,
) -> dict[str, Any]:
  """Runs a study; a killed run resumes from the rows already in the folder.

  A program that occurs in several studies is built once for all of them, and operator
  error is always measured.

  Args:
    name: A key of `ablations.STUDIES`.
    subject: Model and tests.
    draws: Calibration tokens by seed, int32 `[sequences, length]` each.
    folder: Where finished rows are written, one file per row and draw.
    contract: The contract of every row.
    on_row: Called with each row's label; returns the progress callback of that row.

  Returns:
    JSON-ready: `study`, `seeds`, `rows` (label to one result per seed), `reference`.

  Raises:
    ValueError: The study is unknown, draws are identical, or rows in the folder were
      made from other tokens, tests or programs.
  """
  rows_of = study_rows(name)
  _check_draws(draws)
  path = pathlib.Path(folder) / study.ROWS
  path.mkdir(parents=True, exist_ok=True)
  subject = dataclasses.replace(subject, with_operator_error=True)
  results: dict[str, list[dict[str, Any]]] = {label: [] for label, _ in rows_of}
  for seed, tokens in draws.items():
    builds: dict[str, Params] = {}
    for label, program in rows_of:
      file = path / f"seed{seed}-{_digest(program)}.json"
      if file.is_file():
        row = json.loads(file.read_text()) | {"label": label}
        study.check_row(file, row, subject, tokens, program, contract)
      else:
        progress = on_row(f"{label}, seed {seed}") if on_row else None
        row = {"label": label, "seed": seed} | _row(
          subject,
          tokens,
          program,
          builds,
          contract=contract,
          store=path.parent / study.STORE,
          on_progress=progress,
        )
        atomic_io.write_durably(file, (json.dumps(row, indent=1) + "\n").encode())
      results[label].append(row)
  return {
    "study": name,
    "seeds": list(draws),
    "reference": rows_of[-1][0],
    "rows": results,
  }


def _digest(program: Program) -> str:
  text = json.dumps(program.describe(), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def study_rows(name: str) -> ablations.Rows:
  """Returns the rows of a study.

  Raises:
    ValueError: The name is unknown.
  """
  if name not in ablations.STUDIES:
    raise ValueError(
      f"ablate: unknown study {name!r}; use one of {', '.join(ablations.STUDIES)}."
    )
  return ablations.STUDIES[name]


def _check_draws(draws: Mapping[int, np.ndarray]) -> None:
  prints = {seed: token_fingerprint(tokens) for seed, tokens in draws.items()}
  if len(set(prints.values())) < len(prints):
    raise ValueError(
      f"ablate: seeds {', '.join(map(str, draws))} draw the same calibration tokens; "
      "an array of ids is one exact draw, so give text, or one seed."
    )
