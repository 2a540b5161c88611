"""Decompositions of small matrices with and without threads of OpenBLAS, on a CPU.

  python benchmarks/lapack_threads.py [--rounds 5]

HiRes decomposes the 32 x 32 moments of every block. Both sides run in turns in one
process, first alone, then beside as many busy processes as there are cores; medians and
their ratio are written. Before that the results are checked to have the same bits.
"""

import contextlib
import functools
import multiprocessing
import os

import common
import jax
import jax.numpy as jnp
import numpy as np

from mxjax.devices import execution
from mxjax.methods.hires import stage1
from mxjax.numerics import precision
from mxjax.numerics.realization import map_refit
from mxjax.numerics.shaping import reference_chart

BLOCKS = 48


def _busy():
  while True:
    pass


@contextlib.contextmanager
def busy_cores(count):
  """Processes that take every core."""
  start = multiprocessing.get_context("spawn").Process
  others = [start(target=_busy, daemon=True) for _ in range(count)]
  for one in others:
    one.start()
  yield
  for one in others:
    one.kill()
    one.join()


def functions():
  """Calls by name, each a few milliseconds of work."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, BLOCKS, 32, 64))
  first, second = (jnp.asarray(part @ part.mT / 64) for part in x)
  return {
    "HiRes' chart": functools.partial(
      stage1._charts,
      first,
      second,
      chart=reference_chart.reference_chart,
      max_condition=8.0,
    ),
    "inverses of a refit": functools.partial(
      map_refit.damped_inverses, first.astype(jnp.float32)
    ),
  }


def alone(call):
  """The call without threads of OpenBLAS."""
  with execution.one_lapack_thread():
    return jax.block_until_ready(call())


def measure(name, call, rounds):
  """Medians of both sides and their ratio."""
  sides = {
    "threads": lambda: jax.block_until_ready(call()),
    "one thread": lambda: alone(call),
  }
  results = [jax.tree.leaves(side()) for side in sides.values()]
  same = all((a == b).all() for a, b in zip(*results, strict=True))
  assert same, name
  medians = common.medians(common.in_turns(sides, rounds)[0])
  return {
    "milliseconds": {side: 1e3 * value for side, value in medians.items()},
    "ratio": medians["threads"] / medians["one thread"],
  }


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--rounds", type=int, default=5)
  options = parser.parse_args()
  result = common.stamp("scipy", "threadpoolctl") | {"blocks": BLOCKS, "rows": []}
  with precision.float64_scope():
    for name, call in functions().items():
      for others in (0, os.cpu_count()):
        with busy_cores(others):
          row = {"what": name, "busy processes": others}
          result["rows"].append(row | measure(name, call, options.rounds))
        print(result["rows"][-1], flush=True)
  common.write(options.out, result)


if __name__ == "__main__":
  main()
