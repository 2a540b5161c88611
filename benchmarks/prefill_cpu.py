"""Prefill of SmolLM2-135M on CPU: quantized forwards beside the float32 one.

  python benchmarks/prefill_cpu.py [--tokens 512] [--rounds 5]

All forwards run in turn, round after round in one process, so that a busy machine
slows all of them; medians and their ratios are printed and written, and CPU time beside
them, which a busy machine changes less. The weights are
the embedded model's. Maps are random rotations and nothing is calibrated: time does
not depend on what the tables hold, and the linears are legal W4A4 operators.
"""

import argparse
import functools
import importlib.metadata
import json
import os
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import models
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import one_code
from mxjax.numerics.realization.activation_quantizers import Nearest, OneCode
from mxjax.numerics.shaping.input_maps import BlockDense

GOALS = {"nearest": 1.5, "one code": 2.5}


@functools.partial(jax.jit, static_argnames="kind")
def quantized(weight, matrix, kind):
  """A leaf of one kind; rotations fold by themselves."""
  blocks = mxfp4.to_blocks(weight.astype(jnp.float32))
  if kind == "nearest":
    return QuantizedLinear(mxfp4.encode(mxfp4.from_blocks(blocks)), None, Nearest())
  blocks = jnp.einsum("bij,bjn->bin", matrix, blocks, precision="highest")
  packed = mxfp4.encode(mxfp4.from_blocks(blocks))
  rounding = Nearest()
  if kind == "one code":
    gram, cross = one_code.tables(blocks, mxfp4.round_blocks(blocks))
    rounding = OneCode(one_code.pack_symmetric(gram), cross)
  return QuantizedLinear(packed, BlockDense(matrix), rounding)


def quantize(params, kind, seed=0):
  """Params with every decoder linear replaced by a leaf of a kind."""
  rng = np.random.default_rng(seed)
  result = dict(params)
  for name, layer in params.items():
    if name.startswith("layers_"):
      layer = {key: dict(value) for key, value in layer.items()}
      for block, linear in models.PROJECTION_TAPS:
        weight = layer[block][linear]["weight"]
        shape = weight.shape[1] // 32, 32, 32
        matrix = np.linalg.qr(rng.standard_normal(shape))[0].astype(np.float32)
        leaf = quantized(weight, jnp.asarray(matrix), kind)
        layer[block][linear] = layer[block][linear] | {"weight": leaf}
      result[name] = layer
  return result


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--tokens", type=int, default=512)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--out", default="benchmarks/results/prefill_cpu.json")
  options = parser.parse_args()
  model, params = models.from_pretrained(None)
  narrow, narrow_params = models.from_pretrained(None, dtype="bfloat16")
  narrow_params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), narrow_params)
  tokens = np.random.default_rng(0).integers(0, 49152, (1, options.tokens))
  tokens = jnp.asarray(tokens, jnp.int32)
  run_layer = jax.jit(lambda model, layer, x: model.layer(layer, x), static_argnums=0)
  run_head = jax.jit(
    lambda model, params, hidden: model.logits(params, hidden[:, -1:]),
    static_argnums=0,
  )
  kinds = {"float32": (model, params), "bfloat16": (narrow, narrow_params)}
  for kind in ("nearest", "nearest with maps", "one code"):
    kinds[kind] = model, quantize(params, kind)
  kinds["one code in a bfloat16 model"] = narrow, quantize(narrow_params, "one code")

  def forward(model, params):
    hidden = model.embed(params, tokens)
    for index in range(model.num_layers):
      hidden = run_layer(model, params[model.layer_name(index)], hidden)
    outside = {k: v for k, v in params.items() if "layers_" not in k}
    return jax.block_until_ready(run_head(model, outside, hidden))

  for kind in kinds:
    forward(*kinds[kind])
  load = os.getloadavg()[0]
  seconds = {kind: [] for kind in kinds}
  cpu_seconds = {kind: [] for kind in kinds}
  for _ in range(options.rounds):
    for kind, variant in kinds.items():
      start, cpu_start = time.perf_counter(), time.process_time()
      forward(*variant)
      seconds[kind].append(time.perf_counter() - start)
      cpu_seconds[kind].append(time.process_time() - cpu_start)
  medians = {kind: statistics.median(values) for kind, values in seconds.items()}

  def to_float32(times):
    """Median over rounds of a kind's time in the float32 time of that round."""
    return {
      kind: statistics.median(
        a / b for a, b in zip(times[kind], times["float32"], strict=True)
      )
      for kind in kinds
    }

  ratios, cpu_ratios = to_float32(seconds), to_float32(cpu_seconds)
  processor = next(
    line.split(":")[1].strip()
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    if "model name" in line
  )
  result = {
    "command": f"python benchmarks/prefill_cpu.py --tokens {options.tokens} "
    f"--rounds {options.rounds}",
    "machine": {
      "cpu": processor,
      "cores": os.cpu_count(),
      "load_before": load,
      "load_after": os.getloadavg()[0],
      "jax": importlib.metadata.version("jax"),
    },
    "tokens": options.tokens,
    "seconds": seconds,
    "median_seconds": medians,
    "ratio_to_float32": ratios,
    "cpu_seconds": cpu_seconds,
    "cpu_ratio_to_float32": cpu_ratios,
    "goals": GOALS,
  }
  for kind, value in medians.items():
    goal = f", goal {GOALS[kind]}" if kind in GOALS else ""
    cpu = (
      f"{statistics.median(cpu_seconds[kind]):.3f} s of CPU, {cpu_ratios[kind]:.2f} x"
    )
    print(f"{kind:28s} {value:7.3f} s, {ratios[kind]:.2f} x float32{goal}; {cpu}")
  print(f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after")
  out = pathlib.Path(options.out)
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
  main()
