"""The sections of `gpu.py`, each run in a process of its own.

  python benchmarks/gpu_sections.py NAME --out FILE [--smoke] [--ceilings FILE]

Prints what it measures and writes it to FILE as JSON. Times are medians after warm-up.
"""

import argparse
import functools
import importlib.metadata
import json
import os
import pathlib
import secrets
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
# An unpacked checkout is enough: nothing needs to be installed.
sys.path[:0] = [str(HERE), str(HERE.parent)]

import gpu_checks
import gpu_models
from gpu_bench import Bench

from mxjax.devices import execution
from mxjax.layers.inference_packing import int8_matrix
from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import mxfp4_decode, mxfp4_encode
from mxjax.pallas_kernels.products import float8, matmul
from mxjax.pallas_kernels.products.float8_matmul import float8_matmul
from mxjax.pallas_kernels.refinement import one_code


def device(bench):
  """The device, the platform and the versions."""
  first = jax.devices()[0]
  packages = ("jax", "jaxlib", "flax", "numpy")
  return {
    "device": first.device_kind,
    "platform": first.platform,
    "load": os.getloadavg()[0],
    "versions": {name: importlib.metadata.version(name) for name in packages},
  }


def check(bench, name):
  """One kernel against its reference, on fresh inputs."""
  seed = secrets.randbits(32)
  rng = np.random.default_rng(seed)
  result = gpu_checks.CHECKS[name](rng, bench.how, bench.size(512, 40))
  return {"seed": seed, **result}


def ceilings(bench):
  """Copy bandwidth (read and written) and the rate of a square bfloat16 product."""
  n = bench.size(1 << 29, 1 << 12)
  # Negation reads and writes everything once and cannot be optimized away.
  x = jnp.ones(n, jnp.bfloat16)
  copy = 4 * n / bench.seconds(jax.jit(lambda x: -x), x)
  side = bench.size(8192, 64)
  keys = jax.random.split(jax.random.key(0), 2)
  a, b = (jax.random.normal(key, (side, side), jnp.bfloat16) for key in keys)
  gemm = 2 * side**3 / bench.seconds(jax.jit(lambda a, b: a @ b), a, b)
  return {"copy_GBps": copy / 1e9, "bf16_TFLOPs": gemm / 1e12}


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
  """Every section by name; a result may have `goals`, values by name of `gpu.GOALS`."""
  small, key = gpu_models.TINY, jax.random.key(7)
  eight = small if bench.smoke else gpu_models.QWEN3_8B
  large = small if bench.smoke else gpu_models.QWEN3_32B

  def memory():
    result = memory_kernels(bench)
    shares = [r["share_of_copy"] for name, r in result.items() if "encode" in name]
    return {**result, "goals": {"encode, share of copy bandwidth": min(shares)}}

  def prefill_8b():
    result = prefill(bench, eight, key)
    goals = {
      "HiRes forward, times BF16": result["HiRes / BF16"],
      "HiRes forward, float8 products, times BF16": result[
        "HiRes, float8 products / BF16"
      ],
    }
    return {**result, "goals": goals}

  def decode_8b():
    result = decode(bench, eight, key)
    goal = {"HiRes decode, times BF16 tokens a second": result["HiRes / BF16"]}
    return {**result, "goals": goal}

  def build_8b():
    result = build(bench, eight, key)
    minutes = result["model_minutes_as_layers_times_count"]
    return {**result, "goals": {"8B build, minutes": minutes}}

  checks = {
    f"check {name}": functools.partial(check, bench, name) for name in gpu_checks.CHECKS
  }
  return {
    "device": lambda: device(bench),
    "ceilings": lambda: ceilings(bench),
    **checks,
    "memory-bound kernels": memory,
    "packed products": lambda: products(bench),
    "prefill 8B": prefill_8b,
    "decode 8B": decode_8b,
    "build 8B": build_8b,
    "prefill 32B": lambda: prefill(bench, large, key),
  }


def injected(name):
  """Does what MXJAX_GPU_INJECT asks of a section in a rehearsal: `hang:device`."""
  wanted = os.environ.get("MXJAX_GPU_INJECT", "").split(",")
  if f"raise:{name}" in wanted:
    raise RuntimeError("injected")
  if f"hang:{name}" in wanted:
    time.sleep(3600)
  if f"segfault:{name}" in wanted:
    os.kill(os.getpid(), signal.SIGSEGV)
  if f"full:{name}" in wanted:
    raise OSError(28, "No space left on device")


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("name")
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--smoke", action="store_true")
  parser.add_argument("--ceilings", type=pathlib.Path, help="result of that section")
  parser.add_argument("--compiled", help="a folder of compiled programs to share")
  options = parser.parse_args()
  injected(options.name)
  if not options.smoke and jax.default_backend() != "gpu":
    sys.exit("gpu: no GPU; --smoke runs the sections interpreted on a CPU.")
  if options.compiled:
    execution.keep_compiled(options.compiled)
  bench = Bench(options.smoke)
  if options.ceilings and options.ceilings.is_file():
    bench.copy = json.loads(options.ceilings.read_text())["copy_GBps"] * 1e9
  result = sections(bench)[options.name]()
  print(json.dumps(result, indent=1), flush=True)
  options.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
  main()
