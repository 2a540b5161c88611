"""MXFP4 decode in one pass over memory, to bfloat16 or to float8 with one scale.

The reference is `mxjax.numerics.mxfp4.decode`. A forward pass with library products
decodes all weights: 2.5 bytes of traffic per weight to bfloat16, 1.5 to float8. A byte
of codes becomes two bfloat16 and a 16-bit word of four codes becomes four float8, each
a 32-bit register with the codes in order; these views move no data.

A float8 (E4M3) weight has one power-of-two scale. The largest block is at the top of
the format's range, and all blocks are exact if none lies more than `SPREAD` powers of
two below it, because E4M3 holds the two significant bits of E2M1 values. `float8_range`
tells whether a weight fits; do not use the float8 values of a weight that does not.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.implementations import Implementation
from mxjax.pallas_kernels import codec, lowering

FLOAT8 = jnp.float8_e4m3fn
# 6 * 2^6 is 384, and E4M3 ends at 448.
TOP = 6
"""The exponent e for which 6 * 2^e is the largest legal value inside the range."""
SPREAD = 14
"""Powers of two from 6 * 2^TOP down to 0.5 * 2^(TOP - SPREAD), the smallest
subnormal."""
_LOWEST, _HIGHEST = 77, 180
"""Range of a tensor's largest scale byte in which the scale of a product is a
float32."""


BLOCKS, WARPS = 256, 4
"""Blocks per program, and the warps that share them."""

# Magnitudes have bits 0 to 2 and 4 to 6 of a byte, signs bits 3 and 7. A factor of two
# bits copies the byte to both halves, and a mask keeps one code in each.
_TWO_CODES = """
  mul.lo.u32 value, half, {0};
  and.b32 value, value, {1};
  mul.lo.u32 sign, half, 0x01001000;
  and.b32 sign, sign, 0x80008000;
  or.b32 value, value, sign;"""
"""Moves a byte's two codes to the halves of a register: magnitude by a factor and a
mask."""


def bfloat16_ptx() -> str:
  """Returns PTX from a byte of two codes and its duplicated scale to two bfloat16.

  It uses the same two products as `planes.plane_ptx`, on neighbours instead of planes;
  `pairs.py` says why each adds -0.
  """
  return f"""{{
  .reg .b32 value, sign, half, zero;
  mov.b32 zero, 0x80008000;
  mov.b32 half, $1;{_TWO_CODES.format("0x00040040", "0x01C001C0")}
  mov.b32 sign, 0x7E807E80;
  fma.rn.bf16x2 value, value, sign, zero;
  fma.rn.bf16x2 $0, value, $2, zero;
}}"""


def float8_ptx() -> str:
  """Returns PTX from a word of four codes and its duplicated factor to four E4M3.

  A code's bits are a float16 whose exponent is 14 too low.
  """

  # A float16 has its exponent from bit 10 on: codes go to bit 9, where they are 14
  # powers of two too small, and 0x7400 is 2^14.
  def two(source: str, target: str) -> str:
    return f"""
  {source}{_TWO_CODES.format("0x00200200", "0x0E000E00")}
  mov.b32 sign, 0x74007400;
  mul.rn.f16x2 value, value, sign;
  mul.rn.f16x2 {target}, value, $2;"""

  lower = two("and.b32 half, $1, 255;", "low")
  upper = two("shr.b32 half, $1, 8;", "high")
  return f"""{{
  .reg .b32 value, sign, half, low, high;
  .reg .b16 first, second;{lower}{upper}
  cvt.rn.satfinite.e4m3x2.f16x2 first, low;
  cvt.rn.satfinite.e4m3x2.f16x2 second, high;
  mov.b32 $0, {{first, second}};
}}"""


def bfloat16_pair(byte: jax.Array, scale: jax.Array, *, interpret: bool) -> jax.Array:
  """Decodes int32 bytes by duplicated scales to two bfloat16, lower code first."""

  def meaning(byte: jax.Array, scale: jax.Array) -> jax.Array:
    upper = lambda code: codec.bits(codec.element(code) * codec.from_bits(scale))
    even, odd = upper(byte & 15), upper(byte >> 4)
    return lax.shift_right_logical(even, jnp.int32(16)) | (odd & codec.UPPER)

  return lowering.by_ptx(bfloat16_ptx(), meaning, byte, scale, interpret=interpret)


def float8_word(word: jax.Array, factor: jax.Array, *, interpret: bool) -> jax.Array:
  """Decodes int32 words by duplicated factors to four E4M3 each, lowest code first."""

  def meaning(word: jax.Array, factor: jax.Array) -> jax.Array:
    half = lax.bitcast_convert_type(factor.astype(jnp.int16), jnp.float16)
    result = jnp.zeros_like(word)
    for position in range(4):
      value = codec.element((word >> (4 * position)) & 15) * half.astype(jnp.float32)
      byte = lax.bitcast_convert_type(value.astype(FLOAT8), jnp.uint8)
      result |= byte.astype(jnp.int32) << (8 * position)
    return result

  return lowering.by_ptx(float8_ptx(), meaning, word, factor, interpret=interpret)


def _bfloat16_kernel(
  codes_ref: Any, scales_ref: Any, out_ref: Any, *, rows: int, interpret: bool
) -> None:
  mask = lowering.tail_mask(rows, BLOCKS, lowering.program_id(0))
  byte = lowering.load(codes_ref, mask).astype(jnp.int32)
  scale = codec.scale(lowering.load(scales_ref, mask).astype(jnp.int32))
  # A scale has no bits below those of a bfloat16: its upper half fits in both halves.
  twice = codec.bits(scale) | lax.shift_right_logical(codec.bits(scale), jnp.int32(16))
  twice = jnp.broadcast_to(twice[:, None], byte.shape)
  lowering.store(out_ref, bfloat16_pair(byte, twice, interpret=interpret), mask)


def _float8_kernel(
  words_ref: Any,
  scales_ref: Any,
  unit_ref: Any,
  out_ref: Any,
  *,
  rows: int,
  interpret: bool,
) -> None:
  mask = lowering.tail_mask(rows, BLOCKS, lowering.program_id(0))
  # An int16 brings its sign along, which `float8_ptx` would take for codes.
  word = lowering.load(words_ref, mask).astype(jnp.int32) & 0xFFFF
  byte = lowering.load(scales_ref, mask).astype(jnp.int32)
  exponent = byte - (codec.bits(unit_ref[0]) >> 23)
  # A float16 2^exponent; the smallest that a legal block needs is subnormal.
  factor = jnp.where(exponent == -15, 1 << 9, 0)
  factor = jnp.where(exponent >= -14, (exponent + 15) << 10, factor)
  twice = jnp.broadcast_to((factor * 0x10001)[:, None], word.shape)
  lowering.store(out_ref, float8_word(word, twice, interpret=interpret), mask)


def _launch(
  kernel: Any,
  codes: jax.Array,
  scales: jax.Array,
  *scalars: jax.Array,
  name: str,
  interpret: bool,
) -> jax.Array:
  """Runs a kernel over blocks, one per row of `codes`; returns int32 in that shape."""
  rows, spec = codes.shape[0], lowering.BlockSpec
  by_block = spec((BLOCKS, codes.shape[1]), lambda i: (i, 0))
  of_scalars = [spec((1,), lambda i: (0,)) for _ in scalars]
  return lowering.launch(
    functools.partial(kernel, rows=rows, interpret=interpret),
    codes,
    scales.reshape(rows),
    *scalars,
    name=name,
    grid=(-(-rows // BLOCKS),),
    in_specs=[by_block, spec((BLOCKS,), lambda i: (i,)), *of_scalars],
    out_specs=by_block,
    out_shape=jax.ShapeDtypeStruct(codes.shape, jnp.int32),
    warps=WARPS,
    interpret=interpret,
  )


def launch_bfloat16(tensor: mxfp4.MXTensor, *, interpret: bool = False) -> jax.Array:
  """Runs the bfloat16 kernel on `[..., d]`."""
  codes = tensor.codes.reshape(-1, mxfp4.BLOCK_SIZE // 2)
  keywords = {"name": "mxfp4_decode", "interpret": interpret}
  words = _launch(_bfloat16_kernel, codes, tensor.scales, **keywords)
  return lax.bitcast_convert_type(words, jnp.bfloat16).reshape(tensor.shape)


def launch_float8(
  tensor: mxfp4.MXTensor, unit: jax.Array, *, interpret: bool = False
) -> jax.Array:
  """Runs the float8 kernel on `[..., d]`; see `decode_float8`."""
  codes = tensor.codes.reshape(-1, mxfp4.BLOCK_SIZE // 4, 2)
  codes = lax.bitcast_convert_type(codes, jnp.int16)
  keywords = {"name": "mxfp4_decode_float8", "interpret": interpret}
  words = _launch(_float8_kernel, codes, tensor.scales, unit.reshape(1), **keywords)
  return lax.bitcast_convert_type(words, FLOAT8).reshape(tensor.shape)


def _choose(
  place: str,
  implementation: Implementation | None,
  tensor: mxfp4.MXTensor,
  capability: implementations.Capability = implementations.KERNELS,
) -> Implementation:
  blocks = tensor.scales.size, mxfp4.BLOCK_SIZE // 2
  obstacle = lowering.unaddressed(jax.ShapeDtypeStruct(blocks, jnp.uint8))
  keywords = {"pallas": obstacle, "capability": capability}
  chosen = implementations.choose(place, implementation, **keywords)
  # No program has nothing to do.
  return chosen if tensor.codes.size else "xla"


def decode(
  tensor: mxfp4.MXTensor, *, implementation: Implementation | None = None
) -> jax.Array:
  """Decodes `[..., d]` to bfloat16, exactly, like `mxfp4.decode`."""
  implementation = _choose("pallas_kernels.decode", implementation, tensor)
  if implementation == "xla":
    return mxfp4.decode(tensor, jnp.bfloat16)
  return launch_bfloat16(tensor, interpret=implementation == "interpret")


def float8_range(tensor: mxfp4.MXTensor) -> tuple[jax.Array, jax.Array]:
  """Returns the scale of a tensor's float8 values and whether they are exact.

  The scale, a float32 power of two, puts the largest block at the top of the range.
  Blocks with scale byte 0 count as zeros; see `float8.py`. Nothing is exact with a byte
  of 255, or if the scale of a product would not be a float32.
  """
  byte = tensor.scales.astype(jnp.int32)
  # The smallest byte is the largest distance below 255. Blocks of zeros are left out.
  below = jnp.where(byte == 0, 0, mxfp4.NOT_FINITE - byte)
  # One reduction for both ends.
  top, furthest = jnp.stack([byte, below]).max(tuple(range(1, byte.ndim + 1)))
  spread = top - (mxfp4.NOT_FINITE - furthest)
  fits = (top >= _LOWEST) & (top <= _HIGHEST) & (spread <= SPREAD)
  return codec.scale(jnp.maximum(top - TOP, 0)), fits


def decode_float8(
  tensor: mxfp4.MXTensor,
  unit: jax.Array,
  *,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Decodes `[..., d]` to E4M3 with one scale for the tensor, exactly.

  The tensor is packed by the paper's scale rule, and `float8_range` must accept it;
  `unit` is the scale from there, a float32 scalar.
  """
  implementation = _choose(
    "pallas_kernels.decode_float8", implementation, tensor, implementations.FLOAT8
  )
  if implementation == "xla":
    # A power of two: its inverse and the product are exact.
    return (mxfp4.decode(tensor, jnp.float32) * (1 / unit)).astype(FLOAT8)
  return launch_float8(tensor, unit, interpret=implementation == "interpret")
