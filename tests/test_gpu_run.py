"""The questions to a GPU, rehearsed on a CPU with scripts that fail in every way."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

from mxjax.pallas_kernels import choice

ROOT = pathlib.Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = {
  "gpu_checks.py": """
import json, sys
checked = {"checks": {"encode": {"passed": True}}, "all checks": ["encode"]}
open(sys.argv[sys.argv.index("--out") + 1], "w").write(json.dumps(checked))
""",
  "gpu_evaluate.py": """
import json, sys
rate = lambda n: {"tokens_per_s": n, "first_s": 7.0}
part = lambda n: {"likelihoods": rate(n), "perplexity": rate(n)}
parts = {"torch": part(4.0), "bf16": part(3.0), "hires": part(6.0)}
open(sys.argv[sys.argv.index("--out") + 1], "w").write(json.dumps({"parts": parts}))
print("found")
""",
  "gpu_generate.py": "raise RuntimeError('no luck')",
  "gpu_build.py": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
  "gpu_kernels.py": "import time; time.sleep(3600)",
}


@pytest.fixture
def folder(tmp_path):
  """A checkout with the runner itself, and scripts that fail."""
  place = tmp_path / "benchmarks"
  place.mkdir()
  (place / "gpu.py").write_text((BENCHMARKS / "gpu.py").read_text())
  for name, text in SCRIPTS.items():
    (place / name).write_text(text)
  return place


def load(name="gpu"):
  spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def ask(folder, out, *words):
  # An isolated interpreter knows neither the current folder nor PYTHONPATH.
  command = [sys.executable, "-I", str(folder / "gpu.py"), "--out", str(out), *words]
  environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
  return subprocess.run(
    command, cwd="/", env=environment, capture_output=True, text=True, check=False
  )


def verdicts(out, parts):
  return json.loads((out / f"gpu_{parts}.json").read_text())


def test_a_failing_question_costs_itself_only(folder, tmp_path):
  out = tmp_path / "out"
  only = ["--only", "checks", "evaluate", "generate", "build small"]
  done = ask(folder, out, "--part", "1", "2", *only)
  assert done.returncode == 1
  made = verdicts(out, "12")
  status = {name: entry["status"] for name, entry in made["questions"].items()}
  assert status == {
    "checks": "ok",
    "evaluate": "ok",
    "build small": "killed by SIGSEGV",
    "generate": "exit code 1: RuntimeError: no luck",
  }
  assert (out / "evaluate.log").read_text() == "found\n"
  goals = {name: goal["verdict"] for name, goal in made["goals"].items()}
  assert goals["likelihoods, HiRes, tokens a second / torch"] == "met"
  assert goals["likelihoods, our BF16, tokens a second / torch"] == "not met"
  assert goals["small Qwen3 by hires, cold, s"] == "not measured"
  table = done.stdout.rpartition("| question or goal |")[2]
  assert "| build small | 0" in table
  assert (
    "| likelihoods of 200 items, HiRes, first pass, s | 7.00 | at most 8.0" in table
  )


@pytest.mark.slow
def test_a_hanging_question_is_stopped_and_no_disk_still_reports(folder, tmp_path):
  out = tmp_path / "out"
  done = ask(folder, out, "--part", "4", "--budget", "7")
  assert done.returncode == 1
  # On a busy machine the first question begins late, and gets what is left.
  assert re.search("kernels: stopped after [5-7] s", done.stdout)
  assert "build 8B, next: left out: no time" in done.stdout
  assert verdicts(out, "4")["questions"]["kernels"]["seconds"] >= 5


def test_a_folder_that_cannot_be_written_still_reports(folder, tmp_path):
  blocked = tmp_path / "file"
  blocked.write_text("")
  (folder / "gpu_build.py").unlink()
  done = ask(folder, blocked, "--part", "3")
  assert f"gpu: cannot write {blocked}" in done.stdout
  assert "left out: no script" in done.stdout


@pytest.mark.parametrize(
  ("checked", "verdict"),
  [
    (None, "void: kernels were not checked"),
    ({"encode": True}, "void: kernels were not checked"),
    ({"encode": True, "decode": False}, "void: decode"),
    ({"encode": True, "decode": True}, "met"),
  ],
)
def test_goals_rest_on_checked_kernels(folder, tmp_path, checked, verdict):
  file, words = tmp_path / "checks.json", []
  if checked is not None:
    entries = {name: {"passed": passed} for name, passed in checked.items()}
    file.write_text(json.dumps({"checks": entries, "all checks": ["encode", "decode"]}))
    words = ["--checks", str(file)]
  ask(folder, tmp_path / "out", "--part", "1", "--only", "evaluate", *words)
  goals = verdicts(tmp_path / "out", "1")["goals"]
  assert goals["likelihoods of 200 items, HiRes, first pass, s"]["verdict"] == verdict


def test_parts_take_nine_minutes_and_ask_what_goals_need():
  gpu = load()
  asked = [name for part in gpu.PARTS.values() for name in part]
  assert sorted(asked) == sorted(gpu.QUESTIONS)
  assert asked[0] == gpu.CHECKS
  assert all(sum(part.values()) <= gpu.PART_SECONDS for part in gpu.PARTS.values())
  assert {question for question, *_ in gpu.GOALS.values()} <= set(gpu.QUESTIONS)


@pytest.fixture
def scripts(monkeypatch):
  """Finds what scripts import beside them."""
  monkeypatch.syspath_prepend(str(BENCHMARKS))
  return load


def test_goals_read_what_the_scripts_write(scripts):
  gpu, build, evaluate = scripts(), scripts("gpu_build"), scripts("gpu_evaluate")
  for script, words in gpu.QUESTIONS.values():
    if script == "gpu_build.py":
      assert words[0] == "--only" and set(words[1:]) <= set(build.CASES)
  builds = [f"{case}, {one}" for case, (_, each) in build.CASES.items() for one in each]
  measured = dict.fromkeys(evaluate.MEASURES, {"tokens_per_s": 2.0, "first_s": 1.0})
  written = {
    "gpu_build.py": {
      "builds": {name: {"seconds": 1.0, "status": "ok"} for name in builds},
      "whole_model_minutes": dict.fromkeys(build.CASES, 1.0),
    },
    "gpu_evaluate.py": {"parts": dict.fromkeys(evaluate.LIMITS, measured)},
  }
  read = [
    value_of(written[script])
    for question, _, _, value_of in gpu.GOALS.values()
    if (script := gpu.QUESTIONS[question][0]) in written
  ]
  assert read == [1.0] * 9


def test_a_whole_build_is_a_cold_one_and_the_layers_that_it_lacks(scripts):
  build = scripts("gpu_build")
  entry = lambda seconds, status="ok": {"seconds": seconds, "status": status}
  names = [f"8B hires, {one}" for one in ("cold, 2", "kept, 2", "kept, 4")]
  entries = dict(zip(names, map(entry, (100, 50, 60)), strict=True))
  assert build.whole_minutes(entries, "8B hires") == (100 + 34 * 5) / 60
  entries["8B hires, kept, 4"] = entry(90, "stopped after 90 s")
  assert build.whole_minutes(entries, "8B hires") is None
  assert build.whole_minutes({}, "8B hires-next") is None


def test_an_evaluations_rate_counts_the_context_of_every_choice(scripts):
  evaluate = scripts("gpu_evaluate")
  items = evaluate.task(evaluate.TINY, 2, 100)
  choices = [(len(c), len(k)) for c, ks in items for k in ks]
  assert evaluate.tokens_of(items) == sum(map(sum, choices)) and len(choices) == 32
  side = lambda rate: {
    "perplexity": {"first_s": 3.0, "again_s": 1.0, "tokens_per_s": rate}
  }
  rows = evaluate.compared({"torch": side(100.0), "hires": side(150.0)})
  assert [row[-1] for row in rows] == ["1.00", "1.50"]


def test_a_candidate_replaces_what_is_slower_at_every_layer(scripts):
  layers = (("gate", (256,), 128, (8, 32)), ("down", (128,), 256, (8, 32)))
  tried, ms = choice.FLOAT8_STREAM, lambda n: {"ms": n}
  name = tried.name
  times = {
    ("gate", 8): (2.0, 1.0),
    ("gate", 32): (2.0, 1.0),
    ("down", 8): (2.0, 1.9),
    # Not faster by more than chance.
    ("down", 32): (2.0, 1.99),
  }
  mine = {"device": "a GPU"}
  for (layer, rows), (now, then) in times.items():
    mine[f"{layer}, {rows} rows, linears by table"] = ms(now)
    mine[f"{layer}, {rows} rows, linears by {name}"] = ms(then)
  base = {"gate, 8 rows": ms(3.0)}
  parts = {"candidate": mine, "torch compiled": base}
  rows, verdict = load("gpu_kernels").of_candidate(parts, tried, layers)
  assert [row[0] for row in rows] == [f"{layer}, {n} rows" for layer, n in times]
  assert rows[0] == [*("gate, 8 rows", "2.0000", "1.0000"), *"---", "3.0000", "0.50"]
  assert verdict.endswith("taken at 8 rows, and not at 32 rows.")
  mine[f"gate, 8 rows, linears by {name}"] = ms(2.1)
  _, verdict = load("gpu_kernels").of_candidate(parts, tried, layers)
  assert verdict == "No row of choice.py should change."
