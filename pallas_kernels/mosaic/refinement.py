"""Map, A4 encode and one-code refinement of many rows, in Mosaic GPU.

The split arithmetic of `refinement/tile.py`, with its exact ties. A program, one warp
group, takes two blocks of 32 features and walks over tiles of 64 rows; TMA brings the
next tile while this one is computed. The three bfloat16 terms of a table lie side by
side along K, so that a tile waits for its products twice: once for U x and M x, once
for G q.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import codec
from mxjax.pallas_kernels.mosaic import device
from mxjax.pallas_kernels.mosaic.device import gpu
from mxjax.pallas_kernels.products import float8

ROWS, BLOCKS, TERMS = 64, 2, 3
"""Rows of a tile, blocks of a program, and bfloat16 terms of a float32 table."""
AT_ONCE = 3 * device.MULTIPROCESSORS
"""Programs that run at once; registers and shared memory allow three each."""
_BLOCK = mxfp4.BLOCK_SIZE
_PACKED = _BLOCK * (_BLOCK + 1) // 2
_PAIR = _BLOCK // 2

UPPER_PTX = "prmt.b32 $0, $1, $2, 0x7632;"
"""From two float32 to their upper halves, two bfloat16."""

NEAREST_PTX = """{
  .reg .b32 size, other;
  and.b32 size, $1, 0x7FF87FF8;
  mul.rn.bf16x2 size, size, $2;
  mov.b32 other, 0x00800080;
  mul.rn.bf16x2 size, size, other;
  mov.b32 other, 0x00200020;
  add.u16x2 size, size, other;
  mov.b32 other, 0x01FF01FF;
  min.u16x2 size, size, other;
  and.b32 size, size, 0x01C001C0;
  mov.b32 other, 0x7E807E80;
  mul.rn.bf16x2 size, size, other;
  lop3.b32 $0, $1, 0x80008000, size, 0xEA;
}"""
"""From two bfloat16 and the duplicated 2^-e to their nearest values, two bfloat16. The
bits are those of `mxfp4_encode.pair_ptx`; a product with 2^126 makes them values."""

CODES_PTX = """{
  .reg .b32 size, other;
  mov.b32 other, 0x00800080;
  mul.rn.bf16x2 size, $1, other;
  and.b32 size, size, 0x01C001C0;
  shr.b32 other, $1, 6;
  and.b32 other, other, 0x02000200;
  or.b32 size, size, other;
  mul.lo.u32 size, size, 4097;
  shr.b32 $0, size, 18;
}"""
"""From two legal bfloat16 values to a byte of two codes."""


def _by_ptx(ptx: str, meaning: Any, layout: Any, *operands: Any, interpret: bool) -> Any:
  """Runs PTX on `[64, 32]` elements and, after them, words of two: `[64, 16]`."""
  is_whole = [operand.shape[1] == _BLOCK for operand in operands]
  words = device.words_layout()
  layouts = [gpu.Layout.WGMMA if whole else words for whole in is_whole]
  how = {"layouts": layouts, "layout": layout, "interpret": interpret}
  return device.by_ptx(ptx, meaning, *operands, **how)


def halves(word: jax.Array) -> jax.Array:
  """Returns float32 `[n, 2 m]` of the two bfloat16 in int32 words `[n, m]`."""
  pair = jnp.stack([word << 16, word & codec.UPPER], axis=-1)
  return codec.from_bits(pair.reshape(word.shape[0], -1))


def upper_words(x: jax.Array) -> jax.Array:
  """Returns the upper halves of float32 `[n, 32]`, two to an int32 word."""
  bits = lax.shift_right_logical(codec.bits(x), jnp.int32(16))
  even, odd = jnp.moveaxis(bits.reshape(x.shape[0], -1, 2), -1, 0)
  return even | (odd << 16)


def nearest_values(word: jax.Array, factor: jax.Array) -> jax.Array:
  """Encodes pairs of bfloat16 to legal values, bfloat16 `[n, 32]`; see `NEAREST_PTX`.

  `word` and `factor`, the duplicated bits of 2^-e, are int32 `[n, 16]`. A zero keeps
  the sign of what was rounded to it.
  """
  x = halves(word)
  exponent = mxfp4.SCALE_BIAS - jnp.repeat((factor >> 7) & 255, 2, axis=1)
  bits = codec.bits(x) & codec.UPPER_HALF
  index = codec.magnitude_index(bits, exponent, has_subnormals=False)
  return codec.copy_sign(codec.magnitude(index), x).astype(jnp.bfloat16)


def packed_codes(values: jax.Array) -> jax.Array:
  """Returns bytes of two codes, uint8 `[n, 16]`, of legal bfloat16 `[n, 32]`."""
  wide = values.astype(jnp.float32)
  return codec.pack(codec.code_of(wide, wide))


def best_change(
  nearest: jax.Array,
  slope: jax.Array,
  curvature: jax.Array,
  half: jax.Array,
  reciprocal: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Computes `tile.best_change` with fewer instructions, float32 `[n, 32]`.

  `half` is half the curvature and `reciprocal` one over it, finite.

  The score and, where it is negative, the value are the same; a zero may be negative.
  """
  optimum = nearest - slope * reciprocal
  sign = codec.bits(optimum) & codec.SIGN
  size = jnp.minimum(jnp.abs(optimum), 5.0)
  offset = jnp.where(size < 1.0, 1.0, 0.0)
  inner = codec.bits(size + offset) & -(1 << 22)
  middle = codec.from_bits(inner | (1 << 21)) - offset
  middle = codec.from_bits(codec.bits(middle) | sign)
  rises = slope + (middle - nearest) * curvature
  is_outer = codec.from_bits(codec.bits(rises) ^ sign) < 0
  value = codec.from_bits(jnp.where(is_outer, inner + (1 << 22), inner)) - offset
  value = codec.from_bits(codec.bits(value) | sign)
  delta = value - nearest
  return delta * (slope + delta * half), value


