"""Statistics of paired differences: t and exact intervals, exact tests, shares."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from mxjax.errors import ValueRefusal

CONFIDENCE = 0.95
MAX_EXACT = 16
"""Largest number of pairs for which all sign patterns are enumerated."""


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
    raise ValueRefusal(
      "paired_interval",
      expected="at least two pairs",
      got=f"{len(first)} and {len(second)} values",
      mend="give both sides the same seeds",
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


@dataclasses.dataclass(frozen=True)
class Paired:
  """Comparison over paired seeds; negative differences favor the first arm.

  Attributes:
    differences: First minus second, one per seed.
    mean: Mean difference.
    deviation: Sample standard deviation of the differences.
    t_interval: Student's 95 % interval of the mean.
    exact_interval: Interval of the center of symmetry from the signed-rank
      distribution, with the smallest attainable coverage of at least 95 %, or the
      largest one if too few seeds reach 95 %.
    exact_coverage: The actual coverage of `exact_interval`.
    sign_flip_p: Exact two-sided p-value of the mean under sign flips.
    wins: Seeds in which the first arm is lower.
    losses: Seeds in which the second arm is lower.
  """

  differences: tuple[float, ...]
  mean: float
  deviation: float
  t_interval: tuple[float, float]
  exact_interval: tuple[float, float]
  exact_coverage: float
  sign_flip_p: float
  wins: int
  losses: int


def compare_seeds(first: Sequence[float], second: Sequence[float]) -> Paired:
  """Compares two arms seed by seed.

  Raises:
    ValueError: There are fewer than two pairs, or more than can be enumerated.
  """
  pairs = np.subtract(first, second)
  if not 2 <= len(pairs) <= MAX_EXACT:
    raise ValueRefusal(
      "paired",
      expected=f"2 to {MAX_EXACT} seeds",
      got=len(pairs),
      mend="run more, or split them",
    )
  student = paired_interval(first, second)
  low, high, coverage = _signed_rank_interval(pairs)
  # One resample per sign pattern makes the test exact.
  flips = stats.permutation_test(
    (pairs,), np.mean, permutation_type="samples", n_resamples=2 ** len(pairs)
  )
  return Paired(
    differences=tuple(float(d) for d in pairs),
    mean=student.mean,
    deviation=student.deviation,
    t_interval=(student.low, student.high),
    exact_interval=(low, high),
    exact_coverage=coverage,
    sign_flip_p=float(flips.pvalue) if pairs.any() else 1.0,
    wins=int((pairs < 0).sum()),
    losses=int((pairs > 0).sum()),
  )


def _signed_rank_interval(pairs: np.ndarray) -> tuple[float, float, float]:
  """Returns low, high and coverage of the interval between two Walsh averages.

  If the k smallest and k largest averages are left out, the interval misses the center
  with twice the probability that the signed-rank sum is at most k.
  """
  n = len(pairs)
  # Under symmetry about the center every pattern of signs is equally likely.
  signs = np.array(list(itertools.product((0, 1), repeat=n)))
  sums = signs @ np.arange(1, n + 1)
  missed = lambda k: 2 * float((sums <= k).mean())
  # Few seeds reach no 95 %: then nothing is left out, k = 0, whatever it misses.
  left_out = max(k for k in range(n * n) if missed(k) <= 1 - CONFIDENCE or k == 0)
  rows, columns = np.triu_indices(n)
  walsh = np.sort((pairs[rows] + pairs[columns]) / 2)
  return (
    float(walsh[left_out]),
    float(walsh[-1 - left_out]),
    1 - missed(left_out),
  )


def share_interval(count: int, total: int) -> tuple[float, float]:
  """Computes the two-sided 95 % Clopper-Pearson interval of a share."""
  interval = stats.binomtest(count, total).proportion_ci(CONFIDENCE, method="exact")
  return float(interval.low), float(interval.high)
