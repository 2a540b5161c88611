"""Seven tasks of SmolLM2-135M in BF16, RTN and HiRes, on a stated subset.

  python benchmarks/seven_tasks.py --data ../shared/data

Calls `mxjax quantize`, `mxjax evaluate --tasks all` and `mxjax reproduce --results` as
a person would, and times them. The subset is the first --items items of each
multiple-choice task and the first --windows windows of the two texts; on two cores the
full sets take hours. What is finished in runs/seven-tasks is not done again. Writes
benchmarks/results/seven_tasks.json, and seven_tasks.md, which docs/results/methods.md
shows.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import provenance

RESULTS = pathlib.Path(__file__).parent / "results"
RUNS = pathlib.Path("runs/seven-tasks")
METHODS = ("rtn", "hires")
WIKITEXT2, C4 = "wikitext2/wiki.test.raw", "c4/c4_en_train_first1000.jsonl"
NAME = "SmolLM2-135M"
TABLES = ("reproduce", "raw,main,aggregates", "--results")


def call(*words):
  """Runs a command of mxjax in a process of its own; its seconds."""
  start = time.perf_counter()
  command = [sys.executable, "-m", "mxjax.evaluation.cli.parser", *map(str, words)]
  subprocess.run(command, check=True)
  return time.perf_counter() - start


def timed(place, *words):
  """Runs a command that makes a folder, unless it is there; its seconds either way."""
  file = place.with_suffix(".seconds.json")
  if not file.is_file():
    seconds = call(*words, "--out", place)
    file.write_text(json.dumps({"words": list(map(str, words)), "seconds": seconds}))
  found = json.loads(file.read_text())
  if found["words"] != list(map(str, words)):
    raise SystemExit(f"{place} was made by another command; remove it to do it again")
  return found["seconds"]


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--data", type=pathlib.Path, default=pathlib.Path("../shared/data")
  )
  parser.add_argument("--items", type=int, default=100)
  parser.add_argument("--windows", type=int, default=4)
  parser.add_argument("--sequences", type=int, default=4)
  parser.add_argument("--length", type=int, default=512)
  options = parser.parse_args()
  made = provenance.stamp(hidden=("--data",))
  RUNS.mkdir(parents=True, exist_ok=True)
  texts = ["--wikitext2", options.data / WIKITEXT2, "--c4", options.data / C4]
  subset = ["--items", options.items, "--task-windows", options.windows]
  sizes = ["--sequences", options.sequences, "--length", options.length]
  evaluate = ["--tasks", "all", "--name", NAME, *subset, *texts]
  seconds = {"quantize": {}, "evaluate": {}}
  place = RUNS / "results-bf16"
  seconds["evaluate"]["bf16"] = timed(place, "evaluate", *evaluate)
  for method in METHODS:
    run = RUNS / method
    words = ["quantize", "--method", method, *sizes, "--windows", 1]
    words += ["--window-length", options.length]
    seconds["quantize"][method] = timed(run, *words)
    place = RUNS / f"results-{method}"
    seconds["evaluate"][method] = timed(place, "evaluate", run, *evaluate)
  found = [
    json.loads(file.read_text()) for file in sorted(RUNS.glob("*/evaluation.json"))
  ]
  tables = subprocess.run(
    [sys.executable, "-m", "mxjax.evaluation.cli.parser", *TABLES, str(RUNS)],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  ).stdout
  calibration = f"{options.sequences} x {options.length} embedded tokens"
  result = {
    **made,
    "subset": {"items": options.items, "windows": options.windows},
    "texts": {"wikitext2": WIKITEXT2, "c4": C4},
    "calibration": calibration,
    "seconds": seconds,
    "results": found,
  }
  (RESULTS / "seven_tasks.json").write_text(json.dumps(result, indent=1) + "\n")
  (RESULTS / "seven_tasks.md").write_text(tables.replace("## ", "### "))
  print(tables)


if __name__ == "__main__":
  main()
