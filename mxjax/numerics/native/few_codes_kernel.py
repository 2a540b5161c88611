"""LLVM kernel that maps, encodes and changes a few codes of a tile of tokens.

The reference is `mxjax.numerics.realization.few_codes.refine`, formula for formula. See
`refinement_kernel`, whose parts it is made of, for tiles and for the order of sums.

Operands: x `[blocks, 32, n]`, gram `[blocks, 32, 32]`, and with a map another table.
"""

from collections.abc import Callable

from llvmlite import ir

from mxjax.numerics.native.custom_call import Count, Part
from mxjax.numerics.native.refinement_kernel import (
  BLOCK,
  TILE_BYTES,
  Tile,
  best_code,
  encode_tile,
  part,
  parts,
  read_tile,
  row_at,
  write_product,
)
from mxjax.numerics.native.values import (
  F32,
  FLOATS,
  I64,
  INTS,
  POINTER,
  Value,
  constant,
  repeat,
  where,
)


def _best(tile: Tile, gram: Value, scale: Value) -> tuple[Value, Value]:
  """Finds the change of the lowest score, the first in case of ties.

  Returns its coordinate, or -1 where no score is negative, and its value.
  """
  code = scale.code

  def row(i: Value, *before: Value) -> list[Value]:
    slope, nearest = (
      row_at(a, i).load(FLOATS, 64) for a in (tile.pulled, tile.nearest)
    )
    curvature = gram.after(i * (4 * (BLOCK + 1))).load(F32).spread()
    score, value = best_code(nearest, scale, slope, curvature)
    is_best = score < before[0]
    new = score, i.narrow().spread(), value
    return [where(is_best, *pair) for pair in zip(new, before, strict=True)]

  number = lambda kind, value: constant(code, kind, value)
  # Only what lowers the objective is a change.
  start = number(FLOATS, 0.0), number(INTS, -1), number(FLOATS, 0.0)
  _, coordinate, value = repeat(number(I64, 0), BLOCK, row, *start)
  return coordinate, value


def _change(
  tile: Tile, gram: Value, scale: Value, product: ir.Function, best: tuple[Value, Value]
) -> None:
  """Changes the codes of a tile, and its slopes by G times what that moved."""
  coordinate, value = best
  zero = constant(scale.code, I64, 0)

  def row(i: Value) -> list[Value]:
    nearest = row_at(tile.nearest, i).load(FLOATS, 64)
    element = where(coordinate.equals(i.narrow().spread()), value, nearest)
    row_at(tile.difference, i).store((element - nearest) * scale, align=64)
    row_at(tile.nearest, i).store(element, align=64)
    return []

  repeat(zero, BLOCK, row)
  scale.code.call(product, [gram.raw, tile.difference.raw, tile.mismatch.raw])

  def add(i: Value) -> list[Value]:
    slope, moved = (row_at(a, i).load(FLOATS, 64) for a in (tile.pulled, tile.mismatch))
    row_at(tile.pulled, i).store(slope + moved, align=64)
    return []

  repeat(zero, BLOCK, add)


def _write_tile(
  module: ir.Module,
  name: str,
  product: ir.Function,
  *,
  maps: bool,
  changes: int,
  carry: int,
) -> ir.Function:
  """Emits the function for one tile: five addresses and the bytes between features."""
  takes = ir.FunctionType(ir.VoidType(), [POINTER] * 5 + [I64])
  function = ir.Function(module, takes, f"{name}.tile")
  code = ir.IRBuilder(function.append_basic_block("entry"))
  x, gram, matrix, to, cache, stride = (Value(code, a) for a in function.args)
  tile = Tile(*(cache.after(i * TILE_BYTES) for i in range(len(Tile._fields))))
  read_tile(tile, x, stride, matrix if maps else None, product)
  scale = encode_tile(tile, carry)
  code.call(product, [gram.raw, tile.difference.raw, tile.pulled.raw])

  def turn(_: Value) -> list[Value]:
    _change(tile, gram, scale, product, _best(tile, gram, scale))
    return []

  # The last change is made as results are stored, because no slope is read after it.
  # `repeat` would run once for zero turns, too.
  if changes > 1:
    repeat(constant(code, I64, 0), changes - 1, turn)
  coordinate, value = _best(tile, gram, scale)

  def row(i: Value) -> list[Value]:
    nearest = row_at(tile.nearest, i).load(FLOATS, 64)
    element = where(coordinate.equals(i.narrow().spread()), value, nearest)
    to.after(i * stride).store(element * scale)
    return []

  repeat(constant(code, I64, 0), BLOCK, row)
  code.ret_void()
  return function


def kernels(
  kernel_name: Callable[..., str], changes: int, carry: int
) -> tuple[ir.Module, dict[str, tuple[Count, Part]]]:
  """Emits the kernels with and without a map for a number of changes.

  `carry` is that of the scale rule; `kernel_name` names a kernel from the keyword
  `maps`.
  """
  module = ir.Module("few_codes")
  product = write_product(module)
  written = {}
  for maps in (False, True):
    name = kernel_name(maps=maps)
    keywords = {"maps": maps, "changes": changes, "carry": carry}
    tile = _write_tile(module, name, product, **keywords)
    written[name] = parts, part(tile, (1, 2 if maps else None))
  return module, written
