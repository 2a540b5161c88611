"""Runs as people start them: commands, kill and resume, workers, report, verify."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mxjax.cli.main import main
from mxjax.discovery.audit import explain, report, verify, words
from mxjax.discovery.core import store
from mxjax.discovery.search import heldout, runs
from mxjax.discovery.tasks import world

BUDGET = 10


def start(folder, *more):
  arguments = ["discover", "run", "--task", "world", "--seed", "3", "--holdout", "off"]
  return [*arguments, "--budget", str(BUDGET), "--out", str(folder), *more]


def log(folder):
  return (folder / "log.jsonl").read_bytes()


@pytest.fixture(scope="module", autouse=True)
def compiling_of_workers():
  """As users' workers: those of a process of its own are held to the same bytes."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs") / "run"
  assert main(start(folder, "--sandbox", "strict")) == 0
  return folder


@pytest.mark.slow
def test_plan_tells_the_cost_and_starts_nothing(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert main(["discover", "plan", "--task", "world", "--budget", "24"]) == 0
  shown = capsys.readouterr().out
  assert "pays 24 evaluator calls" in shown
  assert "hash" in shown
  words = " ".join(shown.split())
  first, again = re.search(r"took ([\d.]+) s with .*?([\d.]+) s again", words).groups()
  assert float(first) >= float(again)
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_workers_do_not_change_the_trajectory(finished, tmp_path):
  folder = tmp_path / "two"
  assert main(start(folder, "--sandbox", "strict", "--workers", "2")) == 0
  assert log(folder) == log(finished)


@pytest.mark.slow
def test_shared_compiled_programs_change_nothing(finished, tmp_path):
  shared = tmp_path / "compiled"
  counts = []
  for name in ("fills", "finds"):
    folder = tmp_path / name
    options = ["--sandbox", "strict", "--compiled", str(shared)]
    assert main(start(folder, *options)) == 0
    assert log(folder) == log(finished)
    counts.append(len(list(shared.iterdir())))
  assert counts[0] > 0
  assert counts[1] == counts[0]


def test_compiled_programs_are_not_shared_where_they_cannot_be(tmp_path, capsys):
  options = ["--sandbox", "off", "--compiled", str(tmp_path / "compiled")]
  assert main(start(tmp_path / "run", *options)) != 0
  assert "--compiled: expected jailed workers" in capsys.readouterr().err
  assert not (tmp_path / "run" / "log.jsonl").exists()


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_bytes(finished, tmp_path):
  folder = tmp_path / "killed"
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  command = [sys.executable, "-m", "mxjax"]
  process = subprocess.Popen(
    [*command, *start(folder, "--sandbox", "strict")],
    env=environment,
    stdout=subprocess.DEVNULL,
  )
  # Killed after its third paid call is on disk, wherever it is by then.
  while len(list(folder.glob("outcomes/*.json"))) < 3 and process.poll() is None:
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  process.wait()
  paid = {p: p.stat().st_mtime_ns for p in folder.glob("outcomes/*.json")}
  assert paid
  assert main(["discover", "resume", str(folder)]) == 0
  assert log(folder) == log(finished)
  # What was paid for before the kill was not measured again.
  assert all(p.stat().st_mtime_ns == stamp for p, stamp in paid.items())


@pytest.mark.slow
def test_the_report_is_one_file_without_scripts(finished):
  assert main(["discover", "report", str(finished)]) == 0
  page = (finished / "report.html").read_text()
  assert "<script" not in page
  assert "http://" not in page.replace("http://www.w3.org", "")
  for part in ("Anytime", "Ledger", "Verdicts", "Residuals", "Lineage", "Packets"):
    assert f"<h2>{part}" in page
  told = explain.stories(finished, store.read_events(finished))
  seen = {s.verdict["verdict"] for s in told if s.verdict}
  assert seen and all(f">{words.MEANINGS[each]}; " in page for each in seen)


def test_the_lineage_is_a_tree_with_the_line_of_the_champion(finished):
  page, told = (
    report.page(finished),
    explain.stories(finished, store.read_events(finished)),
  )
  tree = page.partition('<div class="tree">')[2].partition("</div>")[0]
  programs = {made.program for s in told for made in s.made if made.event}
  assert tree.count("<li>") == len(programs) > 1
  champion = [e for e in store.read_events(finished) if e["event"] == "program"][-1]
  line = explain.lineage(told, champion["champion"])
  assert tree.count("<b>") == len(line)
  # A program lies as deep in the tree as it has ancestors.
  last = tree.partition(f"<code>{champion['champion'][:12]}</code>")[0]
  assert last.count("<ul>") - last.count("</ul>") == len(line)


def test_the_curve_has_steps_and_every_program(finished):
  page = report.page(finished)
  drawing = page.partition('aria-label="Visible target"')[2].partition("</svg>")[0]
  measured = [e for e in store.read_events(finished) if e["event"] == "program"]
  assert drawing.count("<circle") == len(measured)
  (points,) = re.findall(r'<polyline points="([^"]*)"', drawing)
  assert len(points.split()) == 2 * len(measured) - 1


def test_a_lineage_ends_where_a_program_was_proposed_again():
  """By its descendant and as its own edit; the first packet of each counts."""
  proposed = [("a", ""), ("b", "a"), ("c", "b"), ("b", "c"), ("c", "c"), ("a", "c")]
  packets = [{"packet": {"program": p, "parent": of}} for p, of in proposed]
  told = [explain.Story(p, (), (), None, (), {"value": 1.0}, "") for p in packets]
  stories = lambda program: [story for story, _ in explain.lineage(told, program)]
  assert stories("c") == told[:3]
  assert stories("a") == told[:1]


def test_explain_tells_packet_prediction_and_change(finished, capsys):
  story = next(
    s for s in explain.stories(finished, store.read_events(finished)) if s.verdict
  )
  program = story.packet["packet"]["program"]
  assert main(["discover", "explain", str(finished), program[:12]]) == 0
  shown = capsys.readouterr().out
  for part in ("packet", "residual", "primary", "verdict", "+++"):
    assert part in shown
  assert main(["discover", "explain", str(finished), "nothing"]) == 2


@pytest.mark.slow
def test_verify_executes_again_and_notices_a_change(finished, tmp_path, capsys):
  assert main(["discover", "verify", str(finished), "--calls", "2"]) == 0
  assert "everything holds" in capsys.readouterr().out
  path = next((finished / "programs").glob("*.py"))
  text = path.read_text()
  path.write_text(text.replace("return x", "return x + 1", 1))
  try:
    found = verify.verify(finished, calls=0)
  finally:
    path.write_text(text)
  assert any("not the program" in complaint for complaint in found.complaints)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
  """A run that is verified and resumed without workers."""
  folder = tmp_path_factory.mktemp("runs") / "quick"
  assert main(start(folder, "--sandbox", "off")) == 0
  return folder


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["torn", "gone"])
def test_verify_names_a_program_that_is_lost(quick, tmp_path, harm):
  copied = shutil.copytree(quick, tmp_path / "run")
  path = max((copied / "programs").glob("*.py"))
  path.write_text("def (") if harm == "torn" else path.unlink()
  found = verify.verify(copied, calls=100, trusted=runs.Trusted(sandbox="off"))
  (complaint,) = found.complaints
  assert path.stem[:12] in complaint
  assert 0 < found.executed < found.ledger


