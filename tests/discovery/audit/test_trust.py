"""A run folder is data: what it says is not executed unless the caller says it too."""

import json
import pathlib

import pytest

from mxjax.cli.main import main
from mxjax.discovery.audit import verify
from mxjax.discovery.search import heldout, runs
from mxjax.discovery.tasks import world
from tests.discovery import searching

TASK = world.World(seed=3)


@pytest.fixture
def folder(tmp_path):
  """A closed run of the world, without a program of its own but the first."""
  place = tmp_path / "run"
  options = runs.RunOptions(
    task=dict(TASK.spec),
    config={"seed": 3, "budget": 2},
    sandbox="strict",
    holdout="off",
  )
  runs.write_options(place, options)
  searching.run(place, TASK, searching.Scripted(), seed=3, budget=2)
  return place


def change(folder, **values):
  path = folder / "run.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def touching(tmp_path):
  """A module that leaves a mark when it is imported."""
  mark = tmp_path / "mark"
  (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\ntask = None\n")
  return mark


EVIL = {
  "a function of the library": lambda where: {"task": "subprocess:call", "args": ["x"]},
  "a module beside it": lambda where: {"task": "evil:task", "path": str(where)},
  "two files": lambda where: {"task": str(where)},
  "a built-in name with a path": lambda where: {"task": "world", "path": str(where)},
}
AUDITS = {
  "verify": lambda folder: verify.verify(folder, calls=0),
  "run": lambda folder: runs.run(folder),
  "close": lambda folder: runs.close(folder),
  "held-out scorer": lambda folder: heldout.follow(folder),
}


@pytest.mark.parametrize("audit", AUDITS.values(), ids=AUDITS)
@pytest.mark.parametrize("task", EVIL.values(), ids=EVIL)
def test_a_task_that_the_folder_names_is_not_executed(folder, tmp_path, task, audit):
  mark = touching(tmp_path)
  (tmp_path / "evaluate.py").write_text((tmp_path / "evil.py").read_text())
  (tmp_path / "initial.py").write_text("")
  change(folder, task=task(tmp_path))
  with pytest.raises(ValueError, match="code of its own.*name it yourself by --task"):
    audit(folder)
  assert not mark.exists()


def test_the_level_is_the_callers(folder):
  change(folder, sandbox="off")
  with pytest.raises(ValueError, match="expected a run at sandbox level strict"):
    verify.verify(folder, calls=0)
  trusted = runs.Trusted(sandbox="off")
  assert not verify.verify(folder, calls=0, trusted=trusted).complaints


def test_the_command_line_names_what_it_trusts(folder, tmp_path, capsys):
  change(folder, task={"task": str(tmp_path)})
  for command in ("verify", "resume"):
    assert main(["discover", command, str(folder)]) == 2
    assert "name it yourself by --task" in " ".join(capsys.readouterr().err.split())
  trusted = runs.Trusted(task={"task": str(pathlib.Path(tmp_path))})
  trusted.check(runs.read_options(folder))
