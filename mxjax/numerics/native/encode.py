"""MXFP4 encode in the vector instructions of this machine's processor.

The reference is `mxjax.numerics.mxfp4.encode`, equal bit for bit. XLA:CPU takes longer:
it makes a pass over memory for the maxima and one for the codes, and packs pairs one by
one. Here LLVM compiles the loop below, written in its portable vector code with one
vector of 32 values for a block, and the array is shared out over the cores.
"""

import ctypes
import functools
import os
from concurrent import futures
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from mxjax.numerics import native

BLOCK_SIZE = 32
WORTH_IT = 2**20
"""Values from which on compiling this (a fifth of a second, once) is soon paid back."""
VALUES_A_PART = 2**19
NOT_FINITE_BITS = 0x7F800000

# What is added to the bits of a block's largest magnitude, and what is subtracted from
# the exponent field of the sum: the mantissa that carries into the field is the one
# from which on a rule takes the next exponent.
SCALE_RULES = {"floor": (0, 129), "even": (1 << 21, 129), "rceil": ((1 << 22) - 1, 129)}

_CHUNK = 16

# Where |x| / 2^e reaches codes 1 to 7, in quarters of an exponent from .25 on: these
# values have two bits of mantissa, so that the other bits of |x| decide nothing.
_REACHED = (0, 6, 9, 11, 13, 15, 17)
_SUMS = ("zeroinitializer", *(f"%index.{code}" for code in range(1, 8)))
_COUNTED = "\n".join(
  f"""  %reaches.{code} = icmp sge <32 x i8> %steps, splat (i8 {place})
  %one.{code} = zext <32 x i1> %reaches.{code} to <32 x i8>
  {_SUMS[code]} = add <32 x i8> {_SUMS[code - 1]}, %one.{code}"""
  for code, place in enumerate(_REACHED, start=1)
)

# Exponents of a chunk of blocks first, then their codes: no block waits for its own
# maximum. `scaled` are the bits of |x| / 2^e; ties go to the larger magnitude.
_SOURCE = f"""
declare i32 @llvm.vector.reduce.smax.v32i32(<32 x i32>)
declare i32 @llvm.smax.i32(i32, i32)
declare <32 x i32> @llvm.smax.v32i32(<32 x i32>, <32 x i32>)
declare <32 x i32> @llvm.smin.v32i32(<32 x i32>, <32 x i32>)

define i32 @encode(ptr noalias %x, ptr noalias %codes, ptr noalias %scales,
                   i64 %blocks, i32 %carry, i32 %bias) {{
entry:
  %shifts = alloca [{_CHUNK} x i32], align 64
  %any = icmp sgt i64 %blocks, 0
  br i1 %any, label %chunk, label %done

chunk:
  %start = phi i64 [0, %entry], [%stop, %chunk.end]
  %before = phi i32 [0, %entry], [%largest, %chunk.end]
  %full = add i64 %start, {_CHUNK}
  %is.full = icmp sle i64 %full, %blocks
  %stop = select i1 %is.full, i64 %full, i64 %blocks
  br label %exponent

exponent:
  %b = phi i64 [%start, %chunk], [%b.next, %exponent]
  %so.far = phi i32 [%before, %chunk], [%largest, %exponent]
  %x.b = getelementptr <32 x i32>, ptr %x, i64 %b
  %bits.b = load <32 x i32>, ptr %x.b, align 4
  %sizes = and <32 x i32> %bits.b, splat (i32 2147483647)
  %top = call i32 @llvm.vector.reduce.smax.v32i32(<32 x i32> %sizes)
  %largest = call i32 @llvm.smax.i32(i32 %so.far, i32 %top)
  %carried = add i32 %top, %carry
  %field = lshr i32 %carried, 23
  %free = sub i32 %field, %bias
  %e = call i32 @llvm.smax.i32(i32 %free, i32 -127)
  %byte.wide = add i32 %e, 127
  %byte = trunc i32 %byte.wide to i8
  %scales.b = getelementptr i8, ptr %scales, i64 %b
  store i8 %byte, ptr %scales.b, align 1
  %shift = shl i32 %e, 23
  %place = sub i64 %b, %start
  %shifts.b = getelementptr i32, ptr %shifts, i64 %place
  store i32 %shift, ptr %shifts.b, align 4
  %b.next = add i64 %b, 1
  %more.b = icmp slt i64 %b.next, %stop
  br i1 %more.b, label %exponent, label %code

code:
  %c = phi i64 [%start, %exponent], [%c.next, %write]
  %place.c = sub i64 %c, %start
  %shifts.c = getelementptr i32, ptr %shifts, i64 %place.c
  %down = load i32, ptr %shifts.c, align 4
  %down.0 = insertelement <32 x i32> poison, i32 %down, i64 0
  %downs = shufflevector <32 x i32> %down.0, <32 x i32> poison,
                         <32 x i32> zeroinitializer
  %x.c = getelementptr <32 x i32>, ptr %x, i64 %c
  %bits = load <32 x i32>, ptr %x.c, align 4
  %magnitude = and <32 x i32> %bits, splat (i32 2147483647)
  %normal = sub <32 x i32> %magnitude, %downs
  %is.tiny = icmp sle i32 %down, {-100 << 23}
  br i1 %is.tiny, label %tiny, label %write

tiny: ; subnormals have no exponent field: their mantissa is converted, exactly
  %down.149 = add i32 %down, {149 << 23}
  %tiny.0 = insertelement <32 x i32> poison, i32 %down.149, i64 0
  %tinys = shufflevector <32 x i32> %tiny.0, <32 x i32> poison,
                         <32 x i32> zeroinitializer
  %mantissa = sitofp <32 x i32> %magnitude to <32 x float>
  %mantissa.bits = bitcast <32 x float> %mantissa to <32 x i32>
  %converted = sub <32 x i32> %mantissa.bits, %tinys
  %is.subnormal = icmp slt <32 x i32> %magnitude, splat (i32 {1 << 23})
  %either = select <32 x i1> %is.subnormal, <32 x i32> %converted, <32 x i32> %normal
  br label %write

write:
  %scaled = phi <32 x i32> [%normal, %code], [%either, %tiny]
  %from.quarter = sub <32 x i32> %scaled, splat (i32 {125 << 23})
  %quarters = ashr <32 x i32> %from.quarter, splat (i32 21)
  %above = call <32 x i32> @llvm.smax.v32i32(<32 x i32> %quarters,
                                             <32 x i32> splat (i32 -128))
  %inside = call <32 x i32> @llvm.smin.v32i32(<32 x i32> %above,
                                              <32 x i32> splat (i32 127))
  %steps = trunc <32 x i32> %inside to <32 x i8>
{_COUNTED}
  %is.negative = icmp slt <32 x i32> %bits, zeroinitializer
  %sign = select <32 x i1> %is.negative, <32 x i8> splat (i8 8),
                 <32 x i8> zeroinitializer
  %bytes = or <32 x i8> %index.7, %sign
  %pairs = bitcast <32 x i8> %bytes to <16 x i16>
  %odd = lshr <16 x i16> %pairs, splat (i16 4)
  %joined = or <16 x i16> %pairs, %odd
  %packed = trunc <16 x i16> %joined to <16 x i8>
  %codes.c = getelementptr <16 x i8>, ptr %codes, i64 %c
  store <16 x i8> %packed, ptr %codes.c, align 1
  %c.next = add i64 %c, 1
  %more.c = icmp slt i64 %c.next, %stop
  br i1 %more.c, label %code, label %chunk.end

chunk.end:
  %more = icmp slt i64 %stop, %blocks
  br i1 %more, label %chunk, label %done

done:
  %result = phi i32 [0, %entry], [%largest, %chunk.end]
  ret i32 %result
}}
"""


