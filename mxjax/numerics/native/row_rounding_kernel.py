"""LLVM kernel that rounds rows of a weight by GPTQ and coordinate descent.

The reference is `mxjax.numerics.realization.two_sided.round_rows`, formula for formula,
with sums in the order of the features. A part is `ROWS` rows, one per lane, through all
blocks: XLA:CPU instead runs a handful of tiny operations for each column.

Operands: weight `[blocks, 32, n]`, upper and hessian `[d, d]`, shift `[1]`, all
float32. Results: codes uint8 and decoded float32 `[blocks, 32, n]`, exponents int32
`[blocks, n]`, and float32 room `[n / ROWS, d, ROWS]`.
"""

from typing import NamedTuple

from llvmlite import ir

from mxjax.numerics.native import ROWS
from mxjax.numerics.native.custom_call import Count, Part, dimension, operand, result
from mxjax.numerics.native.refinement_kernel import (
  BLOCK,
  block_exponent,
  nearest_element,
  scales,
)
from mxjax.numerics.native.values import (
  F32,
  I8,
  I32,
  I64,
  POINTER,
  Value,
  constant,
  repeat,
  room,
  where,
)

_FLOATS, _INTS, _BYTES = (ir.VectorType(kind, ROWS) for kind in (F32, I32, I8))
_ROW = 4 * ROWS
"""Bytes of a row of a buffer, one float per lane."""
_TILE = BLOCK * _ROW
_AT_ONCE = 8
"""Sums that share each load; they take eight registers."""
_BLOCK_BYTES = 4 * BLOCK


class _Try(NamedTuple):
  """Addresses of what rounding a block at one exponent gives, and the exponent."""

  elements: Value
  errors: Value
  exponent: Value


class _Place(NamedTuple):
  """Where a part reads and writes: addresses of its first row, and sizes.

  `stride` is bytes between features of float32 arrays, and `width` those of a row of
  the tables.
  """

  weight: Value
  codes: Value
  exponent: Value
  decoded: Value
  stride: Value
  width: Value

  def floats(self, array: Value, feature: Value) -> Value:
    """Returns the address of a feature's rows."""
    return array.after(feature * self.stride)

  def bytes(self, array: Value, feature: Value) -> Value:
    """The same of an array of bytes."""
    return array.after((feature * self.stride) >> 2)


def _at(buffer: Value, row: Value) -> Value:
  return buffer.after(row * _ROW)


def _zero(code: ir.IRBuilder) -> Value:
  return constant(code, I64, 0)


def _sums(
  table: Value, step: Value | int, across: Value | int, rows: Value, stop: Value | int
) -> list[Value]:
  """Sums table[k, i] rows[k] over k below `stop`, for `_AT_ONCE` values of i.

  `step` and `across` are the table's bytes from one k, and from one i, to the next.
  """
  code = table.code

  def add(k: Value, *sums: Value) -> list[Value]:
    row, entry = _at(rows, k).load(_FLOATS, 32), table.after(k * step)
    results = []
    for total in sums:
      results.append(entry.load(F32).spread(ROWS).call("fma", row, total))
      entry = entry.after(across)
    return results

  return repeat(_zero(code), stop, add, *[constant(code, _FLOATS, 0.0)] * _AT_ONCE)


def _code_of(element: Value) -> Value:
  """Returns the code of an element value, with its sign, as bytes."""
  bits = element.bits()
  size = bits & (2**31 - 1)
  # From 1 up, the last bits of a float's exponent and its first mantissa bit count the
  # indices; .5, a subnormal of E2M1, would give zero.
  from_one = ((size >> 22) - 252).call("smax", 0)
  half = element.same(0.5).bits()
  index = where(size.equals(half), size.same(1), from_one)
  return (index | ((bits >> 31) << 3)).narrow(_BYTES)


