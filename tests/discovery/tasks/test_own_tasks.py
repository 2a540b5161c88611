"""Tasks of users: two files in a folder, and a module in the current folder."""

import json
import pathlib
import subprocess
import sys

import pytest

from mxjax.cli.main import main
from mxjax.discovery.audit import verify
from mxjax.discovery.core import store, task
from mxjax.discovery.core.task import Call, ContractError
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search import runs

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
INITIAL = """
import jax.numpy as jnp

GAIN = 1.0

def clean(x):
  return GAIN * x

def shift(x):
  return x + 1
"""
EVALUATE = """
import pathlib
import numpy as np
from mxjax.discovery.core.edit_templates import EditTemplate
from mxjax.discovery.core.residual import Explanation

DESCRIPTION = "Four numbers a row, to be made small."
ROW = ("float32", (4,))
HOOKS = {
  "clean": {"arguments": {"x": ROW}, "outputs": [ROW], "batched": ["x"],
            "doc": "A row, made smaller."},
  "shift": {"arguments": {"x": ROW}, "outputs": [ROW], "doc": "The first row, moved."},
}
MARGINS = {"loss": 1e-3}
OBSERVABLES = {"loss": "mean magnitude, without unit"}
PLAN = {"power": (1, 2)}
PLAN_DOCS = {"power": "the power of magnitudes that counts"}
DATA = np.load(pathlib.Path(__file__).parent / "rows.npy")
ACCOUNTS = (
  Explanation("acts", "smaller rows", {"primary": {"loss": "down"}}),
  Explanation("grows", "larger rows", {"primary": {"loss": "up"}}),
)
EDITS = tuple(
  EditTemplate(id=f"gain {g}", hooks=("clean",), residual="loss", controls=(),
               explanations=ACCOUNTS, template=f"def clean(x):\\n  return {g} * x\\n")
  for g in (0.5, 2.0)
)

def evaluate(hooks, held_out=False, plan=None):
  rows = DATA + held_out
  cleaned = np.asarray(hooks.clean(rows)[0])
  shifted = np.asarray(hooks.shift(rows[0])[0])
  return {"loss": float((np.abs(cleaned) ** plan["power"]).mean() + shifted.mean())}
"""


def write(place):
  """Writes the two files, and data beside them."""
  import numpy as np

  place.mkdir()
  (place / "initial.py").write_text(INITIAL)
  (place / "evaluate.py").write_text(EVALUATE)
  np.save(place / "rows.npy", np.ones((6, 4), np.float32))
  return place


@pytest.fixture
def folder(tmp_path):
  return write(tmp_path / "mine")


def calls(mine, *sources):
  executor = LocalExecutor(mine)
  for source in sources:
    traced = executor.trace(source)
    assert traced.status == "ok", traced.detail
    yield executor, Call(traced.computation, mine.interface.default_plan, {})


def values(executor, call):
  results = []
  executor.run([call], lambda _, outcome, seconds: results.append(outcome))
  return results[0]


@pytest.mark.slow
def test_two_files_run_in_the_strict_jail(folder, tmp_path, capsys):
  out = tmp_path / "run"
  arguments = ["discover", "run", "--task", str(folder), "--out", str(out)]
  assert main([*arguments, "--budget", "4"]) == 0
  events = store.read_events(out)
  outcomes = [e["values"]["loss"] for e in events if e["event"] == "outcome"]
  # The initial program, and gains of a half and of two: 1 + 2, .5 + 2, 2 + 2.
  assert set(outcomes) <= {3.0, 2.5, 4.0}
  assert min(outcomes) == 2.5
  assert "champion" in capsys.readouterr().out
  trusted = runs.Trusted(task={"task": str(folder)})
  assert not verify.verify(out, 2, trusted=trusted).complaints


def test_values_plan_and_held_out(folder):
  mine = task.load({"task": str(folder)})
  initial = mine.interface.default_source()
  edited = initial.replace("return GAIN * x", "return 0 * x").replace("x + 1", "x + 2")
  [first, second] = calls(mine, initial, edited)
  assert values(*first).values == {"loss": 3.0}
  executor, call = second
  assert values(executor, call).values == {"loss": 3.0}
  bad = call._replace(intervention={"kind": "colour"})
  assert values(executor, bad).status == "contract"
  held_out = mine.holdout()
  assert held_out.spec["held_out"] is True
  [(executor, call)] = calls(held_out, initial)
  assert values(executor, call).values == {"loss": 5.0}
  squared = call._replace(plan={"power": 2})
  assert values(executor, squared).values == {"loss": 7.0}


