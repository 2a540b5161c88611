"""Builds the table of an ablation study, with paired differences to a reference row.

Strict-A4 perplexity of small models is chaotic at the 1 % level. A difference counts
only where neither perturbation nor the choice of calibration draws explains it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mxjax.evaluation.measures.statistics import paired_interval
from mxjax.evaluation.report.tables import Table

Row = Mapping[str, Any]
"""One build on one calibration draw, as `ablation.run` writes it."""
RELATIVE_TIE = 1e-3
"""Relative difference of operator errors or KL below which two builds are equal."""
NOTE = (
  "Calibration draws {seeds}; {replicates} perturbed replicates each. ± is half the "
  "range over draws and replicates. Differences are paired with the reference row; "
  "brackets hold the exact 95 % t interval over draws. A difference is a tie when "
  "its interval holds zero or perturbation alone does as much. Local errors are in "
  "units of nearest rounding's."
)


class Comparison(NamedTuple):
  """Paired difference between a row and the reference row in one quantity.

  A negative mean is better than the reference. `interval` is the exact 95 % t interval
  over calibration draws, None for fewer than two; `spread` is how far perturbations
  alone move the quantity, in the noisier row. `verdict` is `better`, `worse` or `tie`,
  or `one replicate` if noise was not measured.
  """

  mean: float
  interval: tuple[float, float] | None
  spread: float
  verdict: str

  def __str__(self) -> str:
    """Formats the difference, its interval and the verdict as a cell."""
    ends = "[{:+.4g}, {:+.4g}] ".format(*self.interval) if self.interval else ""
    return f"{self.mean:+.4g} {ends}{self.verdict}"


class Quantity(NamedTuple):
  """A quantity measured on every row and compared draw by draw.

  `head` is its column head, `read` returns the values of a row, one per perturbed
  replicate, and `form` is their format. Rows are equal below `relative_tie`, the
  relative difference of a quantity that perturbation does not affect; it is None where
  replicates show the noise.
  """

  head: str
  read: Callable[[Row], Sequence[float]]
  form: str
  relative_tie: float | None = None

  def values(self, rows: Sequence[Row]) -> np.ndarray:
    """Returns the values as float64 `[draws, replicates]`."""
    return np.asarray([self.read(row) for row in rows], np.float64)

  def cell(self, rows: Sequence[Row]) -> str:
    """Formats the mean, with half the range if the quantity is noisy."""
    values = self.values(rows)
    text = f"{values.mean():{self.form}}"
    if self.relative_tie is None and values.size > 1:
      text += f" ± {np.ptp(values) / 2:{self.form}}"
    return text

  def compare(self, rows: Sequence[Row], reference: Sequence[Row]) -> Comparison:
    """Compares a row with the reference on the same calibration draws."""
    ours, theirs = self.values(rows), self.values(reference)
    mean, interval = float((ours - theirs).mean()), None
    if len(ours) > 1:
      paired = paired_interval(ours.mean(1).tolist(), theirs.mean(1).tolist())
      interval = paired.low, paired.high
    if self.relative_tie is None:
      spread = float(max(np.ptp(ours, axis=1).max(), np.ptp(theirs, axis=1).max()))
    else:
      spread = self.relative_tie * float(theirs.mean())
    covers_zero = interval is not None and interval[0] <= 0 <= interval[1]
    if self.relative_tie is None and ours.shape[1] < 2:
      verdict = "one replicate"
    elif abs(mean) <= spread or covers_zero:
      verdict = "tie"
    else:
      verdict = "better" if mean < 0 else "worse"
    return Comparison(mean, interval, spread, verdict)


OPERATOR_ERROR = Quantity(
  "operator error", lambda row: [row["operator_error"]], ".6f", RELATIVE_TIE
)
DIVERGENCE = Quantity(
  "KL, nats", lambda row: [row["agreement"]["kl_mean"]], ".4f", RELATIVE_TIE
)


def perplexity(test: str) -> Quantity:
  """Returns the perplexity on one test as a `Quantity`."""
  return Quantity(
    f"perplexity, {test}", lambda row: row["perplexity"][test]["values"], ".2f"
  )


def table(result: Mapping[str, Any]) -> Table:
  """Builds the table of a study from the result of `ablation.run`."""
  rows = result["rows"]
  reference = rows[result["reference"]]
  tests = list(reference[0]["perplexity"])
  quantities = [*map(perplexity, tests), OPERATOR_ERROR]
  if all(row["agreement"] for draws in rows.values() for row in draws):
    quantities.append(DIVERGENCE)
  heads = [head for quantity in quantities for head in (quantity.head, "difference")]
  body = []
  for label, draws in rows.items():
    cells = [label]
    for quantity in quantities:
      is_reference = draws is reference
      difference = "reference" if is_reference else quantity.compare(draws, reference)
      cells += [quantity.cell(draws), str(difference)]
    body.append([*cells, _local_errors(draws)])
  note = NOTE.format(
    seeds=", ".join(map(str, result["seeds"])),
    replicates=len(reference[0]["perplexity"][tests[0]]["values"]) if tests else 0,
  )
  head = ["row", *heads, "local error, sensitivity / mismatch"]
  return Table(result["study"], head, body, note)


def _local_errors(rows: Sequence[Row]) -> str:
  linears = [row["linears"] for row in rows]
  means = [
    f"{np.mean([linear[key] for linear in linears]):.3f}"
    for key in ("local_sensitivity", "local_mismatch")
    if all(key in linear for linear in linears)
  ]
  return " / ".join(means) or "-"
