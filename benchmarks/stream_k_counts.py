"""What the stream-K product needs at least, and how long it is predicted to take.

It is compiled for an H200 without one, and the instructions of its loop are counted in
what `ptxas` makes of it. Each floor is what one part of the GPU needs alone: DRAM for
the weights, the second-level cache for all that programs read, the schedulers for
instructions, the tensor cores for products. A prediction is the longest of them, at the
shares that earlier kernels reached, and what starting and ending a launch takes. It is
written into `results/gpu_predictions.json` before any GPU has run the kernel.

  PYTHONPATH=PLUGIN python benchmarks/stream_k_counts.py --nvdisasm FILE

Needs what `tests/compile_kernels.py` needs, and `nvdisasm`.
"""

import functools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import common

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tests import compile_kernels

OUTPUTS, WIDTH, ROWS = 12288, 4096, (8, 16, 32, 64)
SCHEDULERS, COMPUTE_WARPS, CLOCK_GHZ = 4, 8, 1.98
"""Of a multiprocessor, of a program, and of an H200."""
PRODUCT_COLUMNS = 32
"""Of a matrix instruction of float8."""
FLOAT8_PER_CYCLE = 4096
"""Products and additions of a multiprocessor's tensor cores in a cycle."""
CACHE_TBPS = (5.0, 6.5)
"""What the second-level cache gives all multiprocessors: assumed, low and high."""
SHARES = {"DRAM": (0.75, 0.95), "issue": (0.5, 0.8), "tensor cores": (0.6, 0.8)}
"""Shares of a floor that are reached: assumed, low and high."""
LAUNCH_US = (1.7, 3.5)
"""From the start to the first weights, and from the last to the end: assumed."""


def loop(sass, products):
  """Names of the instructions of the shortest loop with so many products.

  Others lead from a wait at the end of the function back into the middle.
  """
  places, lines = {}, []
  for line in sass.splitlines():
    if label := re.match(r"^(\.L_x_\d+):", line):
      places[label[1]] = len(lines)
    elif found := re.search(
      r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)", line
    ):
      lines.append((found[1], line))
  found = []
  for end, (name, line) in enumerate(lines):
    target = re.search(r"`\((\.L_x_\d+)\)", line)
    if name == "BRA" and target and places.get(target[1], end) < end:
      body = [each for each, _ in lines[places[target[1]] : end + 1]]
      if sum(each.startswith("QGMMA") for each in body) == products:
        found.append(body)
  return min(found, key=len)