def obstacle(x: jax.Array, scale_rule: str, tie_rule: str) -> str | None:
  """Returns why the kernel cannot encode an array by these rules, or None."""
  if isinstance(x, jax.core.Tracer):
    return "it is not part of a traced function"
  if missing := native.missing():
    return missing
  if len(x.devices()) > 1:
    return f"it reads the memory of one CPU, and the array lies on {x.devices()}"
  if x.dtype == jnp.float64:
    return f"it takes values of at most 32 bits, got {x.dtype}"
  if scale_rule not in SCALE_RULES or tie_rule != "away":
    return f"it does not know scale rule {scale_rule} with ties {tie_rule}"
  return None


@functools.cache
def _compiled() -> Any:
  """The function, once in a process."""
  from mxjax.numerics.native.machine_code import compile_module

  addresses = compile_module(_SOURCE, ["encode"])
  kinds = [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_int32, ctypes.c_int32]
  return ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(addresses["encode"])


@functools.cache
def _pool() -> futures.ThreadPoolExecutor:
  """Threads for the cores beside the caller's; a forked process makes its own."""
  if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
  return futures.ThreadPoolExecutor(native.cores(), "mxjax-encode")


def encode(x: np.ndarray, scale_rule: str) -> tuple[np.ndarray, np.ndarray] | None:
  """Encodes float32 values by a rule of `SCALE_RULES`, ties to the larger magnitude.

  Args:
    x: float32 `[..., d]`, contiguous, d a multiple of 32.
    scale_rule: The scale rule.

  Returns:
    Packed codes uint8 `[..., d/2]` and scale bytes uint8 `[..., d/32]`, or None where
    a value is inf or NaN.
  """
  function = _compiled()
  rows, blocks = x.shape[:-1], x.size // BLOCK_SIZE
  # Codes and scales share an allocation, each from a multiple of 64 on, where JAX
  # takes them over without a copy: little else than memory costs as much as finding
  # an address.
  room = -(-16 * blocks // 64) * 64
  raw = np.empty(64 + room + blocks, np.uint8)
  values_at, raw_at = x.ctypes.data, raw.ctypes.data
  start = -raw_at % 64
  codes_at, scales_at = raw_at + start, raw_at + start + room
  carry, bias = SCALE_RULES[scale_rule]
  parts = max(1, x.size // VALUES_A_PART)
  edges = [blocks * i // parts for i in range(parts + 1)]
  largest = [0] * parts
  left = iter(range(parts))

  def work() -> None:
    # Whoever is free takes the next part: a thread that was asleep comes late.
    for i in left:
      first, count = edges[i], edges[i + 1] - edges[i]
      starts = values_at + 128 * first, codes_at + 16 * first, scales_at + first
      largest[i] = function(*starts, count, carry, bias)

  helpers = [_pool().submit(work) for _ in range(min(native.cores(), parts) - 1)]
  work()
  for helper in helpers:
    helper.result()
  if max(largest) >= NOT_FINITE_BITS:
    return None
  codes, scales = raw[start : start + 16 * blocks], raw[start + room :][:blocks]
  codes = codes.reshape(*rows, x.shape[-1] // 2)
  return codes, scales.reshape(*rows, x.shape[-1] // BLOCK_SIZE)
