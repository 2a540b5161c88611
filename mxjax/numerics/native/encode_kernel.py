"""LLVM loop of `mxjax.numerics.native.encode`, with one block per vector.

The loop computes the exponents of a chunk of blocks before their codes, so that no
block waits for its own maximum.
"""

from llvmlite import ir

from mxjax.numerics.native import LANES
from mxjax.numerics.native.values import (
  BYTES,
  I8,
  I32,
  I64,
  INTS,
  POINTER,
  VECTOR_BYTES,
  Value,
  constant,
  either,
  repeat,
  room,
  where,
)

_CHUNK = 16
"""Blocks in a chunk."""
_CODE_BYTES = LANES // 2
_PAIRS, _PACKED = (ir.VectorType(ir.IntType(bits), _CODE_BYTES) for bits in (16, 8))
_MANTISSA, _SIZE = 23, 2**31 - 1

_THRESHOLDS = (0, 6, 9, 11, 13, 15, 17)
"""Values of |x| / 2^e from which codes 1 to 7 apply, in quarters of an exponent from
.25 up: these values have two mantissa bits, so the other bits of |x| do not matter."""


def write() -> ir.Module:
  """Builds the module with the function `encode`.

  The function takes the addresses of float32 values, packed codes and scale bytes, the
  number of blocks (at least one), and the rule's carry and bias. A block's exponent is
  the exponent field of (largest magnitude's bits + carry) minus the bias, at least
  -127. The function returns the bits of the largest magnitude of all blocks.
  """
  module = ir.Module("encode")
  takes = ir.FunctionType(I32, [POINTER] * 3 + [I64, I32, I32])
  function = ir.Function(module, takes, "encode")
  for address in function.args[:3]:
    # Lets LLVM load values past the stores of codes before them.
    address.add_attribute("noalias")
  code = ir.IRBuilder(function.append_basic_block("entry"))
  x, codes, scales, blocks, carry, bias = (Value(code, a) for a in function.args)
  shifts = room(code, 4 * _CHUNK)

  def chunk(start: Value, largest: Value) -> list[Value]:
    full = start + _CHUNK
    stop = where(full < blocks, full, blocks)
    shift_at = lambda block: shifts.after((block - start) * 4)

    def scale(block: Value, largest: Value) -> list[Value]:
      top = (_values(x, block) & _SIZE).largest()
      field = (top + carry) >> _MANTISSA
      exponent = (field - bias).call("smax", -127)
      scales.after(block).store((exponent + 127).narrow(I8), align=1)
      shift_at(block).store(exponent << _MANTISSA)
      return [largest.call("smax", top)]

    def encode(block: Value) -> list[Value]:
      packed = _packed_codes(_values(x, block), shift_at(block).load(I32))
      codes.after(block * _CODE_BYTES).store(packed, align=1)
      return []

    results = repeat(start, stop, scale, largest)
    repeat(start, stop, encode)
    return results

  zero = constant(code, I64, 0), constant(code, I32, 0)
  (largest,) = repeat(zero[0], blocks, chunk, zero[1], step=_CHUNK)
  code.ret(largest.raw)
  return module


def _values(x: Value, block: Value) -> Value:
  """Loads the bits of a block's values."""
  return x.after(block * VECTOR_BYTES).load(INTS)


def _scaled(bits: Value, shift: Value) -> Value:
  """Returns the bits of |x| / 2^e; `shift` is e in the exponent field."""
  size = bits & _SIZE
  normal = size - shift.spread()

  def with_subnormals() -> Value:
    # Subnormals have no exponent field: their mantissa is converted to float, exactly.
    mantissa = size.rounded_to_float().bits()
    converted = mantissa - (shift + (149 << _MANTISSA)).spread()
    return where(size < (1 << _MANTISSA), converted, normal)

  # A branch, because above an exponent of -100 a subnormal's code is zero without the
  # conversion.
  return either(shift < (-100 << _MANTISSA) + 1, with_subnormals, normal)


def _packed_codes(bits: Value, shift: Value) -> Value:
  """Returns the packed nearest codes of a block; ties go to the larger magnitude."""
  # From .25 = 2^(125 - 127) up, four steps in an exponent by two mantissa bits.
  quarters = (_scaled(bits, shift) - (125 << _MANTISSA)).signed_shift(21)
  # A byte holds it after the clamps, which pass no threshold; 32 bytes compare at once.
  steps = quarters.call("smax", -128).call("smin", 127).narrow(BYTES)
  one = constant(bits.code, BYTES, 1)
  index = where(bits < 0, constant(bits.code, BYTES, 8), 0)
  for threshold in _THRESHOLDS:
    index += where(steps >= threshold, one, 0)
  # In little-endian order the even code is the low byte of a pair.
  pairs = index.reinterpreted(_PAIRS)
  return (pairs | (pairs >> 4)).narrow(_PACKED)