def _round_block(target: Value, table: Value, width: Value, chosen: _Try) -> Value:
  """Rounds a block's columns in order; `table` is the block's tile of U.

  Fills the elements and errors of `chosen`; returns the sums of squared errors.
  """
  code = target.code
  shift, low_shift, scale = scales(chosen.exponent)
  none = constant(code, _FLOATS, 0.0)

  def clear(j: Value) -> list[Value]:
    _at(chosen.errors, j).store(none, align=32)
    return []

  repeat(_zero(code), BLOCK, clear)

  def column(j: Value, squares: Value) -> list[Value]:
    coupling = table.after(j * 4)

    def add(i: Value, total: Value) -> list[Value]:
      factor = coupling.after(i * width).load(F32).spread(ROWS)
      return [factor.call("fma", _at(chosen.errors, i).load(_FLOATS, 32), total)]

    # Up to j itself, whose error is zero yet, because `repeat` runs at least once.
    (pulled,) = repeat(_zero(code), j + 1, add, none)
    wanted = _at(target, j).load(_FLOATS, 32) - pulled
    element = nearest_element(wanted, shift, low_shift)
    pivot = coupling.after(j * width).load(F32).spread(ROWS)
    error = (wanted - element * scale) / pivot
    _at(chosen.elements, j).store(element, align=32)
    _at(chosen.errors, j).store(error, align=32)
    return [squares + error * error]

  (squares,) = repeat(_zero(code), BLOCK, column, none)
  return squares


def _write_gptq(module: ir.Module, name: str) -> ir.Function:
  """Emits GPTQ of a part with searched exponents; errors are left in its room."""
  takes = ir.FunctionType(ir.VoidType(), [POINTER] * 6 + [I64] * 3)
  function = ir.Function(module, takes, f"{name}.gptq")
  code = ir.IRBuilder(function.append_basic_block("entry"))
  weight, upper, codes, exponents, decoded, errors, blocks, stride, width = (
    Value(code, argument) for argument in function.args
  )
  place = _Place(weight, codes, exponents, decoded, stride, width)
  target = room(code, _TILE)
  buffers = [(room(code, _TILE), room(code, _TILE)) for _ in range(2)]

  def block(index: Value) -> list[Value]:
    first = index * BLOCK
    columns = upper.after(first * 4)

    def compensate(i: Value, largest: Value) -> list[Value]:
      sums = _sums(columns.after(i * 4), width, 4, errors, first + 1)
      for offset, total in enumerate(sums):
        original = place.floats(place.weight, first + i + offset).load(_FLOATS)
        moved = original - total
        _at(target, i + offset).store(moved, align=32)
        largest = largest.call("smax", moved.bits() & (2**31 - 1))
      return [largest]

    # Still without an error, and keeps the first block's sums from being empty.
    _at(errors, first).store(constant(code, _FLOATS, 0.0), align=32)
    start = constant(code, _INTS, 0)
    (largest,) = repeat(_zero(code), BLOCK, compensate, start, step=_AT_ONCE)
    floor = block_exponent(largest, 0)
    # At most 126, since a float32 is below 2^128.
    tries = [_Try(*both, floor + step) for step, both in enumerate(buffers)]
    table = columns.after(first * width)
    low, high = (_round_block(target, table, width, one) for one in tries)
    # At a tie the floor rule's exponent, as in the reference.
    is_higher = high < low
    chosen = where(is_higher, tries[1].exponent, tries[0].exponent)
    _, _, scale = scales(chosen)
    place.floats(place.exponent, index).store(chosen)

    def keep(i: Value) -> list[Value]:
      def chosen_row(addresses: list[Value]) -> Value:
        first_try, second_try = (_at(a, i).load(_FLOATS, 32) for a in addresses)
        return where(is_higher, second_try, first_try)

      element = chosen_row([one.elements for one in tries])
      error = chosen_row([one.errors for one in tries])
      _at(errors, first + i).store(error, align=32)
      place.bytes(place.codes, first + i).store(_code_of(element), align=1)
      place.floats(place.decoded, first + i).store(element * scale)
      return []

    repeat(_zero(code), BLOCK, keep)
    return []

  repeat(_zero(code), blocks, block)
  code.ret_void()
  return function


