"""The held-out scorer: a process of its own that follows a run's log.

It reads which program was the champion at every mark, scores it on data that the
search never loads, and writes into a folder beside the run that the search never
opens. The report unseals the scores only after the run is closed.
"""

import json
import pathlib
import sys
import time
from typing import Any

from mxjax.discovery.core import task as task_
from mxjax.discovery.core.packet import condition
from mxjax.discovery.core.residual import PRIMARY
from mxjax.discovery.core.store import Store, read_events
from mxjax.discovery.core.task import Status
from mxjax.discovery.sandbox.laboratory import Executor, Laboratory
from mxjax.discovery.search import runs

POLL_SECONDS = 1.0


def sealed_folder(folder: pathlib.Path) -> pathlib.Path:
  """Where the scores of a run go: beside it, not in it."""
  return folder.with_name(folder.name + ".heldout")


def follow(folder: pathlib.Path) -> None:
  """Scores the champion of every mark until the run is closed."""
  options = runs.read_options(folder)
  holdout = task_.load(options.task).holdout()
  if holdout is None:
    return
  store = Store(sealed_folder(folder))
  bench = runs.make_bench(holdout, store, options.sandbox)
  lab = Laboratory(holdout, bench, store)
  done = 0
  try:
    while True:
      events = read_events(folder) if (folder / "log.jsonl").exists() else []
      done = _score_marks(lab, store, folder, events, done)
      if events and events[-1]["event"] == "closed":
        return
      time.sleep(POLL_SECONDS)
  finally:
    bench.close()
    store.close()


def score_closed(
  folder: pathlib.Path, holdout: task_.Task, bench: Executor, archive: Store
) -> None:
  """Scores all marks of a closed run in this process, for studies of many runs.

  Args:
    folder: The run.
    holdout: Its held-out task.
    bench: Workers for that task.
    archive: Held-out outcomes of other runs, see `Laboratory`.

  Raises:
    ValueError: The run is still open: a score could reach its search.
  """
  events = read_events(folder)
  if events[-1]["event"] != "closed":
    raise ValueError(f"heldout: {folder} is not closed; resume it first.")
  if len(unsealed(folder)) == sum(event["event"] == "mark" for event in events):
    return
  store = Store(sealed_folder(folder))
  lab = Laboratory(holdout, bench, store, archive=archive)
  _score_marks(lab, store, folder, events, 0)
  store.close()


def _score_marks(
  lab: Laboratory,
  store: Store,
  folder: pathlib.Path,
  events: list[dict[str, Any]],
  done: int,
) -> int:
  """Scores the marks after the first `done`; returns how many there are."""
  marks = [event for event in events if event["event"] == "mark"]
  for mark in marks[done:]:
    score = _score(lab, folder, mark["champion"])
    store.emit("heldout", call=mark["call"], champion=mark["champion"], **score)
  return len(marks)


def _score(lab: Laboratory, folder: pathlib.Path, program: str) -> dict[str, Any]:
  source = (folder / "programs" / f"{program}.py").read_text()
  prepared = lab.prepare(source)
  if prepared.call is None:
    return {"status": str(prepared.status), "value": None}
  outcome = lab.run([condition(PRIMARY, "heldout", prepared.call, lab.evaluator)])[0]
  value = outcome.values[lab.task.target] if outcome.status == Status.OK else None
  return {"status": str(outcome.status), "value": value}


def unsealed(folder: pathlib.Path) -> list[dict[str, Any]]:
  """The scores of a closed run; empty while it is open or without a scorer.

  Args:
    folder: The run.
  """
  path = sealed_folder(folder) / "log.jsonl"
  events = read_events(folder)
  if not path.exists() or not events or events[-1]["event"] != "closed":
    return []
  return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
  follow(pathlib.Path(sys.argv[1]))
