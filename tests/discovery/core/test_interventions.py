"""The exact form of every control: examples, what is refused, and what is said then."""

import pytest

from mxjax.discovery.core import interventions
from mxjax.discovery.tasks import world
from mxjax.discovery.tasks.ptq import task as ptq

PTQ = ptq.PtqTask(model="random:0", calibration=[8, 32], windows=[2, 32])
TASKS = [PTQ, world.World(seed=3), world.World(seed=3, luck=0.5)]
KNOWN = interventions.of_task(PTQ.interface, PTQ.interventions)


@pytest.mark.parametrize("task", TASKS, ids=["ptq", "world", "lucky world"])
def test_every_example_has_the_form_that_it_shows(task):
  known = interventions.of_task(task.interface, task.interventions)
  assert interventions.PROGRAM in known
  for kind, form in known.items():
    assert form.example["kind"] == kind
    assert interventions.checked(known, form.example) == form.example
    assert {*form.values} >= {*form.example} - {"kind"}


def test_the_parent_is_the_evaluators_to_fill_in():
  change = {"kind": "scope", "part": "mlp", "parent": True}
  assert interventions.checked(KNOWN, change) == {"kind": "scope", "part": "mlp"}


WRONG = {
  "name for kind": ({"name": "scope", "part": "mlp"}, "expected an intervention with"),
  "unknown kind": ({"kind": "magic"}, "among shuffle_stats, random_map, scope"),
  "an unknown part": ({"kind": "scope", "part": "attn"}, 'one of "even", "odd"'),
  "a value too few": ({"kind": "shuffle_stats"}, "expected the values hooks"),
  "a value too many": ({"kind": "random_map", "seed": 1}, "got seed"),
  "no list": ({"kind": "shuffle_stats", "hooks": "transform"}, "a list of one or more"),
  "an empty list": ({"kind": "shuffle_stats", "hooks": []}, "a list of one or more"),
  "a hook that no control changes": (
    {"kind": "shuffle_stats", "hooks": ["tables"]},
    "a list of one or more",
  ),
  "no number": ({"kind": "dose", "factor": "half"}, "a number from -4 to 4"),
  "a truth value": ({"kind": "dose", "factor": True}, "a number from -4 to 4"),
  "a large number": ({"kind": "dose", "factor": 1e9}, "a number from -4 to 4"),
  "a span that ends first": (
    {"kind": "permute", "part": "mlp", "layers": [2, 1]},
    "two integers",
  ),
  "a program without parts": ({"kind": "program"}, "expected either `without`"),
  "both forms of a program": (
    {"kind": "program", "without": ["transform"], "code": "x"},
    "expected either `without`",
  ),
  "code that is no text": ({"kind": "program", "code": 5}, "expected either"),
  "an unknown part of a program": (
    {"kind": "program", "without": ["colour"]},
    "a list of one or more",
  ),
}


@pytest.mark.parametrize(("change", "told"), WRONG.values(), ids=WRONG)
def test_another_form_is_refused_with_one_that_would_do(change, told):
  with pytest.raises(ValueError) as caught:
    interventions.checked(KNOWN, change)
  assert told in str(caught.value)
  assert '{"kind": ' in str(caught.value), "an example to write"


def test_a_list_names_each_once():
  """Repeats would be another condition for the same measurement."""
  names = interventions.Value(doc="", one_of=("a", "b"), several=True)
  assert names.allows(["a", "b"])
  assert not names.allows(["a", "a"])
