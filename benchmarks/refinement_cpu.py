"""One-code refinement on a CPU: the native kernel beside XLA, in turns in one process.

  python benchmarks/refinement_cpu.py [--rounds 15]

Inputs are raw blocks that a map of each block takes into the installed coordinates
first, as in every forward of HiRes. Before anything is timed the decoded blocks are
checked to have the same bits. Both run jitted; medians and their ratio are written.
"""

import functools

import common
import jax
import jax.numpy as jnp
import numpy as np

from mxjax.devices import execution
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import one_code

SHAPES = {
  "SmolLM2, width 576, 2048 tokens": (18, 2048),
  "SmolLM2, width 1536, 2048 tokens": (48, 2048),
  "8B, width 4096, 512 tokens": (128, 512),
}


def problem(blocks, tokens):
  """Inputs, tables and maps of a linear with random weights."""
  rng = np.random.default_rng(0)
  x = rng.standard_t(4, (blocks, 32, tokens)).astype(np.float32)
  weight = jnp.asarray(rng.standard_normal((blocks, 32, 256)).astype(np.float32))
  gram, cross = one_code.tables(weight, mxfp4.round_blocks(weight))
  maps = np.eye(32) + rng.standard_normal((blocks, 32, 32)) / 16
  return (jnp.asarray(x), gram, cross), jnp.asarray(maps.astype(np.float32))


def measure(shape, what, rounds):
  """Medians of both sides, of one function and shape."""
  operands, maps = problem(*SHAPES[shape])

  def call(name):
    chosen = functools.partial(getattr(one_code, what), implementation=name)
    return functools.partial(jax.jit(chosen), *operands, matrix=maps)

  calls = {name: call(name) for name in ("native", "xla")}
  same = bool((calls["native"]() == calls["xla"]()).all())
  assert same or what == "refined_objective", shape
  ready = {
    name: lambda call=call: jax.block_until_ready(call())
    for name, call in calls.items()
  }
  medians = common.medians(common.in_turns(ready, rounds)[0])
  return {
    "what": what,
    "shape": shape,
    "milliseconds": {name: 1e3 * value for name, value in medians.items()},
    "ratio": medians["xla"] / medians["native"],
    "same_bits": same,
  }


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--rounds", type=int, default=15)
  options = parser.parse_args()
  execution.keep_freed_memory()
  result = common.stamp("llvmlite") | {"rows": []}
  for shape in SHAPES:
    for what in ("refined_blocks", "refined_objective"):
      result["rows"].append(measure(shape, what, options.rounds))
      print(result["rows"][-1], flush=True)
  common.write(options.out, result)


if __name__ == "__main__":
  main()