RUN_FILE = "run.json: expected the options of a run, got"


@pytest.mark.parametrize(
  ("name", "before", "after", "verb", "told"),
  [
    ("log.jsonl", '"n":3,', '"n":x,', "report", "breaks at event 3"),
    (
      "log.jsonl",
      '"n":3,',
      '"n":x,',
      "resume",
      "event 3 as it was, .* the same version",
    ),
    ("run.json", "{", "", "status", RUN_FILE),
    ("run.json", '"budget"', '"calls"', "resume", RUN_FILE),
    (
      "run.json",
      '"budget": 10',
      '"budget": 9',
      "resume",
      "event 0 as it was, .* the same",
    ),
    ("run.json", '"seed": 3', '"sea": 3', "verify", RUN_FILE),
  ],
)
def test_a_folder_that_was_changed_is_told_in_a_sentence(
  quick, tmp_path, capsys, name, before, after, verb, told
):
  copied = shutil.copytree(quick, tmp_path / "run")
  text = (copied / name).read_text()
  (copied / name).write_text(text.replace(before, after))
  words = ["--sandbox", "off"] if verb in ("resume", "verify") else []
  assert main(["discover", verb, str(copied), *words]) == 2
  assert re.search(told, " ".join(capsys.readouterr().err.split()))


def test_an_option_that_a_task_does_not_know_is_told(tmp_path, capsys):
  words = start(tmp_path / "run", "--task-options", '{"sea": 3}')
  assert main(words) == 2
  told = " ".join(capsys.readouterr().err.split())
  assert "task: world: expected options that fit" in told
  assert "got an unexpected keyword argument 'sea'" in told
  assert not (tmp_path / "run").exists()


