"""The sections of `gpu.py`, each run in a process of its own.

  python benchmarks/gpu_sections.py NAME --out FILE [--smoke] [--earlier FOLDER]

Prints what it measures and writes it to FILE as JSON; FOLDER has the results of earlier
sections. Times are those of `gpu_bench.Bench.measure`.
"""

import argparse
import faulthandler
import functools
import importlib.metadata
import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
# An unpacked checkout is enough: nothing needs to be installed.
sys.path[:0] = [str(HERE), str(HERE.parent)]

import gpu_attention
import gpu_checks
import gpu_models
import gpu_torch
import gpu_trained
import gpu_tuning
import gpu_whole
from gpu_bench import Bench

from mxjax.devices import kept_programs
from mxjax.models import CausalLM
from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import choice, mxfp4_decode, mxfp4_encode
from mxjax.pallas_kernels.products import float8, matmul
from mxjax.pallas_kernels.products.float8_matmul import float8_matmul
from mxjax.pallas_kernels.refinement import one_code

COMPILED = "backend_compile"
"""In the name of the event by which JAX tells the seconds of a compilation."""


def device(bench):
  """The device, the platform and the versions."""
  first = jax.devices()[0]
  packages = ("jax", "jaxlib", "flax", "numpy")
  return {
    "device": first.device_kind,
    "platform": first.platform,
    "load": os.getloadavg()[0],
    "versions": {name: importlib.metadata.version(name) for name in packages},
    "state": state_of_card(),
  }


def state_of_card():
  """What the driver says of the card, or None."""
  query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
  try:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
    return subprocess.run(
      command, capture_output=True, text=True, check=True, timeout=20
    ).stdout.strip()
  except (OSError, subprocess.SubprocessError):
    return None


def check(bench, name):
  """One kernel against its reference, on fresh inputs."""
  seed = secrets.randbits(32)
  rng = np.random.default_rng(seed)
  result = gpu_checks.CHECKS[name](rng, bench.how, bench.size(512, 40))
  return {"seed": seed, **result}


def ceilings(bench):
  """Copy bandwidth (read and written) and the rate of a square bfloat16 product.

  The bandwidth is that of the faster of two: XLA's negation, and the driver's copy.
  """
  n = bench.size(1 << 29, 1 << 12)
  x = jnp.ones(n, jnp.bfloat16)
  side = bench.size(8192, 64)
  keys = jax.random.split(jax.random.key(0), 2)
  a, b = (jax.random.normal(key, (side, side), jnp.bfloat16) for key in keys)
  calls = {
    # Negation reads and writes everything once and cannot be optimized away.
    "negation": (lambda x: -x, (x,)),
    "copy": (jnp.copy, (x,)),
    "gemm": (lambda a, b: a @ b, (a, b)),
  }
  results = bench.measure_kernels(calls)
  fastest = min(results[name]["ms"] for name in ("negation", "copy"))
  return {
    "copy_GBps": 4 * n / fastest / 1e6,
    "bf16_TFLOPs": 2 * side**3 / results["gemm"]["ms"] / 1e9,
    **results,
  }


def moved(function, arguments):
  """Bytes of operands and results."""
  leaves = jax.tree.leaves((arguments, jax.eval_shape(function, *arguments)))
  return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


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
  results = bench.measure_kernels(calls)
  copy = bench.earlier("ceilings").get("copy_GBps", float("nan")) * 1e9
  for name, result in results.items():
    rate = moved(*calls[name]) / result["ms"] * 1e3
    result |= {"GBps": rate / 1e9, "share_of_copy": rate / copy}
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
    if rows >= choice.LIBRARY.rows:
      inputs = float8.of_tensor(mxfp4.encode(x))
      calls[rows, "float8"] = narrow, (inputs, weight, unit)
  results = bench.measure_kernels(calls)
  for (rows, name), result in results.items():
    if name == bench.how:
      nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
      result["weight_GBps"] = nbytes / result["ms"] / 1e6
    result["TFLOPs"] = 2 * rows * m * d / result["ms"] / 1e9
  return {f"{rows} rows, {name}": result for (rows, name), result in results.items()}