def count(rows, nvdisasm, folder):
  """Registers and instructions a step of the kernel for some rows."""
  import jax.numpy as jnp

  from mxjax.pallas_kernels.mosaic import stream_k, weights
  from tests import kernel_cases

  launch = functools.partial(stream_k.float8_products, dtype=jnp.bfloat16)
  array, weight = kernel_cases.array, kernel_cases.packed(OUTPUTS, WIDTH)
  x = array((rows, WIDTH), kernel_cases.float8.FORM)
  scale, row_unit = kernel_cases.scalar, array((rows,), jnp.float32)
  run = compile_kernels.compiler(folder)
  [ptx], _ = run(launch, [x], [weight], [scale], [row_unit])
  told = compile_kernels.assemble(ptx, folder)
  words = [str(nvdisasm), str(folder / "kernel.cubin")]
  sass = subprocess.run(words, capture_output=True, text=True, check=True).stdout
  steps = stream_k.UNIT
  body = loop(sass, steps * weights.COLUMNS // PRODUCT_COLUMNS)
  return told | {
    "instructions of a step and warp": len(body) / steps,
    "of them on the uniform unit": sum(each.startswith("U") for each in body) / steps,
  }


def floors(rows, instructions, copy_tbps):
  """Microseconds that each part of the GPU needs alone, and what they are made of."""
  import jax.numpy as jnp

  from mxjax.pallas_kernels import lowering
  from mxjax.pallas_kernels.mosaic import stream_k, weights

  work = stream_k.Work.of(rows, (OUTPUTS,), WIDTH, jnp.bfloat16)
  units = -(-work.total // work.programs)
  steps = units * stream_k.UNIT
  packed = OUTPUTS * WIDTH * 17 / 32
  read = work.total * stream_k.UNIT * weights.COLUMNS * work.tile
  cut = sum(int(work.start(p)) % work.units > 0 for p in range(1, work.programs))
  parts = 2 * 4 * cut * stream_k.OUTPUTS * stream_k.GROUPS * work.tile
  issued = steps * instructions * COMPUTE_WARPS / SCHEDULERS
  products = steps * weights.COLUMNS * stream_k.OUTPUTS * stream_k.GROUPS * work.tile
  assert work.programs <= lowering.multiprocessors()
  return {
    "programs": work.programs,
    "steps of a program": steps,
    "tiles that are cut": cut,
    "MB": {"weights": packed / 1e6, "inputs": read / 1e6, "parts": parts / 1e6},
    "us": {
      "DRAM": packed / copy_tbps / 1e6,
      "cache, TB": (packed + read + parts) / 1e12,
      "issue": issued / CLOCK_GHZ / 1e3,
      "tensor cores": products / FLOAT8_PER_CYCLE / CLOCK_GHZ / 1e3,
    },
  }


def predicted(us):
  """Milliseconds, low and high."""
  bounds = []
  for low, launch in zip((True, False), LAUNCH_US, strict=True):
    longest = [us[name] / share[low] for name, share in SHARES.items()]
    longest.append(us["cache, TB"] * 1e6 / CACHE_TBPS[low])
    bounds.append(round((max(longest) + launch) / 1e3, 4))
  return bounds


def main():
  """Compiles, counts, predicts and writes."""
  parser = common.parser(__doc__)
  parser.add_argument(
    "--nvdisasm", default=shutil.which("nvdisasm"), help="the program"
  )
  options = parser.parse_args()
  if why_not := compile_kernels.obstacle():
    sys.exit(why_not)
  if options.nvdisasm is None:
    sys.exit("nvdisasm is not on the path: name it by --nvdisasm")
  compile_kernels.prepare()
  memory = common.RESULTS / "gpu" / "h200_3_memory.json"
  copy = json.loads(memory.read_text())["results"]["ceilings"]["copy_GBps"] / 1e3
  kernels, times = {}, {}
  for rows in ROWS:
    with tempfile.TemporaryDirectory() as folder:
      counted = count(rows, options.nvdisasm, pathlib.Path(folder))
    needs = floors(rows, counted["instructions of a step and warp"], copy)
    kernels[f"{rows} rows"] = counted | needs
    times[f"{rows} rows"] = {"ms": predicted(needs["us"])}
  result = {
    **common.stamp(),
    "compiled for": "sm_90a, nothing was run",
    "assumed": {
      "cache_TBps": CACHE_TBPS,
      "shares": SHARES,
      "launch_us": LAUNCH_US,
      "copy_TBps": copy,
    },
    "kernels": kernels,
    "predicted": times,
  }
  head = [
    "rows",
    "instructions a step",
    "DRAM",
    "cache",
    "issue",
    "tensor cores",
    "predicted",
  ]
  lines = [
    [
      name,
      f"{kernel['instructions of a step and warp']:.0f}",
      f"{kernel['us']['DRAM']:.1f}",
      f"{kernel['us']['cache, TB'] * 1e6 / CACHE_TBPS[1]:.1f}",
      f"{kernel['us']['issue']:.1f}",
      f"{kernel['us']['tensor cores']:.1f}",
      " to ".join(f"{1e3 * ms:.1f}" for ms in times[name]["ms"]),
    ]
    for name, kernel in kernels.items()
  ]
  common.write(options.out, result, common.markdown(head, lines))
  file = common.RESULTS / "gpu_predictions.json"
  every = json.loads(file.read_text())
  every["float8 stream-K"] = {
    "command": result["command"],
    "date": result["date"],
    "for": f"[{OUTPUTS}, {WIDTH}] on one NVIDIA H200; nothing was run",
    "predicted": times,
  }
  file.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
  main()
