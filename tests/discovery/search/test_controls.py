"""Control selection against brute force and an integer-programming solver."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from scipy import optimize

from mxjax.discovery.core.residual import PRIMARY, Control, Explanation, disagree
from mxjax.discovery.search import controls


@st.composite
def experiments(draw):
  names = [f"c{i}" for i in range(draw(st.integers(0, 6)))]
  symbols = st.sampled_from(["down", "same", "up", None])
  explanations = []
  for index in range(draw(st.integers(2, 4))):
    table = {
      condition: {o: s for o in ("x", "y") if (s := draw(symbols)) is not None}
      for condition in (PRIMARY, *names)
    }
    explanations.append(Explanation(f"e{index}", "", table))
  allowed = [Control(n, {"kind": n}, draw(st.integers(1, 4))) for n in names]
  return explanations, allowed


def separates(explanations, conditions):
  return all(
    any(disagree(a.predicts(c), b.predicts(c)) for c in conditions)
    for a, b in itertools.combinations(explanations, 2)
  )


def brute_force(explanations, allowed):
  best = None
  for size in range(len(allowed) + 1):
    for chosen in itertools.combinations(sorted(allowed, key=lambda c: c.name), size):
      if separates(explanations, [PRIMARY, *(c.name for c in chosen)]):
        key = (sum(c.cost for c in chosen), size, tuple(c.name for c in chosen))
        best = min(best or key, key)
  return best


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(experiments())
def test_selection_is_the_cheapest_first_of_equals(experiment):
  explanations, allowed = experiment
  expected = brute_force(explanations, allowed)
  if expected is None:
    with pytest.raises(controls.IndistinguishableError):
      controls.minimal(explanations, allowed)
    return
  chosen = controls.minimal(explanations, allowed)
  cost, names = sum(c.cost for c in chosen), tuple(c.name for c in chosen)
  assert (cost, len(chosen), names) == expected
  assert controls.select("minimal", explanations, allowed) == chosen
  everything = controls.select("all", explanations, allowed)
  assert {c.name for c in everything} == {c.name for c in allowed}


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(experiments())
def test_the_cost_is_that_of_an_integer_program(experiment):
  explanations, allowed = experiment
  pairs = [
    (a, b)
    for a, b in itertools.combinations(explanations, 2)
    if not disagree(a.predicts(PRIMARY), b.predicts(PRIMARY))
  ]
  hypothesis.assume(pairs and allowed)
  cover = np.array(
    [
      [float(disagree(a.predicts(c.name), b.predicts(c.name))) for c in allowed]
      for a, b in pairs
    ]
  )
  solved = optimize.milp(
    np.array([float(c.cost) for c in allowed]),
    constraints=optimize.LinearConstraint(cover, lb=1.0),
    bounds=optimize.Bounds(0, 1),
    integrality=np.ones(len(allowed)),
  )
  if not solved.success:
    with pytest.raises(controls.IndistinguishableError):
      controls.minimal(explanations, allowed)
  else:
    cost = sum(c.cost for c in controls.minimal(explanations, allowed))
    assert cost == pytest.approx(solved.fun)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(experiments(), st.integers(0, 5))
def test_random_legal_controls_never_cost_more_than_the_minimal_set(experiment, seed):
  explanations, allowed = experiment
  try:
    smallest = controls.select("minimal", explanations, allowed)
  except controls.IndistinguishableError:
    return
  chosen = controls.select("random", explanations, allowed, seed)
  assert chosen == controls.select("random", explanations, allowed, seed)
  assert sum(c.cost for c in chosen) <= sum(c.cost for c in smallest)
  everything = controls.select("all", explanations, allowed)
  assert list(everything) == sorted(allowed, key=lambda c: c.name)
  assert controls.select("none", explanations, allowed) == ()


def test_a_silent_account_separates_nothing():
  loud = Explanation("loud", "", {"c": {"x": "up"}})
  silent = Explanation("silent", "", {})
  control = Control("c", {})
  with pytest.raises(controls.IndistinguishableError, match="loud / silent") as caught:
    controls.minimal([loud, silent], [control])
  assert "silent predicts nothing under any control" in str(caught.value)


@pytest.mark.parametrize("cost", [0, -1, 1.5])
def test_a_control_costs_at_least_one_call(cost):
  with pytest.raises(ValueError, match="cost"):
    Control("c", {}, cost)


@pytest.mark.parametrize("name", ["primary", "probe 1", "text of the parent"])
def test_a_control_is_not_named_like_a_condition_of_ours(name):
  # The outcome of one would take the place of the other's.
  with pytest.raises(ValueError, match="expected a name other than"):
    Control(name, {"kind": "text"})


def test_sizes_beyond_exact_search_are_refused():
  many = [Explanation(f"e{i}", "", {PRIMARY: {"x": "up"}}) for i in range(17)]
  with pytest.raises(ValueError, match="at most"):
    controls.minimal(many, [])
  twice = [Control("c", {}), Control("c", {})]
  with pytest.raises(ValueError, match="distinct"):
    controls.minimal(many[:2], twice)


def test_a_question_that_would_fill_the_memory_is_refused():
  """A model may register controls that separate a pair each: 2**n sets of them."""
  pairs = [*itertools.combinations(range(7), 2)][:18]
  predicted = lambda number: {
    f"c{n}": {"x": "down" if number == pair[0] else "up"}
    for n, pair in enumerate(pairs)
    if number in pair
  }
  accounts = [Explanation(f"e{i}", "", predicted(i)) for i in range(7)]
  allowed = [Control(f"c{n}", {"kind": "c"}) for n in range(len(pairs))]
  with pytest.raises(ValueError, match="at most 65536 sets"):
    controls.minimal(accounts, allowed)
