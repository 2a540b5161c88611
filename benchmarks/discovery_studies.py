"""The paper's discovery studies in the synthetic world, where rules of ours propose.

  python benchmarks/discovery_studies.py world [STUDY ...] [--out DIR] [--seeds N ...]
  python benchmarks/discovery_studies.py payoff-noisy | payoff-plain [--only N ...]
  python benchmarks/discovery_studies.py tables

Does what `mxjax discover study` does for every named study (all by default) in one
folder, and writes what was found to results/studies_world.json, or to a file of its own
for each `payoff-`. Killed at any point it goes on where it stood when given the same
folder. `--only` takes some of the folder's seeds, where time demands it. In the two
worlds of `payoff-` experiments should pay and should not; what is expected is frozen
with the plan, and every arm pays only for what it executes anew. `tables` writes the
tables of all files beside them, one Markdown file a study.
"""

import argparse
import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import platform
import re
import sys
import time

import common
import jax
import scipy

from mxjax.discovery.studies import arms, study, tables
from mxjax.evaluation.report.tables import markdown

SEEDS, PAYOFF_SEEDS = tuple(range(301, 309)), tuple(range(201, 209))
WORLDS = {
  "world": {"task": "world"},
  "payoff-noisy": {"task": "world", "luck": 0.8},
  "payoff-plain": {"task": "world"},
}
EXPECTED = {
  "payoff-noisy": "144 edits, few of them right, and two of three gains are luck "
  "that only a control shows. QuantForge ends lower on held-out data than Score-only, "
  "TextMem, ReflectMem, uniform random draws and shuffled verdicts in at least six of "
  "eight seeds.",
  "payoff-plain": "few edits, 144, and a score with hardly any noise. Experiments "
  "bring nothing; QuantForge is not behind any other arm by more than noise: the 95 % "
  "interval of each paired difference holds zero or lies below it.",
}
TUNED = (1, 2, 3, 11, 12, 21, 22, 211, 215, 900, 901, 902, 903, 31, 32, 33, 101, 102)
"""Seeds on which something was tried, which no study may take."""


def results_of(world):
  return common.RESULTS / f"studies_{world.replace('-', '_')}.json"


@contextlib.contextmanager
def locked(path):
  """Holds a file's folder for one of several processes that add to the file."""
  folder = os.open(path.parent, os.O_RDONLY)
  try:
    fcntl.flock(folder, fcntl.LOCK_EX)
    yield
  finally:
    os.close(folder)


def read(path, frozen):
  """Returns the results so far of what is frozen alike, or none."""
  written = json.loads(path.read_text()) if path.exists() else {}
  if written.get("frozen", {}).get("hash") != frozen["hash"]:
    return {"frozen": frozen, "studies": {}}
  return written


def measured(held, name, seeds, options):
  """Runs or resumes some seeds of a study; returns the record of the results file."""
  start = time.perf_counter()
  tell = lambda line: print(line, flush=True)
  results = study.conduct(held, name, tell, seeds=seeds)
  return {
    "command": command(held.options, options.world, name, results["seeds"]),
    "date": datetime.date.today().isoformat(),
    "cpu": common.cpu(),
    "versions": {
      "python": platform.python_version(),
      "jax": jax.__version__,
      "scipy": scipy.__version__,
    },
    "seconds_of_this_call": round(time.perf_counter() - start),
    "results": results,
  }


def command(made, world, name, seeds):
  """Returns what gives the results of these seeds."""
  listed = lambda numbers: " ".join(map(str, numbers))
  only = "" if tuple(seeds) == made.seeds else f" --only {listed(seeds)}"
  told = f"--seeds {listed(made.seeds)} --budget {made.budget}"
  return f"python benchmarks/discovery_studies.py {world} {name} {told}{only}"


def merged(before, record, made, world):
  """Returns the record with the seeds that an earlier one holds beside its own."""
  if before is None:
    return record
  old, new = before["results"], record["results"]
  seeds = sorted({*old["seeds"], *new["seeds"]})
  by_seed = lambda a, b: {str(n): {**a, **b}[str(n)] for n in seeds}
  results = {
    **new,
    "seeds": seeds,
    "landmarks": by_seed(old["landmarks"], new["landmarks"]),
    "runs": {arm: by_seed(old["runs"][arm], runs) for arm, runs in new["runs"].items()},
  }
  seconds = before["seconds_of_this_call"] + record["seconds_of_this_call"]
  return {
    **record,
    "command": command(made, world, new["study"], seeds),
    "seconds_of_this_call": seconds,
    "results": results,
  }


def conduct(options):
  folder, is_payoff = pathlib.Path(options.out), options.world in EXPECTED
  made = study.StudyOptions(
    task=WORLDS[options.world],
    seeds=tuple(options.seeds),
    tuning_seeds=TUNED,
    budget=options.budget,
    is_sequential=is_payoff,
    expects=EXPECTED.get(options.world, ""),
    sandbox="off",
  )
  held = study.Folder(folder, made)
  result = results_of(options.world)
  every = ["payoff"] if is_payoff else arms.PAPER_STUDIES
  for name in options.studies or every:
    # A payoff is written seed by seed, by several processes or at several times.
    parts = [[n] for n in options.only or made.seeds] if is_payoff else [options.only]
    for seeds in parts:
      record = measured(held, name, seeds or (), options)
      with locked(result):
        written = read(result, held.frozen)
        before = written["studies"].get(name)
        if is_payoff:
          record = merged(before, record, made, options.world)
        written["studies"][name] = record
        # One line a run keeps the file readable and its differences small.
        text = re.sub(r"\n {5,}", " ", json.dumps(written, indent=1))
        result.write_text(text + "\n")
  held.close()


def write_tables():
  for world in WORLDS:
    path = results_of(world)
    studies = json.loads(path.read_text())["studies"] if path.exists() else {}
    for name, result in studies.items():
      told = f"`{result['command']}`, {result['date']}, {path.name}."
      found = markdown(tables.tables(result["results"]))
      # No headings: the pages that include a file have their own.
      text = re.sub(r"(?m)^## (.*)$", r"**\1**", found)
      path.with_name(f"{path.stem}_{name}.md").write_text(f"{told}\n\n{text}")


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("world", choices=(*WORLDS, "tables"))
  parser.add_argument("studies", nargs="*")
  parser.add_argument("--out", default=None)
  parser.add_argument("--seeds", type=int, nargs="+")
  parser.add_argument("--only", type=int, nargs="+", help="some of the seeds")
  parser.add_argument("--budget", type=int)
  options = parser.parse_args()
  if options.world == "tables":
    return write_tables()
  options.seeds = options.seeds or (
    PAYOFF_SEEDS if options.world in EXPECTED else SEEDS
  )
  options.budget = options.budget or 240
  options.out = options.out or f"runs/studies_{options.world}"
  conduct(options)


if __name__ == "__main__":
  sys.exit(main())
