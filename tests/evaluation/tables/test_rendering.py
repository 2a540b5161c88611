"""Tables from result files; the paper's own rows give the paper's own tables."""

import json
import re

import pytest

from mxjax.evaluation import results
from mxjax.evaluation.measures import fitness
from mxjax.evaluation.report import html
from mxjax.evaluation.report.tables import Table
from mxjax.evaluation.tables import page, rendering
from mxjax.evaluation.tables.declared import TABLES
from mxjax.evaluation.tables.quantities import QUANTITIES, Measured
from tests.evaluation.paper import COLUMNS, PAPER


def save(
  folder,
  row,
  *,
  model,
  method,
  seed=None,
  percent=False,
  drop=(),
  tokens="t",
  **facts_of_file,
):
  """Writes a printed row as a result file."""
  facts = {"items": 5, "official_items": 5, "token_sha256": tokens}
  unit = lambda task: 100.0 if percent and task in fitness.ACCURACIES else 1.0
  scored = {
    task: facts | {"score": float(row[name]) / unit(task)}
    for name, task in COLUMNS.items()
    if task not in drop and name in row
  }
  named = {"model": model, "method": method, "seed": seed, **facts_of_file}
  value = results.to_json(tasks=scored, **named)
  results.write(folder / f"{model}-{method}-{seed}", value, {})


@pytest.fixture
def rendered(mxjax):
  """Tables of the results in a folder by title; rows are dicts."""

  def run(names, folder, *options):
    made = mxjax("reproduce", names, "--results", folder, *options)["tables"]
    return {
      table["title"]: [
        dict(zip(table["head"], row, strict=True)) for row in table["rows"]
      ]
      for table in made
    }

  return run


def ours(rows):
  return [row for row in rows if "(paper)" not in row.get("Model", "")]


@pytest.fixture
def seven_models(tmp_path):
  for model, table in PAPER["raw_seven_task"].items():
    for row in table["rows"]:
      percent = table["accuracy_unit"] == "percent"
      save(tmp_path, row, model=model, method=row["Method"], percent=percent)
  return tmp_path


def test_the_cross_model_table_of_the_paper(seven_models, rendered):
  (rows,) = rendered("main", seven_models).values()
  assert len(rows) == 10
  for printed, row in zip(PAPER["cross_model_fit7"], rows, strict=True):
    assert row["Row"] == printed["Method"]
    for model in PAPER["raw_seven_task"]:
      # From rounded inputs: the paper's own are not printed.
      assert abs(float(row[model]) - float(printed[model])) < 2.1e-4
      assert row[f"{model} (paper)"] == printed[model]
    assert abs(float(row["Robust"]) - float(printed["Robust"])) < 1.1e-4
    assert row["Robust (paper)"] == printed["Robust"]


def test_the_raw_tables_of_the_paper(seven_models, rendered):
  (rows,) = rendered("raw", seven_models).values()
  assert len(ours(rows)) == len(rows) - len(ours(rows)) == 77
  row = next(r for r in rows if (r["Model"], r["Row"]) == ("Qwen-8B", "HiRes"))
  assert (row["WT2↓"], row["ARC-C (%)↑"]) == ("10.0550", "54.85")


def test_a_missing_cell_stays_empty_and_other_methods_get_rows(tmp_path, rendered):
  table = PAPER["raw_seven_task"]["Qwen-8B"]
  reference, rtn = table["rows"][:2]
  save(tmp_path, reference, model="Q", method="BF16", percent=True)
  save(tmp_path, rtn, model="Q", method="RTN", percent=True, drop=("piqa",))
  save(tmp_path, rtn, model="Other", method="mine", percent=True)
  made = rendered("raw,main,aggregates", tmp_path)
  complete = {(r["Model"], r["Row"]): r for r in made["Complete seven-task results"]}
  row = complete["Q", "RTN"]
  assert row["PIQA (%)↑"] == row["Fit-7↓"] == ""
  assert row["WT2↓"] == "11.8340"
  assert complete["Other", "mine"]["PIQA (%)↑"] != ""
  assert ("Q", "GPTQ") not in complete
  main = {row["Row"]: row for row in made["Fit-7 across models: Fit-7↓"]}
  assert main["RTN"]["Q"] == main["RTN"]["Mean"] == main["mine"]["Other"] == ""
  aggregate = {(r["Model"], r["Row"]): r for r in made["Alternative aggregates"]}
  # Fit-3 needs no PIQA, Acc5 does.
  assert aggregate["Q", "RTN"]["Fit-3↓"] != "" and aggregate["Q", "RTN"]["Acc5↑"] == ""
  assert aggregate["Other", "mine"]["Fit-7↓"] == ""
  assert aggregate["Other", "mine"]["Acc5↑"] != ""


