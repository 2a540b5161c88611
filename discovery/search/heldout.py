"""The held-out scorer: a separate process that follows the log of a run.

It reads which program was the champion at every mark, scores it on data that the search
never loads, and writes into a sibling folder that the search never opens. The report
unseals the scores only after the run is closed.
"""

import json
import os
import pathlib
import sys
import time
from typing import Any

from mxjax.discovery.core import task as task_
from mxjax.discovery.core.store import Store, read_events
from mxjax.discovery.core.task import Status
from mxjax.discovery.sandbox.executor import Executor
from mxjax.discovery.search import runs
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.errors import ValueRefusal

POLL_SECONDS = 1.0


def sealed_folder(folder: pathlib.Path) -> pathlib.Path:
  """Returns the folder for a run's scores, a sibling of the run folder."""
  return folder.with_name(folder.name + ".heldout")


def follow(
  folder: pathlib.Path, run: int | None = None, trusted: str | None = None
) -> None:
  """Scores the champion of every mark until the run is closed.

  `trusted` is the JSON form of `runs.Trusted`, by default that of a strange folder.

  `run` is the process that started this one: when it is gone, the log gets no end until
  somebody resumes the run, which starts another scorer.
  """
  options = runs.read_options(folder)
  runs.Trusted(**json.loads(trusted or "{}")).check(options)
  holdout = task_.load(options.task).holdout()
  if holdout is None:
    return
  store = _waited_for(sealed_folder(folder))
  executor = runs.make_executor(holdout, store, options.sandbox)
  evaluator = CachedEvaluator(holdout, executor, store)
  scored = 0
  try:
    while True:
      events = read_events(folder) if (folder / "log.jsonl").exists() else []
      # Before the end is looked for: the last marks are logged just ahead of it.
      scored = _score_marks(evaluator, store, folder, events, scored)
      if _is_closed(events) or run not in (None, os.getppid()):
        return
      time.sleep(POLL_SECONDS)
  finally:
    executor.close()
    store.close()


def _waited_for(sealed: pathlib.Path) -> Store:
  """Opens the folder once the scorer of a killed run has noticed its end."""
  while True:
    try:
      return Store(sealed)
    except BlockingIOError:
      time.sleep(POLL_SECONDS)


def score_closed(
  folder: pathlib.Path, holdout: task_.Task, executor: Executor, archive: Store
) -> None:
  """Scores all marks of a closed run in this process, for studies of many runs.

  `archive` holds held-out outcomes of other runs, see `CachedEvaluator`.

  Raises:
    ValueError: The run is still open, so a score could reach its search.
  """
  events = read_events(folder)
  if not _is_closed(events):
    raise ValueRefusal(
      folder,
      expected="a run that has been closed",
      got="one that is open",
      mend="resume it first",
    )
  if len(unsealed(folder)) < sum(event["event"] == "mark" for event in events):
    store = Store(sealed_folder(folder))
    evaluator = CachedEvaluator(holdout, executor, store, archive=archive)
    _score_marks(evaluator, store, folder, events, 0)
    store.close()


def unsealed(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the scores of a closed run; empty if it is open or was not scored."""
  sealed = sealed_folder(folder)
  if not (sealed / "log.jsonl").exists() or not _is_closed(read_events(folder)):
    return []
  return read_events(sealed)


def _is_closed(events: list[dict[str, Any]]) -> bool:
  return bool(events) and events[-1]["event"] == "closed"


def _score_marks(
  evaluator: CachedEvaluator,
  store: Store,
  folder: pathlib.Path,
  events: list[dict[str, Any]],
  scored: int,
) -> int:
  """Scores the marks after the first `scored`; returns the number of marks."""
  marks = [event for event in events if event["event"] == "mark"]
  for mark in marks[scored:]:
    source = (folder / "programs" / f"{mark['champion']}.py").read_text()
    status, value = _score(evaluator, source)
    scores = {"status": str(status), "value": value}
    store.emit("heldout", call=mark["call"], champion=mark["champion"], **scores)
  return len(marks)


def _score(evaluator: CachedEvaluator, source: str) -> tuple[Status, float | None]:
  prepared = evaluator.prepare(source)
  if prepared.call is None:
    # A mark without a value: a champion of the visible task need not run on this one.
    return prepared.status, None
  (outcome,) = evaluator.measure(prepared.call)
  return outcome.status, outcome.values.get(evaluator.task.target)


if __name__ == "__main__":
  follow(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:3]), *sys.argv[3:])
