"""Kernels and the packed runtime on one GPU: correctness first, then speed.

  python benchmarks/gpu.py [--budget 450] [--out benchmarks/results/gpu.json]
  python benchmarks/gpu.py --smoke         # tiny shapes, kernels interpreted, any CPU

Every kernel is compared with its reference on fresh inputs; then ceilings (copy
bandwidth, bfloat16 product) are measured, and everything else beside them in the same
run, medians after warm-up. A section that would begin after the budget is left out
and named. The result file is rewritten after every section.
"""

import argparse
import functools
import json
import pathlib
import secrets
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent)]

import gpu_checks
import gpu_models
from gpu_bench import Bench

from mxjax.layers.inference_packing import int8_matrix
from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import mxfp4_decode, mxfp4_encode
from mxjax.pallas_kernels.products import float8, matmul
from mxjax.pallas_kernels.products.float8_matmul import float8_matmul
from mxjax.pallas_kernels.refinement import one_code


def checks(bench):
  seed = secrets.randbits(32)
  print(f"seed {seed}")
  results = gpu_checks.run(bench.how, seed, bench.size(512, 40), bench.pool)
  bench.failed = [name for name, result in results.items() if not result["passed"]]
  return {"seed": seed, "kernels": results}


def ceilings(bench):
  """Copy bandwidth (read and written) and the rate of a square bfloat16 product."""
  n = bench.size(1 << 29, 1 << 12)
  # Negation reads and writes everything once and cannot be optimized away.
  x = jnp.ones(n, jnp.bfloat16)
  bench.copy = 4 * n / bench.seconds(jax.jit(lambda x: -x), x)
  side = bench.size(8192, 64)
  keys = jax.random.split(jax.random.key(0), 2)
  a, b = (jax.random.normal(key, (side, side), jnp.bfloat16) for key in keys)
  bench.gemm = 2 * side**3 / bench.seconds(jax.jit(lambda a, b: a @ b), a, b)
  return {"copy_GBps": bench.copy / 1e9, "bf16_TFLOPs": bench.gemm / 1e12}


def bandwidth(bench, function, arguments):
  """Seconds, GB/s of operands and results, and the share of the copy rate."""
  moved = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments))
  moved += sum(
    leaf.size * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(jax.eval_shape(function, *arguments))
  )
  seconds = bench.seconds(function, *arguments)
  rate = moved / seconds
  return {"ms": 1e3 * seconds, "GBps": rate / 1e9, "share_of_copy": rate / bench.copy}


def memory_kernels(bench):
  """Encode, decode and the fused kernel against the copy bandwidth."""
  rows, width = bench.size((16384, 8192), (32, 64))
  x = jax.random.normal(jax.random.key(0), (rows, width), jnp.float32)
  narrow, calls = x.astype(jnp.bfloat16), {}

  def add(name, function, *arguments, **options):
    run = functools.partial(function, implementation=bench.how, **options)
    calls[name] = jax.jit(run), arguments

  for values in (x, narrow):
    add(f"encode {values.dtype}", mxfp4_encode.encode, values)
  leaf = gpu_models.random_linear(jax.random.key(1), 64, width, True)
  tables = leaf.input_map.matrix, leaf.rounding.gram, leaf.rounding.cross
  refine = one_code.refine
  for form in ("codes", "values", "float8"):
    add(f"one code bfloat16, {form}", refine, narrow, *tables, form=form)
  add("transform and nearest, float8", refine, narrow, tables[0], form="float8")
  packed = mxfp4.encode(narrow)
  unit, _ = mxfp4_decode.float8_range(packed)
  add("decode bfloat16", mxfp4_decode.decode, packed)
  add("decode float8", mxfp4_decode.decode_float8, packed, unit)
  bench.warm(calls.values())
  results = {name: bandwidth(bench, *call) for name, call in calls.items()}
  shares = [r["share_of_copy"] for name, r in results.items() if "encode" in name]
  bench.goal("encode, share of copy bandwidth", min(shares))
  return results


def products(bench):
  """Packed products: kernel and library, prefill and decode shapes."""
  m, d = bench.size((12288, 4096), (96, 64))
  weight = gpu_models.random_linear(jax.random.key(2), m, d, True).weight
  dense, (unit, _) = jnp.ones((m, d), jnp.bfloat16), mxfp4_decode.float8_range(weight)
  plain = jax.jit(lambda x, w: jnp.einsum("nd,md->nm", x, w))
  packed = {
    how: jax.jit(
      functools.partial(matmul.matmul, dtype=jnp.bfloat16, implementation=how)
    )
    for how in (bench.how, "xla")
  }
  narrow = jax.jit(functools.partial(float8_matmul, dtype=jnp.bfloat16))
  calls = {}
  for rows in bench.size((1, 4, 16, 64, 256, 2048), (1, 20)):
    x = jax.random.normal(jax.random.key(3), (rows, d), jnp.bfloat16)
    calls[rows, "bf16 weight"] = plain, (x, dense)
    calls |= {(rows, how): (run, (x, weight)) for how, run in packed.items()}
    if rows >= matmul.LIBRARY_ROWS:
      inputs = float8.of_tensor(mxfp4.encode(x))
      calls[rows, "float8"] = narrow, (inputs, weight, unit)
  bench.warm(calls.values())
  results = {}
  for (rows, name), (run, arguments) in calls.items():
    row = results.setdefault(f"{rows} rows, ms", {})
    row[name] = 1e3 * bench.seconds(run, *arguments)
    if name == bench.how:
      row["weight_GBps"] = (
        sum(a.nbytes for a in jax.tree.leaves(weight)) / row[name] / 1e6
      )
      row["TFLOPs"] = 2 * rows * m * d / row[name] / 1e9
  return results