def test_seeds_and_paired_differences_of_the_paper(tmp_path, rendered):
  for row in PAPER["ablation_bf16"]:
    save(tmp_path, row, model=row["Model"], method="BF16")
  for row in PAPER["calib_seed_stability"]:
    save(tmp_path, row, model=row["Model"], method=row["Method"], seed=int(row["Seed"]))
  seeds, paired = rendered("seeds", tmp_path).values()
  printed = {
    (r["Model"], r["Method"], r["Seed"]): r for r in PAPER["calib_seed_stability"]
  }
  assert len(ours(seeds)) == 12
  for row in ours(seeds):
    fit = printed[row["Model"], row["Row"], row["Seed"]]["Fit-7"]
    assert abs(float(row["Fit-7↓"]) - float(fit)) < 1.1e-6
    assert row["ARC-C↑"] != ""
  here, there = (
    next(r for r in paired if r["Model"] == model) for model in ("Qwen", "Qwen (paper)")
  )
  assert there["by draw"] == "-0.017621, -0.014093, -0.019540"
  interval = "-0.01708 [-0.02395, -0.01022] better"
  assert here["mean [95 % interval]"] == there["mean [95 % interval]"] == interval
  assert [row["models with this sign"] for row in (here, there)] == ["", "2 of 2"]


def test_recovery_that_is_fitted_fresh_as_in_the_paper(tmp_path, rendered):
  """Results of our own builds bear the methods' names, not the paper's labels."""
  methods = TABLES["fresh"].rows
  for row in PAPER["ablation_bf16"]:
    save(tmp_path, row, model=row["Model"], method="BF16")
  for row in PAPER["fresh_stale_multiseed"]:
    method = methods[row["Statistics"]]
    save(tmp_path, row, model=row["Model"], method=method, seed=int(row["Seed"]))
  _, paired = rendered("fresh", tmp_path).values()
  found = {row["Model"]: row["mean [95 % interval]"] for row in paired}
  for model, printed in PAPER["fresh_minus_stale_text"].items():
    expected = [float(x) for x in (printed["mean"], *printed["ci"])]
    for name in (model, f"{model} (paper)"):
      assert found[name].endswith("] better")
      numbers = [float(x) for x in re.findall(r"[-+]\d[\d.]*", found[name])]
      assert numbers == pytest.approx(expected, abs=5e-6)


def test_three_files_with_the_same_numbers(seven_models, tmp_path, mxjax):
  out = tmp_path / "out"
  words = ("reproduce", "raw", "--results", seven_models, "--out", out)
  printed = mxjax(*words, as_json=False)
  assert printed == (out / "tables.md").read_text()
  assert "| Qwen-8B | HiRes | 10.0550 | 16.2990 | 54.85 | 77.61 |" in printed
  assert "results,Qwen-8B,HiRes,10.0550" in (out / "tables.csv").read_text()
  page = (out / "tables.html").read_text()
  assert page.count("<table>") == 1
  assert page.count("<svg") == 7
  assert "54.85" in page
  assert "http" not in page.replace("http://www.w3.org", "")


ROW = PAPER["ablation_bf16"][0]


def test_other_tokens_than_the_float_model_are_refused(tmp_path, refused):
  save(tmp_path, ROW, model="Q", method="BF16")
  save(tmp_path, ROW, model="Q", method="RTN", tokens="others")
  message = refused("reproduce", "all", "--results", tmp_path)
  assert "wikitext2 on different tokens" in message


def test_another_dtype_than_the_float_models_is_refused(tmp_path, refused):
  # What says nothing was made before there was a choice, in float32.
  save(tmp_path, ROW, model="Q", method="BF16")
  save(tmp_path, ROW, model="Q", method="RTN", dtype="float32")
  results.references(results.read([tmp_path]))
  save(tmp_path, ROW, model="Q", method="HiRes", dtype="bfloat16")
  message = refused("reproduce", "all", "--results", tmp_path)
  assert "in bfloat16 and" in message and "the same --dtype" in message


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


def test_a_chart_of_ten_methods_has_colors_of_the_palette():
  tasks = {"piqa": {"score": 0.5, "token_sha256": "", "dtype": "float32"}}
  names = [results.FLOAT, *map(str, range(10))]
  found = [results.Result("m", name, None, tasks, "") for name in names]
  used = {int(c) for c in re.findall(r'class="c(\d+)"', page.damage_chart(found, "m"))}
  style = html.STYLE.read_text()
  assert len(used) > 1 and all(f".c{color} {{" in style for color in used)


def test_a_cell_of_a_markdown_table_stays_one_cell():
  table = Table("t", ("Model", "Row"), [["a|b", "two\nlines"]])
  assert table.markdown().splitlines()[-1] == r"| a\|b | two lines |"


