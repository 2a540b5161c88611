"""The float8 product of W4A4 operands, and a kernel that shifts some of its rows.

Inputs are E5M2 in absolute units (`float8.py`), weights E4M3 with one power of two
(`mxfp4_decode.py`), and their products are exact. The library multiplies them, or
Mosaic's kernel, which decodes weights in registers (`choice.py`). A row with a block
outside E5M2's range is multiplied by the power of two that takes its largest block to
the top of the range, and its products by the inverse. A row's blocks may then lie 2^28
apart, where float32 keeps 24 bits of a sum. The kernel that shifts always runs, because
only the GPU knows which rows these are; nearly always a program only checks the scales
of its rows.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.errors import ValueRefusal
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.implementations import FLOAT8, Implementation
from mxjax.numerics.precision import HIGHEST
from mxjax.pallas_kernels import choice, codec, lowering, mxfp4_decode
from mxjax.pallas_kernels.mosaic import products, stream_k
from mxjax.pallas_kernels.products import float8
from mxjax.pallas_kernels.products.float8 import Float8Inputs

_ROWS, _COLUMNS = 32, 128
"""Rows of a program and columns of a step."""
_SCALES = 64
"""Scales of a row that are checked per step."""
_PROGRAMS = 4
"""Programs that share the columns of a tile of rows."""


def _part(step: jax.Array, size: int, total: int) -> tuple[Any, jax.Array | None]:
  """Returns a step's columns and which of them exist; None if every step is full."""
  exists = step * size + lax.iota(jnp.int32, size) < total
  return lowering.columns(step * size, size), exists if total % size else None


