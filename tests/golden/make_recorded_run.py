"""Keeps of a run by a language model what its replay needs, in a folder of golden data.

  python tests/golden/make_recorded_run.py RUN CASSETTE tests/golden/NAME

Of the log stay the events as `test_recorded_run.py` compares them, with the outcomes
whole: what was measured is the recording machine's, as last bits differ from machine to
machine. `proxy.jsonl` holds what the free proxy measured, in order, where it was asked.
Neither has a path.
"""

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
TASK = ("objective", "calibration", "windows", "margins", "initial", "references")
"""Options of a `ptq` task that the prompts depend on, and no path."""


def compared(event):
  """What two logs have in common if they are of one run."""
  return {key: event[key] for key in KEPT if key in event}


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
  for event in map(json.loads, (run / "log.jsonl").read_text().splitlines()):
    told = {"open": {"task": task}, "replies": event}.get(event["event"], {})
    if event["event"] == "outcome":
      told = outcomes[event["exec_id"]]
    rows.append(compared(event) | {k: told[k] for k in TOLD if k in told})
  rows[0]["task"] = {k: task[k] for k in TASK if k in task}
  write(out / "log.jsonl", rows)
  asked = [each for each in outcomes.values() if "proxy_error" in each["values"]]
  if asked:
    write(out / "proxy.jsonl", asked)


def write(path, rows):
  """Writes JSON lines."""
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
  main()
