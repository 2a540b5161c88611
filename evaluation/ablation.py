"""Ablation studies: the paper's tables over calibration draws, with what they can say.

Strict-A4 perplexity of small models is chaotic at the 1 % level, so every row has its
perplexity over perturbed replicates and calibration draws, and its operator error,
which no chaos reaches. Differences to the reference row are paired by draw and
replicate; one that the spread of either explains is a tie.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mxjax.calibration.calibration import Params, token_fingerprint
from mxjax.evaluation import study
from mxjax.evaluation.measures.metrics import paired_interval
from mxjax.methods.hires import ablations
from mxjax.methods.program import Program
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.running import pipeline
from mxjax.storage import atomic_io

RELATIVE_TIE = 1e-3
"""Relative difference of operator errors or KL below which two builds are equal."""
_LINEAR_KEYS = ("edit_rate", "local_sensitivity", "local_mismatch", "error_final")
OnRow = Callable[[str], pipeline.OnProgress | None]


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A row's paired difference to the reference row, in one quantity.

  Attributes:
    mean: Mean difference; negative is better than the reference.
    interval: Exact 95 % t interval over calibration draws, None for fewer than two.
    spread: What perturbations alone move the quantity by, in the noisier row.
    verdict: `better`, `worse` or `tie`; `one replicate` where noise was not measured.
  """

  mean: float
  interval: tuple[float, float] | None
  spread: float
  verdict: str


def _interval(
  ours: Sequence[float], theirs: Sequence[float]
) -> tuple[float, float] | None:
  """Ends of the paired 95 % interval; None for fewer than two draws."""
  if len(ours) < 2:
    return None
  found = paired_interval(ours, theirs)
  return found.low, found.high


def _verdict(mean: float, spread: float, interval: tuple[float, float] | None) -> str:
  """A difference counts when neither noise nor the choice of draws explains it."""
  covers_zero = interval is not None and interval[0] <= 0 <= interval[1]
  if abs(mean) <= spread or covers_zero:
    return "tie"
  return "better" if mean < 0 else "worse"


def compare_perplexity(
  rows: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]], test: str
) -> Comparison:
  """Compares perplexities of a row and of the reference, draw by draw.

  Args:
    rows: The row at every calibration draw.
    reference: The reference row at the same draws.
    test: Name of the test.
  """
  ours, theirs = (
    np.asarray([row["perplexity"][test]["values"] for row in side])
    for side in (rows, reference)
  )
  spread = float(max(np.ptp(ours, axis=1).max(), np.ptp(theirs, axis=1).max()))
  mean = float((ours - theirs).mean())
  interval = _interval(ours.mean(1).tolist(), theirs.mean(1).tolist())
  verdict = _verdict(mean, spread, interval)
  if ours.shape[1] < 2:
    verdict = "one replicate"
  return Comparison(mean, interval, spread, verdict)


def compare_operator_error(
  rows: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]
) -> Comparison:
  """Compares operator errors, draw by draw; differences below 0.1 % are ties."""
  return _compare(
    *([row["operator_error"] for row in side] for side in (rows, reference))
  )


def compare_agreement(
  rows: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]
) -> Comparison:
  """Compares mean KL to the float model, draw by draw; below 0.1 % is a tie."""
  return _compare(
    *([row["agreement"]["kl_mean"] for row in side] for side in (rows, reference))
  )


def _compare(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
  mean = float(np.mean(ours) - np.mean(theirs))
  spread = RELATIVE_TIE * float(np.mean(theirs))
  interval = _interval(ours, theirs)
  return Comparison(mean, interval, spread, _verdict(mean, spread, interval))


def _summary(record: Mapping[str, Any]) -> dict[str, float]:
  """Means over all linears of what the report of a run shows by linear."""
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
  """Builds and measures one row; rows of one build key share their linears."""
  key = ablations.build_key(program)
  used = program
  if key is not None and key in builds:
    used = ablations.reuse(program, builds[key])
  # A row that collapses is a result of a study: the gate reports and does not stop it.
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
  """Runs a study; rows already in the folder are kept, so a killed run resumes.

  A program that stands in several studies is built once for all of them.

  Args:
    name: A key of `ablations.STUDIES`.
    subject: Model and tests; operator error is always measured.
    draws: Calibration tokens by seed, int32 `[sequences, length]` each.
    folder: Where rows are written as they finish, one file a row and draw.
    contract: The contract of every row.
    on_row: Called with each row's label; what it returns follows its progress.

  Returns:
    JSON-ready: `study`, `seeds`, `rows` (label to one result a seed), `reference`.

  Raises:
    ValueError: An unknown study, draws that are the same, or rows of the folder that
      were made from other tokens, tests or programs.
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
  """Names a row's file by its program."""
  text = json.dumps(program.describe(), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def study_rows(name: str) -> ablations.Rows:
  """The rows of a study.

  Raises:
    ValueError: An unknown name.
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


def _signed(value: float) -> str:
  return f"{value:+.4g}"


def _cell(comparison: Comparison) -> str:
  text = _signed(comparison.mean)
  if comparison.interval:
    low, high = comparison.interval
    text += f" [{_signed(low)}, {_signed(high)}]"
  return f"{text} {comparison.verdict}"


def table(result: Mapping[str, Any]) -> str:
  """The study as a Markdown table: values, and paired differences to the reference."""
  rows = result["rows"]
  reference = rows[result["reference"]]
  tests = list(reference[0]["perplexity"])
  head = ["row"]
  for test in tests:
    head += [f"perplexity, {test}", "difference"]
  head += ["operator error", "difference"]
  has_agreement = all(row["agreement"] for found in rows.values() for row in found)
  if has_agreement:
    head += ["KL, nats", "difference"]
  head.append("local error, sensitivity / mismatch")
  lines = [head, ["---"] * len(head)]
  for label, found in rows.items():
    cells = [label]
    for test in tests:
      values = np.asarray([row["perplexity"][test]["values"] for row in found])
      spread = f" ± {np.ptp(values) / 2:.2f}" if values.size > 1 else ""
      cells.append(f"{values.mean():.2f}{spread}")
      comparison = compare_perplexity(found, reference, test)
      cells.append("reference" if found is reference else _cell(comparison))
    errors = [row["operator_error"] for row in found]
    cells.append(f"{np.mean(errors):.6f}")
    comparison = compare_operator_error(found, reference)
    cells.append("reference" if found is reference else _cell(comparison))
    if has_agreement:
      cells.append(f"{np.mean([row['agreement']['kl_mean'] for row in found]):.4f}")
      comparison = compare_agreement(found, reference)
      cells.append("reference" if found is reference else _cell(comparison))
    local = [row["linears"] for row in found]
    cells.append(
      " / ".join(
        f"{np.mean([line[key] for line in local]):.3f}"
        for key in ("local_sensitivity", "local_mismatch")
        if all(key in line for line in local)
      )
      or "-"
    )
    lines.append(cells)
  body = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
  seeds = ", ".join(map(str, result["seeds"]))
  replicates = len(reference[0]["perplexity"][tests[0]]["values"]) if tests else 0
  note = (
    f"Calibration draws {seeds}; {replicates} perturbed replicates each. ± is half the "
    "range over draws and replicates. Differences are paired with the reference row; "
    "brackets hold the exact 95 % t interval over draws. A difference is a tie when "
    "its interval holds zero or perturbation alone does as much. Local errors are in "
    "units of nearest rounding's."
  )
  return f"## {result['study']}\n\n{body}\n\n{note}\n"