def _shift_kernel(
  byte_ref: Any,
  scales_ref: Any,
  out_ref: Any,
  unit_ref: Any,
  *,
  place: tuple[jax.Array, jax.Array],
  rows: int,
  width: int,
  is_by_blocks: bool,
) -> None:
  """Shifts some columns of a tile of rows in place; `out_ref` is `byte_ref`."""
  exists, share = lowering.tail_mask(rows, _ROWS, place[0]), place[1]
  blocks, steps = width // mxfp4.BLOCK_SIZE, -(-width // _COLUMNS)

  def look(step: jax.Array, before: Any) -> Any:
    here, has_block = _part(step, _SCALES, blocks)
    byte = lowering.load(scales_ref.at[:, here], exists, has_block)
    exponent = float8.exponents(byte)
    outside = float8.is_outside(exponent).astype(jnp.int32)
    found = jnp.max(outside, axis=1), jnp.max(exponent, axis=1)
    return tuple(map(jnp.maximum, before, found))

  none = jnp.zeros(_ROWS, jnp.int32), jnp.full(_ROWS, -mxfp4.SCALE_BIAS, jnp.int32)
  # A shift is that of a whole row, so every program looks at all of its scales.
  outside, top = lax.fori_loop(0, -(-blocks // _SCALES), look, none)
  shift = float8.shift_of(outside > 0, top)
  # As wide as the rows, because a mask has an axis; one program writes the units.
  is_first = (share + 0 * shift) == 0
  its = is_first if exists is None else is_first & exists
  lowering.store(unit_ref, float8.row_unit(shift, top), its)

  def move(step: jax.Array, carry: None) -> None:
    at = share + step * _PROGRAMS
    here, has_column = _part(at, _COLUMNS, width)
    its_blocks, has_block = _part(at, _COLUMNS // mxfp4.BLOCK_SIZE, blocks)
    byte = lowering.load(byte_ref.at[:, here], exists, has_column).astype(jnp.int16)
    scale = lowering.load(scales_ref.at[:, its_blocks], exists, has_block)
    exponent = _spread(float8.exponents(scale), is_by_blocks)
    value = float8.shifted_values(float8.from_byte(byte), exponent, shift[:, None])
    # Rows that stay are not stored, so that their bits do not depend on others.
    lowering.store(out_ref.at[:, here], float8.to_byte(value), outside > 0, has_column)
    return carry

  @lowering.when(jnp.max(outside, axis=0) > 0)
  def _() -> None:
    lax.fori_loop(0, (steps - share + _PROGRAMS - 1) // _PROGRAMS, move, None)


def _spread(exponent: jax.Array, is_by_blocks: bool) -> jax.Array:
  """Repeats exponents `[rows, blocks]` for the columns of their blocks."""
  if not is_by_blocks:
    return codec.spread(exponent, mxfp4.BLOCK_SIZE)
  groups = exponent.reshape(len(exponent), -1, 1, float8.BLOCKS, 1)
  each = float8.WORDS, float8.BLOCKS, 4
  return jnp.broadcast_to(groups, (*groups.shape[:2], *each)).reshape(len(exponent), -1)


def shifted(x: Float8Inputs, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """Takes all rows of `[n, d]` into E5M2's range; see `shifted_each`."""
  return shifted_each([x], interpret=interpret)[0]


def shifted_each(
  xs: Sequence[Float8Inputs], *, interpret: bool = False
) -> list[tuple[jax.Array, jax.Array]]:
  """Takes all rows into E5M2's range by powers of two of their own, in one launch.

  Inputs have one shape `[n, d]` and order. Returns for each E5M2 values `[n, d]`, and
  what a row's products are to be multiplied by, float32 `[n]`: 1 for a row without a
  block outside the range, whose values stay.
  """
  rows, width = xs[0].shape
  is_by_blocks = xs[0].is_by_blocks
  covered = lambda size, unit: -(-size // unit) * unit
  row = lambda *columns: lowering.BlockSpec(
    (_ROWS, *columns), lambda i, j, _: (i, *(0 for _ in columns))
  )
  byte = row(covered(width, _COLUMNS))
  array = jax.ShapeDtypeStruct
  scales = row(covered(width // mxfp4.BLOCK_SIZE, _SCALES))
  made = array((rows, width), jnp.uint8), array((rows,), jnp.float32)
  keywords = {"rows": rows, "width": width, "is_by_blocks": is_by_blocks}

  def kernel(operands: Any, *results: Any) -> None:
    *place, linear = map(lowering.program_id, range(3))
    one = functools.partial(_shift_kernel, place=tuple(place), **keywords)
    each = zip(operands, results, strict=True)
    branches = [functools.partial(one, *given, *to) for given, to in each]
    lowering.switch(linear, branches)

  view = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint8)
  count = len(xs)
  results = lowering.launch(
    kernel,
    [(view(x.values), x.scales) for x in xs],
    name="float8_shift",
    grid=(-(-rows // _ROWS), min(_PROGRAMS, -(-width // _COLUMNS)), count),
    in_specs=[[(byte, scales)] * count],
    out_specs=[(byte, row())] * count,
    out_shape=[made] * count,
    # Values, in the even places of operands and results, are shifted where they lie.
    in_place={2 * i: 2 * i for i in range(count)},
    warps=4,
    interpret=interpret,
  )
  return [(lax.bitcast_convert_type(a, float8.FORM), unit) for a, unit in results]


def _shifted_by_xla(x: Float8Inputs) -> tuple[jax.Array, jax.Array]:
  """Computes `shifted` without a kernel."""
  exponent = float8.exponents(x.scales)
  outside, top = float8.is_outside(exponent).any(axis=1), exponent.max(axis=1)
  shift = float8.shift_of(outside, top)
  wide = _spread(exponent, x.is_by_blocks)
  moved = float8.shifted_values(x.values.astype(jnp.float32), wide, shift[:, None])
  moved = lax.bitcast_convert_type(float8.to_byte(moved), float8.FORM)
  return jnp.where(outside[:, None], moved, x.values), float8.row_unit(shift, top)


def float8_matmul(
  x: Float8Inputs,
  weight: mxfp4.MXTensor,
  unit: jax.Array,
  *,
  dtype: jax.typing.DTypeLike = jnp.float32,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Multiplies W4A4 operands like `matmul.matmul`, by a product of float8.

  The products are exact; the GPU and its library decide how float8 sums are rounded:
  see docs/concepts/kernels.md. `choice.product` says what multiplies. A row with a
  block outside E5M2's range is shifted into it by a power of two; what it holds is then
  rounded to multiples of 2^-29 of the scale of its largest block. `x` is `[n, d]`, the
  packed weight `[m, d]` must be accepted by `mxfp4_decode.float8_range`, and `unit` is
  the scale from there. `implementation` concerns everything but the library's product.
  Returns `[n, m]` in `dtype`; raises ValueError if the widths differ.
  """
  keywords = {"dtype": dtype, "implementation": implementation}
  [made] = float8_matmul_each([x], [weight], [unit], **keywords)
  return made


def float8_matmul_each(
  xs: Sequence[Float8Inputs],
  tensors: Sequence[mxfp4.MXTensor],
  units: Sequence[jax.Array],
  *,
  dtype: jax.typing.DTypeLike = jnp.float32,
  implementation: Implementation | None = None,
) -> list[jax.Array]:
  """Multiplies the operands of several linears of one width as `float8_matmul` does.

  The inputs, `[n, d]` all, may be the same object. Linears that the stream-K form
  multiplies share a launch, the others have launches of their own.
  """
  for x, weight in zip(xs, tensors, strict=True):
    if x.shape[-1] != weight.shape[-1] or x.shape != xs[0].shape:
      raise ValueRefusal(
        "pallas_kernels.float8_matmul",
        expected="x [n, d] and weight [m, d], n and d the same in all",
        got=f"{x.shape} and {weight.shape}",
      )
  implementation = implementations.choose(
    "pallas_kernels.float8_matmul",
    implementation,
    pallas=None if xs[0].shape[0] else "x has no rows",
    capability=FLOAT8,
  )
  chosen = [
    choice.product(x.shape[0], *weight.shape, has_float8=True)
    for x, weight in zip(xs, tensors, strict=True)
  ]
  places = range(len(xs)) if implementation != "xla" else ()
  shared = [place for place in places if chosen[place] is choice.FLOAT8_STREAM]
  of_shared = lambda of_each: [of_each[place] for place in shared]
  made: dict[int, jax.Array] = {}
  if shared:
    operands = map(of_shared, (xs, tensors, units))
    results = _together(*operands, dtype=dtype, interpret=implementation == "interpret")
    made = dict(zip(shared, results, strict=True))
  for place, operands in enumerate(zip(xs, tensors, units, chosen, strict=True)):
    if place not in made:
      made[place] = _alone(*operands, dtype=dtype, implementation=implementation)
  return [made[place] for place in range(len(xs))]


def _together(
  xs: Sequence[Float8Inputs],
  tensors: Sequence[mxfp4.MXTensor],
  units: Sequence[jax.Array],
  *,
  dtype: jax.typing.DTypeLike,
  interpret: bool,
) -> list[jax.Array]:
  """Multiplies by the stream-K form; one launch shifts the inputs of all."""
  # What all share is shifted once.
  xs = xs[:1] if all(x is xs[0] for x in xs) else xs
  each = shifted_each([x.by_blocks() for x in xs], interpret=interpret)
  moved, by_row = zip(*each, strict=True)
  return stream_k.float8_products(
    moved, tensors, units, by_row, dtype=dtype, interpret=interpret
  )


def _alone(
  x: Float8Inputs,
  weight: mxfp4.MXTensor,
  unit: jax.Array,
  chosen: choice.Product,
  *,
  dtype: jax.typing.DTypeLike,
  implementation: Implementation,
) -> jax.Array:
  """Multiplies by a launch of its own, or by the library."""
  interpret = implementation == "interpret"
  # Both products below read the columns in their order.
  x = x.in_order()
  moved, by_row = (
    _shifted_by_xla(x) if implementation == "xla" else shifted(x, interpret=interpret)
  )
  # Powers of two or NaN: exact in bfloat16, too.
  by_row = by_row[:, None].astype(dtype)
  if implementation != "xla" and chosen is choice.FLOAT8_MOSAIC:
    made = products.float8_product(
      moved, weight, unit, dtype=dtype, interpret=interpret
    )
    return made * by_row
  values = mxfp4_decode.decode_float8(weight, unit, implementation=implementation)
  # The highest precision keeps a GPU's library from using its fast sums.
  by_columns = ((1,), (1,)), ((), ())
  keywords = {"precision": HIGHEST, "preferred_element_type": dtype}
  return (
    lax.dot_general(moved, values, by_columns, **keywords) * unit.astype(dtype) * by_row
  )
