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
MEASURED = ("outputs", "parts")
"""What a replay is told of an outcome besides."""
TASK = ("objective", "calibration", "windows", "margins", "initial", "references")
"""Options of a `ptq` task that the prompts depend on, and no path."""


def reduced(event):
  """An event of the golden log."""
  kept = {key: event[key] for key in KEPT if key in event}
  if event["event"] == "outcome":
    kept |= {key: event[key] for key in MEASURED if key in event}
  if event["event"] == "open":
    kept |= {"task": {k: event["task"][k] for k in TASK if k in event["task"]}}
  if event["event"] == "replies":
    kept |= {"models": event["models"]}
  return kept


def main():
  """Writes the files."""
  run, cassette, out = map(pathlib.Path, sys.argv[1:])
  out.mkdir(exist_ok=True)
  shutil.copy(cassette, out / "cassette.jsonl")
  log = (run / "log.jsonl").read_text().splitlines()
  write(out / "log.jsonl", [reduced(json.loads(line)) for line in log])
  stored = sorted((run / "outcomes").glob("*.json"), key=lambda f: f.stat().st_mtime_ns)
  found = [json.loads(file.read_text())["value"]["outcome"] for file in stored]
  if asked := [each for each in found if "proxy_error" in each["values"]]:
    write(out / "proxy.jsonl", asked)


def write(path, rows):
  """Writes JSON lines."""
  path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))


if __name__ == "__main__":
  main()