def test_the_held_out_scorer_is_another_process_and_stays_sealed(finished, tmp_path):
  folder = tmp_path / "run"
  options = runs.read_options(finished)
  runs.write_options(
    folder,
    runs.RunOptions(
      task=options.task,
      config={**options.config, "mark_every": 5},
      sandbox="off",
      holdout="after",
    ),
  )
  runs.run(folder, trusted=runs.Trusted(sandbox="off"))
  scores = heldout.unsealed(folder)
  assert [s["call"] for s in scores] == [5, 10]
  assert all(s["status"] == "ok" for s in scores)
  visible = {
    e["champion"]: e["value"] for e in store.read_events(folder) if e["event"] == "mark"
  }
  assert all(s["value"] != visible[s["champion"]] for s in scores)
  assert not list(folder.glob("**/*heldout*"))
  # While a run is open its scores are not shown.
  lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
  (folder / "log.jsonl").write_text("".join(lines[:-1]))
  assert heldout.unsealed(folder) == []


def test_a_run_never_overwrites_a_folder(finished, capsys):
  assert main(start(finished)) == 2
  assert "discover" in capsys.readouterr().err


def test_options_survive_the_folder(tmp_path):
  made = runs.RunOptions(task={"task": "world", "seed": 1}, config={"budget": 3})
  runs.write_options(tmp_path / "run", made)
  assert runs.read_options(tmp_path / "run") == made
  assert json.loads((tmp_path / "run" / "run.json").read_text())["sandbox"] == "strict"
  with pytest.raises(FileNotFoundError, match="the folder of a run"):
    runs.read_options(tmp_path)


def test_a_run_gives_its_calls_their_time_and_no_proxy_where_none_may_be_asked(
  tmp_path, monkeypatch
):
  class Task(world.World):
    def proxy(self):
      return self

  class Made(Exception):
    pass

  def make(task, store, sandbox, **how):
    raise Made(how["call_seconds"])

  options = runs.RunOptions(
    task=dict(world.World(seed=3).spec),
    config={"budget": 4, "call_seconds": 7, "asks": False},
  )
  runs.write_options(tmp_path / "run", options)
  monkeypatch.setattr(runs, "make_executor", make)
  with pytest.raises(Made, match="7"):
    runs.run(tmp_path / "run")
  kept = store.Store(tmp_path / "kept")
  assert runs.free_proxy(options, Task(seed=3), kept) is None
  asking = dataclasses.replace(options, config={"budget": 4})
  assert runs.free_proxy(asking, Task(seed=3), kept) is not None
  kept.close()
