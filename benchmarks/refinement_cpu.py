"""One-code refinement on a CPU: the native kernel beside XLA, in turns in one process.

  python benchmarks/refinement_cpu.py [--rounds 15]

Inputs are raw blocks that a map of each block takes into the installed coordinates
first, as in every forward of HiRes. Before anything is timed the decoded blocks are
checked to have the same bits. Both run jitted; medians and their ratio are printed and
written to `benchmarks/results/refinement_cpu.json`.
"""

import argparse
import functools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import provenance

from mxjax.devices import execution
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import one_code

SHAPES = {
  "SmolLM2, width 576, 2048 tokens": (18, 2048),
  "SmolLM2, width 1536, 2048 tokens": (48, 2048),
  "8B, width 4096, 512 tokens": (128, 512),
}
OUT = pathlib.Path(__file__).parent / "results" / "refinement_cpu.json"


def problem(blocks, tokens):
  """Inputs, tables and maps of a linear with random weights."""
  rng = np.random.default_rng(0)
  x = rng.standard_t(4, (blocks, 32, tokens)).astype(np.float32)
  weight = jnp.asarray(rng.standard_normal((blocks, 32, 256)).astype(np.float32))
  gram, cross = one_code.tables(weight, mxfp4.round_blocks(weight))
  maps = np.eye(32) + rng.standard_normal((blocks, 32, 32)) / 16
  return (jnp.asarray(x), gram, cross), jnp.asarray(maps.astype(np.float32))


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=15)
  options = parser.parse_args()
  execution.keep_freed_memory()
  result = provenance.stamp(packages=("llvmlite",)) | {"rows": []}
  for shape, (blocks, tokens) in SHAPES.items():
    operands, maps = problem(blocks, tokens)
    for what in ("refined_blocks", "refined_objective"):
      calls = {
        name: jax.jit(functools.partial(getattr(one_code, what), implementation=name))
        for name in ("native", "xla")
      }
      found = {name: call(*operands, matrix=maps) for name, call in calls.items()}
      same = bool((found["native"] == found["xla"]).all())
      assert same or what == "refined_objective", shape
      seconds = {name: [] for name in calls}
      for _ in range(options.rounds):
        for name, call in calls.items():
          start = time.perf_counter()
          jax.block_until_ready(call(*operands, matrix=maps))
          seconds[name].append(time.perf_counter() - start)
      medians = {name: statistics.median(times) for name, times in seconds.items()}
      row = {
        "what": what,
        "shape": shape,
        "milliseconds": {name: 1e3 * value for name, value in medians.items()},
        "ratio": medians["xla"] / medians["native"],
        "same_bits": same,
      }
      result["rows"].append(row)
      print(
        f"{shape:34s} {what:18s} native {row['milliseconds']['native']:6.2f} ms, "
        f"XLA {row['milliseconds']['xla']:6.2f} ms: {row['ratio']:.1f} x"
      )
  OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
  main()
