import pytest

from mxjax.evaluation.measures import fitness
from mxjax.evaluation.tasks import tasks
from tests import refusals


@pytest.fixture(scope="module")
def items():
  try:
    return {name: tasks.load_items(name) for name in tasks.TASKS}
  except FileNotFoundError as error:
    pytest.skip(str(error))


def test_the_official_splits_are_complete(items):
  sizes = {name: len(rows) for name, rows in items.items()}
  assert sizes == {
    "arc_challenge": 299,
    "arc_easy": 2376,
    "hellaswag": 10042,
    "piqa": 1838,
    "winogrande": 1267,
  }
  assert tuple(sizes) == fitness.ACCURACIES
  for rows in items.values():
    assert len({row.id for row in rows}) == len(rows)
    assert all(0 <= row.gold < len(row.choices) for row in rows)
    assert all(choice for row in rows for choice in row.choices)


def test_gold_labels_are_spread_over_the_choices(items):
  for name, rows in items.items():
    most = max(sum(row.gold == index for row in rows) for index in range(2))
    assert most < 0.55 * len(rows), name


def test_prompts(items):
  arc = items["arc_challenge"][0]
  assert arc.contexts[0].startswith("Question: Juan and LaKeisha roll")
  assert arc.contexts[0].endswith("\nAnswer:")
  assert arc.continuations[3] == " Record the details of the investigation."
  assert arc.gold == 3
  swag = items["hellaswag"][0]
  assert swag.contexts[0] == ("Roof shingle removal: A man is sitting on a roof. He")
  assert swag.continuations[swag.gold] == " starts pulling up roofing on a roof."
  piqa = items["piqa"][0]
  assert piqa.contexts[0].startswith("Question: How do I ready a guinea pig cage")
  assert piqa.choices[0].endswith(
    "ripped paper strips, you will also need to supply "
    "it with a water bottle and a food dish."
  )


def test_winogrande_scores_the_same_ending_after_either_name(items):
  item = items["winogrande"][0]
  assert item.contexts == (
    "Sarah was a much better surgeon than Maria so Sarah",
    "Sarah was a much better surgeon than Maria so Maria",
  )
  assert set(item.continuations) == {" always got the easier cases."}
  assert item.gold == 1


def test_arc_easy_is_the_test_split_each_question_once(items):
  assert items["arc_easy"][0].id == "Mercury_417466"
  assert items["arc_easy"][0].gold == 0


def test_wikihow_marks_are_dropped():
  clean = tasks.clean_hellaswag
  assert clean(" How to [title] Go [step] on.  Then ") == "How to. Go on. Then"


def test_mistakes_are_named():
  load = lambda name, **options: lambda: tasks.load_items(name, **options)
  refusals.check(
    [
      (load("boolq"), "boolq", "embedded"),
      (load("piqa", source="disk"), "disk"),
      (load("piqa", limit=0), "limit 0"),
    ]
  )
  refusals.check([(load("piqa", source="hub"), "Couldn't reach")], ConnectionError)


def test_a_short_split_is_refused(monkeypatch):
  monkeypatch.setattr(tasks.text_sources, "hub_rows", lambda *a: [{}] * 5)
  with pytest.raises(ValueError, match="expected 1838 items of piqa, got 5"):
    tasks.load_items("piqa", source="hub")
