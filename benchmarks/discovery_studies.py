"""The paper's discovery studies, in the synthetic world or with the real evaluator.

  python benchmarks/discovery_studies.py world [STUDY ...] [--out DIR] [--seeds N ...]
  python benchmarks/discovery_studies.py ptq   [STUDY ...] [--out DIR] [--seeds N ...]
                                        [--only N ...]
  python benchmarks/discovery_studies.py tables

Does what `mxjax discover study` does for every named study (all by default) in one
folder, and writes what was found to results/studies_world.json or studies_ptq.json.
Killed at any point it goes on where it stood when given the same folder. `--only` takes
some of the folder's seeds, where time demands it. `tables` writes the tables of both
files beside them, one Markdown file a study.
"""

import argparse
import datetime
import json
import pathlib
import platform
import re
import sys
import time

import jax
import scipy

from mxjax.discovery.cli import study as study_cli
from mxjax.discovery.studies import study, tables
from mxjax.discovery.tasks.ptq import margins
from mxjax.models.loading import embedded

HERE = pathlib.Path(__file__).parent
PTQ = {"calibration": [8, 64], "windows": [16, 128]}
SEEDS = tuple(range(101, 109))
TUNED = (1, 2, 3, 11, 12, 21, 22)


def cpu():
  lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  return next(line.split(": ")[1] for line in lines if "model name" in line)


def task(world, folder):
  if world == "world":
    return {"task": "world"}
  if (begun := study_cli.begun_task(folder)) is not None:
    return begun
  models = {
    "model": str(embedded.trained_folder("llama")),
    "holdout": str(embedded.trained_folder("qwen3")),
  }
  return dict(margins.calibrated({"task": "ptq", **models, **PTQ}))


def placeless(text, task):
  """The text with models named by their place in the repository."""
  for key in {"model", "holdout"} & set(task):
    text = text.replace(task[key], f"models/trained/{pathlib.Path(task[key]).name}")
  return text


def conduct(options):
  folder = pathlib.Path(options.out)
  made = study.StudyOptions(
    task=task(options.world, folder),
    seeds=tuple(options.seeds),
    tuning_seeds=TUNED,
    budget=options.budget,
    # Jailed workers drop what they compiled when it fills their memory.
    sandbox="off" if options.world == "world" else "strict",
  )
  held = study.Folder(folder, made)
  result = HERE / "results" / f"studies_{options.world}.json"
  written = json.loads(result.read_text()) if result.exists() else {}
  if written.get("frozen", {}).get("hash") != held.frozen["hash"]:
    written = {"frozen": held.frozen, "studies": {}}
  for name in options.studies or study.STUDIES:
    start = time.perf_counter()
    tell = lambda line: print(line, flush=True)
    found = study.conduct(held, name, tell, seeds=options.only or ())
    written["studies"][name] = {
      "command": f"python benchmarks/discovery_studies.py {options.world} {name} "
      f"--seeds {' '.join(map(str, made.seeds))} --budget {made.budget}"
      + (f" --only {' '.join(map(str, options.only))}" if options.only else ""),
      "date": datetime.date.today().isoformat(),
      "cpu": cpu(),
      "versions": {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "scipy": scipy.__version__,
      },
      "seconds_of_this_call": round(time.perf_counter() - start),
      "results": found,
    }
    # One line a run keeps the file readable and its differences small.
    text = re.sub(r"\n {5,}", " ", json.dumps(written, indent=1))
    result.write_text(placeless(text, made.task) + "\n")
  held.close()


def write_tables():
  for world in ("world", "ptq"):
    path = HERE / "results" / f"studies_{world}.json"
    studies = json.loads(path.read_text())["studies"] if path.exists() else {}
    for name, result in studies.items():
      told = f"`{result['command']}`, {result['date']}, {path.name}."
      body = [told, *(table.markdown() for table in tables.tables(result["results"]))]
      path.with_name(f"{path.stem}_{name}.md").write_text("\n\n".join(body) + "\n")


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("world", choices=("world", "ptq", "tables"))
  parser.add_argument("studies", nargs="*")
  parser.add_argument("--out", default=None)
  parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
  parser.add_argument("--only", type=int, nargs="+", help="some of the seeds")
  parser.add_argument("--budget", type=int, default=240)
  options = parser.parse_args()
  if options.world == "tables":
    return write_tables()
  options.out = options.out or f"runs/studies_{options.world}"
  conduct(options)


if __name__ == "__main__":
  sys.exit(main())