def build(bench, shape, key):
  """HiRes of two layers by the pipeline itself, with a run folder and without.

  A model's minutes are its layers by the second run, the compilation that the first one
  waited for, and what a run folder adds.
  """
  from mxjax import methods
  from mxjax.calibration.calibration import Calibration
  from mxjax.run.quantize import default_save_every, run

  sequences, length = bench.size((128, 2048), (2, 16))
  config = gpu_models.config_of(shape, layers=2)
  model = CausalLM(config)
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, (sequences, length))
  params = jax.jit(model.init)(key, jnp.asarray(tokens[:1, :8], jnp.int32))["params"]
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: compiled.append(seconds) if COMPILED in name else None
  )

  def quantize(folder=None):
    start = time.perf_counter()
    # A build that is stopped at its limit leaves at least where its time went.
    told = lambda at: print(f"{time.perf_counter() - start:7.2f} s, {at}", flush=True)
    result = run(
      params,
      Calibration(model, tokens),
      methods.HIRES,
      check=False,
      on_progress=told,
      run_dir=folder,
      save_every=1 if folder else None,
    )
    jax.block_until_ready(result.params)
    return time.perf_counter() - start, result.record

  first, record = quantize()
  count, waited = len(compiled), sum(compiled)
  seconds, record = (first, record) if bench.smoke else quantize()
  again = len(compiled) - count
  with tempfile.TemporaryDirectory() as folder:
    on_disk, written = quantize(pathlib.Path(folder) / "run")
  # Two layers and the hidden states between them, of which HiRes has three sets.
  layer, writing = seconds / 2, written.clock.seconds["writing"]
  saved = default_save_every(3 * tokens.size * shape.hidden * 2)
  stats = jax.devices()[0].memory_stats() or {}
  return {
    "sequences": sequences,
    "length": length,
    "first_run_seconds": first,
    "programs_compiled": count,
    "programs_compiled_again": again,
    "compilation_seconds": waited,
    "seconds": seconds,
    "stage_seconds": record.clock.seconds,
    "seconds_with_run_folder": on_disk,
    "writing_seconds": writing,
    "layers_between_saves": saved,
    "peak_GB": stats.get("peak_bytes_in_use", 0) / 1e9,
    "model_minutes": (
      layer * shape.layers + writing * shape.layers / saved + first - seconds
    )
    / 60,
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

  def whole(run, kind, goal):
    result = run(bench, eight, kind)
    return {**result, "goals": {goal: result["/ BF16"]} if goal else {}}

  goals = {
    "prefill HiRes": "HiRes forward, times BF16",
    "prefill HiRes, float8 products": "HiRes forward, float8 products, times BF16",
    "decode HiRes": "HiRes decode, times BF16 tokens a second",
  }
  of_models = {}
  for name, run, kinds in (
    (
      "prefill",
      gpu_whole.prefill,
      (gpu_whole.BASELINE, "BF16", *gpu_models.KINDS[:-1]),
    ),
    ("decode", gpu_whole.decode, ("BF16", "HiRes", "HiRes, int8 head")),
  ):
    for kind in kinds:
      place = f"{name} {kind}"
      of_models[place] = functools.partial(whole, run, kind, goals.get(place))

  def build_8b():
    result = build(bench, eight, key)
    return {**result, "goals": {"8B build, minutes": result["model_minutes"]}}

  checks = {
    f"check {name}": functools.partial(check, bench, name) for name in gpu_checks.CHECKS
  }
  return {
    "device": lambda: device(bench),
    "ceilings": lambda: ceilings(bench),
    **checks,
    "memory-bound kernels": memory,
    "packed products": lambda: products(bench),
    "attention of a prefill": lambda: gpu_attention.time_prefill(bench, eight),
    "torch's baselines": lambda: gpu_torch.baselines(bench, eight),
    **{
      name: functools.partial(gpu_tuning.section, bench, name)
      for name in gpu_tuning.SECTIONS
    },
    **of_models,
    "trained model": gpu_trained.section,
    "build 8B": build_8b,
    "prefill 32B": lambda: gpu_whole.prefill(bench, large, "HiRes"),
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
  parser.add_argument("--earlier", type=pathlib.Path, help="folder of earlier results")
  parser.add_argument("--compiled", help="a folder of compiled programs to share")
  options = parser.parse_args()
  injected(options.name)
  if not options.smoke and jax.default_backend() != "gpu":
    sys.exit("gpu: no GPU; --smoke runs the sections interpreted on a CPU.")
  if options.compiled:
    kept_programs.keep_compiled(options.compiled)
  # Where a section is that a limit will stop.
  faulthandler.dump_traceback_later(45, repeat=True, exit=False)
  bench = Bench(options.smoke, options.earlier)
  result = sections(bench)[options.name]()
  print(json.dumps(result, indent=1), flush=True)
  options.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
  main()
