"""LLVM kernel that maps, encodes and refines a tile of tokens.

The reference is `mxjax.numerics.realization.one_code.refine`, formula for formula. A
tile is one block of 32 features by `LANES` tokens, one per lane. Each product is a
chain of fused multiply-adds in XLA:CPU's order, so refined codes have its bits.

Operands: x `[blocks, 32, n]`, gram and cross `[blocks, 32, 32]`, and for kernels with a
map `[blocks, 32, 32]`; all float32, n at least `LANES`.
"""

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir

from mxjax.numerics.native import LANES
from mxjax.numerics.native.custom_call import Count, Part, dimension, operand, result
from mxjax.numerics.native.values import (
  F32,
  FLOATS,
  I64,
  INTS,
  POINTER,
  VECTOR_BYTES,
  Value,
  constant,
  repeat,
  room,
  where,
)

BLOCK = 32
TABLE_BYTES = 4 * BLOCK * BLOCK
TILE_BYTES = BLOCK * VECTOR_BYTES
_ROWS_AT_ONCE = 4
"""Rows of a product that share each load; their sums take eight registers."""
_STRIP = 8 * LANES
"""Tokens in a part."""

_MANTISSA, _BIAS, _SIZE, _SIGN = 23, 127, 2**31 - 1, -(2**31)
_QUARTER, _HALF, _THREE_QUARTERS, _ONE, _SIX = (
  int.from_bytes(struct.pack("<f", value), "little")
  for value in (0.25, 0.5, 0.75, 1.0, 6.0)
)
_HALF_A_STEP, _WHOLE_STEPS = 1 << 21, -(1 << 22)
"""Half a quantum, and the mask of whole quanta, for values from one up, which have one
mantissa bit."""
_NAN = 0x7FC00000


class Tile(NamedTuple):
  """Addresses of tile buffers in first-level cache, 32 vectors each."""

  x: Value
  difference: Value
  nearest: Value
  pulled: Value
  mismatch: Value


def row_at(address: Value, index: Value) -> Value:
  """Returns the address of a row of a tile buffer."""
  return address.after(index * VECTOR_BYTES)


def write_product(module: ir.Module) -> ir.Function:
  """Emits M X for a table M `[32, 32]` and a tile X, summing in column order."""
  takes = ir.FunctionType(ir.VoidType(), [POINTER] * 3)
  function = ir.Function(module, takes, "block_product")
  code = ir.IRBuilder(function.append_basic_block("entry"))
  table, tile, product = (Value(code, argument) for argument in function.args)

  def rows(first: Value) -> list[Value]:
    sums = [constant(code, FLOATS, 0.0)] * _ROWS_AT_ONCE
    begin = table.after(first * (4 * BLOCK))
    for k in range(BLOCK):
      x = tile.after(k * VECTOR_BYTES).load(FLOATS, 64)
      for r in range(_ROWS_AT_ONCE):
        factor = begin.after(4 * (BLOCK * r + k)).load(F32).spread()
        sums[r] = factor.call("fma", x, sums[r])
    for r, total in enumerate(sums):
      row_at(product, first).after(r * VECTOR_BYTES).store(total, align=64)
    return []

  repeat(constant(code, I64, 0), BLOCK, rows, step=_ROWS_AT_ONCE)
  code.ret_void()
  return function


def block_exponent(largest: Value, carry: int) -> Value:
  """Computes `mxfp4.block_exponent` of finite blocks.

  Takes the bits of the largest magnitude, and what the scale rule adds to them.
  """
  field = (largest + carry) >> _MANTISSA
  return (field - (_BIAS + 2)).call("smax", -_BIAS)


def scales(exponent: Value) -> tuple[Value, Value, Value]:
  """Computes what `nearest_element` and decoding need at exponents from -127 to 127.

  Returns the exponent in the exponent field, the shift for a converted subnormal
  mantissa in the same field, and 2^e, see `mxfp4.scale_of`.
  """
  low = exponent.call("smin", -100) + 149
  normal = (exponent + _BIAS) << _MANTISSA
  subnormal = normal.same(1 << (_MANTISSA - 1))
  scale = where(exponent.equals(-_BIAS), subnormal, normal)
  return exponent << _MANTISSA, low << _MANTISSA, scale.floats()


