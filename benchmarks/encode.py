"""Times the MXFP4 encoder against other libraries, on the CPU, in one process.

Run it with `make bench`. Every contender turns the same float32 [2048, 4096] array
into E2M1 codes and one scale per 32 values. Before anything is timed its output is
checked to be MXFP4: scales are powers of two, and every code is a nearest one for its
scale. Libraries choose scales by different rules, which are named in the results.

Contenders take turns of a few calls, so that a slow moment of the machine hits all of
them. The first call of a turn pays for what the contender before left in caches and
threads; its median is in the results, and speeds are from the calls after it. Two
things that are no encoders run with them, to compare with: the maximum over each block,
which every encoder needs before it knows a scale, and the same array negated, which
writes more than an encoder does. Results are written only if other processes left the
cores alone while the runs were timed.
"""

import importlib.metadata
import os
import pathlib
import shutil
import time
from typing import NamedTuple

THREADS = 2
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
os.environ["OMP_NUM_THREADS"] = str(THREADS)
os.environ["JAX_PLATFORMS"] = "cpu"

import common
import jax
import jax.numpy as jnp
import numpy as np
import qwix
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16
from compressed_tensors.quantization.utils import calculate_qparams
from torch._inductor.codegen import cpp as inductor_cpp
from torchao.prototype.mx_formats import mx_tensor

import mxjax
from mxjax.devices import execution

SHAPE = (2048, 4096)
BLOCK = 32
WARMUPS = 3
TURNS = 15
CALLS = 5  # of a turn
OTHERS_AT_MOST = 0.05  # of one core, on average
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
PACKED = "packed codes, E8M0 bytes"


class Contender(NamedTuple):
  """One way to encode.

  Attributes:
    name: What is shown.
    package: The distribution whose version is recorded.
    output: The form that the timed call leaves its result in.
    encode: The timed call; returns when its result is ready.
    payload: The result as uint8 codes [rows, d] and exponents [rows, d/32].
  """

  name: str
  package: str
  output: str
  encode: object
  payload: object


def exponents(scales):
  """The exponents of float scales, which must be powers of two."""
  mantissa, exponent = np.frexp(scales)
  assert (mantissa == 0.5).all(), "a scale is not a power of two"
  return exponent - 1


def bytes_payload(codes, scales):
  codes = np.asarray(codes)
  unpacked = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
  return unpacked, np.asarray(scales).astype(np.int32) - 127


def ours(x):
  values = jax.device_put(x)
  encode = lambda: jax.block_until_ready(mxjax.encode(values))
  payload = lambda tensor: bytes_payload(tensor.codes, tensor.scales)
  yield Contender("mxjax.numerics.mxfp4.encode", "mxjax", PACKED, encode, payload)


def torchao(x):
  values = torch.from_numpy(x)
  to_mx = lambda values: mx_tensor.to_mx(values, torch.float4_e2m1fn_x2, BLOCK)
  payload = lambda pair: bytes_payload(*(one.view(torch.uint8) for one in pair[::-1]))
  calls = {"eager": to_mx}
  if shutil.which("g++"):
    # The CPU compiler of torch 2.13 lacks a C++ name for the type of the scales, and
    # fails. With the name it gives the same bits as eager mode, in less time.
    inductor_cpp.DTYPE_TO_CPP[torch.float8_e8m0fnu] = "at::Float8_e8m0fnu"
    calls["torch.compile"] = torch.compile(to_mx)
  else:
    print("no g++: torch.compile is left out")
  for how, call in calls.items():
    encode = lambda call=call: call(values)
    yield Contender(f"torchao to_mx, {how}", "torchao", PACKED, encode, payload)


def of_qwix(x):
  values = jax.device_put(x)

  def quantize(values):
    array = qwix.quantize(values, "mxfp4", channelwise_axes=(0,), tiled_axes={1: BLOCK})
    return array.qvalue, array.scale

  def quantize_and_pack(values):
    codes, scales = quantize(values)
    nibbles = jax.lax.bitcast_convert_type(codes, jnp.uint4).astype(jnp.uint8)
    packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    return packed, (bits >> 23).astype(jnp.uint8)

  def wide(pair):
    codes, scales = map(np.asarray, pair)
    return codes.view(np.uint8) & 15, exponents(scales)

  plain, packing = jax.jit(quantize), jax.jit(quantize_and_pack)
  yield Contender(
    *("qwix.quantize, jit", "qwix", "one byte a code, float32 scales"),
    *(lambda: jax.block_until_ready(plain(values)), wide),
  )
  yield Contender(
    *("qwix.quantize, jit, packed here", "qwix", PACKED),
    lambda: jax.block_until_ready(packing(values)),
    lambda pair: bytes_payload(*pair),
  )


def compressed_tensors(x):
  values = torch.from_numpy(x)
  scheme = QuantizationScheme(targets=["Linear"], **MXFP4A16)
  form = CompressionFormat.mxfp4_pack_quantized.value
  compressor = BaseCompressor.get_value_from_registry(form)

  def compress():
    blocks = values.view(SHAPE[0], -1, BLOCK)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    return compressor.compress({"weight": values, "weight_scale": scale}, scheme)

  yield Contender(
    *("compressed-tensors MXFP4 compressor", "compressed-tensors", PACKED, compress),
    lambda state: bytes_payload(state["weight_packed"], state["weight_scale"]),
  )


