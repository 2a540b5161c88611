"""A complete search with the real evaluator: run, run again, killed and resumed.

  python benchmarks/discovery_run.py [--out DIR] [--only first second killed]

Quantizes the small trained Llama-family model 240 times, with the Qwen3-family model
held out, from the RTN program with the embedded proposer, behind the strict jail. The
third run is killed with SIGKILL after 10, 60 and 150 paid calls and resumed. Every
call of every run is executed; what XLA compiled is shared through DIR/compiled. Folders
that are begun are resumed. Writes results/discovery_run.json (the ledger, the lineage,
the visible and the held-out curve, and the SHA-256 of every trajectory) and its table.
"""

import argparse
import datetime
import json
import pathlib
import platform
import signal
import subprocess
import sys
import time

import discovery_log
import jax
import provenance

from mxjax.discovery.core import store
from mxjax.discovery.search import heldout
from mxjax.models.loading import embedded

RESULT = pathlib.Path(__file__).parent / "results" / "discovery_run.json"
OPTIONS = {"calibration": [8, 64], "windows": [16, 128]}
KILLS = (10, 60, 150)
CLI = [sys.executable, "-m", "mxjax.discovery.cli.parser", "discover"]


def paid(folder):
  return len(list(folder.glob("outcomes/*.json")))


def start(folder):
  compiled = ["--compiled", str(folder.parent / "compiled")]
  if (folder / "run.json").exists():
    return [*CLI, "resume", str(folder), *compiled]
  models = [
    *("--model", str(embedded.trained_folder("llama"))),
    *("--holdout-model", str(embedded.trained_folder("qwen3"))),
  ]
  options = ["--task-options", json.dumps(OPTIONS)]
  where = ["--out", str(folder), *compiled]
  return [*CLI, "run", "--task", "ptq", *models, *options, *where]


def is_closed(folder):
  log = folder / "log.jsonl"
  return log.exists() and store.read_events(folder)[-1]["event"] == "closed"


def complete(folder, kills=()):
  """Runs a folder to its end; returns seconds and the counts at which it was killed."""
  begin, killed = time.perf_counter(), []
  for count in kills:
    if paid(folder) >= count:
      continue
    process = subprocess.Popen(start(folder))
    while paid(folder) < count and process.poll() is None:
      time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed.append(paid(folder))
  if not is_closed(folder) or not heldout.unsealed(folder):
    subprocess.run(start(folder), check=True)
  return round(time.perf_counter() - begin), killed


def summary(folder, seconds, killed):
  return {
    **discovery_log.summary(folder),
    "evaluator": store.read_events(folder)[0]["evaluator"],
    "seconds_of_this_call": seconds,
    "killed_after_outcomes": killed,
  }


def table(result):
  """One line a run."""
  lines = []
  for name, run in result["runs"].items():
    ledger, curves = run["ledger"], (run["visible"], run["heldout"])
    calls = f"{ledger['candidate']} + {ledger['control']} + {ledger['probe']}"
    lines.append(
      [
        name,
        f"{calls} = {ledger['total']}",
        f"{ledger['reused']}",
        f"{ledger['proposer']['calls']}",
        *(f"{curve[0][1]:.4f} to {curve[-1][1]:.4f}" for curve in curves),
        ", ".join(map(str, run["killed_after_outcomes"])) or "-",
        f"`{run['log_sha256'][:12]}`",
      ]
    )
  head = ["run", "candidates + controls + probes", "reused", "proposals"]
  head += ["visible log perplexity, call 20 to 240", "held out, the same"]
  head += ["killed after", "log"]
  return provenance.markdown(head, lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", default="runs/discovery_run")
  parser.add_argument("--only", nargs="+", default=["first", "second", "killed"])
  options = parser.parse_args()
  for name in options.only:
    folder = pathlib.Path(options.out) / name
    seconds, killed = complete(folder, KILLS if name == "killed" else ())
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": {}}
    result["runs"][name] = summary(folder, seconds, killed)
    hashes = {run["log_sha256"] for run in result["runs"].values()}
    result |= {
      "command": "python benchmarks/discovery_run.py",
      "date": datetime.date.today().isoformat(),
      "machine": platform.machine(),
      "python": platform.python_version(),
      "jax": jax.__version__,
      **OPTIONS,
      "same_trajectory": len(hashes) == 1,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(table(result))


if __name__ == "__main__":
  main()
