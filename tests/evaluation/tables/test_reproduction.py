"""Reproductions end to end on a tiny model: kills, failures, reduced tables, plans."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mxjax.cli.main import main
from mxjax.evaluation import builds, results
from mxjax.evaluation.tables import jobs, settings
from mxjax.evaluation.tables.declared import TABLES, Declared
from mxjax.evaluation.tables.jobs import Build, Job
from tests import tiny

ROOT = pathlib.Path(__file__).parents[3]
TABLE = Declared(
  "",
  "Paths",
  {"none": "rtn", "both": "rtn+r", "gptq": "gptq"},
  ("wikitext2", "codes_per_block", "operator_error"),
  draws=(0, 3),
  reference="none",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return tiny.save_folder(tmp_path_factory.mktemp("model"), max_positions=256)


@pytest.fixture(autouse=True)
def table(monkeypatch):
  monkeypatch.setitem(TABLES, "discrete", TABLE)


def words(model, out, *extra, tables="discrete"):
  text = model / "text.txt"
  data = ["--calib", text, "--wikitext2", text, "--sequences", 2]
  sizes = ["--length", 32, "--windows", 2, "--window-length", 32]
  sizes += ["--local-sequences", 2, "--operator-error"]
  return ["reproduce", tables, "--models", model, "--out", out, *data, *sizes, *extra]


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
  """A finished reproduction: its folder."""
  from mxjax.cli.main import main

  out = tmp_path_factory.mktemp("made") / "out"
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(TABLES, "discrete", TABLE)
    assert main(list(map(str, words(model, out)))) == 0
  return out


@pytest.mark.slow
def test_the_table_has_every_cell_and_its_differences(made, model):
  text = (made / "tables.md").read_text()
  rows = re.findall(rf"\| {model.name} \| (\S+) \| (\d) \| ([\d.]+) \|", text)
  assert [row[:2] for row in rows] == [
    (label, str(seed)) for seed in (0, 3) for label in TABLE.rows
  ]
  assert "failed" not in text and "Not in the paper." in text
  title = "## Paths (reduced: 2 x 32 calibration tokens, calibrated on "
  title += "text.txt, "
  title += "first 2 windows, windows of 32 tokens, text.txt for wikitext2, "
  assert title + "local errors on 2 sequences)" in text
  assert text.count("## Paths (reduced): differences of operator error") == 1
  # The linears are the same in these rows.
  assert re.search(rf"\| {model.name} \| both \| \+0.000000, \+0.000000 \| \+0 ", text)
  assert not (made / "store").exists()


@pytest.mark.slow
def test_rows_that_differ_in_recovery_share_linears(made, model):
  def row(method, seed):
    return jobs.measured(Build(str(model), method, seed), made)["build"]

  store = [str(made / "store")]
  assert row("rtn", 3)["shared_with"] == row("gptq", 3)["shared_with"] == store
  linears = made / model.name / "rtn-seed3" / "build"
  assert row("rtn+r", 3)["shared_with"] == [str(linears)]
  assert row("rtn", 3)["made_by"]["command"].startswith("mxjax reproduce ")


@pytest.mark.slow
def test_shared_linears_give_the_build_itself(made, model, tmp_path, mxjax):
  text = model / "text.txt"
  data = ("--calib", text, "--data", text, "--sequences", 2, "--length", 32)
  sizes = ("--windows", 1, "--window-length", 32)
  out = tmp_path / "alone"
  (alone,) = mxjax("quantize", model, "--method", "rtn+r", "--out", out, *data, *sizes)
  shared = jobs.measured(Build(str(model), "rtn+r", 0), made)["build"]
  assert alone["perplexity"] == shared["perplexity"]
  assert mxjax("verify", made / model.name / "rtn+r-seed0" / "build")["faults"] == []


@pytest.mark.slow
def test_linears_of_another_method_or_draw_are_refused(made, model, tmp_path, refused):
  place = made / model.name / "rtn-seed0" / "build"
  text = model / "text.txt"
  data = ("--calib", text, "--data", text, "--sequences", 2, "--length", 32)
  sizes = ("--windows", 2, "--window-length", 32, "--out", tmp_path / "new")
  options = (*data, *sizes, "--linears", place)
  assert "got rtn on the same tokens" in refused(
    *("quantize", model, "--method", "gptq"), *options
  )
  said = refused("quantize", model, "--method", "rtn+r", "--seed", 3, *options)
  assert "got rtn on other tokens" in said


@pytest.mark.slow
def test_linears_of_another_model_are_refused(made, model, tmp_path, refused):
  """Of the same shape and tokenizer, such as a tuned variant of a model."""
  place = made / model.name / "rtn-seed0" / "build"
  other = shutil.copytree(model, tmp_path / "other")
  weights = other / "model.safetensors"
  weights.write_bytes(weights.read_bytes()[:-1] + b"\x3c")
  text = model / "text.txt"
  data = ("--calib", text, "--data", text, "--sequences", 2, "--length", 32)
  sizes = ("--windows", 2, "--window-length", 32, "--out", tmp_path / "new")
  words = ("--method", "rtn+r", *data, *sizes, "--linears")
  said = refused("quantize", other, *words, place)
  assert "got rtn on the same tokens and other weights" in said
  said = refused("quantize", model, *words, place, "--dtype", "float32")
  assert "on the same tokens and other weights" in said
  # A checkpoint alone does not tell what it was made of.
  alone = shutil.copytree(place / "checkpoint", tmp_path / "alone")
  assert "got " in (said := refused("quantize", model, *words, alone))
  assert said.endswith("alone, which has none; leave the option out.")


@pytest.mark.slow
def test_a_finished_reproduction_runs_nothing_again(made, model, mxjax, monkeypatch):
  monkeypatch.setattr(jobs.Reproduction, "perform", None)
  before = (made / "tables.md").read_text()
  assert mxjax(*words(model, made), as_json=False) == before
  more = mxjax(*words(model, made, "--seeds", "3"))["tables"]
  assert "1 of 2 calibration draws" in more[0]["title"]
  mxjax(*words(model, made), as_json=False)


def test_damaged_files_are_named_with_what_to_do(tmp_path):
  (tmp_path / "settings.json").write_text('{"quantize": ')
  with pytest.raises(ValueError, match=r"settings.json: expected settings of tables"):
    settings.keep_to(tmp_path, {})
  build = Build("m", "rtn", 0)
  place = Job(build, "local").place(tmp_path)
  place.parent.mkdir(parents=True)
  place.write_text("{")
  with pytest.raises(ValueError, match=r"local.json: expected a measure, .* again."):
    jobs.measured(build, tmp_path)
  (tmp_path / "items").mkdir()
  (tmp_path / "items/piqa.jsonl").write_text('{"gold": 1}\n')
  values = {"file": str(tmp_path / "evaluation.json")}
  with pytest.raises(ValueError, match=r"piqa.jsonl: expected a decision on an item"):
    results.decisions("piqa", values)
  with pytest.raises(ValueError, match=r"evaluation.json: expected the losses of c4"):
    results.decisions("c4", values | {"window_losses": ["high"]})


@pytest.mark.slow
def test_other_settings_are_refused(made, model, refused):
  for changed, differs in (
    (("--windows", 1), "tasks windows 1, got tasks windows 2;"),
    (("--dtype", "float32"), "dtype float32, got dtype none;"),
    (("--length", 16), "calibration length 16, got calibration length 32;"),
    (("--local-sequences", 3), "local sequences 3, got local sequences 2;"),
  ):
    said = refused(*words(model, made, *changed))
    assert f"expected what was made with {differs} name another --out" in said


@pytest.mark.slow
def test_a_kill_costs_the_job_in_work_alone(model, made, tmp_path, mxjax):
  """A real process, killed while its third build runs; the table is the same."""
  out = tmp_path / "out"
  program = (
    "import sys; from mxjax.cli.main import main;"
    "from mxjax.evaluation.tables.declared import TABLES;"
    "from tests.evaluation.tables.test_reproduction import TABLE;"
    "TABLES['discrete'] = TABLE; sys.exit(main(sys.argv[1:]))"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", program, *map(str, words(model, out))],
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  third = out / model.name / "gptq-seed0" / "build" / "run"
  deadline = time.monotonic() + 200
  while not (third / "state.json").is_file() and time.monotonic() < deadline:
    assert process.poll() is None
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  process.wait()
  finished = out / model.name / "rtn-seed0" / "build" / "result.json"
  assert finished.is_file() and not (third.parent / "result.json").exists()
  stamp = finished.stat().st_mtime_ns
  # What a killed evaluation leaves: a folder without its last file.
  (third.parent.parent / "wikitext2" / "items").mkdir(parents=True)
  mxjax(*words(model, out), as_json=False)
  assert finished.stat().st_mtime_ns == stamp
  assert (out / "tables.md").read_text() == (made / "tables.md").read_text()


@pytest.mark.slow
def test_a_failing_cell_costs_itself_and_is_tried_again(
  model, made, tmp_path, mxjax, monkeypatch, capsys
):
  real, calls = builds.run_method, []

  def failing(subject, tokens, method, **options):
    calls.append(method.name)
    if method.name == "gptq":
      raise FloatingPointError("layers_1: not\nfinite")
    return real(subject, tokens, method, **options)

  out = tmp_path / "out"
  command = words(model, out, "--seeds", "0")
  with monkeypatch.context() as patch:
    patch.setattr(builds, "run_method", failing)
    assert main([*map(str, command), "--json"]) == 1
  printed, said = capsys.readouterr()
  told = json.loads(printed.splitlines()[-1])
  message = "build: layers_1: not finite"
  assert list(told["failures"].values()) == [message]
  # At once, hours before the tables perhaps.
  assert said.index(f"failed: {message}") < said.index("tables.md")
  row = next(r for r in told["tables"][0]["rows"] if r[1] == "gptq")
  assert set(row[3:]) == {"failed"}
  build = f"gptq of {model.name}, seed 0"
  assert f"{build}: {message}" in told["tables"][0]["note"]
  assert calls == ["rtn", "rtn+r", "gptq"]
  again = mxjax(*command)
  assert again["failures"] == {}
  assert "failed" not in str(again["tables"])


@pytest.mark.slow
def test_rows_can_be_left_out(model, made, tmp_path, mxjax):
  out = shutil.copytree(made, tmp_path / "out")
  table, *_ = mxjax(*words(model, out, "--without", "gptq"))["tables"]
  assert [row[1] for row in table["rows"]] == ["none", "both"] * 2
  assert "without gptq" in table["title"]
  plan = mxjax(*words(model, tmp_path / "new", "--without", "gptq", "--plan"))
  assert plan["rows"][0][1] == "4 (2 with linears of their own)"


@pytest.mark.slow
def test_equal_draws_are_refused(model, tmp_path, refused):
  np.save(tmp_path / "ids.npy", np.arange(4 * 32, dtype=np.int32).reshape(4, 32) % 60)
  options = words(model, tmp_path / "out", "--without", "tasks,local")
  said = refused(*options, "--calib", tmp_path / "ids.npy")
  assert "got the same for seeds 0 and 3" in said


@pytest.mark.slow
def test_the_plan_counts_what_is_left_and_starts_nothing(model, made, tmp_path, mxjax):
  out = tmp_path / "out"
  plan = mxjax(*words(model, out, "--plan"))
  (row,) = plan["rows"]
  told = dict(zip(plan["head"], row, strict=True))
  assert told["builds"] == "6 (4 with linears of their own)"
  assert told["evaluations"] == "7 (1 tasks)"
  assert told["measures"] == "6"
  assert told["passes"] == "18"
  assert plan["seconds"] > 0 and not out.exists()
  left = mxjax(*words(model, made, "--plan"))
  assert left["rows"][0][1] == "0 (0 with linears of their own)"
  assert left["note"].startswith("0 jobs are left")


def test_mistakes_are_one_line(refused):
  of_a = ("--models", "a")
  for words, message in (
    (["stages"], "expected --models to build, or --results to read, got none"),
    (["stage", *of_a], "write stages if"),
    (["stages", *of_a], "expected --out for what is built"),
    (["stages", "--models", "x/a,y/a", "--out", "o"], "models of different names"),
    (["stages", *of_a, "--without", "locl"], "write local if"),
    (["all", *of_a, "--without", '"K=0, D=I"'], "expected --out for what"),
    (["all", *of_a, "--without", "K"], ' "K=0, D=I",'),
  ):
    assert message in refused("reproduce", *words)
