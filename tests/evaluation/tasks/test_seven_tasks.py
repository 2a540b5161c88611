"""The whole way on a small trained model: quantize, evaluate tasks, tables."""

import json

import numpy as np
import pytest

from mxjax.cli.main import main
from mxjax.evaluation import text_sources
from mxjax.evaluation.tasks import seven_tasks
from mxjax.models.loading import embedded

ITEMS, TASKS = 4, "winogrande,arc_easy,wikitext2"
SOURCE = embedded.trained_folder("llama")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
  """Results of the float and the RTN model, and the folder of both."""
  folder = tmp_path_factory.mktemp("runs")
  try:
    passages = text_sources.embedded_text("test").split("\n\n")
  except FileNotFoundError as error:
    pytest.skip(str(error))
  text = folder / "test.txt"
  text.write_text("\n\n".join(passages[:20]))
  sizes = ("--sequences", 2, "--length", 64, "--windows", 1, "--window-length", 64)
  sizes += ("--dtype", "float32")
  quantize = ("quantize", SOURCE, "--method", "rtn", "--out", folder / "rtn", *sizes)
  tail = ("--tasks", TASKS, "--items", ITEMS, "--wikitext2", text)
  tail += ("--task-windows", 2, "--window-length", 64)
  float32 = ("--dtype", "float32")
  exact = ("evaluate", SOURCE, *tail, *float32, "--out", folder / "results/float")
  ours = ("evaluate", folder / "rtn", *tail, "--out", folder / "results/rtn")
  for words in (quantize, exact, ours):
    assert main(list(map(str, words))) == 0
  read = lambda name: json.loads(
    (folder / "results" / name / "evaluation.json").read_text()
  )
  return folder, read("float"), read("rtn")


def test_results_say_what_was_measured_on_which_tokens(evaluated):
  folder, exact, ours = evaluated
  assert (exact["method"], exact["seed"]) == ("BF16", None)
  assert (ours["method"], ours["seed"], ours["model"]) == ("rtn", 0, "llama")
  assert list(exact["tasks"]) == ["wikitext2", "arc_easy", "winogrande"]
  for name, task in exact["tasks"].items():
    assert task["token_sha256"] == ours["tasks"][name]["token_sha256"]
  assert exact["tasks"]["arc_easy"]["items"] == ITEMS
  assert exact["tasks"]["arc_easy"]["official_items"] == 2376
  assert 1 < exact["tasks"]["wikitext2"]["score"] < 400
  assert ours["tasks"]["wikitext2"]["score"] != exact["tasks"]["wikitext2"]["score"]
  assert ours["calibration"]["fingerprint"]


def test_every_item_is_saved_and_gives_the_score(evaluated):
  folder, exact, _ = evaluated
  lines = (folder / "results/float/items/arc_easy.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert len(rows) == ITEMS
  right = np.mean([row["prediction_norm"] == row["gold"] for row in rows])
  assert exact["tasks"]["arc_easy"]["score"] == right
  assert all(np.isfinite(row["log_likelihoods"]).all() for row in rows)


def test_tables_of_these_results_leave_what_is_missing_empty(evaluated, mxjax):
  places = ("--results", evaluated[0] / "results")
  printed = mxjax("reproduce", "main,raw", *places, as_json=False)
  title = "Complete seven-task results (reduced: "
  assert f"{title}arc_easy: first 4 of 2376, winogrande: first 4 of 1267)" in printed
  assert "Fit-7 across models" in printed
  assert "| RTN |  |  |  |" in printed


@pytest.mark.parametrize(
  ("words", "message"),
  [
    ([SOURCE, "--tasks", "boolq"], "expected one of all, wikitext2"),
    ([SOURCE, "--tasks", "c4"], "pass a text, JSONL or .npy file"),
  ],
)
def test_mistakes_are_one_line(words, message, refused):
  assert message in refused("evaluate", *words)


def test_names_of_tasks_come_in_the_order_of_the_paper():
  assert seven_tasks.parse_names("piqa,c4") == ["c4", "piqa"]
  assert len(seven_tasks.parse_names("all")) == 7