def _is_changed(score: jax.Array, place: jax.Array) -> jax.Array:
  """Returns where a row changes: at its lowest score, the first of equal ones."""
  lowest = jnp.min(score, axis=1)
  ties = jnp.where(score == _by_row(lowest), place, _BLOCK)
  first = jnp.where(lowest < 0, jnp.min(ties, axis=1), _BLOCK)
  return place == _by_row(first)


def _by_row(column: jax.Array, width: int = _BLOCK) -> jax.Array:
  return lax.broadcast_in_dim(column, (ROWS, width), (0,))


def _by_column(row: jax.Array) -> jax.Array:
  return lax.broadcast_in_dim(row, (ROWS, _BLOCK), (1,))


def _iota(axis: int) -> jax.Array:
  shape, layout = (ROWS, _BLOCK), gpu.Layout.WGMMA
  return gpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


@dataclasses.dataclass(frozen=True)
class _Work:
  """Static properties of a launch, and the program's place in it."""

  rows: int
  repeats: int
  has_map: bool
  has_gram: bool
  form: str
  interpret: bool

  @property
  def tiles(self) -> int:
    return -(-self.rows // ROWS)

  def start(self, step: jax.Array) -> jax.Array:
    """Returns a tile's first row; the last tile overlaps, and writes the same."""
    tile = lax.axis_index("part") * self.repeats + step
    return jnp.minimum(tile * ROWS, self.rows - ROWS)


def _narrow(x: jax.Array, work: _Work) -> jax.Array:
  """Cuts float32 to bfloat16."""
  cut = lambda x: codec.from_bits(codec.bits(x) & codec.UPPER).astype(jnp.bfloat16)
  return _by_ptx(UPPER_PTX, cut, gpu.Layout.WGMMA, x, interpret=work.interpret)


def _terms(table: jax.Array, work: _Work) -> list[jax.Array]:
  """Returns three bfloat16 terms that add up to a float32 table, smallest first."""
  terms = []
  for _ in range(TERMS):
    terms.insert(0, _narrow(table, work))
    table = table - codec.from_bits(codec.bits(table) & codec.UPPER)
  return terms


def _store_terms(ref: Any, terms: Sequence[jax.Array]) -> None:
  for i, term in enumerate(terms):
    ref[:, i * _BLOCK : (i + 1) * _BLOCK] = term


def _of_block(block: int) -> Any:
  return pl.ds(block * _BLOCK, _BLOCK)


def _triangle(low: jax.Array, high: jax.Array, block: Any) -> jax.Array:
  """Returns places in the packed triangles of `one_code.pack_symmetric`."""
  return block * _PACKED + (low * (2 * _BLOCK - 1 - low) >> 1) + high


def _prepare(refs: dict[str, Any], scratch: Any, work: _Work) -> None:
  """Writes the terms of U, G and M, and the curvatures, to shared memory."""
  pair, how = lax.axis_index("pair"), {"interpret": work.interpret}
  here = pl.ds(pair * ROWS, ROWS)

  def load(name: str) -> jax.Array:
    how = {"layout": gpu.Layout.WGMMA, "optimized": False}
    return gpu.load(refs[name].at[here], **how).astype(jnp.float32)

  if work.has_map:
    _store_terms(scratch["map"], _terms(load("matrix"), work))
  if not work.has_gram:
    return
  row, column = _iota(0), _iota(1)
  inside, block = row & (_BLOCK - 1), pair * BLOCKS + (row >> 5)
  place = _triangle(jnp.minimum(inside, column), jnp.maximum(inside, column), block)
  gram = device.take(refs["gram"], place, layout=gpu.Layout.WGMMA, **how)
  gram = gram.astype(jnp.float32)
  _store_terms(scratch["gram"], _terms(gram, work))
  mismatch = gram + load("cross")
  if work.has_map:
    gpu.commit_smem()
    mismatch = _mapped(_terms(mismatch, work), scratch, work, row < _BLOCK)
  _store_terms(scratch["mismatch"], _terms(mismatch, work))
  layout = gpu.Layout.WGMMA.reduce(0)
  diagonal = gpu.broadcasted_iota(jnp.int32, (_BLOCK,), 0, layout=layout)
  for b in range(BLOCKS):
    place = _triangle(diagonal, diagonal, pair * BLOCKS + b)
    curvature = device.take(refs["gram"], place, layout=layout, **how)
    curvature = curvature.astype(jnp.float32)
    # A slope of 0 times infinity would be NaN.
    reciprocal = jnp.minimum(1.0 / curvature, jnp.finfo(jnp.float32).max)
    for i, row in enumerate((curvature, 0.5 * curvature, reciprocal)):
      scratch["curvature"][b, i] = row


def _mapped(
  terms: Sequence[jax.Array], scratch: Any, work: _Work, is_first: jax.Array
) -> jax.Array:
  """Multiplies both blocks' tables by U, float32 `[64, 32]`, from their terms.

  What is left out is below the last bit of a float32 product.
  """
  pairs = (0, 2), (1, 1), (2, 0), (1, 2), (2, 1), (2, 2)

  def product(block: int) -> jax.Array:
    def run(acc: Any) -> jax.Array:
      for i, j in pairs:
        columns = slice(j * _BLOCK, (j + 1) * _BLOCK)
        matrix = scratch["map"].at[_of_block(block), columns]
        stage = scratch["stage"].at[:, :_BLOCK] if work.interpret else None
        device.multiply(acc, terms[i], matrix, stage)
      return lax.optimization_barrier(acc[...])

    return pl.run_scoped(run, gpu.ACC((ROWS, _BLOCK), jnp.float32))

  return jnp.where(is_first, product(0), product(1))


def _products(x: Any, block: int, scratch: Any, work: _Work) -> list[jax.Array]:
  """Returns U x and M x of a tile in shared memory, those that there are."""
  there = ("map", work.has_map), ("mismatch", work.has_gram)
  tables = [scratch[name].at[_of_block(block)] for name, is_there in there if is_there]

  def run(*accs: Any) -> list[jax.Array]:
    for i in range(TERMS):
      for acc, table in zip(accs, tables, strict=True):
        gpu.wgmma(acc, x, table.at[:, i * _BLOCK : (i + 1) * _BLOCK].T)
    # Nothing may read an accumulator before the products are waited for.
    return list(lax.optimization_barrier([acc[...] for acc in accs]))

  return pl.run_scoped(run, *[gpu.ACC((ROWS, _BLOCK), jnp.float32)] * len(tables))


def _pulled(nearest: jax.Array, block: int, scratch: Any, work: _Work) -> jax.Array:
  """Returns G q."""

  def run(acc: Any) -> jax.Array:
    whole = jnp.concatenate([nearest] * TERMS, axis=1)
    stage = scratch["stage"] if work.interpret else None
    device.multiply(acc, whole, scratch["gram"].at[_of_block(block)].T, stage)
    return lax.optimization_barrier(acc[...])

  return pl.run_scoped(run, gpu.ACC((ROWS, _BLOCK), jnp.float32))


def _realize(
  x: Any, block: int, scratch: Any, work: _Work
) -> tuple[jax.Array, jax.Array]:
  """Realizes a tile: bfloat16 values in units of the scale, and exponents `[64]`."""
  how = {"interpret": work.interpret}
  products = _products(x, block, scratch, work) if work.has_map or work.has_gram else []
  if work.has_map:
    words = _by_ptx(
      UPPER_PTX, upper_words, device.words_layout(), products[0], **how
    )
  else:
    words = gpu.load(x, layout=gpu.Layout.WGMMA)
    cast = lambda x: upper_words(x.astype(jnp.float32))
    words = _by_ptx("mov.b32 $0, $1;", cast, device.words_layout(), words, **how)
  size = words & 0x7FFF7FFF
  # The upper half of a word determines the exponent, whatever is in the lower half.
  largest = jnp.maximum(jnp.max(size, axis=1), jnp.max(size << 16, axis=1))
  exponent = codec.block_exponent(largest)
  inverse = codec.inverse_scale_of(exponent)
  factor = lax.shift_right_logical(codec.bits(inverse), jnp.int32(16)) * 0x10001
  nearest = _by_ptx(
    NEAREST_PTX, nearest_values, gpu.Layout.WGMMA, words, _by_row(factor, _PAIR), **how
  )
  if not work.has_gram:
    return nearest, exponent
  slope = _pulled(nearest, block, scratch, work) - products[-1] * _by_row(inverse)
  before = nearest.astype(jnp.float32)
  layout = gpu.Layout.WGMMA.reduce(0)
  rows = (gpu.load(scratch["curvature"].at[block, i], layout=layout) for i in range(3))
  score, value = best_change(before, slope, *map(_by_column, rows))
  # A newly chosen zero is +0, code 0.
  result = jnp.where(_is_changed(score, _iota(1)), value + 0.0, before)
  return _narrow(result, work), exponent


def _outputs(
  values: jax.Array, exponent: jax.Array, work: _Work
) -> tuple[jax.Array, jax.Array | None]:
  """Returns a tile in the form that is asked for, and its scale bytes."""
  byte = (exponent + mxfp4.SCALE_BIAS).astype(jnp.uint8)
  if work.form == "codes":
    layout = device.words_layout()
    how = {"interpret": work.interpret}
    return _by_ptx(CODES_PTX, packed_codes, layout, values, **how), byte
  if work.form == "values":
    return values * _by_row(codec.scale_of(exponent).astype(jnp.bfloat16)), None
  scale = codec.scale_of(exponent)
  factor = _by_row(jnp.where(float8.is_outside(exponent), 1.0, scale))
  return (values.astype(jnp.float32) * factor).astype(float8.FORM), byte


def _kernel(refs: dict[str, Any], scratch: Any, work: _Work) -> None:
  pair = lax.axis_index("pair")
  count = jnp.minimum(
    work.repeats, work.tiles - lax.axis_index("part") * work.repeats
  )

  def fetch(step: jax.Array) -> None:
    slot, rows = lax.rem(step, 2), pl.ds(work.start(step), ROWS)
    for block in range(BLOCKS):
      columns = pl.ds((pair * BLOCKS + block) * _BLOCK, _BLOCK)
      source, target = refs["x"].at[rows, columns], scratch["x"].at[slot, block]
      gpu.copy_gmem_to_smem(source, target, scratch["arrived"].at[slot])

  fetch(jnp.int32(0))
  _prepare(refs, scratch, work)
  gpu.commit_smem()

  def run(step: jax.Array, carry: None) -> None:
    slot, rows = lax.rem(step, 2), pl.ds(work.start(step), ROWS)
    gpu.barrier_wait(scratch["arrived"].at[slot])

    @pl.when(step + 1 < count)
    def _() -> None:
      fetch(step + 1)

    gpu.wait_smem_to_gmem(0, wait_read_only=True)
    for block in range(BLOCKS):
      x = scratch["x"].at[slot, block]
      result, byte = _outputs(*_realize(x, block, scratch, work), work)
      scratch["out"][block] = result
      index = pair * BLOCKS + block
      if byte is not None:
        refs["scales"][rows, index] = byte
      gpu.commit_smem()
      size = result.shape[1]
      columns = pl.ds(index * size, size)
      gpu.copy_smem_to_gmem(scratch["out"].at[block], refs["out"].at[rows, columns])
    return carry

  lax.fori_loop(0, count, run, None)
  gpu.wait_smem_to_gmem(0)


def obstacle(rows: int, width: int, tables: Any, form: str) -> str | None:
  """Returns why the kernel cannot take inputs `[rows, width]`, or None."""
  if rows < ROWS or width % (BLOCKS * _BLOCK):
    wanted = f"{ROWS} rows or more and a width in multiples of {BLOCKS * _BLOCK}"
    return f"its Mosaic form takes {wanted}, got {[rows, width]}"
  return device.obstacle()


def launch(
  x: jax.Array, tables: Any, *, form: str, interpret: bool = False
) -> list[jax.Array]:
  """Runs the kernel on bfloat16 `[n, d]`; `tables` is a `tile.Tables`.

  Returns the values, bfloat16 `[n, d]`, or codes and scales, or float8 and scales.
  """
  rows, width = x.shape
  blocks = width // _BLOCK
  tiles = -(-rows // ROWS)
  parts = max(1, min(tiles, AT_ONCE * BLOCKS // blocks))
  work = _Work(
    rows,
    -(-tiles // parts),
    tables.matrix is not None,
    tables.gram is not None,
    form,
    interpret,
  )
  inputs = {"x": x}
  if work.has_map:
    matrix = jnp.broadcast_to(tables.matrix, (blocks, _BLOCK, _BLOCK))
    inputs["matrix"] = matrix.reshape(width, _BLOCK)
  if work.has_gram:
    inputs["gram"] = tables.gram.reshape(-1)
    inputs["cross"] = tables.cross.reshape(width, _BLOCK)
  array = jax.ShapeDtypeStruct
  share, dtype = {
    "codes": (2, jnp.uint8),
    "values": (1, jnp.bfloat16),
    "float8": (1, float8.FORM),
  }[form]
  outputs = {"out": array((rows, width // share), dtype)}
  if form != "values":
    outputs["scales"] = array((rows, blocks), jnp.uint8)
  names = [*inputs, *outputs]

  def mxjax_one_code(*refs: Any, **scratch: Any) -> None:
    _kernel(dict(zip(names, refs, strict=True)), scratch, work)

  call = gpu.kernel(
    mxjax_one_code,
    out_type=tuple(outputs.values()),
    scratch_types=_scratch(work, share, dtype),
    grid=(blocks // BLOCKS, -(-tiles // work.repeats)),
    grid_names=("pair", "part"),
    interpret=device.mode(interpret),
  )
  return list(call(*inputs.values()))


def _scratch(work: _Work, share: int, dtype: Any) -> dict[str, Any]:
  """Returns the shared memory of a program."""
  three = device.tile(ROWS, TERMS * _BLOCK, jnp.bfloat16, swizzle=64)
  scratch = {
    "x": device.tile(ROWS, _BLOCK, jnp.bfloat16, 2, BLOCKS),
    "out": gpu.SMEM((BLOCKS, ROWS, _BLOCK // share), dtype),
    "arrived": gpu.Barrier(num_arrivals=BLOCKS, num_barriers=2),
  }
  if work.has_map:
    scratch["map"] = three
  if work.has_gram:
    scratch |= {"gram": three, "mismatch": three}
    scratch["curvature"] = gpu.SMEM((BLOCKS, 3, _BLOCK), jnp.float32)
  if work.interpret:
    scratch["stage"] = three
  return scratch
