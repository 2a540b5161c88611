"""Keeps of a run by a language model what its replay needs, in a folder of golden data.

  python tests/golden/make_recorded_run.py RUN CASSETTE tests/golden/NAME

Of the log stay the events as `test_recorded_run.py` compares them, with the outcomes
whole: what was measured is the recording machine's, as last bits differ from machine to
machine. `proxy.jsonl` holds what the free proxy measured, in order, where it was asked.
`champions.json` holds the sources of the best programs after some numbers of calls.
None has a path.
"""

import itertools
import json
import pathlib
import shutil
import sys

KEPT = (
  *("event", "kind", "condition", "status", "call", "charged", "values", "detail"),
  *("verdict", "reason", "response", "observed"),
)
"""What is compared: the rest are digests of sources and of traced programs."""
TOLD = ("outputs", "parts", "task", "models")
"""What a replay is told besides, or tests read."""
TASK = ("objective", "activation_rule", "calibration", "windows")
TASK += ("margins", "initial", "references")
"""Options of a `ptq` task that the prompts depend on, and no path."""
MARKS = (15, 20, 30, 40)
"""Numbers of calls after which the best program is kept, where a run had as many."""


def compared(event):
  """What two logs have in common if they are of one run."""
  return {key: event[key] for key in KEPT if key in event}


def events_of(run):
  """The events of a run folder's log."""
  return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def champions(run):
  """Source of the best program of a run folder after each of `MARKS`, by "call N".

  A run of fewer calls than a mark has no program of it.
  """
  events, kept = events_of(run), {}
  spent = max((e["call"] for e in events if e["event"] == "outcome"), default=0)
  programs = [e for e in events if e["event"] == "program"]
  for mark in (mark for mark in MARKS if mark <= spent):
    # A program that is proposed again later has its first call, and a later champion.
    until = [*itertools.takewhile(lambda e, mark=mark: e["call"] <= mark, programs)]
    best = run / "programs" / f"{until[-1]['champion']}.py"
    kept[f"call {mark}"] = best.read_text()
  return kept


def main():
  """Writes the files."""
  run, cassette, out = map(pathlib.Path, sys.argv[1:])
  out.mkdir(exist_ok=True)
  shutil.copy(cassette, out / "cassette.jsonl")
  stored = sorted((run / "outcomes").glob("*.json"), key=lambda f: f.stat().st_mtime_ns)
  outcomes = {f.stem: json.loads(f.read_text())["value"]["outcome"] for f in stored}
  # In the order in which a prompt tells them, which the log does not keep.
  task = json.loads((run / "run.json").read_text())["task"]
  rows = []
  for event in events_of(run):
    told = {"open": {"task": task}, "replies": event}.get(event["event"], {})
    if event["event"] == "outcome":
      told = outcomes[event["exec_id"]]
    rows.append(compared(event) | {k: told[k] for k in TOLD if k in told})
  rows[0]["task"] = {k: task[k] for k in TASK if k in task}
  write(out / "log.jsonl", rows)
  asked = [each for each in outcomes.values() if "proxy_error" in each["values"]]
  if asked:
    write(out / "proxy.jsonl", asked)
  if best := champions(run):
    (out / "champions.json").write_text(json.dumps(best, indent=1) + "\n")


def write(path, rows):
  """Writes JSON lines."""
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
  main()
