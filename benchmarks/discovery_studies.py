"""The paper's discovery studies, in the synthetic world or with the real evaluator.

  python benchmarks/discovery_studies.py world [STUDY ...] [--out DIR] [--seeds N ...]
  python benchmarks/discovery_studies.py ptq   [STUDY ...] [--out DIR] [--seeds N ...]
                                        [--only N ...]
  python benchmarks/discovery_studies.py payoff-noisy | payoff-plain
  python benchmarks/discovery_studies.py payoff-real-noisy | payoff-real-plain
                                        [--only N ...] [--core N]
  python benchmarks/discovery_studies.py tables

Does what `mxjax discover study` does for every named study (all by default) in one
folder, and writes what was found to results/studies_world.json or studies_ptq.json.
Killed at any point it goes on where it stood when given the same folder. `--only` takes
some of the folder's seeds, where time demands it. In the two worlds of `payoff-`, and
with the real evaluator in the two of `payoff-real-`, experiments should pay and should
not; what is expected is frozen with the plan, and every arm pays only for what it
executes anew. The last two run on one core, because XLA's threads wait for one another
at the processor's cost, and their number is in the last bits of what is measured.
`tables` writes the tables of all files beside them, one Markdown file a
study.
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

from mxjax.cli.discover import study as study_cli
from mxjax.discovery.studies import study, tables
from mxjax.discovery.tasks.ptq import margins
from mxjax.evaluation.report.tables import markdown
from mxjax.models.loading import embedded

PTQ = {"calibration": [8, 64], "windows": [16, 128]}
SEEDS, PAYOFF_SEEDS = tuple(range(301, 309)), tuple(range(201, 209))
NOISY_SEEDS = tuple(range(221, 229))
"""Of the noisy regime of the real evaluator: earlier plans began some of 201 to 218."""
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
  "payoff-real-noisy": "20 edits with 26 settings, half of them decoys, thousands of "
  "programs, and a score of 64 tokens, so that most gains are luck of the text; held "
  "out are 8,192 tokens of the same text. A control on 16,384 others tells a gain from "
  "luck, and bad luck from a loss; others are paid only where a gain holds. QuantForge "
  "ends lower on held-out data than Score-only, TextMem, ReflectMem, uniform random "
  "draws and shuffled verdicts in at least six of eight seeds.",
  "payoff-real-plain": "the same edits, and a divergence over 2,048 tokens with hardly "
  "any noise: all arms come to the same few programs. Experiments bring nothing; "
  "QuantForge is not behind any other arm by more than noise: the 95 % interval of "
  "each paired difference holds zero or lies below it.",
}
REAL = {
  "payoff-real-noisy": {
    "task": {
      "activation_rule": "one_code",
      "windows": [2, 32],
      "holdout": str(embedded.trained_folder("llama")),
      "holdout_windows": [64, 128],
      "other_windows": [256, 64],
    },
    "config": {"proposals_per_call": 4, "revise_retired": False},
  },
  "payoff-real-plain": {"task": {"activation_rule": "one_code", "objective": "kl"}},
}
"""Options of the real evaluator's regimes.

With HiRes' own rule for activations, which is native code, a text of this size takes
seconds. A champion that holds a retired change is not revised: on seed 900, most
proposals came from one, did not take the change back, and were used up long before the
calls.
"""
# An earlier plan, of trees with a free proxy and a held-out model of another family,
# began seeds 211 and 215.
TUNED = (1, 2, 3, 11, 12, 21, 22, 211, 215, 900, 901, 902, 903)
TUNED_IN_WORLDS = (31, 32, 33, 101, 102)


def task(world, folder):
  if world in WORLDS:
    return dict(WORLDS[world])
  if (begun := study_cli.begun_task(folder)) is not None:
    return begun
  models = {
    "model": str(embedded.trained_folder("llama")),
    "holdout": str(embedded.trained_folder("qwen3")),
  }
  own = REAL.get(world, {}).get("task", {})
  return dict(margins.calibrated({"task": "ptq", **models, **PTQ, **own}))


def placeless(text, task):
  """The text with models named by their place in the repository."""
  for key in {"model", "holdout"} & set(task):
    text = text.replace(task[key], f"models/trained/{pathlib.Path(task[key]).name}")
  return text


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
  own = {k: v for k, v in REAL.get(options.world, {}).items() if k != "task"}
  made = study.StudyOptions(
    task=task(options.world, folder),
    seeds=tuple(options.seeds),
    tuning_seeds=TUNED + (TUNED_IN_WORLDS if options.world in WORLDS else ()),
    budget=options.budget,
    is_sequential=is_payoff,
    expects=EXPECTED.get(options.world, ""),
    **own,
    # Jailed workers drop what they compiled when it fills their memory.
    sandbox="off" if options.world in WORLDS else "strict",
  )
  held = study.Folder(folder, made)
  result = results_of(options.world)
  every = [name for name in study.STUDIES if not name.startswith("payoff")]
  if is_payoff:
    every = ["payoff-real" if options.world in REAL else "payoff"]
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
        result.write_text(placeless(text, made.task) + "\n")
  held.close()


def write_tables():
  for world in ("ptq", *WORLDS, *REAL):
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
  parser.add_argument("world", choices=(*WORLDS, *REAL, "ptq", "tables"))
  parser.add_argument("studies", nargs="*")
  parser.add_argument("--out", default=None)
  parser.add_argument("--seeds", type=int, nargs="+")
  parser.add_argument("--only", type=int, nargs="+", help="some of the seeds")
  parser.add_argument("--budget", type=int)
  parser.add_argument("--core", type=int, default=0, help="of the real regimes")
  options = parser.parse_args()
  if options.world == "tables":
    return write_tables()
  own = {**dict.fromkeys(EXPECTED, PAYOFF_SEEDS), "payoff-real-noisy": NOISY_SEEDS}
  options.seeds = options.seeds or own.get(options.world, SEEDS)
  options.budget = options.budget or (60 if options.world in REAL else 240)
  options.out = options.out or f"runs/studies_{options.world}"
  if options.world in REAL:
    # Before XLA counts the cores; workers inherit it.
    os.sched_setaffinity(0, {options.core})
  conduct(options)


if __name__ == "__main__":
  sys.exit(main())
