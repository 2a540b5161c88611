"""Tables from result files; the paper's own rows give the paper's own tables."""

import pytest

from mxjax.evaluation import paper_tables, results
from mxjax.evaluation.measures import fitness
from tests.evaluation.paper import COLUMNS, PAPER


def save(folder, row, *, model, method, seed=None, percent=False, drop=(), tokens="t"):
  """Writes a printed row as a result file."""
  facts = {"items": 5, "official_items": 5, "token_sha256": tokens}
  unit = lambda task: 100.0 if percent and task in fitness.ACCURACIES else 1.0
  scored = {
    task: facts | {"score": float(row[name]) / unit(task)}
    for name, task in COLUMNS.items()
    if task not in drop
  }
  value = results.to_json(model=model, method=method, seed=seed, tasks=scored)
  results.write(folder / f"{model}-{method}-{seed}", value, {})


def built(folder):
  """The tables of the results in a folder, by title."""
  tables = paper_tables.build(results.read([str(folder)]))
  return {table.title: table for table in tables}


@pytest.fixture
def seven_models(tmp_path):
  for model, table in PAPER["raw_seven_task"].items():
    for row in table["rows"]:
      percent = table["accuracy_unit"] == "percent"
      save(tmp_path, row, model=model, method=row["Method"], percent=percent)
  return tmp_path


def test_the_cross_model_table_of_the_paper(seven_models):
  tables = built(seven_models)
  table = tables["Fit-7 across models"]
  got = {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}
  assert len(got) == 10
  for row in PAPER["cross_model_fit7"]:
    for model in PAPER["raw_seven_task"]:
      # From rounded inputs: the paper's own are not printed.
      difference = float(got[row["Method"]][model]) - float(row[model])
      assert abs(difference) < 2.1e-4
    assert abs(float(got[row["Method"]]["Robust↓"]) - float(row["Robust"])) < 1.1e-4
  assert len(tables) == 7 + 2


def test_a_missing_cell_stays_empty(tmp_path):
  table = PAPER["raw_seven_task"]["Qwen-8B"]
  reference, rtn = table["rows"][:2]
  save(tmp_path, reference, model="Q", method="BF16", percent=True)
  save(tmp_path, rtn, model="Q", method="RTN", percent=True, drop=("piqa",))
  save(tmp_path, rtn, model="Other", method="RTN", percent=True)
  tables = built(tmp_path)
  complete = tables["Complete results on Q"]
  row = dict(zip(complete.head, complete.rows[1], strict=True))
  assert row["Method"] == "RTN"
  assert row["PIQA↑"] == row["Fit-7↓"] == ""
  assert row["WT2↓"] == "11.834"
  assert tables["Fit-7 across models"].rows[0] == ["RTN", "", "", "", ""]
  aggregate = {tuple(r[:2]): r for r in tables["Alternative aggregates"].rows}
  # Fit-3 needs no PIQA, Acc5 does.
  assert aggregate["Q", "RTN"][3] != "" and aggregate["Q", "RTN"][5] == ""
  assert aggregate["Other", "RTN"][2:5] == ["", "", ""]
  assert aggregate["Other", "RTN"][5] != ""


def test_seeds_and_paired_differences_of_the_paper(tmp_path):
  for row in PAPER["ablation_bf16"]:
    save(tmp_path, row, model=row["Model"], method="BF16")
  for row in PAPER["calib_seed_stability"]:
    save(tmp_path, row, model=row["Model"], method=row["Method"], seed=int(row["Seed"]))
  tables = built(tmp_path)
  seeds = tables["Calibration seeds"]
  printed = {
    (r["Model"], r["Method"], r["Seed"]): r for r in PAPER["calib_seed_stability"]
  }
  assert len(seeds.rows) == 12
  for row in seeds.rows:
    assert abs(float(row[-1]) - float(printed[tuple(row[:3])]["Fit-7"])) < 1.1e-6
  paired = tables["Paired differences of Fit-7"]
  differences = {row[0]: row for row in paired.rows}
  assert differences["Qwen"][1:4] == ["HiRes − WUSH", "0, 3, 5", "-0.017084"]
  assert differences["Qwen"][4] == "[-0.023948, -0.010220]"
  assert len(paired.rows) == 2


def test_three_files_with_the_same_numbers(seven_models, tmp_path, mxjax):
  out = tmp_path / "out"
  printed = mxjax("tables", seven_models, "--out", out, as_json=False)
  assert printed == (out / "tables.md").read_text()
  assert "| HiRes | 10.055 | 16.299 | 54.85 | 77.61 |" in printed
  assert "Complete results on Qwen-8B,HiRes,10.055" in (out / "tables.csv").read_text()
  page = (out / "tables.html").read_text()
  assert page.count("<table>") == 9
  assert page.count("<svg") == 7
  assert "54.85" in page
  assert "http" not in page.replace("http://www.w3.org", "")


ROW = PAPER["ablation_bf16"][0]


def test_other_tokens_than_the_float_model_are_refused(tmp_path):
  save(tmp_path, ROW, model="Q", method="BF16")
  save(tmp_path, ROW, model="Q", method="RTN", tokens="others")
  with pytest.raises(ValueError, match="wikitext2 on different tokens"):
    built(tmp_path)


def test_two_files_that_contradict_are_refused(tmp_path):
  save(tmp_path / "a", ROW, model="Q", method="RTN")
  save(tmp_path / "b", ROW | {"WT2": "9.0"}, model="Q", method="RTN")
  with pytest.raises(ValueError, match="different scores of RTN on Q"):
    results.read([str(tmp_path)])


def test_tasks_of_two_files_are_joined(tmp_path):
  save(tmp_path / "a", ROW, model="Q", method="RTN", drop=("piqa",))
  others = tuple(task for task in fitness.TASKS if task != "piqa")
  save(tmp_path / "b", ROW, model="Q", method="RTN", drop=others)
  (joined,) = results.read([str(tmp_path)])
  assert set(joined.scores) == set(fitness.TASKS)


def test_another_file_is_refused(tmp_path, refused):
  (tmp_path / "evaluation.json").write_text("[]")
  assert "kind mxjax-evaluation" in refused("tables", tmp_path)
  assert "got none at" in refused("tables", tmp_path / "none")