def test_another_file_is_refused(tmp_path, refused):
  (tmp_path / "evaluation.json").write_text("[]")
  said = refused("reproduce", "all", "--results", tmp_path)
  assert "kind mxjax-evaluation" in said
  assert "got none at" in refused("reproduce", "raw", "--results", tmp_path / "none")


def test_intervals_come_from_the_same_items_of_both_models(tmp_path):
  """A method that errs where the float model does has no damage, and no interval."""

  def entry(task, rows):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    (folder / "items").mkdir(parents=True)
    lines = "".join(json.dumps({"gold": 1, "prediction_norm": r}) + "\n" for r in rows)
    (folder / "items" / f"{task}.jsonl").write_text(lines)
    return {"score": sum(rows) / len(rows), "file": str(folder / "evaluation.json")}

  losses = lambda *values: {"score": 2.7, "window_losses": values, "file": ""}
  exact = {
    "wikitext2": losses(1.0, 1.2, 0.8),
    "c4": losses(1.0, 1.1),
    "arc_challenge": entry("arc_challenge", [1, 0, 1, 1, 0, 1]),
  }
  fit, same = QUANTITIES["fit3"], Measured(exact, exact)
  assert fit.text(same) == "0.00000 [0.00000, 0.00000]"
  worse = exact | {"arc_challenge": entry("arc_challenge", [0, 0, 1, 1, 0, 1])}
  value, low, high = (
    fit.text(Measured(worse, exact)).strip("]").split(" ", 2)[0],
    *(
      map(
        float, fit.text(Measured(worse, exact)).partition("[")[2].strip("]").split(",")
      )
    ),
  )
  assert 0 <= low < float(value) < high
  exact["arc_challenge"]["file"] = "absent"
  assert "[" not in fit.text(Measured(worse, exact))


def test_failed_cells_say_so_beside_what_was_measured():
  declared = TABLES["edits"]
  cell = Measured(facts={"local": {"codes_per_block": 0.5}}, failure="build: no memory")
  (table,) = rendering.build(declared, {("m", "HiRes", 0): cell}, reduced=["2 windows"])
  assert table.title == f"{declared.title} (reduced: 2 windows)"
  assert table.rows[0] == ["m", "HiRes", "0.50", "failed"]
  assert "build: no memory" in table.note
  assert rendering.build(declared, {("m", "HiRes", 0): Measured()}) == []


def test_differences_are_of_what_is_better_when_it_falls():
  scores = lambda c4, arc: {"c4": {"score": c4}, "arc_challenge": {"score": arc}}
  found = {
    ("m", label, seed): Measured(scores(*pair), scores(9.0, 0.5))
    for label, pair in {"Both": (10.0, 0.3), "None": (11.0, 0.2)}.items()
    for seed in (0, 3)
  }
  left = TABLES["recovery-seeds"]._replace(columns=("c4", "arc_challenge"))
  whole, differences = rendering.build(left, found)
  assert whole.head[-1] == "ARC-C↑"
  assert differences.title.endswith("differences of C4↓")
  assert differences.rows[0][3].endswith("worse")


def test_columns_of_models_average_several_draws():
  cell = lambda fit: Measured({"x": {"score": fit}}, {})
  quantity = QUANTITIES["fit7"]._replace(of_scores=lambda scores, _: scores["x"])
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(QUANTITIES, "fit7", quantity)
    found = {("m", "RTN", 0): cell(0.2), ("m", "RTN", 3): cell(0.3)}
    (table,) = rendering.build(TABLES["main"], found)
  row = dict(zip(table.head, table.rows[0], strict=True))
  assert row["m"] == "0.250000 ± 0.070711"
  assert row["Mean"] == "0.25000" and row["Qwen-8B (paper)"] == ".1666"


def test_a_measure_without_a_value_leaves_its_cell_empty():
  build = lambda error: Measured(facts={"build": {"operator_error": error}})
  assert QUANTITIES["operator_error"].values(build(0.5)) == [0.5]
  assert QUANTITIES["operator_error"].values(build(None)) == []


def test_the_time_of_a_build_that_took_over_work_is_none():
  build = lambda **row: Measured(facts={"build": row})
  minutes = QUANTITIES["build_minutes"]
  assert minutes.values(build(seconds=120.0, shared_with=[])) == [2.0]
  assert minutes.values(build(seconds=120.0, shared_with=["store"])) == []
  assert minutes.values(build(seconds=120.0)) == []
  cells = {("m", "HiRes", 0): build(seconds=120.0, shared_with=["store"])}
  table, *_ = rendering.build(TABLES["cost"], cells)
  assert rendering.NO_TIME in table.note
