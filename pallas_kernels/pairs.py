"""Two bfloat16 in a register: rounding to legal values and packing, by PTX.

Each PTX has its meaning in plain JAX beside it, on 16-bit halves of any order or on
int32 words of two, the even column's half lower. A factor is the bits of 2^-e, e the
exponent of the block.

Before compute capability 9.0 there is no product of two bfloat16. It is written as a
fused one to which -0 is added, which is exact, zeros included, and which `ptxas` makes
the same instruction of where there is one.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import codec, lowering

SIZE_PTX = "and.b32 $0, $1, 0x7FFF7FFF;"
"""From two bfloat16 to their magnitudes."""
UPPER_PTX = "prmt.b32 $0, $1, $2, 0x7632;"
"""From two float32 to their upper halves, two bfloat16."""

PAIR_INTEGERS = (9, 0)
"""Compute capability from which there are sums and minima of two 16-bit integers."""
# As bfloat16, 0x8000 is -0 and 0x0080 is 2^-126, the smallest normal number.
_SCALED = """
  .reg .b32 size, other, zero;
  mov.b32 zero, 0x80008000;
  and.b32 size, $1, 0x7FF87FF8;
  fma.rn.bf16x2 size, size, $2, zero;
  mov.b32 other, 0x00800080;
  fma.rn.bf16x2 size, size, other, zero;"""
"""From two bfloat16 and the duplicated factor to their magnitudes times 2^-126.

The legal values below 1 fall on subnormals and all legal values are 2^6 apart in the
bits, so adding half of that and truncating rounds ties up. Four mantissa bits are as
decisive as seven and keep the products exact where it matters."""
# 0x20 is half of 2^6. 0x1FF is the last bit pattern of code 7, at which larger values,
# infinity and NaN saturate.
_HALF_ADDED = """
  mov.b32 other, 0x00200020;
  add.u16x2 size, size, other;
  mov.b32 other, 0x01FF01FF;
  min.u16x2 size, size, other;"""
"""One instruction after `ptxas`."""
# The minimum comes first and is lower by the half, 0x20: then the sum, of 32 bits, ends
# at 0x1FF in each half and carries out of none.
_HALF_ADDED_BEFORE = """
  mov.b32 other, 0x01DF01DF;
  min.bf16x2 size, size, other;
  add.u32 size, size, 0x00200020;"""
"""The same before `PAIR_INTEGERS`. Magnitudes are ordered as their bits are, a minimum
drops NaN, and no half carries into the other."""


def _rounded() -> str:
  """Returns PTX from the operands of `_SCALED` to magnitudes' codes at bit 6."""
  is_old = lowering.is_before(PAIR_INTEGERS)
  half_added = _HALF_ADDED_BEFORE if is_old else _HALF_ADDED
  return f"""{_SCALED}{half_added}
  and.b32 size, size, 0x01C001C0;"""


# The product puts the lower half's code, at bit 6, to bit 18 as well, below the upper
# half's at bit 22.
_JOINED = """
  shr.b32 other, $1, 6;
  and.b32 other, other, 0x02000200;
  or.b32 size, size, other;
  mul.lo.u32 size, size, 4097;
  shr.b32 $0, size, 18;"""
"""From two codes at bit 6 to a byte: the signs go above the three magnitude bits, and a
product with 2^12 + 1 joins the codes."""


def codes_ptx() -> str:
  """Returns PTX from two bfloat16 and the duplicated factor to their nearest codes.

  The result is a byte of two codes.
  """
  return f"{{{_rounded()}{_JOINED}\n}}"


def nearest_ptx() -> str:
  """Returns PTX from two bfloat16 and the duplicated factor to their nearest values.

  A product with 2^126 makes values, two bfloat16, of codes at bit 6.
  """
  return f"""{{{_rounded()}
  mov.b32 other, 0x7E807E80;
  fma.rn.bf16x2 size, size, other, zero;
  and.b32 other, $1, 0x80008000;
  or.b32 $0, size, other;
}}"""


# A legal value needs no rounding: a product with 2^-126 alone takes its code to bit 6.
PACKED_PTX = f"""{{
  .reg .b32 size, other, zero;
  mov.b32 zero, 0x80008000;
  mov.b32 other, 0x00800080;
  fma.rn.bf16x2 size, $1, other, zero;
  and.b32 size, size, 0x01C001C0;{_JOINED}
}}"""
"""From two legal bfloat16 values to a byte of two codes."""


def upper(x: jax.Array) -> jax.Array:
  """Returns the upper halves of float32, int16."""
  return lax.shift_right_logical(codec.bits(x), jnp.int32(16)).astype(jnp.int16)


def halves(word: jax.Array) -> jax.Array:
  """Returns the halves of words `[n, m]`, int16 `[n, 2 m]`."""
  pair = jnp.stack([word, word >> 16], axis=-1)
  return pair.reshape(word.shape[0], -1).astype(jnp.int16)


def largest(word: jax.Array) -> jax.Array:
  """Returns the bits of each row's largest magnitude, as float32, int32 `[n]`.

  The upper half of a word decides, whatever is in the lower half.
  """
  size = word & 0x7FFF7FFF
  return jnp.maximum(jnp.max(size, axis=1), jnp.max(size << 16, axis=1))


def factor_words(exponent: jax.Array) -> jax.Array:
  """Returns the duplicated factor of exponents, in words."""
  bits = codec.bits(codec.inverse_scale_of(exponent))
  return lax.shift_right_logical(bits, jnp.int32(16)) * 0x10001


def nearest(half: jax.Array, factor: jax.Array) -> jax.Array:
  """Rounds bfloat16 to legal values, in units of the scale; see `nearest_ptx`.

  Both are int16 bits. A zero keeps the sign of what was rounded to it.
  """
  index, x = _nearest_index(half, factor)
  return codec.copy_sign(codec.magnitude(index), x).astype(jnp.bfloat16)


def _nearest_index(half: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the index of the nearest magnitude, and the float32 that was rounded."""
  x = codec.from_bits(half.astype(jnp.int32) << 16)
  exponent = mxfp4.SCALE_BIAS - ((factor.astype(jnp.int32) >> 7) & 255)
  size = codec.bits(x) & codec.UPPER_HALF
  # This is what an interpreter runs, on a CPU, where XLA flushes subnormals.
  return codec.magnitude_index(size, exponent, has_subnormals=False), x


def nearest_values(word: jax.Array, factor: jax.Array) -> jax.Array:
  """Rounds like `nearest`, from words `[n, 16]` to bfloat16 `[n, 32]`."""
  return nearest(halves(word), halves(factor))


def nearest_codes(word: jax.Array, factor: jax.Array) -> jax.Array:
  """Encodes words `[n, 16]` to bytes, int32 `[n, 16]`; see `codes_ptx`."""
  code = codec.with_sign(*_nearest_index(halves(word), halves(factor)))
  return _joined(code)


def packed_codes(values: jax.Array) -> jax.Array:
  """Returns bytes of two codes, uint8 `[n, 16]`, of legal bfloat16 `[n, 32]`."""
  return _joined(codec.code_of(values.astype(jnp.float32))).astype(jnp.uint8)


def _joined(codes: jax.Array) -> jax.Array:
  even, odd = jnp.moveaxis(codes.reshape(codes.shape[0], -1, 2), -1, 0)
  return even | (odd << 4)
