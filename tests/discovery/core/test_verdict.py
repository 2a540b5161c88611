"""The verdict table: total, in the order that the design notes state."""

import itertools

import pytest

from mxjax.discovery.core import verdict
from mxjax.discovery.core.residual import Explanation, consistent, symbol
from mxjax.discovery.core.verdict import Response, Verdict

TABLE = list(
  itertools.product(
    (True, False),
    (True, False),
    (True, False),
    (True, False),
    ("focal", "competitor", "several", "none"),
  )
)


def decide(safe, same, gains, signature, survivors):
  return verdict.decide(
    is_safe=safe,
    is_equivalent=same,
    gains=gains,
    shows_signature=signature,
    survivors=survivors,
  )


@pytest.mark.parametrize("cell", TABLE)
def test_every_cell_has_the_verdict_of_the_first_rule_that_applies(cell):
  safe, same, gains, signature, survivors = cell
  found, reason = decide(*cell)
  if not safe:
    expected = Verdict.UNSAFE
  elif same:
    expected = Verdict.NO_EFFECT
  elif survivors in ("several", "none"):
    expected = Verdict.UNRESOLVED
  elif survivors == "focal" and gains:
    expected = Verdict.SUPPORTED
  elif gains:
    expected = Verdict.TARGET_ONLY
  elif signature:
    expected = Verdict.MEDIATOR_ONLY
  else:
    expected = Verdict.NO_EFFECT
  assert found == expected
  assert reason


def test_all_six_verdicts_and_responses_are_reached():
  assert {decide(*cell)[0] for cell in TABLE} == set(Verdict)
  assert set(verdict.RESPONSES) == set(Verdict)
  assert set(verdict.RESPONSES.values()) == set(Response)


@pytest.mark.parametrize(
  ("change", "expected"),
  [(-0.11, "down"), (-0.1, "same"), (0.0, "same"), (0.1, "same"), (0.11, "up")],
)
def test_a_margin_belongs_to_same(change, expected):
  assert symbol(change, 0.1) == expected


IDENTITY = Explanation(
  "identity",
  "these weights matter",
  {"primary": {"loss": "down"}, "c": {"loss": "same"}},
)
CAPACITY = Explanation(
  "capacity", "any weights do", {"primary": {"loss": "down"}, "c": {"loss": "down"}}
)


@pytest.mark.parametrize(
  ("control", "expected", "left"),
  [
    ("same", Verdict.SUPPORTED, ("identity",)),
    ("down", Verdict.TARGET_ONLY, ("capacity",)),
    ("up", Verdict.UNRESOLVED, ()),
  ],
)
def test_the_papers_example_of_random_allocation(control, expected, left):
  finding = verdict.resolve(
    (IDENTITY, CAPACITY),
    {"primary": {"loss": "down"}, "c": {"loss": control}},
    "loss",
    is_safe=True,
    is_equivalent=False,
  )
  assert (finding.verdict, finding.survivors) == (expected, left)
  assert finding.explicit == "control"
  assert set(finding.survivors) | set(finding.excluded) == {"identity", "capacity"}


def test_without_the_control_nothing_is_excluded():
  finding = verdict.resolve(
    (IDENTITY, CAPACITY),
    {"primary": {"loss": "down"}},
    "loss",
    is_safe=True,
    is_equivalent=False,
  )
  assert finding.verdict == Verdict.UNRESOLVED
  assert finding.reason == "several_left"
  assert not finding.explicit


def test_an_unsafe_run_excludes_nothing():
  finding = verdict.resolve(
    (IDENTITY, CAPACITY), {}, "loss", is_safe=False, is_equivalent=False
  )
  assert finding.verdict == Verdict.UNSAFE
  assert finding.excluded == {}


def test_what_was_not_observed_contradicts_nobody():
  assert consistent({"x": "up"}, {"y": "down"})
  assert not consistent({"x": "up"}, {"x": "same"})
