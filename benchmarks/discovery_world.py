"""A complete 240-call run in the synthetic world, twice, with its ledger and truth.

`python benchmarks/discovery_world.py --seed 0` writes results/discovery_world.json:
the ledger, the anytime and held-out curves, verdicts against the known truth, and
whether the second run wrote the same bytes.
"""

import argparse
import collections
import json
import pathlib
import tempfile
import time

import discovery_log

from mxjax.discovery.core import store
from mxjax.discovery.search import runs
from mxjax.discovery.tasks import world

RESULT = pathlib.Path(__file__).parent / "results" / "discovery_world.json"
# What each explicit verdict says of the edit, in the words of the world's truth.
CLAIMS = {
  "supported": {"mechanism"},
  "mediator_only": {"mediator"},
  "target_only": {"capacity", "inert_capacity"},
}


def run(folder: pathlib.Path, seed: int, holdout: str) -> tuple[str, float]:
  options = runs.RunOptions(
    task={"task": "world", "seed": seed},
    config={"seed": seed, "budget": 240},
    sandbox="off",
    holdout=holdout,
  )
  runs.write_options(folder, options)
  start = time.perf_counter()
  runs.run(folder)
  return discovery_log.digest(folder), time.perf_counter() - start


def judged(events: list, truth: dict) -> dict:
  labels = {e["id"]: e.get("label", "") for e in events if e["event"] == "packet"}
  counts: dict = collections.defaultdict(lambda: [0, 0])
  for event in events:
    if event["event"] == "verdict" and event["verdict"] in CLAIMS:
      site, operation = labels[event["packet"]].split("(")[0].split("-")
      is_right = truth[site][operation] in CLAIMS[event["verdict"]]
      counts[event["verdict"]][not is_right] += 1
  return {name: {"right": a, "wrong": b} for name, (a, b) in sorted(counts.items())}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seed", type=int, default=0)
  seed = parser.parse_args().seed
  with tempfile.TemporaryDirectory() as scratch:
    first, second = pathlib.Path(scratch) / "first", pathlib.Path(scratch) / "second"
    digest, seconds = run(first, seed, "after")
    again, _ = run(second, seed, "off")
    result = {
      "command": f"python benchmarks/discovery_world.py --seed {seed}",
      "sandbox": "off",
      **discovery_log.summary(first),
      "against_the_truth": judged(store.read_events(first), world.World(seed).truth),
      "second_run_same_bytes": digest == again,
      "seconds_first_run_with_heldout": round(seconds, 1),
    }
  RESULT.write_text(json.dumps(result, indent=1) + "\n")
  print(json.dumps(result, indent=1))


if __name__ == "__main__":
  main()
