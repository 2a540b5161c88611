"""Programs that a HiRes build of one layer compiles, by the function that they are of.

  python benchmarks/compiled_programs.py

The widths are in the proportions of Qwen3-8B, so that as many shapes differ; a model of
many equal layers compiles as many programs as this one. Counted on a CPU: on a GPU the
loops over batches of blocks are not there, and kernels are.
"""

import argparse
import collections
import datetime
import json
import logging
import pathlib
import re
import sys
import tempfile

import jax
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import gpu_models

from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.models import CausalLM
from mxjax.run.quantize import run

SMALL = gpu_models.Shape("a 64th of Qwen3-8B", 64, 192, 1, 4, 1, 16, 61)


class Counted(logging.Handler):
  """Counts JAX's messages about compiled programs."""

  def __init__(self):
    super().__init__()
    self.names = collections.Counter()

  def emit(self, record):
    found = re.search(r"Finished XLA compilation of jit\((.*?)\)", record.getMessage())
    if found:
      self.names[found[1].strip("<>")] += 1


def count(folder):
  """Builds, and returns how often each function was compiled."""
  model = CausalLM(gpu_models.config_of(SMALL, qk_norm=None))
  tokens = np.random.default_rng(0).integers(0, SMALL.vocabulary, (4, 64))
  params = jax.jit(model.init)(jax.random.key(0), tokens[:1])["params"]
  counted = Counted()
  logging.getLogger("jax").addHandler(counted)
  logging.getLogger("jax").propagate = False
  jax.config.update("jax_log_compiles", True)
  calib = Calibration(model, tokens)
  run(params, calib, methods.HIRES, check=False, run_dir=folder)
  return counted.names


def main():
  """Writes and prints the result."""
  parser = argparse.ArgumentParser(description=__doc__)
  results = HERE / "results" / "compiled_programs.json"
  parser.add_argument("--out", type=pathlib.Path, default=results)
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    names = count(pathlib.Path(folder) / "run")
  document = {
    "command": "python benchmarks/compiled_programs.py",
    "date": datetime.date.today().isoformat(),
    "versions": {"jax": jax.__version__},
    "programs": sum(names.values()),
    "of functions": dict(names.most_common()),
  }
  options.out.write_text(json.dumps(document, indent=1) + "\n")
  print(json.dumps(document, indent=1))


if __name__ == "__main__":
  main()
