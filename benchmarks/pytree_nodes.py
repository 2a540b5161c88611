"""How often JAX runs the program of another class, and what it costs to prevent it.

  python benchmarks/pytree_nodes.py [--processes 20] [--pairs 200]

Nodes of two dataclasses without fields are registered by
`jax.tree_util.register_dataclass` or by our `pytree_nodes.register`. In each of some
processes, a function of its own is called with the first and then with the second class
of every pair, and one function with a hundred classes; a call is wrong if it computes
what another class would. Processes, because the bits of a hash that decide it differ
from process to process.

The cost is the median time to take apart and to put together 210 quantized linears by
the two, side by side, and to call a compiled function of them that does nothing.
"""

import collections
import dataclasses
import json
import statistics
import subprocess
import sys
import time

import common
import jax
import jax.numpy as jnp

from mxjax.numerics import pytree_nodes

REGISTER = {
  "jax": jax.tree_util.register_dataclass,
  "ours": pytree_nodes.register,
}
CLASSES, LINEARS, REPEATS = 100, 210, 200


def numbered(register, number):
  """A class without fields that knows its number."""
  cls = dataclasses.make_dataclass(f"Node{number}", [], frozen=True)
  cls.number = number
  return register(cls)


def wrong_calls(pairs):
  """Wrong second calls of pairs, and wrong calls of one function, by registration."""
  found = {}
  for name, register in REGISTER.items():
    wrong = 0
    for _ in range(pairs):
      add = jax.jit(lambda node, x: x + node.number)
      first, second = numbered(register, 0), numbered(register, 1)
      add(first(), jnp.int32(0))
      wrong += int(add(second(), jnp.int32(0))) != 1
    add = jax.jit(lambda node, x: x + node.number)
    classes = [numbered(register, number) for number in range(CLASSES)]
    got = [int(add(cls(), jnp.int32(0))) for cls in classes]
    found[name] = [wrong, sum(g != number for number, g in enumerate(got))]
  return found


def linears(register):
  """Nodes with the children of a quantized linear: codes, scales, map and tables."""

  @dataclasses.dataclass(frozen=True)
  class Tables:
    gram: jax.Array
    cross: jax.Array
    changes: int = dataclasses.field(default=2, metadata={"static": True})

  @dataclasses.dataclass(frozen=True)
  class Codes:
    codes: jax.Array
    scales: jax.Array

  @dataclasses.dataclass(frozen=True)
  class Linear:
    weight: Codes
    input_map: jax.Array
    rounding: Tables

  for cls in (Tables, Codes, Linear):
    register(cls)
  leaf = jnp.zeros(1)
  one = lambda: Linear(Codes(leaf, leaf), leaf, Tables(leaf, leaf))
  return [one() for _ in range(LINEARS)]


def milliseconds():
  """Median milliseconds by what is done and how classes are registered."""
  sides = {}
  for name, register in REGISTER.items():
    tree = linears(register)
    leaves, structure = jax.tree.flatten(tree)
    call = jax.jit(lambda tree: jnp.int32(0) * len(tree))
    call(tree).block_until_ready()
    sides[name] = {
      "take apart": lambda tree=tree: jax.tree.flatten(tree),
      "put together": lambda s=structure, x=leaves: jax.tree.unflatten(s, x),
      "call": lambda call=call, tree=tree: call(tree).block_until_ready(),
    }
  times = collections.defaultdict(list)
  for _ in range(REPEATS):
    for name, works in sides.items():
      for work, run in works.items():
        start = time.perf_counter()
        run()
        times[work, name].append(1e3 * (time.perf_counter() - start))
  works = dict.fromkeys(work for work, _ in times)
  return {
    work: {name: statistics.median(times[work, name]) for name in REGISTER}
    for work in works
  }


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--processes", type=int, default=20)
  parser.add_argument("--pairs", type=int, default=200, help="of classes, a process")
  parser.add_argument("--one", action="store_true", help="count in this process alone")
  options = parser.parse_args()
  if options.one:
    print(json.dumps(wrong_calls(options.pairs)))
    return
  command = [sys.executable, __file__, "--one", "--pairs", str(options.pairs)]
  counts = []
  for _ in range(options.processes):
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    counts.append(json.loads(done.stdout.splitlines()[-1]))
  wrong = {
    name: {
      "pairs": sum(count[name][0] for count in counts),
      "of pairs": options.pairs * options.processes,
      "processes with a wrong pair": sum(count[name][0] > 0 for count in counts),
      "of a hundred classes": [count[name][1] for count in counts],
    }
    for name in REGISTER
  }
  result = {
    **common.stamp(),
    "processes": options.processes,
    "wrong": wrong,
    "milliseconds": milliseconds(),
  }
  options.out.write_text(json.dumps(result, indent=1) + "\n")
  print(json.dumps({"wrong": wrong, "milliseconds": result["milliseconds"]}, indent=1))


if __name__ == "__main__":
  main()
