"""Packed MXFP4 decoded to bfloat16, two values per register.

Four neighbouring codes form a 16-bit word. The first, second, third and fourth columns
of all words form four *planes* with a quarter of the columns each. A product over all
columns is the sum of the products of the planes, so the columns never have to be
reordered.

A register holds two words, and one shift or mask works on both. A code's sign and three
low bits, moved to bits 15 and 8 to 6, are a bfloat16 whose exponent is 126 too low,
including the subnormal 0.5; two products multiply by 2^126 and by the block's scale.
The compiler does not find this form, so it is written in PTX.
`benchmarks/results/gpu_counts.json` has the instructions.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import mxfp4, pytree_nodes
from mxjax.pallas_kernels import codec, lowering

COUNT = 4
"""Codes in a word, and planes of a tensor."""
WORDS = mxfp4.BLOCK_SIZE // COUNT
"""Words in a block."""


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Planes:
  """Values `[n, d]` by planes: bfloat16 `[4, n, d / 4]`."""

  values: jax.Array

  @property
  def shape(self) -> tuple[int, int]:
    """Shape `(n, d)`."""
    _, rows, width = self.values.shape
    return rows, COUNT * width

  def whole(self) -> jax.Array:
    """Restores the order of the columns: bfloat16 `[n, d]`."""
    return self.values.transpose(1, 2, 0).reshape(self.shape)


def words(codes: jax.Array) -> jax.Array:
  """Views packed codes uint8 `[n, d / 2]` as int16 `[n, d / 4]`."""
  rows, size = codes.shape
  return lax.bitcast_convert_type(codes.reshape(rows, size // 2, 2), jnp.int16)


def of_tile(x: jax.Array) -> jax.Array:
  """Returns the planes `[4, n, d / 4]` of an array `[n, d]`."""
  rows, width = x.shape
  return x.reshape(rows, width // COUNT, COUNT).transpose(2, 0, 1)


def split(x: jax.Array) -> Planes:
  """Splits values `[n, d]` into planes."""
  return Planes(of_tile(x))


def scale_ptx() -> str:
  """Returns PTX from scale bytes to bfloat16 2^(byte - 127), NaN for 255."""
  # 0x0040 is 2^-127, for the byte 0. Adding zero times the scale makes NaN of infinity,
  # the byte 255, and changes no other.
  return """{
  .reg .b32 value, other;
  shl.b32 value, $1, 7;
  mov.b32 other, 0x00400040;
  max.bf16x2 other, value, other;
  mov.b32 value, 0x00000000;
  fma.rn.bf16x2 $0, other, value, other;
}"""


def plane_ptx(position: int) -> str:
  """Returns PTX from words and bfloat16 scales to values of one position of four.

  `pairs.py` says why each product adds -0.
  """
  lowest = 4 * position
  if position < COUNT - 1:
    # A product with two bits moves sign and magnitude at once, to the left. Shifting
    # right by 6 first makes the third code's distances leftward too; the fourth needs
    # only that shift.
    before = 0 if position < 2 else 6
    at = lowest - before
    code, factor = 0xF << at, (1 << (12 - at)) + (1 << (6 - at))
    move = f"""shr.b32 value, $1, {before};
  and.b32 value, value, {code << 16 | code:#010x};
  mul.lo.u32 value, value, {factor};
  and.b32 value, value, 0x81C081C0;"""
  else:
    move = """shr.b32 value, $1, 6;
  and.b32 value, value, 0x01C001C0;
  and.b32 factor, $1, 0x80008000;
  or.b32 value, value, factor;"""
  return f"""{{
  .reg .b32 value, factor, zero;
  mov.b32 zero, 0x80008000;
  {move}
  mov.b32 factor, 0x7E807E80;
  fma.rn.bf16x2 value, value, factor, zero;
  fma.rn.bf16x2 $0, value, $2, zero;
}}"""


def scales(byte: jax.Array, *, interpret: bool) -> jax.Array:
  """Returns bfloat16 2^(byte - 127) of int16 bytes, any shape; see `scale_ptx`."""

  def meaning(byte: jax.Array) -> jax.Array:
    return codec.scale(byte.astype(jnp.int32)).astype(jnp.bfloat16)

  return lowering.by_ptx(scale_ptx(), meaning, byte, interpret=interpret)


def plane(
  word: jax.Array, scale: jax.Array, position: int, *, interpret: bool
) -> jax.Array:
  """Decodes one position of four from int16 words, exactly, to bfloat16."""

  def meaning(word: jax.Array, scale: jax.Array) -> jax.Array:
    code = (word.astype(jnp.int32) >> (4 * position)) & 15
    return (codec.element(code) * scale.astype(jnp.float32)).astype(jnp.bfloat16)

  return lowering.by_ptx(plane_ptx(position), meaning, word, scale, interpret=interpret)