@pytest.mark.parametrize(
  "file, old, new, message",
  [
    ("initial.py", "def shift", "def shaft", "got none for shift"),
    ("evaluate.py", "MARGINS = ", "MARGIN = ", "expected MARGINS, a nonempty"),
    (
      "evaluate.py",
      '"outputs": [ROW], "doc": "The',
      '"results": [ROW], "doc": "The',
      r"HOOKS\['shift'\]: expected arguments",
    ),
    ("evaluate.py", "ROW = (", "ROW = = (", "that can be imported, got SyntaxError"),
    ("evaluate.py", "ROW = (", "raise SystemExit(1)\nROW = (", "got SystemExit"),
    ("evaluate.py", "1e-3}", "float('nan')}", "expected finite margins"),
    ("evaluate.py", "1e-3}", "-1.0}", "expected finite margins"),
    (
      "evaluate.py",
      '"float32", (4,)',
      '"float33", (4,)',
      r"HOOKS\['clean'\]: expected arguments",
    ),
    (
      "evaluate.py",
      '"float32", (4,)',
      '"float32", (-4,)',
      r"HOOKS\['clean'\]: expected arguments",
    ),
  ],
)
def test_what_the_files_lack_is_said(folder, tmp_path, capsys, file, old, new, message):
  text = (folder / file).read_text()
  assert old in text
  (folder / file).write_text(text.replace(old, new))
  with pytest.raises(ValueError, match=message):
    task.load({"task": str(folder)})
  out = tmp_path / "run"
  assert main(["discover", "run", "--task", str(folder), "--out", str(out)]) == 2
  assert not out.exists()


def test_the_embedded_proposer_refuses_a_task_without_edits(folder, tmp_path, capsys):
  text = EVALUATE.replace("EDITS = tuple(", "OTHERS = tuple(")
  (folder / "evaluate.py").write_text(text)
  out = tmp_path / "run"
  assert main(["discover", "run", "--task", str(folder), "--out", str(out)]) == 2
  said = " ".join(capsys.readouterr().err.split())
  assert "expected a task with edit templates" in said
  assert "EDITS" in said and "--proposer llm" in said
  assert not out.exists()


def test_what_a_score_may_depend_on_is_part_of_the_task(folder):
  contract = lambda: task.load({"task": str(folder)}).contract
  before = contract()
  (folder / "evaluate.py").write_text(EVALUATE + "\n# another\n")
  other = contract()
  assert other != before
  # Data beside them, too; but neither caches of Python nor runs that write there.
  (folder / "data").mkdir()
  (folder / "data" / "more.csv").write_text("1")
  data = contract()
  assert data != other
  (folder / "data" / "more.csv").write_text("2")
  assert contract() not in (data, other)
  now = contract()
  for name in ("__pycache__/a", ".git/a", "runs/a/run.json", "runs/study.json"):
    (folder / name).parent.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text("{}")
  assert contract() == now


def test_observables_of_margins_must_be_returned(folder):
  (folder / "evaluate.py").write_text(EVALUATE.replace('{"loss": f', '{"lost": f'))
  mine = task.load({"task": str(folder)})
  [(executor, call)] = calls(mine, mine.interface.default_source())
  with pytest.raises(ContractError, match="expected loss, got"):
    mine.run(call, executor.artifacts, b"")


@pytest.mark.slow
def test_a_module_in_the_current_folder_is_found_by_all_processes(tmp_path):
  source = (EXAMPLES / "own_discovery_task.py").read_text()
  (tmp_path / "mymod.py").write_text(source)
  command = [sys.executable, "-P", "-m", "mxjax", "discover"]
  run = [*command, "run", "--task", "mymod:Denoise", "--budget", "3", "--out", "out"]
  subprocess.run(run, cwd=tmp_path, check=True, capture_output=True)
  spec = json.loads((tmp_path / "out" / "run.json").read_text())["task"]
  assert spec == {"task": "mymod:Denoise", "path": str(tmp_path)}
  verify_ = [*command, "verify", str(tmp_path / "out")]
  assert subprocess.run(verify_, cwd="/", capture_output=True).returncode == 2
  verify_ += ["--task", "mymod:Denoise"]
  subprocess.run(verify_, cwd=tmp_path, check=True, capture_output=True)


def test_a_missing_module_leaves_nothing(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  run = ["discover", "run", "--task", "nomod:Task", "--out", "out"]
  assert main(run) == 2
  assert "expected Task in a module nomod" in capsys.readouterr().err
  assert not (tmp_path / "out").exists()


def test_a_default_program_that_does_not_run_is_one_sentence(folder, capsys):
  text = EVALUATE.replace("  rows =", "  raise ValueError('no rows')\n  rows =")
  (folder / "evaluate.py").write_text(text)
  words = ["discover", "plan", "--task", str(folder), "--sandbox", "off"]
  assert main(words) == 2
  told = " ".join(capsys.readouterr().err.split())
  assert "no rows; mend the task before a run" in told
