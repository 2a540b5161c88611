"""What rows that float8 cannot hold cost: linears with 0 %, 1 % and 100 % of them.

E5M2 holds blocks whose maximum lies between 2^-13 and about 6e4. A row with a block
outside is handled apart by `float8_matmul`. Timed is the linear as a user calls it, A4
rounding and product of 2,048 bfloat16 rows at two shapes of Qwen3-8B, in float8 and in
bfloat16, many weights in one program so that they do not stay in the cache; and both
products are compared, row by row. Takes less than 40 s on an H100.

  python benchmarks/gpu_float8_rows.py
  python benchmarks/gpu_float8_rows.py --tiny     # rehearses on a CPU
"""

import statistics
import sys
import time

import common
import jax
import jax.numpy as jnp
import numpy as np

import mxjax
from mxjax.layers.inference_packing import with_products
from mxjax.numerics.realization.activation_quantizers import Nearest

SHAPES = {"gate_proj": (12288, 4096), "down_proj": (4096, 12288)}
TINY_SHAPES = {"gate_proj": (96, 64), "down_proj": (64, 96)}
SHARES = (0.0, 0.01, 1.0)
PRODUCTS = ("bfloat16", "float8")
SMALL = 1e-6
"""Values of a block that E5M2 cannot hold, beside ones of size 1 in the row."""
AGREES = 2.0**-7
"""Largest difference of a row's outputs over their norm: both are bfloat16."""


def inputs(rows, width, share):
  """Bfloat16 rows of which a share has one block outside, spread evenly."""
  x = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
  count = -(-rows * share // 1)
  if count:
    chosen = np.linspace(0, rows - 1, int(count)).astype(int)
    x[chosen, 32:64] *= SMALL
  return jnp.asarray(x, jnp.bfloat16)


def weights(outputs, width, count):
  """Linears without a map, whose inputs are rounded to nearest."""
  draw = jax.jit(
    lambda key: mxjax.encode(jax.random.normal(key, (outputs, width)) * width**-0.5)
  )
  keys = jax.random.split(jax.random.key(0), count)
  return [mxjax.QuantizedLinear(draw(key), None, Nearest()) for key in keys]


def milliseconds(run, x, linears, seconds):
  """Median of a linear's time, and the runs."""
  jax.block_until_ready(run(x, linears))
  taken, start = [], time.perf_counter()
  while len(taken) < 3 or (time.perf_counter() - start < seconds and len(taken) < 50):
    begin = time.perf_counter()
    jax.block_until_ready(run(x, linears))
    taken.append(1e3 * (time.perf_counter() - begin) / len(linears))
  return round(statistics.median(taken), 4), [round(ms, 4) for ms in taken]


def measure(outputs, width, rows, count, seconds):
  """Times and differences of one shape, by share of rows."""
  how = None if jax.default_backend() == "gpu" else "interpret"
  one = lambda x, linear: mxjax.linear(x, linear, implementation=how)
  run = jax.jit(lambda x, linears: [one(x, linear) for linear in linears])
  plain = {"linears": weights(outputs, width, count)}
  of_products = {
    products: with_products(dict(enumerate(plain["linears"])), products)
    for products in PRODUCTS
  }
  result = {}
  for share in SHARES:
    x, entry, made = inputs(rows, width, share), {}, {}
    for products, packed in of_products.items():
      linears = list(packed.values())
      ms, runs = milliseconds(run, x, linears, seconds)
      entry[products] = {"ms": ms, "runs_ms": runs}
      made[products] = np.asarray(run(x, linears[:1])[0], np.float32)
    error = np.linalg.norm(made["float8"] - made["bfloat16"], axis=1)
    error = error / np.linalg.norm(made["bfloat16"], axis=1)
    entry["largest difference of a row"] = float(error.max())
    result[f"{share:.0%}"] = entry
  return result


def main():
  """Measures, prints a table and writes the result."""
  parser = common.parser(__doc__)
  parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
  options = parser.parse_args()
  shapes = TINY_SHAPES if options.tiny else SHAPES
  rows, count, seconds = (300, 2, 0.0) if options.tiny else (2048, 16, 0.4)
  start = time.perf_counter()
  found = {
    name: measure(*shape, rows, count, seconds) for name, shape in shapes.items()
  }
  lines = []
  for name, shares in found.items():
    none = shares["0%"]["float8"]["ms"]
    for share, entry in shares.items():
      ms = {products: entry[products]["ms"] for products in PRODUCTS}
      ratios = [ms["float8"] / none, ms["float8"] / ms["bfloat16"]]
      numbers = [f"{value:.4f}" for value in ms.values()]
      numbers += [f"{value:.2f}" for value in ratios]
      lines.append([name, share, *numbers])
  head = ["linear", "rows outside", "bfloat16, ms", "float8, ms"]
  text = common.markdown([*head, "float8 / at 0 %", "float8 / bfloat16"], lines)
  result = common.stamp() | {
    "device": jax.devices()[0].device_kind,
    "rows": rows,
    "linears": found,
    "seconds": round(time.perf_counter() - start, 1),
  }
  if options.tiny:
    print(text)
  else:
    common.write(options.out, result, text)
  differences = [
    entry["largest difference of a row"]
    for shares in found.values()
    for entry in shares.values()
  ]
  if not max(differences) <= AGREES:
    sys.exit(f"float8 and bfloat16 differ by {max(differences)} of a row's norm")


if __name__ == "__main__":
  main()
