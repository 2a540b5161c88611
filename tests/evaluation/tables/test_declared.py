"""Declared tables: their rows are methods, their numbers the paper's."""

import pytest

from mxjax import methods
from mxjax.cli import reproduce
from mxjax.cli.main import build_parser
from mxjax.evaluation.evaluating import TaskData
from mxjax.evaluation.provenance import DEFAULT_MODEL
from mxjax.evaluation.results import FLOAT
from mxjax.evaluation.tables import cells, jobs, paper
from mxjax.evaluation.tables.declared import TABLES
from mxjax.evaluation.tables.jobs import Build, Job
from mxjax.evaluation.tables.quantities import QUANTITIES
from mxjax.evaluation.tables.reproduction import Request
from mxjax.evaluation.tables.settings import Settings
from tests.conftest import GOLDEN

EXCERPT = (GOLDEN / "paper_excerpt.tex").read_text()
METHODS = {name for table in TABLES.values() for name in table.rows.values()}
COUNTS = {
  "main": 90,
  "progression": 16,
  "raw": 77,
  "references": 2,
  "seeds": 12,
  "aggregates": 14,
  "stages": 8,
  "components": 8,
  "components-seeds": 24,
  "geometry": 6,
  "discrete": 6,
  "rules": 18,
  "local": 6,
  "edits": 2,
  "rule-cost": 4,
  "recovery": 10,
  "recovery-seeds": 24,
  "fresh": 12,
  "encoding": 6,
  "encoding-seeds": 12,
  "storage": 3,
  "cost": 6,
}
"""Rows in the paper, or cells of tables whose columns are models."""


def test_every_row_is_a_method():
  for method in METHODS - {FLOAT}:
    assert methods.get(method).name == method


def test_every_method_has_a_folder_of_its_own(tmp_path):
  builds = [Build("models/m", method, 0) for method in METHODS]
  assert len({build.folder(tmp_path) for build in builds}) == len(METHODS)


@pytest.mark.parametrize("name", TABLES)
def test_rows_and_columns_are_those_of_the_paper(name):
  declared = TABLES[name]
  rows = paper.printed(declared)
  assert len(rows) == COUNTS.get(name, 0)
  assert bool(rows) == bool(declared.label)
  assert {row.label for row in rows} <= set(declared.rows)
  assert not rows or {row.label for row in rows} == set(declared.rows)
  assert set(declared.columns) <= set(QUANTITIES)
  assert not declared.reference or declared.reference in declared.rows
  if len(declared.draws) > 1 and rows and rows[0].seed is not None:
    assert {row.seed for row in rows} == set(declared.draws)
  for row in rows:
    assert row.cells
    assert all(paper.value(text) < 1e6 for text in row.cells.values())


def sections():
  """Rows of the excerpt by the table's label: the model of a row, and its text."""
  plain = EXCERPT.replace("\\HiRes", "HiRes").replace("\\pm", "+-").replace("\\%", "%")
  for part in plain.split("\\label{")[1:]:
    label, _, text = part.partition("}\n")
    model, rows = "", []
    for line in text.replace("$", "").splitlines():
      parts = [cell.strip() for cell in line.removesuffix("\\\\").split("&")]
      model = parts[0] or model
      bold = [cell.removeprefix("\\textbf{").rstrip("}") for cell in parts]
      rows.append((model, bold))
    yield label, rows


def test_numbers_are_those_of_the_papers_source():
  """Every cell of these tables stands in the paper's rows of its model and label."""
  found = 0
  for label, lines in sections():
    declared = next(t for t in TABLES.values() if label[4:] in t.label)
    for row in paper.printed(declared):
      texts = [
        words for model, words in lines if declared.is_by_model or model == row.model
      ]
      own = [words for words in texts if row.label in words]
      words = {word for each in own or texts for word in each}
      words |= {word.removesuffix(" min").removesuffix(" tok/s") for word in words}
      assert set(row.cells.values()) <= words, (label, row)
      found += len(row.cells)
  assert found > 300