def _write_descent(module: ir.Module, name: str, passes: int) -> ir.Function:
  """Emits passes of coordinate descent of a part; its room gets the weights' gap."""
  takes = ir.FunctionType(ir.VoidType(), [POINTER] * 7 + [I64] * 3)
  function = ir.Function(module, takes, f"{name}.descent")
  code = ir.IRBuilder(function.append_basic_block("entry"))
  weight, hessian, shift, codes, exponents, decoded, gap, blocks, stride, width = (
    Value(code, argument) for argument in function.args
  )
  place = _Place(weight, codes, exponents, decoded, stride, width)
  slope = room(code, _TILE)
  features = blocks * BLOCK
  damping = shift.load(F32).spread(ROWS)

  def open_gap(d: Value) -> list[Value]:
    ours = place.floats(place.decoded, d).load(_FLOATS)
    _at(gap, d).store(place.floats(place.weight, d).load(_FLOATS) - ours, align=32)
    return []

  repeat(_zero(code), features, open_gap)

  def block(index: Value) -> list[Value]:
    first = index * BLOCK
    panel = hessian.after(first * width)

    def slopes(i: Value) -> list[Value]:
      sums = _sums(panel.after(i * width), 4, width, gap, features)
      for offset, total in enumerate(sums):
        here = _at(gap, first + i + offset).load(_FLOATS, 32)
        _at(slope, i + offset).store(total + damping * here, align=32)
      return []

    repeat(_zero(code), BLOCK, slopes, step=_AT_ONCE)
    exponent = place.floats(place.exponent, index).load(_INTS)
    tile = panel.after(first * 4)
    repeat(
      _zero(code),
      BLOCK,
      lambda j: _descend(place, tile, slope, gap, damping, first, j, scales(exponent)),
    )
    return []

  def turn(_: Value) -> list[Value]:
    repeat(_zero(code), blocks, block)
    return []

  if passes:
    repeat(_zero(code), passes, turn)
  code.ret_void()
  return function


def _descend(
  place: _Place,
  tile: Value,
  slope: Value,
  gap: Value,
  damping: Value,
  first: Value,
  j: Value,
  of_exponent: tuple[Value, Value, Value],
) -> list[Value]:
  """Moves a column's codes where that lowers the objective."""
  code = j.code
  shift, low_shift, scale = of_exponent
  coupling = tile.after(j * place.width)
  pivot = coupling.after(j * 4).load(F32).spread(ROWS) + damping
  old = place.floats(place.decoded, first + j).load(_FLOATS)
  pull = _at(slope, j).load(_FLOATS, 32)
  none = constant(code, _FLOATS, 0.0)
  is_curved = none < pivot
  vertex = old + where(is_curved, pull / where(is_curved, pivot, 1.0), none)
  element = nearest_element(vertex, shift, low_shift)
  step = element * scale - old
  is_better = (step * (step * pivot - pull * 2.0)) < 0.0
  step = where(is_better, step, none)
  value = where(is_better, element * scale, old)
  place.floats(place.decoded, first + j).store(value)
  at_code = place.bytes(place.codes, first + j)
  at_code.store(where(is_better, _code_of(element), at_code.load(_BYTES, 1)), align=1)
  # The gap stays that of the current codes, from which later blocks take their slopes.
  ours = place.floats(place.weight, first + j).load(_FLOATS) - value
  _at(gap, first + j).store(ours, align=32)

  def follow(i: Value) -> list[Value]:
    factor = coupling.after(i * 4).load(F32).spread(ROWS)
    lowered = _at(slope, i).load(_FLOATS, 32) - factor * step
    _at(slope, i).store(lowered, align=32)
    return []

  # Without the damping, which is on the diagonal: this column is not read again.
  repeat(_zero(code), BLOCK, follow)
  return []


def _parts(frame: Value) -> Value:
  """Returns the number of parts: groups of `ROWS` rows."""
  return dimension(frame, 0, 2) / ROWS


def kernels(name: str, passes: int) -> tuple[ir.Module, dict[str, tuple[Count, Part]]]:
  """Emits the kernel with a number of passes of descent, under a name."""
  module = ir.Module("row_rounding")
  gptq = _write_gptq(module, name)
  descent = _write_descent(module, name, passes)

  def part(frame: Value, index: Value) -> None:
    code = frame.code
    blocks, rows = (dimension(frame, 0, axis) for axis in (0, 2))
    stride, width = rows * 4, blocks * _BLOCK_BYTES
    at = index * _ROW
    weight, decoded, exponent = (
      array.after(at)
      for array in (operand(frame, 0), result(frame, 1), result(frame, 2))
    )
    codes = result(frame, 0).after(index * ROWS)
    own = result(frame, 3).after(at * blocks * BLOCK)
    upper, hessian, shift = (operand(frame, place) for place in (1, 2, 3))
    sizes = blocks, stride, width
    outputs = codes, exponent, decoded, own
    code.call(gptq, [v.raw for v in (weight, upper, *outputs, *sizes)])
    code.call(descent, [v.raw for v in (weight, hessian, shift, *outputs, *sizes)])

  return module, {name: (_parts, part)}