def nearest_element(x: Value, shift: Value, low_shift: Value) -> Value:
  """Rounds x to element values on its bits, like `mxfp4.round_elements`."""
  size = x.bits() & _SIZE
  mantissa = size.rounded_to_float().bits() - low_shift
  scaled = where(size < (1 << _MANTISSA), mantissa, size - shift)
  # Half a step up, then down to whole steps: a tie goes away from zero, and a carry out
  # of the mantissa is the next exponent.
  from_one = ((scaled + _HALF_A_STEP) & _WHOLE_STEPS).call("smin", _SIX)
  half = where(scaled >= _QUARTER, scaled.same(_HALF), 0)
  below = where(scaled >= _THREE_QUARTERS, scaled.same(_ONE), half)
  magnitude = where(scaled >= _ONE, from_one, below)
  return (magnitude | (x.bits() & _SIGN)).floats()


def _grid_neighbours(target: Value) -> tuple[Value, Value]:
  """Computes `one_code._grid_neighbours`."""
  size = target.call("fabs")
  number = lambda value: constant(target.code, FLOATS, value)
  step = where(size < 2.0, number(0.5), where(size < 4.0, number(1.0), 2.0))
  per_step = where(size < 2.0, number(2.0), where(size < 4.0, number(1.0), 0.5))
  free = (size * per_step).call("floor") * step
  inner, outer = (where(v < 6.0, v, 6.0) for v in (free, free + step))
  signed = where(inner.equals(0.0), inner, inner.call("copysign", target))
  return signed, outer.call("copysign", target)


def best_code(
  nearest: Value, scale: Value, slope: Value, curvature: Value
) -> tuple[Value, Value]:
  """Computes `one_code.best_code`."""
  vertex = nearest - slope / (curvature * scale)
  inner, outer = _grid_neighbours(where(slope.equals(0.0), nearest, vertex))
  # `one_code.code_score`, with both products rounded.
  score = lambda delta: (delta * 2.0) * slope + (delta * delta) * curvature
  inner_score, outer_score = (score((v - nearest) * scale) for v in (inner, outer))
  is_better = outer_score < inner_score
  pairs = (outer_score, inner_score), (outer, inner)
  best, value = (where(is_better, *pair) for pair in pairs)
  return best, value


def read_tile(
  tile: Tile, x: Value, stride: Value, matrix: Value | None, product: ir.Function
) -> None:
  """Loads a tile of inputs into cache and applies the block's map, if any."""
  to = tile.x if matrix is None else tile.pulled

  def row(i: Value) -> list[Value]:
    row_at(to, i).store(x.after(i * stride).load(FLOATS), align=64)
    return []

  repeat(constant(x.code, I64, 0), BLOCK, row)
  if matrix is not None:
    x.code.call(product, [v.raw for v in (matrix, to, tile.x)])


def encode_tile(tile: Tile, carry: int = 0) -> Value:
  """Fills the nearest elements and their differences from x; returns the scales.

  `carry` is that of the scale rule in `native.encode.SCALE_RULES`.
  """
  code = tile.x.code
  zero = constant(code, I64, 0)

  def larger(i: Value, largest: Value) -> list[Value]:
    return [largest.call("smax", row_at(tile.x, i).load(INTS, 64) & _SIZE)]

  (largest,) = repeat(zero, BLOCK, larger, constant(code, INTS, 0))
  # What is not finite may overflow here; its scale is replaced below.
  shift, low_shift, scale = scales(block_exponent(largest, carry))
  # The scale of a block that is not finite is NaN.
  nan = largest.same(_NAN).floats()
  scale = where((largest >> _MANTISSA).equals(255), nan, scale)

  def row(i: Value) -> list[Value]:
    x = row_at(tile.x, i).load(FLOATS, 64)
    element = nearest_element(x, shift, low_shift)
    row_at(tile.nearest, i).store(element, align=64)
    row_at(tile.difference, i).store(element * scale - x, align=64)
    return []

  repeat(zero, BLOCK, row)
  return scale


class _Best(NamedTuple):
  """Each token's best change (score, coordinate, value) and its objective."""

  score: Value
  coordinate: Value
  value: Value
  objective: Value


def _refine(
  tile: Tile, gram: Value, cross: Value, scale: Value, product: ir.Function
) -> _Best:
  """Finds the lowest score over all coordinates, the first in case of ties."""
  code = scale.code
  code.call(product, [gram.raw, tile.difference.raw, tile.pulled.raw])
  code.call(product, [cross.raw, tile.x.raw, tile.mismatch.raw])

  def row(i: Value, *before: Value) -> list[Value]:
    best = _Best(*before)
    mismatch = row_at(tile.mismatch, i).load(FLOATS, 64)
    slope = row_at(tile.pulled, i).load(FLOATS, 64) - mismatch
    curvature = gram.after(i * (4 * (BLOCK + 1))).load(F32).spread()
    nearest = row_at(tile.nearest, i).load(FLOATS, 64)
    score, value = best_code(nearest, scale, slope, curvature)
    is_best = score < best.score
    difference = row_at(tile.difference, i).load(FLOATS, 64)
    return [
      where(is_best, score, best.score),
      where(is_best, i.narrow().spread(), best.coordinate),
      where(is_best, value, best.value),
      difference.call("fma", slope - mismatch, best.objective),
    ]

  number = lambda kind, value: constant(code, kind, value)
  nothing = number(FLOATS, 0.0)
  start = number(FLOATS, float("inf")), number(INTS, 0), nothing, nothing
  return _Best(*repeat(number(I64, 0), BLOCK, row, *start))


