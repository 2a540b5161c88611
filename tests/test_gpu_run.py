"""The GPU run, rehearsed on a CPU with sections that fail in every way."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def load():
  spec = importlib.util.spec_from_file_location("gpu_run", SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def rehearse(out, inject, *more, only):
  command = [sys.executable, "-I", str(SCRIPT), "--smoke", "--part", "1", "--out"]
  command += [str(out), "--only", *only, *more]
  # An isolated interpreter knows neither the current folder nor PYTHONPATH.
  environment = {"PATH": "/usr/bin:/bin", "MXJAX_GPU_INJECT": inject, "HOME": "/tmp"}
  return subprocess.run(
    command, cwd="/", env=environment, capture_output=True, text=True, check=False
  )


def test_a_failing_section_costs_itself_only(tmp_path):
  inject = "raise:device,segfault:check encode,full:check GPTQ"
  only = ["device", "ceilings", "check encode", "check GPTQ"]
  done = rehearse(tmp_path, inject, only=only)
  assert done.returncode == 1
  document = json.loads((tmp_path / "gpu_part1.json").read_text())
  status = {name: entry["status"] for name, entry in document["results"].items()}
  assert status["device"] == "exit code 1: RuntimeError: injected"
  assert status["check encode"] == "killed by SIGSEGV"
  assert "No space left on device" in status["check GPTQ"]
  assert status["ceilings"] == "ok"
  assert document["results"]["ceilings"]["copy_GBps"] > 0
  assert "check encode: killed by SIGSEGV" in done.stdout
  assert "RuntimeError: injected" in (tmp_path / "gpu_part1.log").read_text()


def test_a_hanging_section_is_stopped_and_no_disk_still_reports(tmp_path):
  blocked = tmp_path / "file"
  blocked.write_text("")
  budget = ["--budget", "7"]
  done = rehearse(blocked, "hang:device", *budget, only=["device", "ceilings"])
  assert done.returncode == 1
  # On a busy machine the first section begins late, and gets what is left.
  assert re.search("device: stopped after [5-7] s", done.stdout)
  assert "ceilings: left out: no time" in done.stdout
  assert f"gpu: cannot write {blocked}" in done.stdout
  assert '"status": "stopped after' not in blocked.read_text()


def test_goals_rest_on_checked_kernels(tmp_path):
  gpu = load()
  options = type("Options", (), {"budget": 9.0, "out": tmp_path, "smoke": True})
  goal = "encode, share of copy bandwidth"
  assert set(gpu.GOALS) == set(gpu.PREDICTIONS["goals"])
  passed = {"check encode": {"passed": True}}
  for checks, value, verdict in (
    ({}, 0.85, "void: encode"),
    ({"check encode": {"passed": False}}, 0.85, "void: encode"),
    (passed, 0.85, "met"),
    (passed, 0.7, "not met"),
    (passed, float("nan"), "void: no number"),
  ):
    measured = {"memory-bound kernels": {"goals": {goal: value}}}
    part = gpu.Part(1, options)
    part.results = {**checks, **measured}
    found = part.goals()[goal]
    assert found["verdict"] == verdict
    assert 0 < found["predicted"][0] < found["predicted"][1]
    part.save()
    later = gpu.Part(2, options)
    later.results = measured
    assert later.goals()[goal]["verdict"] == verdict


def test_every_section_of_the_parts_exists():
  gpu = load()
  program = "import gpu_sections, gpu_checks, gpu_bench, json; " + (
    "print(json.dumps([list(gpu_sections.sections(gpu_bench.Bench(True))), "
    "list(gpu_checks.CHECKS)]))"
  )
  done = subprocess.run(
    [sys.executable, "-c", program],
    cwd=ROOT / "benchmarks",
    capture_output=True,
    text=True,
    check=True,
  )
  sections, checks = json.loads(done.stdout)
  assert {name for part in gpu.PARTS.values() for name in part} == set(sections)
  assert set(gpu.PREDICTIONS["predicted"]) <= set(sections)
  assert list(gpu.KERNELS) == checks
