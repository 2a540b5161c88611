"""A long search behind the strict jail, killed at random, beside an undisturbed one.

  python benchmarks/long_search.py [--budget 5000] [--workers 8] [--kills 20]

Two runs of the synthetic world, its edits in 64 sizes, with the same seed: one is left
alone; the other is killed with SIGKILL, workers included, after random numbers of paid
calls, and resumed each time. Both logs must be the same bytes, the ledger's sums those
of the outcomes in the log, and `verify` must find nothing. The supervisor's memory is
read over the undisturbed run. Writes results/long_search.json; exits with 1 where
anything differs.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import provenance

from mxjax.discovery.audit import verify
from mxjax.discovery.core import store

HERE = pathlib.Path(__file__).parent.resolve()
RESULT = HERE / "results" / "long_search.json"
CLI = [sys.executable, "-m", "mxjax.discovery.cli.parser", "discover"]
SECONDS = 0.5
"""Between two looks at a run."""


def start(folder, options):
  words = ["--workers", str(options.workers)]
  if (folder / "run.json").exists():
    words = ["resume", str(folder), *words]
  else:
    words += ["--task", "long_world:LongWorld", "--holdout", "off"]
    words += ["--seed", str(options.seed)]
    words += ["--budget", str(options.budget), "--width", str(options.width)]
    words = ["run", "--out", str(folder), *words]
  # A session of its own, so that a kill reaches the workers as a crash would not.
  return subprocess.Popen(
    [*CLI, *words],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    start_new_session=True,
    cwd=HERE,
  )


def paid(folder):
  return sum(1 for _ in folder.glob("outcomes/*.json"))


def resident_mb(pid):
  pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def undisturbed(folder, options):
  """Runs to the end; returns seconds and (paid calls, resident MB) over the run."""
  begun, process, memory = time.monotonic(), start(folder, options), []
  while process.poll() is None:
    time.sleep(4 * SECONDS)
    if process.poll() is None:
      memory.append((paid(folder), round(resident_mb(process.pid), 1)))
  if process.returncode:
    raise SystemExit(process.stderr.read().decode())
  return time.monotonic() - begun, memory


def killed(folder, options, end):
  """Kills a run at random counts and resumes it; returns these counts."""
  random_ = random.Random(options.seed)
  counts = sorted(random_.sample(range(5, end), options.kills))
  seen = []
  for count in counts:
    process = start(folder, options)
    while process.poll() is None and paid(folder) < count:
      time.sleep(SECONDS / 10)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    seen.append(paid(folder))
  process = start(folder, options)
  errors = process.communicate()[1]
  if process.returncode:
    raise SystemExit(errors.decode())
  return seen


def sums_agree(folder):
  """Whether the closing ledger is the sum of the outcomes in the log."""
  events = store.read_events(folder)
  charged = collections.Counter()
  for event in events:
    if event["event"] == "outcome":
      charged[event["kind"]] += event["charged"]
  ledger = events[-1]["ledger"]
  return all(ledger[kind] == count for kind, count in charged.items()) and (
    ledger["total"] == sum(charged.values())
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--budget", type=int, default=5000)
  parser.add_argument("--workers", type=int, default=8)
  parser.add_argument("--width", type=int, default=8, help="packets of a round")
  parser.add_argument("--kills", type=int, default=20)
  parser.add_argument("--seed", type=int, default=11)
  parser.add_argument("--out", type=pathlib.Path, default=RESULT)
  options = parser.parse_args()
  made = provenance.stamp(hidden=("--out",))
  with tempfile.TemporaryDirectory(prefix="mxjax-long-") as place:
    whole, broken = (pathlib.Path(place) / name for name in ("whole", "broken"))
    seconds, memory = undisturbed(whole, options)
    counts = killed(broken, options, paid(whole))
    logs = [(folder / "log.jsonl").read_bytes() for folder in (whole, broken)]
    half = len(memory) // 2
    result = {
      **made,
      "seconds_undisturbed": round(seconds),
      "ledger": store.read_events(whole)[-1]["ledger"],
      "reason": store.read_events(whole)[-1]["reason"],
      "calls_executed": paid(whole),
      "resident_MB_first_half": max((m for _, m in memory[:half]), default=0),
      "resident_MB_second_half": max((m for _, m in memory[half:]), default=0),
      "killed_after_calls": counts,
      "same_log": logs[0] == logs[1],
      "sums_agree": all(map(sums_agree, (whole, broken))),
      "complaints": verify.verify(broken, 3).complaints,
    }
  options.out.write_text(json.dumps(result, indent=1) + "\n")
  print(json.dumps(result, indent=1))
  fine = result["same_log"] and result["sums_agree"] and not result["complaints"]
  return 0 if fine else 1


if __name__ == "__main__":
  sys.exit(main())