def _write_decoded(
  tile: Tile, scale: Value, best: _Best, to: Value, stride: Value
) -> None:
  """Stores the refined blocks of `one_code.refined_blocks`."""
  none = constant(scale.code, INTS, -1)
  changed = where(best.score < 0.0, best.coordinate, none)

  def row(i: Value) -> list[Value]:
    nearest = row_at(tile.nearest, i).load(FLOATS, 64)
    element = where(changed.equals(i.narrow().spread()), best.value, nearest)
    to.after(i * stride).store(element * scale)
    return []

  repeat(constant(scale.code, I64, 0), BLOCK, row)


def _write_tile(
  module: ir.Module, name: str, product: ir.Function, *, maps: bool, decodes: bool
) -> ir.Function:
  """Emits the function for one tile: six addresses and the bytes between features."""
  takes = ir.FunctionType(ir.VoidType(), [POINTER] * 6 + [I64])
  function = ir.Function(module, takes, f"{name}.tile")
  code = ir.IRBuilder(function.append_basic_block("entry"))
  x, gram, cross, matrix, to, cache, stride = (Value(code, a) for a in function.args)
  tile = Tile(*(cache.after(i * TILE_BYTES) for i in range(len(Tile._fields))))
  read_tile(tile, x, stride, matrix if maps else None, product)
  scale = encode_tile(tile)
  best = _refine(tile, gram, cross, scale, product)
  if decodes:
    _write_decoded(tile, scale, best, to, stride)
  else:
    to.store(best.objective + where(best.score < 0.0, best.score, 0.0))
  code.ret_void()
  return function


def parts(frame: Value) -> Value:
  """Returns the number of parts: the strips of tokens of all blocks."""
  return dimension(frame, 0, 0) * _strips(frame)


def _strips(frame: Value) -> Value:
  return (dimension(frame, 0, 2) + (_STRIP - 1)) / _STRIP


def part(
  tile: ir.Function, tables: Sequence[int | None], *, decodes: bool = True
) -> Part:
  """Returns the emitter for one strip of one block.

  `tables` has the operand of each table that `tile` takes, or None for no table.
  """

  def write(frame: Value, index: Value) -> None:
    code = frame.code
    # 20 KiB, which every tile of the part uses again.
    cache = room(code, len(Tile._fields) * TILE_BYTES)
    tokens, strips = dimension(frame, 0, 2), _strips(frame)
    block, strip = index / strips, index % strips
    x, to = operand(frame, 0), result(frame, 0)
    none = Value(code, ir.Constant(POINTER, None))
    of_block = [
      none if i is None else operand(frame, i).after(block * TABLE_BYTES)
      for i in tables
    ]
    row_bytes = tokens * 4
    x_block = x.after(block * row_bytes * BLOCK)
    to_block = to.after(block * row_bytes * (BLOCK if decodes else 1))
    # The last tile starts early enough to be full, so it repeats some tokens.
    # Two threads may so write a token at once, with the same bits.
    last = tokens - LANES
    first = strip * _STRIP
    stop = where(first + _STRIP < tokens, first + _STRIP, tokens)

    def one(start: Value) -> list[Value]:
      at = where(start < last, start, last) * 4
      addresses = x_block.after(at), *of_block, to_block.after(at), cache
      code.call(tile, [v.raw for v in (*addresses, row_bytes)])
      return []

    repeat(first, stop, one, step=LANES)

  return write


def kernels(
  kernel_name: Callable[..., str],
) -> tuple[ir.Module, dict[str, tuple[Count, Part]]]:
  """Emits all kernels: with and without a map, for decoded blocks or their objective.

  A kernel with a map takes it as the fourth operand and applies it first. `kernel_name`
  names a kernel from the keywords `maps` and `decodes`.
  """
  module = ir.Module("refinement")
  product = write_product(module)
  written = {}
  for maps, decodes in itertools.product((False, True), repeat=2):
    name = kernel_name(maps=maps, decodes=decodes)
    tile = _write_tile(module, name, product, maps=maps, decodes=decodes)
    tables = 1, 2, 3 if maps else None
    written[name] = parts, part(tile, tables, decodes=decodes)
  return module, written