def prefill(bench, shape, key):
  """The full forward of a random model, HiRes first, BF16 last."""
  tokens = bench.size(2048, 16)
  attention, reason = gpu_models.fastest_attention()
  hidden = jax.random.normal(key, (1, tokens, shape.hidden), jnp.bfloat16)
  run_layer = jax.jit(
    lambda p, h: gpu_models.forward_layer(shape, attention, bench.runtime, p, h)[0]
  )
  run_head = jax.jit(gpu_models.forward_head)
  flop = shape.layers * (shape.linear_flop(tokens) + shape.attention_flop(tokens))
  flop += 2 * tokens * shape.hidden * shape.vocabulary
  result = {
    "attention": f"{attention}: {reason}",
    "tokens": tokens,
    "TFLOP": flop / 1e12,
  }
  one = [gpu_models.random_layer(key, shape, kind) for kind in gpu_models.KINDS]
  bench.warm([(run_layer, (layer, hidden)) for layer in one])
  del one
  for kind in gpu_models.KINDS:
    keys = jax.random.split(key, shape.layers)
    layers = [gpu_models.random_layer(k, shape, kind) for k in keys]
    head = gpu_models.random_head(key, shape)

    def forward(hidden, layers=layers, head=head):
      for layer in layers:
        hidden = run_layer(layer, hidden)
      return run_head(head, hidden)

    seconds = bench.seconds(forward, hidden, batches=3)
    stats = jax.devices()[0].memory_stats() or {}
    result[kind] = {
      "ms": 1e3 * seconds,
      "layer_ms": 1e3 * bench.seconds(run_layer, layers[0], hidden),
      "TFLOPs": flop / seconds / 1e12,
      "params_GB": sum(a.nbytes for a in jax.tree.leaves((layers, head))) / 1e9,
      # The process's peak so far: HiRes runs first because it needs less.
      "peak_GB": stats.get("peak_bytes_in_use", 0) / 1e9,
    }
    del layers, head, forward
  for kind in gpu_models.KINDS[:-1]:
    result[f"{kind} / BF16"] = result[kind]["ms"] / result["BF16"]["ms"]
  return result


def decode(bench, shape, key):
  """Tokens a second of some layers, times their count, and a bfloat16 or int8 head.

  Some tokens are decoded in one program, as generation does it: the caches stay where
  they are, and each token's hidden state is the next one's input.
  """
  positions, some, tokens = bench.size((2048, 8, 16), (8, 2, 2))
  result = {"layers_timed": some, "positions": positions, "tokens_in_a_program": tokens}
  # Jitted, so that equal layers are traced and lowered once.
  run_layer = jax.jit(
    functools.partial(gpu_models.forward_layer, shape, None, bench.runtime)
  )

  def token(index, state, layers):
    hidden, caches = state
    after = []
    for layer, cache in zip(layers, caches, strict=True):
      hidden, cache = run_layer(layer, hidden, cache, positions - tokens + index)
      after.append(cache)
    return hidden, after

  @jax.jit
  def run(layers, caches, hidden):
    body = functools.partial(token, layers=layers)
    # The written caches are not returned: returning would copy all of them.
    return jax.lax.fori_loop(0, tokens, body, (hidden, caches))[0]

  hidden = jax.random.normal(key, (1, 1, shape.hidden), jnp.bfloat16)
  caches = [gpu_models.empty_cache(shape, positions) for _ in range(some)]
  keys = jax.random.split(key, some)
  layers = {
    kind: [gpu_models.random_layer(k, shape, kind) for k in keys]
    for kind in ("HiRes", "BF16")
  }
  bench.warm([(run, (each, caches, hidden)) for each in layers.values()])
  head, run_head = gpu_models.random_head(key, shape), jax.jit(gpu_models.forward_head)
  narrow = {**head, "head": int8_matrix(head["head"])}
  heads = {"": head, ", int8 head": narrow}
  last = {name: bench.seconds(run_head, each, hidden) for name, each in heads.items()}
  for kind, each in layers.items():
    part = bench.seconds(run, each, caches, hidden) / tokens
    for name, of_head in last.items():
      result[kind + name] = {
        "layers_ms": 1e3 * part,
        "head_ms": 1e3 * of_head,
        "tokens_per_second": 1 / (part * shape.layers / some + of_head),
      }
  baseline = result["BF16"]["tokens_per_second"]
  for kind in ("HiRes", "HiRes, int8 head"):
    result[f"{kind} / BF16"] = result[kind]["tokens_per_second"] / baseline
  return result


