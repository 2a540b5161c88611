"""What the functions of a build and of a token do on a GPU, counted and not run.

  python benchmarks/gpu_programs.py

Compiles the functions of `tests/hot_functions.py` for an H200 at the shapes of
Qwen3-8B and reads launches, bytes and operations of products from the final programs
(`tests/hlo.py`); a function of one sequence counts once. Then a token of `generate`
with layers in arrays of their own, and the same with stacked layers under a scan.
"""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from tests import compile_kernels

if compile_kernels.obstacle() is None:
  compile_kernels.prepare()  # XLA reads it when jax is imported.

import jax
import jax.numpy as jnp

from tests import hlo, hot_functions

POSITIONS, LAYERS = 2048, 3


def of_token(stacked):
  """Counts of a token by some layers: one after another, or scanned over a stack."""
  import gpu_models

  shape = gpu_models.QWEN3_8B
  make = lambda: (
    gpu_models.random_layer(jax.random.key(0), shape, "HiRes"),
    gpu_models.empty_cache(shape, POSITIONS),
  )
  one = jax.eval_shape(make)
  several = [[part] * LAYERS for part in one]
  if stacked:
    longer = lambda a: jax.ShapeDtypeStruct((LAYERS, *a.shape), a.dtype)
    several = jax.tree.map(longer, one)

  def layer(hidden, each):
    start = jnp.int32(POSITIONS - 1)
    return gpu_models.forward_layer(shape, None, None, each[0], hidden, each[1], start)

  def token(params, caches, hidden):
    if stacked:
      return jax.lax.scan(layer, hidden, (params, caches))
    after = []
    for each in zip(params, caches, strict=True):
      hidden, cache = layer(hidden, each)
      after.append(cache)
    return hidden, after

  mesh, place = compile_kernels.target()
  arguments = *several, jax.ShapeDtypeStruct((1, 1, shape.hidden), jnp.bfloat16)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    jitted = jax.jit(token, donate_argnums=1)
    made = jitted.lower(*jax.tree.map(place, arguments)).compile()
  counts = hlo.Program(made.as_text()).counts()
  return {name: count / LAYERS for name, count in counts.items()}


def main():
  """Writes and prints the result."""
  parser = argparse.ArgumentParser(description=__doc__)
  results = HERE / "results" / "gpu_programs.json"
  parser.add_argument("--out", type=pathlib.Path, default=results)
  options = parser.parse_args()
  if why_not := compile_kernels.obstacle():
    sys.exit(f"nothing was compiled: {why_not}")
  functions = {name: counts for name, counts, _ in hot_functions.check()}
  tokens = {
    "a layer for one token": of_token(stacked=False),
    "a layer for one token, stacked": of_token(stacked=True),
  }
  document = {
    "command": "python benchmarks/gpu_programs.py",
    "date": datetime.date.today().isoformat(),
    "compiled for": f"{compile_kernels.HOPPER.name}, nothing was run",
    "versions": {n: importlib.metadata.version(n) for n in ("jax", "jaxlib")},
    "functions": functions,
    "decoding": tokens,
  }
  options.out.write_text(json.dumps(document, indent=1) + "\n")
  print(json.dumps(tokens, indent=1))


if __name__ == "__main__":
  main()