def yardsticks(x):
  """The first step of any encoder by itself, and a copy that changes a bit."""
  values = jax.device_put(x)
  negated = jax.jit(lambda x: -x)
  largest = jax.jit(lambda x: jnp.abs(x.reshape(len(x), -1, BLOCK)).max(-1))
  return {
    "maximum over blocks, jit": lambda: jax.block_until_ready(largest(values)),
    "negation, jit": lambda: jax.block_until_ready(negated(values)),
  }


def rule_exponents(x):
  """The exponents that each known scale rule gives, in exact arithmetic."""
  largest = np.abs(x.astype(np.float64)).reshape(len(x), -1, BLOCK).max(-1)
  mantissa, exponent = np.frexp(largest)
  floor = exponent - 3
  return {
    "floor": floor,
    "even": floor + (mantissa >= 0.875),
    "rceil": floor + (mantissa > 0.75),
  }


def check(name, x, payload):
  """Refuses what is not MXFP4; returns the scale rule and the blocks that follow it."""
  codes, exponent = payload
  assert codes.shape == x.shape, (name, codes.shape)
  assert exponent.shape == (len(x), x.shape[1] // BLOCK), (name, exponent.shape)
  assert codes.max() <= 15 and (np.abs(exponent) <= 127).all(), name
  scaled = x.astype(np.float64).reshape(len(x), -1, BLOCK)
  scaled = np.ldexp(scaled, -exponent[..., None]).reshape(x.shape)
  value = MAGNITUDES[codes & 7] * np.where(codes & 8, -1, 1)
  nearest = np.full(x.shape, np.inf)
  for magnitude in MAGNITUDES:
    nearest = np.minimum(nearest, np.abs(np.abs(scaled) - magnitude))
  wrong = int((np.abs(value - scaled) > nearest).sum())
  assert wrong == 0, f"{name}: {wrong} codes are not nearest for their scale"
  agreement = {
    rule: float((exponent == expected).mean())
    for rule, expected in rule_exponents(x).items()
  }
  rule = max(agreement, key=lambda rule: agreement[rule])
  assert agreement[rule] > 0.999, f"{name}: no known scale rule, {agreement}"
  exceptions = round((1 - agreement[rule]) * exponent.size)
  return rule if exceptions == 0 else f"{rule} but for {exceptions} blocks"


def measure(calls):
  """Seconds [contender, turn, call of the turn]."""
  for call in calls:
    for _ in range(WARMUPS):
      call()
  seconds = np.zeros((len(calls), TURNS, CALLS))
  for turn in range(TURNS):
    for times, call in zip(seconds[:, turn], calls, strict=True):
      for i in range(CALLS):
        start = time.perf_counter()
        call()
        times[i] = time.perf_counter() - start
  return seconds


def cpu_seconds_of_others():
  """CPU time of the whole machine so far, less this process's own."""
  fields = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
  user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
  ticks = user + nice + system + irq + softirq + steal
  own = os.times()
  return ticks / os.sysconf("SC_CLK_TCK") - own.user - own.system


def main():
  options = common.parser(__doc__).parse_args()
  made = common.stamp("torch", "llvmlite")
  torch.set_num_threads(THREADS)
  # As `mxjax` sets it for its own commands; it holds for all libraries measured here.
  keeps_memory = execution.keep_freed_memory()
  rng = np.random.default_rng(0)
  rows = np.exp(rng.standard_normal((SHAPE[0], 1)))
  x = (rows * rng.standard_normal(SHAPE)).astype(np.float32)
  sides = ours, torchao, of_qwix, compressed_tensors
  contenders = [contender for side in sides for contender in side(x)]
  rules = [check(c.name, x, c.payload(c.encode())) for c in contenders]
  yards = yardsticks(x)
  start, others = time.perf_counter(), cpu_seconds_of_others()
  seconds = measure([*(c.encode for c in contenders), *yards.values()])
  others = (cpu_seconds_of_others() - others) / (time.perf_counter() - start)
  medians = np.median(seconds[:, :, 1:], axis=(1, 2))
  best_peer = medians[1 : len(contenders)].min()
  speeds = [round(x.nbytes / median / 1e9, 3) for median in medians]
  table = []
  for i, contender in enumerate(contenders):
    row = {
      "name": contender.name,
      "version": importlib.metadata.version(contender.package),
      "scale_rule": rules[i],
      "output": contender.output,
      "median_ms": round(1e3 * medians[i], 3),
      "fastest_ms": round(1e3 * seconds[i].min(), 3),
      "median_ms_of_first_calls": round(1e3 * np.median(seconds[i, :, 0]), 3),
      "input_gb_per_s": speeds[i],
      "speed_over_best_peer": round(best_peer / medians[i], 3),
    }
    table.append(row)
    print(f"{speeds[i]:7.3f} GB/s {row['speed_over_best_peer']:6.2f}x  {row['name']}")
  beside = dict(zip(yards, speeds[len(contenders) :], strict=True))
  print(beside)
  if others > OTHERS_AT_MOST:
    raise SystemExit(
      f"not written: other processes used {others:.2f} cores meanwhile, at most "
      f"{OTHERS_AT_MOST} may be; run it again on a quiet machine"
    )
  made["machine"] |= {"threads": THREADS, "cores_used_by_others": round(others, 3)}
  result = {
    **made,
    "shape": SHAPE,
    "dtype": "float32",
    "freed_memory_kept": keeps_memory,
    "turns": TURNS,
    "calls_of_a_turn": CALLS,
    "warmups": WARMUPS,
    "results": table,
    "no_encoders_input_gb_per_s": beside,
  }
  common.write(options.out, result)


if __name__ == "__main__":
  main()
