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

_LINEAR_KEYS = ("edit_rate", "local_sensitivity", "local_mismatch", "error_final")


def _summary(record: Mapping[str, Any]) -> dict[str, float]:
  """Averages the per-linear values of the run report over all linears."""
  layers = record["layers"]
  linears = [line for layer in layers for line in layer["linears"].values()]
  values = {key: [line[key] for line in linears if key in line] for key in _LINEAR_KEYS}
  attention = [layer["recovery"].get("attention", {}) for layer in layers]
  values["value_scale"] = [a for fit in attention for a in fit.get("scale", [])]
  return {key: float(np.mean(found)) for key, found in values.items() if found}


def _row(
  subject: study.Subject,
  tokens: np.ndarray,
  program: Program,
  builds: dict[str, Params],
  **options: Any,
) -> dict[str, Any]:
  """Builds and measures one row; rows with the same build key share their linears."""
  key = ablations.build_key(program)
  build = builds.get(key) if key is not None else None
  used = program if build is None else ablations.reuse(program, build)
  # A row that collapses is a valid result: the sanity gate reports it and does not
  # stop.
  row, params = study.run_method(subject, tokens, used, check=False, **options)
  if key is not None:
    builds[key] = params
  row["linears"] = _summary(row["record"])
  row["record"]["layers"] = []
  return row | {"reused_build": build is not None}


def run(
  name: str,
  subject: study.Subject,
  draws: Mapping[int, np.ndarray],
  folder: str | os.PathLike[str],
  *,
  contract: Contract = PAPER_CONTRACT,
  on_row: Callable[[str], pipeline.OnProgress | None] | None = None,
  facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Runs a study; a killed run resumes from the rows already in the folder.

  A program that occurs in several studies is built once for all of them, and operator
  error is always measured. `name` is a key of `ablations.STUDIES`, `draws` are
  calibration tokens by seed, int32 `[sequences, length]` each, and finished rows are
  written to `folder`, one file per row and draw. `on_row` is called with each row's
  label and returns the progress callback of that row. New rows get the JSON-ready
  `facts`.

  Returns:
    JSON-ready: `study`, `seeds`, `rows` (label to one result per seed), `reference`.

  Raises:
    ValueError: The study is unknown, draws are identical, or rows in the folder were
      made from other tokens, tests or programs.
  """
  if name not in ablations.STUDIES:
    raise ValueError(
      f"ablate: unknown study {name!r}; use one of {', '.join(ablations.STUDIES)}."
    )
  _check_draws(draws)
  path = pathlib.Path(folder)
  subject = dataclasses.replace(subject, with_operator_error=True)
  rows_of = ablations.STUDIES[name]
  results: dict[str, list[dict[str, Any]]] = {label: [] for label, _ in rows_of}
  for seed, tokens in draws.items():
    builds: dict[str, Params] = {}
    for label, program in rows_of:
      file = path / study.ROWS / f"seed{seed}-{_digest(program)}.json"
      row = study.read_row(file, subject, tokens, program, contract)
      if row is None:
        progress = on_row(f"{label}, seed {seed}") if on_row else None
        options = {"contract": contract, "store": path / study.STORE}
        made = _row(subject, tokens, program, builds, on_progress=progress, **options)
        row = {"label": label, "seed": seed, **(facts or {})} | made
        study.write_row(file, row)
      results[label].append(row | {"label": label})
  return {
    "study": name,
    "seeds": list(draws),
    "reference": rows_of[-1][0],
    "rows": results,
  }


def _digest(program: Program) -> str:
  text = json.dumps(program.describe(), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def _check_draws(draws: Mapping[int, np.ndarray]) -> None:
  prints = {seed: token_fingerprint(tokens) for seed, tokens in draws.items()}
  if len(set(prints.values())) < len(prints):
    raise ValueError(
      f"ablate: seeds {', '.join(map(str, draws))} draw the same calibration tokens; "
      "an array of ids is one exact draw, so give text, or one seed."
    )
