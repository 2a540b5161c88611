"""Paired differences: intervals, ties, and what is no evidence."""

import numpy as np
import pytest

from mxjax.evaluation.measures.statistics import compare


def test_the_interval_of_paired_draws_is_the_papers():
  """Fresh less stale Fit-3 on Qwen over three seeds (the paper prints these ends)."""
  differences = (-0.009132, -0.006444, -0.008489)
  found = compare([[0.05 + each] for each in differences], [[0.05]] * 3)
  assert found.interval == pytest.approx((-0.011509, -0.004535), abs=2e-6)
  assert compare([[0.04]], [[0.05]]).interval is None


@pytest.mark.parametrize(
  ("ours", "verdict"),
  [((9.0, 9.1), "better"), ((10.1, 10.2), "tie"), ((11.0, 11.3), "worse")],
)
def test_a_difference_inside_the_spread_of_replicates_is_a_tie(ours, verdict):
  assert compare([ours], [(10.0, 10.2)]).verdict == verdict


def test_one_value_cannot_rank():
  assert compare([[5.0]], [[10.0]]).verdict == "one value"


def test_differences_are_paired_by_draw():
  """Draws differ much, the pair little: pairing sees it, unless draws do not agree."""
  reference = [(10.0, 10.0), (20.0, 20.0)]
  found = compare([(9.0, 9.0), (19.0, 19.0)], reference)
  assert found.mean == pytest.approx(-1.0)
  assert found.interval == pytest.approx((-1.0, -1.0))
  assert found.verdict == "better"
  found = compare([(9.0, 9.0), (19.9, 19.9)], reference)
  assert found.interval[0] < 0 < found.interval[1]
  assert found.verdict == "tie"


@pytest.mark.parametrize(
  ("ours", "verdict"), [(0.0129, "tie"), (0.0131, "worse"), (0.006, "better")]
)
def test_differences_up_to_the_least_that_counts_are_ties(ours, verdict):
  assert compare([[ours]], [[0.01]], least=0.003).verdict == verdict


def test_resampled_items_give_the_interval_of_one_draw():
  samples = np.linspace(-0.2, 0.8, 1001)
  found = compare([[1.3]], [[1.0]], samples=samples)
  assert found.interval == pytest.approx((-0.175, 0.775))
  assert found.verdict == "tie"
  assert compare([[1.3]], [[1.0]], samples=samples + 0.2).verdict == "worse"
  assert str(found) == "+0.3 [-0.175, +0.775] tie"
