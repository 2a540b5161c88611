"""Student's t interval of paired differences."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


class Interval(NamedTuple):
  """Mean of paired differences and a t interval around it.

  `deviation` is the sample standard deviation (denominator n - 1).
  """

  mean: float
  deviation: float
  low: float
  high: float


def paired_interval(
  first: Sequence[float], second: Sequence[float], *, critical: float | None = None
) -> Interval:
  """Computes the 95 % t interval of `first - second`, paired by position (seed).

  `critical` is the t quantile to use; None computes it. The paper rounds that of three
  seeds to 4.303.

  Raises:
    ValueError: There are fewer than two pairs, or the counts differ.
  """
  if len(first) != len(second) or len(first) < 2:
    raise ValueError(
      "paired_interval: expected at least two pairs, got "
      f"{len(first)} and {len(second)} values; give both sides the same seeds."
    )
  differences = np.subtract(first, second).astype(np.float64)
  if critical is None:
    critical = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1))
  mean, half = float(differences.mean()), critical * float(stats.sem(differences))
  deviation = float(differences.std(ddof=1))
  return Interval(mean, deviation, mean - half, mean + half)


class Comparison(NamedTuple):
  """Paired difference of one quantity between two methods; lower is better.

  `interval` is the 95 % interval of the mean difference, None if nothing gives one.
  `verdict` is `better`, `worse` or `tie`, or `one value` if no noise was measured.
  """

  mean: float
  interval: tuple[float, float] | None
  verdict: str

  def __str__(self) -> str:
    """Formats the difference, its interval and the verdict as a cell."""
    ends = "[{:+.4g}, {:+.4g}] ".format(*self.interval) if self.interval else ""
    return f"{self.mean:+.4g} {ends}{self.verdict}"


def compare(
  ours: Sequence[Sequence[float]],
  theirs: Sequence[Sequence[float]],
  *,
  least: float = 0.0,
  samples: np.ndarray | None = None,
) -> Comparison:
  """Compares two methods on the same calibration draws.

  The interval is Student's over draws; for one draw, that of `samples`, the difference
  on resampled items. It is a tie if the interval holds zero, or if the mean difference
  is at most `least` or what replicates of one draw differ by.

  Args:
    ours: Values, one row per draw and one column per perturbed replicate.
    theirs: The same draws of the other method.
    least: Smallest difference that counts.
    samples: Differences on resampled items, `[samples]`, or empty.
  """
  first, second = (np.asarray(side, np.float64) for side in (ours, theirs))
  mean, interval = float((first - second).mean()), None
  if len(first) > 1:
    paired = paired_interval(first.mean(1).tolist(), second.mean(1).tolist())
    interval = paired.low, paired.high
  elif samples is not None and len(samples):
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(samples, (tail, 1 - tail))
    interval = float(low), float(high)
  spread = max(float(np.ptp(side, axis=1).max()) for side in (first, second))
  if abs(mean) <= max(spread, least) or (interval and interval[0] <= 0 <= interval[1]):
    return Comparison(mean, interval, "tie")
  if interval is None and first.shape[1] < 2 and not least:
    return Comparison(mean, interval, "one value")
  return Comparison(mean, interval, "better" if mean < 0 else "worse")
