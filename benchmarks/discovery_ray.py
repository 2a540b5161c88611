"""The same search on local workers and on a local Ray cluster: are the bytes equal?

  python benchmarks/discovery_ray.py     (needs the extra `mxjax[ray]`)

Writes results/discovery_ray.json.
"""

import datetime
import hashlib
import json
import pathlib
import platform
import tempfile
import time

import jax
import ray

from mxjax.discovery.cli import parser
from mxjax.discovery.core import store

RESULT = pathlib.Path(__file__).parent / "results" / "discovery_ray.json"
BUDGET = 12


def main():
  runs = {}
  with tempfile.TemporaryDirectory() as scratch:
    for name, more in (("pool", []), ("ray", ["--ray", "--workers", "2"])):
      folder = pathlib.Path(scratch) / name
      command = ["discover", "run", "--task", "world", "--seed", "3", "--width", "2"]
      command += ["--budget", str(BUDGET), "--holdout", "off", "--out", str(folder)]
      begin = time.perf_counter()
      if parser.main([*command, *more]) != 0:
        raise RuntimeError(f"the {name} run failed")
      log = (folder / "log.jsonl").read_bytes()
      runs[name] = {
        "arguments": " ".join([*command[:-1], "DIR", *more]),
        "seconds": round(time.perf_counter() - begin, 1),
        "log_sha256": hashlib.sha256(log).hexdigest(),
        "ledger": store.read_events(folder)[-1]["ledger"],
      }
  ray.shutdown()
  result = {
    "command": "python benchmarks/discovery_ray.py",
    "date": datetime.date.today().isoformat(),
    "machine": platform.machine(),
    "versions": {
      "python": platform.python_version(),
      "jax": jax.__version__,
      "ray": ray.__version__,
    },
    "sandbox": "strict",
    "runs": runs,
    "same_bytes": runs["pool"]["log_sha256"] == runs["ray"]["log_sha256"],
  }
  RESULT.write_text(json.dumps(result, indent=1) + "\n")
  print(json.dumps(result, indent=1))


if __name__ == "__main__":
  main()
