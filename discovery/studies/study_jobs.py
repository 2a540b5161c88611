"""The paper's discovery tables: its studies as jobs of the runner of tables."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from mxjax.discovery.studies import figures, study, tables
from mxjax.discovery.tasks.ptq import margins
from mxjax.evaluation.report.tables import Table, markdown
from mxjax.evaluation.tables import runner

SEEDS = tuple(range(101, 109))
"""Paired seeds of the studies."""
TUNED_ON = (1, 2, 3)
"""Seeds used while cards, margins and gate were set."""


def begun_task(folder: pathlib.Path) -> dict[str, Any] | None:
  """Returns the frozen task of an existing study folder, or None.

  Reusing it avoids measuring the task's margins again.
  """
  frozen = folder / "frozen.json"
  if not frozen.exists():
    return None
  return json.loads(frozen.read_text())["options"]["task"]


def planned(
  models: Sequence[str], calls: int, seeds: Sequence[int] | None
) -> study.StudyOptions:
  """Returns the options of the paper's studies, before anything is measured.

  Args:
    models: The model that is searched and the one that is held out; none for the
      synthetic world.
    calls: Evaluator calls of each run.
    seeds: Instead of `SEEDS`.
  """
  task: dict[str, Any] = {"task": "world"}
  if models:
    visible, hidden = models
    task = {"task": "ptq", "model": visible, "holdout": hidden}
  return study.StudyOptions(
    task=task, seeds=tuple(seeds or SEEDS), tuning_seeds=TUNED_ON, budget=calls
  )


def opened(
  folder: pathlib.Path, options: study.StudyOptions, tell: study.Tell
) -> study.Folder:
  """Opens a new or begun folder of studies; margins are measured if it is new.

  Raises:
    ValueError: The folder was begun with other options.
  """
  task = begun_task(folder) or margins.completed(options.task, tell=tell)
  return study.Folder(folder, dataclasses.replace(options, task=task))


def made(folder: study.Folder, name: str, tell: study.Tell) -> list[Table]:
  """Runs or resumes a study, and writes NAME.md, and the figure of `matched`.

  Returns its tables, each followed by the paper's.
  """
  results = study.conduct(folder, name, tell)
  found = tables.tables(results)
  (folder.path / f"{name}.md").write_text(markdown(found))
  if name == "matched":
    page = figures.anytime(results)
    (folder.path / "anytime.html").write_text(page, encoding="utf-8")
  return found


class Studies(runner.Work[str]):
  """The work of several studies in one folder, by their names.

  A study is never done before it has run here: it goes on by itself, and reads at once
  what is finished.

  Attributes:
    tables: Those of the studies that have run, by name.
  """

  def __init__(self, folder: study.Folder, tell: study.Tell) -> None:
    """Takes an open folder; `tell` gets a sentence on each finished part."""
    self._folder, self._tell = folder, tell
    self.tables: dict[str, list[Table]] = {}

  @override
  def is_done(self, job: str) -> bool:
    return job in self.tables

  @override
  def perform(self, job: str) -> None:
    self.tables[job] = made(self._folder, job, self._tell)
