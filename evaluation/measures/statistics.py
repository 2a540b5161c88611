"""Student's interval of paired differences: the one place that computes it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


class Interval(NamedTuple):
  """Mean of paired differences and a t interval around it.

  Attributes:
    mean: Of the differences.
    deviation: Their sample standard deviation, n - 1 in the denominator.
    low: Lower end.
    high: Upper end.
    count: Pairs.
  """

  mean: float
  deviation: float
  low: float
  high: float
  count: int


def paired_interval(
  first: Sequence[float], second: Sequence[float], *, critical: float | None = None
) -> Interval:
  """The 95 % t interval of `first - second`, paired by position (seed).

  Args:
    first: One value a seed.
    second: The other side's values on the same seeds.
    critical: The t quantile to use; None computes it. The paper rounds that of three
      seeds to 4.303.

  Raises:
    ValueError: Fewer than two pairs, or unequal counts.
  """
  if len(first) != len(second) or len(first) < 2:
    raise ValueError(
      "paired_interval: expected at least two pairs, got "
      f"{len(first)} and {len(second)} values; give both sides the same seeds."
    )
  differences = np.subtract(first, second).astype(np.float64)
  count = len(differences)
  if critical is None:
    critical = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
  mean, half = float(differences.mean()), critical * float(stats.sem(differences))
  deviation = float(differences.std(ddof=1))
  return Interval(mean, deviation, mean - half, mean + half, count)