def build(bench, shape, key):
  """HiRes of one layer by the pipeline itself, times the number of layers."""
  from mxjax import methods
  from mxjax.calibration.calibration import Calibration
  from mxjax.models import CausalLM, ModelConfig
  from mxjax.running import pipeline

  sequences, length = bench.size((128, 2048), (2, 16))
  config = ModelConfig(
    vocab_size=bench.size(4096, shape.vocabulary),
    hidden_size=shape.hidden,
    intermediate_size=shape.intermediate,
    num_layers=1,
    num_heads=shape.heads,
    num_kv_heads=shape.kv_heads,
    head_dim=shape.head_dim,
    norm_eps=1e-6,
    rope_theta=1e6,
    tie_embeddings=True,
    max_positions=4096,
    dtype=bench.size("bfloat16", "float32"),
  )
  model = CausalLM(config)
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, (sequences, length))
  params = jax.jit(model.init)(key, jnp.asarray(tokens[:1, :8], jnp.int32))["params"]

  def quantize(tokens):
    start = time.perf_counter()
    result = pipeline.quantize_with_record(
      params, Calibration(model, tokens), methods.HIRES, check=False
    )
    jax.block_until_ready(result.params)
    return time.perf_counter() - start, result.record.clock.seconds

  # Sequences are reduced one at a time, so few of them compile what many need; a
  # model of many equal layers compiles once.
  first, _ = quantize(tokens[: bench.size(8, 2)])
  seconds, stages = (first, {}) if bench.smoke else quantize(tokens)
  return {
    "sequences": sequences,
    "length": length,
    "first_seconds_8_sequences_with_compilation": first,
    "layer_seconds": seconds,
    "stage_seconds": stages,
    "layers": shape.layers,
    "model_minutes_as_layers_times_count": seconds * shape.layers / 60,
  }


def sections(bench):
  """Name, least seconds it needs, and the function, in order."""
  small = gpu_models.TINY
  eight = small if bench.smoke else gpu_models.QWEN3_8B
  large = small if bench.smoke else gpu_models.QWEN3_32B
  key = jax.random.key(7)

  def prefill_8b():
    result = prefill(bench, eight, key)
    bench.goal("HiRes forward, times BF16", result["HiRes / BF16"])
    faster = "HiRes forward, float8 products, times BF16"
    bench.goal(faster, result["HiRes, float8 products / BF16"])
    return result

  def decode_8b():
    result = decode(bench, eight, key)
    bench.goal("HiRes decode, times BF16 tokens a second", result["HiRes / BF16"])
    return result

  def build_8b():
    result = build(bench, eight, key)
    bench.goal("8B build, minutes", result["model_minutes_as_layers_times_count"])
    return result

  return [
    ("checks", 0, lambda: checks(bench)),
    ("ceilings", 0, lambda: ceilings(bench)),
    ("memory-bound kernels", 10, lambda: memory_kernels(bench)),
    ("packed products", 15, lambda: products(bench)),
    (f"prefill {eight.name}", 30, prefill_8b),
    (f"decode {eight.name}", 40, decode_8b),
    (f"prefill {large.name} (32B)", 40, lambda: prefill(bench, large, key)),
    (f"build {eight.name}", 60, build_8b),
  ]


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--smoke", action="store_true")
  parser.add_argument("--budget", type=float, default=450, help="seconds")
  parser.add_argument("--out", default="")
  options = parser.parse_args()
  name = "gpu_smoke" if options.smoke else "gpu"
  options.out = options.out or f"benchmarks/results/{name}.json"
  if not options.smoke and jax.default_backend() != "gpu":
    sys.exit("benchmarks/gpu.py needs a GPU; --smoke runs it interpreted on a CPU.")
  bench = Bench(options)
  print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
  for name, needs, run in sections(bench):
    elapsed = time.perf_counter() - bench.start
    print(f"\n== {name} (after {elapsed:.0f} s)", flush=True)
    if elapsed + needs > bench.budget and not bench.smoke:
      bench.results[name] = "left out: no time"
      print("left out: no time")
    else:
      bench.results[name] = run()
      if name != "checks":
        print(json.dumps(bench.results[name], indent=1), flush=True)
    bench.save()
  print("\n== goals" + (" (smoke: the numbers mean nothing)" if bench.smoke else ""))
  for name, goal in bench.goals.items():
    verdict = "met" if goal["met"] else "NOT met"
    print(f"{verdict:7s} {name}: {goal['value']:.3f}, {goal['goal']}")
  if bench.failed:
    print(f"kernels that differ from their reference: {', '.join(bench.failed)}")
  return 1 if bench.failed else 0


if __name__ == "__main__":
  sys.exit(main())
