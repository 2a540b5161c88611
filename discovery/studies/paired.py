"""Statistics of paired seeds: t and exact intervals, exact tests, shares."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from scipy import stats

from mxjax.evaluation.measures.statistics import CONFIDENCE, paired_interval

MAX_EXACT = 16
"""Largest number of pairs for which all sign patterns are enumerated."""


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


def compare(first: Sequence[float], second: Sequence[float]) -> Paired:
  """Compares two arms seed by seed.

  Raises:
    ValueError: There are fewer than two pairs, or more than can be enumerated.
  """
  pairs = np.subtract(first, second)
  if not 2 <= len(pairs) <= MAX_EXACT:
    raise ValueError(
      f"paired: expected 2 to {MAX_EXACT} seeds, got {len(pairs)}; run more, or split "
      "them."
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
  signs = np.array(list(itertools.product((0, 1), repeat=n)))
  sums = signs @ np.arange(1, n + 1)
  missed = lambda k: 2 * float((sums <= k).mean())
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
