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