def test_a_spot_of_each_new_table():
  value = lambda name, model, label: next(
    row.cells for row in paper.printed(TABLES[name]) if row[:2] == (model, label)
  )
  assert value("local", "Qwen", "Sensitivity")["local_mismatch"] == "1.043"
  assert value("edits", "Llama-3-8B", "HiRes")["edited_elements"] == "2.12%"
  assert value("cost", "Qwen3-32B", "HiRes")["build_minutes"] == "286.9"
  assert (
    value("rule-cost", "Qwen3-8B", "With refinement")["tokens_per_second"] == "40.6"
  )
  assert value("encoding", "Llama", "none")["layer_mse"] == "4.1640092e-05"
  stale = value("progression", "Qwen3-8B", "Use stale MLP statistics")
  assert stale["fit3"] == ".04173"


def test_jobs_stand_once_and_builds_before_what_needs_them():
  todo = jobs.jobs([TABLES["stages"], TABLES["recovery"]], ["a", "b"], draws=None)
  assert len(set(todo)) == len(todo)
  # BF16; four stages, of which recovery shares two, and its other three.
  assert len({job.build for job in todo}) == 2 * (1 + 4 + 3)
  for index, job in enumerate(todo):
    if job.build.method != FLOAT and job.what != "build":
      assert Job(job.build, "build") in todo[:index]


def test_draws_replace_those_of_the_paper():
  drawn = lambda name, draws: (
    {job.build.seed for job in jobs.jobs([TABLES[name]], ["a"], draws=draws)} - {None}
  )
  assert drawn("fresh", None) == {0, 3, 5}
  assert drawn("fresh", [1, 2]) == drawn("stages", [1, 2]) == {1, 2}
  assert drawn("stages", None) == {0}


def test_titles_say_the_dtype_where_it_is_not_the_papers():
  told = {
    dtype: set(
      Request(
        tables=["main"], models=["a", DEFAULT_MODEL], settings=Settings(dtype=dtype)
      ).reduced("main")
    )
    for dtype in ("bfloat16", "float32", None)
  }
  assert told["float32"] - told["bfloat16"] == {"float32 arithmetic"}
  # By default each model has its own.
  of_one = {f"float32 arithmetic of {DEFAULT_MODEL}"}
  assert told[None] - told["bfloat16"] == of_one


def test_a_build_is_tested_on_as_many_windows_as_its_columns_read():
  tasks = TaskData(windows=4)
  windows = lambda **given: Settings(tasks=tasks, **given).evaluation.windows
  assert windows() == windows(operator_error=True) == 1
  assert windows(agreement=True) == windows(replicates=2) == 4


def test_the_paper_keeps_a_row_that_is_left_out_of_ours():
  whole = TABLES["main"]
  cut = cells.selected(whole, ["BATQuant+GPTQ"], {})
  assert "BATQuant+GPTQ" not in cut.rows
  assert {row.label for row in paper.printed(cut)} == {*whole.rows}


def test_fewer_tasks_than_seven_leave_fit_3():
  columns = lambda name, *absent: cells.selected(TABLES[name], absent, {}).columns
  assert columns("seeds", "piqa")[-2:] == ("winogrande", "fit3")
  assert columns("seeds")[-1] == "fit7"
  assert "fit3" not in columns("seeds", "c4")
  assert columns("fresh", "piqa").count("fit3") == 1


def test_a_row_can_be_of_another_method_and_the_title_says_so():
  words = ["reproduce", "main,components", "--plan", "--models", "a"]
  fewer = "SpinQuant+GPTQ=spinquant:steps=10"
  options = build_parser().parse_args([*words, "--instead", fewer])
  options.instead += ["K=0, D=I=rtn"]
  reproduce._check(options)
  request = reproduce.requested(options)
  rows = lambda name: {*request.declared[name].rows.values()}
  replaced = rows("main") ^ {*TABLES["main"].rows.values()}
  assert replaced == {"spinquant", "spinquant:steps=10"}
  assert "rtn" in rows("components")
  said = request.reduced
  assert "SpinQuant+GPTQ as spinquant:steps=10" in said("main")
  assert "K=0, D=I as rtn" in said("components")
  assert not any(" as " in each for each in said("fresh"))


def test_another_method_of_a_row_that_does_not_fit_is_an_error():
  wrong = ("SpinQuant+GPTQ", "SpinQuant=rtn", "HiRes=hirez", "RTN=rtn:steps=10", "RTN=")
  for text in wrong:
    words = ["reproduce", "main", "--plan", "--models", "a", "--instead", text]
    with pytest.raises(ValueError):
      reproduce._check(build_parser().parse_args(words))
