"""Instructions of the kernels' machine code for each value, and what they allow.

  NVDISASM=PATH python benchmarks/gpu_counts.py

Also the launches of a compiled layer, for one token beside a cache and for 2,048.

Compiles the kernels as `tests/compile_kernels.py` does, for an H200 and without one,
disassembles them (`nvdisasm` of a CUDA toolkit, or of the package triton), and counts
the instructions of one pass through the loop that has most matrix instructions for its
size, else through the largest loop, or of the whole kernel where it has none; and those
of the whole kernel with all its passes, which bound the rate.
A multiprocessor starts 128 instructions a cycle, 64 of them on the units for
integers, comparisons and selections; that bounds the values a second, and the bound is
set beside the values that the memory can bring and take. Bounds are no measurements:
nothing here has run, and no kernel reaches all of its bound.
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path[:0] = map(str, pathlib.Path(__file__).resolve().parents[:2])

from tests import compile_kernels

if compile_kernels.obstacle() is None:
  compile_kernels.prepare()  # XLA reads it when jax is imported.

from tests import kernel_cases

MULTIPROCESSORS, CLOCK, MEMORY = 132, 1.755e9, 4.3e12
STARTED, INTEGER = 128, 64
"""Instructions of a thread that a multiprocessor starts in a cycle: all, and on the
units that do everything but multiply and add."""
POSITIONS = 2048
"""Of the cache, and tokens of the prompt."""
MULTIPLY = ("FADD", "FMUL", "FFMA", "IMAD", "HMUL2", "HADD2", "HFMA2")
ELSEWHERE = (
  "U",
  "R2UR",
  "WARPGROUP",
  "HGMMA",
  "HMMA",
  "LD",
  "ST",
  "BAR",
  "SHFL",
  "NOP",
)


def instructions(sass):
  """Operations in order, and the span of each loop."""
  found, labels, loops = [], {}, []
  for line in sass.splitlines():
    if match := re.match(r"\s*(\.L_x_\d+):", line):
      labels[match[1]] = len(found)
    elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
      found.append(match[1].split()[0])
      target = re.search(r"BRA.*`\((\.L_x_\d+)\)", match[1])
      if target and labels.get(target[1], len(found)) < len(found) - 1:
        loops.append((labels[target[1]], len(found)))
  return found, loops


def weight_of_loop(found, span):
  """Share of matrix instructions of a warp group, then size."""
  operations = found[slice(*span)]
  return sum("GMMA" in op for op in operations) / len(operations), len(operations)


def count(ptx, folder, per_thread, passes=1, loops_alike=1):
  """Instructions a value by kind, of `passes` through the loop in the whole kernel.

  What is outside the loop runs once. Branches that are skipped count as if taken. With
  several linears in a program the kernel has as many loops that are alike.
  """
  cubin = folder / "kernel.cubin"
  tool = compile_kernels.toolkit() / "bin" / "ptxas"
  architecture = f"-arch={compile_kernels.HOPPER.name}"
  subprocess.run([tool, architecture, "-o", cubin, ptx], check=True)
  sass = subprocess.run(
    [disassembler(), "-c", cubin], capture_output=True, text=True, check=True
  ).stdout
  found, loops = instructions(sass)
  whole = sum(op.split(".")[0] != "NOP" for op in found)
  if loops:
    start, end = max(loops, key=functools.partial(weight_of_loop, found))
    found = found[start:end]
  by_operation = collections.Counter(op.split(".")[0] for op in found)
  total = sum(n for op, n in by_operation.items() if op != "NOP")
  multiply = sum(n for op, n in by_operation.items() if op.startswith(MULTIPLY))
  elsewhere = sum(
    n for op, n in by_operation.items() if op.startswith(ELSEWHERE) and op != "NOP"
  )
  return {
    "instructions": total / per_thread,
    "of the whole kernel": (whole / loops_alike + (passes - 1) * total)
    / (passes * per_thread),
    "on integer units": (total - multiply - elsewhere) / per_thread,
    "waits for products": sum(op.startswith("WARPGROUP.DEPBAR") for op in found),
    "counted": f"{'loop' if loops else 'kernel'} of {total}, {per_thread} values",
    "most frequent": dict(by_operation.most_common(12)),
  }


def waves(launch, arguments, assembled):
  """Programs, those that registers let run at once, and their quotient: of Triton's."""
  import jax

  found = [
    (equation.params["grid_mapping"].grid, equation.params["compiler_params"].num_warps)
    for equation in jax.make_jaxpr(launch)(*arguments).eqns
    if equation.primitive.name == "pallas_call"
  ]
  if not found:
    return {}
  [[grid, warps]] = found
  # Registers are given to a warp in units of 256.
  of_a_warp = -(-assembled["registers"] * 32 // 256) * 256
  at_once = MULTIPROCESSORS * min(65536 // (of_a_warp * warps), 64 // warps)
  programs = math.prod(grid)
  return {"programs": programs, "at once": at_once, "waves": programs / at_once}


def disassembler():
  """Path of nvdisasm."""
  found = os.environ.get("NVDISASM") or shutil.which("nvdisasm")
  if not found:
    sys.exit("benchmarks/gpu_counts.py needs nvdisasm on the path or in NVDISASM.")
  return found


def cases():
  """Name: launch, arguments, values a thread and pass, passes and loops, bytes a value.

  Of several linears that share a launch, x is read once.
  """
  import jax.numpy as jnp

  from mxjax.pallas_kernels import mxfp4_decode, mxfp4_encode
  from mxjax.pallas_kernels.attention import prefill
  from mxjax.pallas_kernels.mosaic import device
  from mxjax.pallas_kernels.products import int8_matmul, matmul
  from mxjax.pallas_kernels.refinement import one_code

  known = kernel_cases.cases()
  packed = 17 / 32
  result = {}

  def add(name, values, threads, size, passes=1, loops=1):
    result[name] = (*known[name], values / threads, (passes, loops), size)

  for name, size in (("float32", 4), ("bfloat16", 2)):
    values, threads = mxfp4_encode.BLOCKS * 32, mxfp4_encode.WARPS * 32
    add(f"encode {name}", values, threads, size + packed)
  values, threads = mxfp4_decode.BLOCKS * 32, mxfp4_decode.WARPS * 32
  add("decode to bfloat16", values, threads, 2 + packed)

  def refine(name, size, linears=1):
    tile = one_code.Tile.of(2048, jnp.bfloat16, linears)
    add(name, tile.rows * 32, tile.warps * 32, size, tile.repeats, linears)

  for name, size in (("codes", packed), ("values", 2), ("float8", 33 / 32)):
    refine(f"one code, split, {name}", 2 + size)
  refine("one code, split, values, 3 linears", 2 + 2 / 3, 3)
  refine("one code, split, float8, 2 linears", 33 / 32 + 1, 2)
  refine("one code, split, values, of a gated product", 6)
  refine("nearest, split, values", 4)
  for name, rows, shape in (
    ("bfloat16 x packed, 1 row", 1, (4096, 4096)),
    ("packed x packed, 16 rows", 16, (12288, 4096)),
    ("bfloat16 x packed, 2048 rows", 2048, (12288, 4096)),
    ("packed x packed, 2048 rows", 2048, (4096, 4096)),
  ):
    tile = matmul.Tile.of(rows, *shape)
    values = tile.outputs * tile.columns
    passes = shape[1] // (tile.columns * tile.splits)
    add(f"matmul {name}", values, tile.warps * 32, packed, passes)
  tile = int8_matmul.Tile.of([12288], 4096)
  values = tile.outputs * tile.blocks * 32
  passes = 4096 // (tile.blocks * 32 * tile.splits)
  add("int8 x packed, 1 row", values, tile.warps * 32, packed, passes)
  tile = prefill.Tile.of(128, compile_kernels.HOPPER.capability)
  # Values are scores, of a program with half of the keys.
  passes = 1024 // tile.chunk
  add("attention, 2048 tokens", tile.rows * tile.chunk, tile.warps * 32, 0, passes)
  if not device.obstacle():
    for case in mosaic_cases(packed):
      add(*case)
  return result


def mosaic_cases(packed):
  """The arguments of `add` in `cases`, for kernels in Mosaic GPU."""
  from mxjax.pallas_kernels.mosaic import encode, products, refinement

  width = refinement.BLOCKS * 32
  tiles, pairs = 2048 // refinement.ROWS, 4096 // width
  passes = -(-tiles // (3 * MULTIPROCESSORS // pairs))
  yield "Mosaic encode bfloat16", encode.BLOCKS * 32, 128, 2 + packed
  for name, size in (("codes", packed), ("values", 2), ("float8", 33 / 32)):
    case = f"Mosaic one code, {name}"
    yield case, refinement.ROWS * width, 128, 2 + size, passes
  yield "Mosaic nearest, values", refinement.ROWS * width, 128, 4, passes
  # A pass is two steps, and those after the loop are not in it.
  values = 2 * products.OUTPUTS * products.COLUMNS
  passes = (4096 // products.COLUMNS - 2) // 2
  for name in ("float8 product", "bfloat16 x packed"):
    yield f"Mosaic {name}, 2048 rows", values, 128, packed, passes


def rows_of_a_token(run, folder, again):
  """What the refinements of a token take: a program is a row of a block and a linear.

  `cycles at least` is what all of a launch's instructions take to start, for inputs of
  4,096 features; that the next one waits for the last is not in it.
  """
  from mxjax.pallas_kernels.refinement.one_code import Tile

  warps, known, result = Tile.of(1, "bfloat16").warps, kernel_cases.cases(), {}
  for name, linears in (
    ("float32, int8, 1 row", 1),
    ("int8, 1 row, normalized, 3 linears", 3),
    ("int8, 1 row, of a gated product", 1),
    ("int8, 1 row, of attention", 1),
  ):
    launch, *arguments = known[f"one code, {name}"]
    if not again(f"one code, {name}"):
      continue
    instructions = count(run(launch, *arguments)[0][0], folder, 1)["instructions"]
    cycles = 128 * linears * 32 * warps * instructions / STARTED / MULTIPROCESSORS
    result[name] = {"instructions": instructions, "cycles at least": round(cycles)}
    print(f"{name:40s} {result[name]}")
  return result


def launches(run):
  """Kernels that one more Qwen3-8B-shaped layer starts, by kind and use."""
  import gpu_models
  import jax
  import jax.numpy as jnp

  from mxjax.layers.quantized_linear import QuantizedLinear

  shape, tokens = gpu_models.QWEN3_8B, 16
  row = lambda n: jax.ShapeDtypeStruct((1, n, shape.hidden), jnp.bfloat16)
  token_layer = jax.jit(functools.partial(gpu_models.forward_layer, shape, None, None))
  many_layer = jax.jit(functools.partial(gpu_models.forward_layer, shape, None, None))

  def token(layers, caches, hidden):
    def step(index, state):
      (hidden, caches), after = state, []
      for layer, cache in zip(layers, caches, strict=True):
        hidden, cache = token_layer(layer, hidden, cache, POSITIONS - tokens + index)
        after.append(cache)
      return hidden, after

    return jax.lax.fori_loop(0, tokens, step, (hidden, caches))[0]

  def prefill(layers, hidden):
    for layer in layers:
      hidden = many_layer(layer, hidden)[0]
    return hidden

  cache = jax.eval_shape(lambda: gpu_models.empty_cache(shape, POSITIONS))
  result = {}
  for kind in gpu_models.KINDS:
    stored = "BF16" if kind == "BF16" else "HiRes"
    layer = jax.eval_shape(
      lambda stored=stored: gpu_models.random_layer(jax.random.key(0), shape, stored)
    )
    if "float8" in kind:
      unit = jax.ShapeDtypeStruct((), jnp.float32)
      layer = {
        name: dataclasses.replace(leaf, float8_scale=unit)
        if isinstance(leaf, QuantizedLinear)
        else leaf
        for name, leaf in layer.items()
      }
    layers = [layer] * 5
    uses = {"2048 tokens": (prefill, layers, row(POSITIONS))}
    if "float8" not in kind:  # Few rows are not multiplied so.
      uses["one token"] = token, layers, [cache] * 5, row(1)
    result[kind] = {}
    for name, (function, *lists, hidden) in uses.items():
      # From the fourth layer on XLA computes apart what all layers share.
      four, five = (
        started(run(function, *(each[:n] for each in lists), hidden)[1]) for n in (4, 5)
      )
      result[kind][name] = five - four
    print(f"{kind}: launches of a layer {result[kind]}", flush=True)
  return result


def started(program):
  """Launches in the computation of a program that has most; a branch counts as one."""
  launch = re.compile(
    r"\n\s+(?:ROOT )?%[^\n]* (?:fusion|custom-call|copy|conditional)\("
  )
  parts = re.split(r"\n(?=%|ENTRY)", program)
  return max(len(launch.findall(part)) for part in parts)


def main():
  """Writes and prints the result."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", default="benchmarks/results/gpu_counts.json")
  parser.add_argument(
    "--only",
    nargs="+",
    default=[""],
    help="count again what has one of these in its name, or `launches`",
  )
  options = parser.parse_args()
  out = pathlib.Path(options.out)
  again = lambda name: any(part in name for part in options.only)
  stored = {} if again("") else json.loads(out.read_text())
  if why_not := compile_kernels.obstacle():
    sys.exit(f"nothing was compiled: {why_not}")
  rate = MULTIPROCESSORS * CLOCK
  kernels = {}
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    run = compile_kernels.compiler(folder)
    for name, (launch, *arguments, per_thread, passes, size) in cases().items():
      if not again(name):
        continue
      ptx = run(launch, *arguments)[0][0]
      result = count(ptx, folder, per_thread, *passes)
      result |= waves(launch, arguments, compile_kernels.assemble(ptx, folder))
      values = rate * min(
        STARTED / result["of the whole kernel"], INTEGER / result["on integer units"]
      )
      result["values a second at most"] = values
      result["memory rate at most"] = values * size / MEMORY
      kernels[name] = result
      print(
        f"{name:36s} {result['instructions']:6.2f} instructions, "
        f"{result['of the whole kernel']:6.2f} of the whole kernel, "
        f"{result['on integer units']:5.2f} on integer units, "
        f"{values:.3g} values/s, {result['memory rate at most']:.2f} of the memory's"
      )
    of_a_token = rows_of_a_token(run, folder, again)
    layers = "launches of a Qwen3-8B-shaped layer"
    of_a_layer = launches(run) if again("launches") else stored[layers]
  document = {
    "command": "python benchmarks/gpu_counts.py",
    "date": datetime.date.today().isoformat(),
    "compiled for": f"{compile_kernels.HOPPER.name}, nothing was run",
    "assumed": {
      "multiprocessors": MULTIPROCESSORS,
      "clock_GHz": CLOCK / 1e9,
      "memory_TBps": MEMORY / 1e12,
    },
    "versions": {n: importlib.metadata.version(n) for n in ("jax", "jaxlib")},
    "kernels": stored.get("kernels", {}) | kernels,
    "refinements of a token": stored.get("refinements of a token", {}) | of_a_token,
    layers: of_a_layer,
  }
  out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
  main()
