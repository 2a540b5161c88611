"""Map, A4 encode and one-code refinement of many rows, in Mosaic GPU.

The split arithmetic of `refinement/tile.py`, with its exact ties. A program, one warp
group, takes two blocks of 32 features of one linear and walks over tiles of 64 rows;
TMA brings the next tile while this one is computed. The three bfloat16 terms of a table
lie side by side along K, so that a tile waits for its products twice: once for U x and
M x, once for G q.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import codec, lowering, pairs
from mxjax.pallas_kernels.mosaic import device
from mxjax.pallas_kernels.mosaic.device import gpu
from mxjax.pallas_kernels.products import float8
from mxjax.pallas_kernels.refinement import tile

ROWS, BLOCKS, TERMS = 64, 2, 3
"""Rows of a tile, blocks of a program, and bfloat16 terms of a float32 table."""
_BLOCK = mxfp4.BLOCK_SIZE
_PACKED = _BLOCK * (_BLOCK + 1) // 2
_PAIR = _BLOCK // 2


def _is_changed(score: jax.Array, place: jax.Array) -> jax.Array:
  """Returns where a row changes: at its lowest score, the first of equal ones."""
  lowest = jnp.min(score, axis=1)
  ties = jnp.where(score == by_row(lowest), place, _BLOCK)
  first = jnp.where(lowest < 0, jnp.min(ties, axis=1), _BLOCK)
  return place == by_row(first)


def by_row(column: jax.Array, width: int = _BLOCK) -> jax.Array:
  """Repeats what a tile's rows have, `[64]`, for columns: `[64, width]`."""
  return lax.broadcast_in_dim(column, (ROWS, width), (0,))


def _iota(axis: int) -> jax.Array:
  shape, layout = (ROWS, _BLOCK), gpu.Layout.WGMMA
  return gpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


@dataclasses.dataclass(frozen=True)
class Work:
  """Static properties of a launch, and the program's place in it.

  Attributes:
    rows: Rows of the inputs.
    repeats: Tiles of 64 rows that a program takes, at most.
    has_map, has_gram, has_cross: Whether there are the map U, G and K.
    changes: The most codes of a block that change.
    rounds_up: Whether exponents are those of the scale rule `even`.
    form: `codes`, `values` or `float8`.
    interpret: Whether the kernel is interpreted.
  """

  rows: int
  repeats: int
  has_map: bool
  has_gram: bool
  has_cross: bool
  changes: int
  rounds_up: bool
  form: str
  interpret: bool

  @property
  def tiles(self) -> int:
    """Returns the number of tiles of rows."""
    return -(-self.rows // ROWS)

  def start(self, step: jax.Array) -> jax.Array:
    """Returns a tile's first row; the last tile overlaps, and writes the same."""
    index = lax.axis_index("part") * self.repeats + step
    return jnp.minimum(index * ROWS, self.rows - ROWS)


def _narrow(x: jax.Array, work: Work) -> jax.Array:
  """Cuts float32 to bfloat16."""
  cut = lambda x: codec.from_bits(codec.bits(x) & codec.UPPER).astype(jnp.bfloat16)
  keywords = {"layout": gpu.Layout.WGMMA, "interpret": work.interpret}
  return device.on_pairs(pairs.UPPER_PTX, cut, x, **keywords)


def _terms(table: jax.Array, work: Work) -> list[jax.Array]:
  """Returns three bfloat16 terms that add up to a float32 table, smallest first."""
  terms = []
  for _ in range(TERMS):
    terms.insert(0, _narrow(table, work))
    # A cut takes 8 of the 24 bits, and the rest is exact.
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


def prepare(refs: dict[str, Any], scratch: Any, work: Work, pair: jax.Array) -> None:
  """Writes the terms of U, G and M, and the curvatures, to shared memory."""
  keywords = {"interpret": work.interpret}
  here = pl.ds(pair * ROWS, ROWS)

  def load(name: str) -> jax.Array:
    keywords = {"layout": gpu.Layout.WGMMA, "optimized": False}
    return gpu.load(refs[name].at[here], **keywords).astype(jnp.float32)

  if work.has_map:
    _store_terms(scratch["map"], _terms(load("matrix"), work))
  if not work.has_gram:
    return
  row, column = _iota(0), _iota(1)
  # The two blocks of a program lie below each other in the 64 rows.
  inside, block = row & (_BLOCK - 1), pair * BLOCKS + (row >> 5)
  place = _triangle(jnp.minimum(inside, column), jnp.maximum(inside, column), block)
  gram = device.take(refs["gram"], place, layout=gpu.Layout.WGMMA, **keywords)
  gram = gram.astype(jnp.float32)
  _store_terms(scratch["gram"], _terms(gram, work))
  mismatch = gram + load("cross") if work.has_cross else gram
  if work.has_map:
    # The product below reads what other threads wrote.
    gpu.commit_smem()
    mismatch = _mapped(_terms(mismatch, work), scratch, work, row < _BLOCK)
  _store_terms(scratch["mismatch"], _terms(mismatch, work))
  layout = gpu.Layout.WGMMA.reduce(0)
  diagonal = gpu.broadcasted_iota(jnp.int32, (_BLOCK,), 0, layout=layout)
  for b in range(BLOCKS):
    place = _triangle(diagonal, diagonal, pair * BLOCKS + b)
    curvature = device.take(refs["gram"], place, layout=layout, **keywords)
    curvature = curvature.astype(jnp.float32)
    for i, row in enumerate(tile.parabolas(curvature)):
      scratch["curvature"][b, i] = row


def _mapped(
  terms: Sequence[jax.Array], scratch: Any, work: Work, is_first: jax.Array
) -> jax.Array:
  """Multiplies both blocks' tables by U, float32 `[64, 32]`, from their terms.

  What is left out is below the last bit of a float32 product.
  """
  # Terms by size, 0 the smallest: from small products to large ones, so that float32
  # sums lose least.
  products = (0, 2), (1, 1), (2, 0), (1, 2), (2, 1), (2, 2)

  def product(block: int) -> jax.Array:
    def run(acc: Any) -> jax.Array:
      for i, j in products:
        columns = slice(j * _BLOCK, (j + 1) * _BLOCK)
        matrix = scratch["map"].at[_of_block(block), columns]
        stage = scratch["stage"].at[:, :_BLOCK] if work.interpret else None
        device.multiply(acc, terms[i], matrix, stage)
      return lax.optimization_barrier(acc[...])

    return pl.run_scoped(run, gpu.ACC((ROWS, _BLOCK), jnp.float32))

  return jnp.where(is_first, product(0), product(1))


def _products(x: Any, block: int, scratch: Any, work: Work) -> list[jax.Array]:
  """Returns U x and M x of a tile in shared memory, those that there are."""
  there = ("map", work.has_map), ("mismatch", work.has_gram)
  tables = [scratch[name].at[_of_block(block)] for name, is_there in there if is_there]

  def run(*accs: Any) -> list[jax.Array]:
    for i in range(TERMS):
      for acc, table in zip(accs, tables, strict=True):
        gpu.wgmma(acc, x, table.at[:, i * _BLOCK : (i + 1) * _BLOCK].T)
    # One wait is for all. Nothing may read an accumulator before it.
    rest = (gpu.wgmma_accumulator_load(acc, wait_n=None) for acc in accs[1:])
    return list(lax.optimization_barrier([accs[0][...], *rest]))

  return pl.run_scoped(run, *[gpu.ACC((ROWS, _BLOCK), jnp.float32)] * len(tables))


def _pulled(nearest: jax.Array, block: int, scratch: Any, work: Work) -> jax.Array:
  """Returns G q."""

  def run(acc: Any) -> jax.Array:
    whole = jnp.concatenate([nearest] * TERMS, axis=1)
    stage = scratch["stage"] if work.interpret else None
    device.multiply(acc, whole, scratch["gram"].at[_of_block(block)].T, stage)
    return lax.optimization_barrier(acc[...])

  return pl.run_scoped(run, gpu.ACC((ROWS, _BLOCK), jnp.float32))


def _changed(before: jax.Array, slope: jax.Array, curves: Any) -> jax.Array:
  """Returns a tile after the best change of each row; see `tile.best_change`."""
  score, value = tile.best_change(before, slope, *curves)
  return jnp.where(_is_changed(score, _iota(1)), value, before)


def realize(
  x: Any, block: int, scratch: Any, work: Work
) -> tuple[jax.Array, jax.Array]:
  """Realizes a tile: bfloat16 values in units of the scale, and exponents `[64]`."""
  products = _products(x, block, scratch, work) if work.has_map or work.has_gram else []
  is_mapped = work.has_map
  half = (
    # Cut to upper halves, which decide the code: no boundary has more bits.
    _narrow(products[0], work) if is_mapped else gpu.load(x, layout=gpu.Layout.WGMMA)
  )
  keywords = {"rounds_up": work.rounds_up, "interpret": work.interpret}
  exponent = device.block_exponents(half, **keywords)
  words = device.words(half, interpret=work.interpret)
  factor = by_row(pairs.factor_words(exponent), _PAIR)
  keywords = {"layout": gpu.Layout.WGMMA, "interpret": work.interpret}
  nearest = device.on_pairs(
    pairs.nearest_ptx(), pairs.nearest_values, words, factor, **keywords
  )
  if not work.has_gram:
    return nearest, exponent
  inverse = by_row(codec.inverse_scale_of(exponent))
  slope = _pulled(nearest, block, scratch, work) - products[-1] * inverse
  before = nearest.astype(jnp.float32)
  layout = gpu.Layout.WGMMA.reduce(0)
  rows = (gpu.load(scratch["curvature"].at[block, i], layout=layout) for i in range(3))
  curves = [lax.broadcast_in_dim(row, (ROWS, _BLOCK), (1,)) for row in rows]
  changed = _changed(before, slope, curves)
  for _ in range(work.changes - 1):
    slope += _pulled(_narrow(changed - before, work), block, scratch, work)
    before, changed = changed, _changed(changed, slope, curves)
  return _narrow(changed, work), exponent


def outputs(
  values: jax.Array, exponent: jax.Array, work: Work
) -> tuple[jax.Array, jax.Array | None]:
  """Returns a tile in the form that is asked for, and its scale bytes."""
  byte = (exponent + mxfp4.SCALE_BIAS).astype(jnp.uint8)
  if work.form == "codes":
    keywords = {"layout": device.words_layout(), "interpret": work.interpret}
    return device.on_pairs(
      pairs.PACKED_PTX, pairs.packed_codes, values, **keywords
    ), byte
  if work.form == "values":
    return values * by_row(codec.scale_of(exponent).astype(jnp.bfloat16)), None
  scale = codec.scale_of(exponent)
  factor = by_row(jnp.where(float8.is_outside(exponent), 1.0, scale))
  return (values.astype(jnp.float32) * factor).astype(float8.FORM), byte


def _of_linear(run: Callable[[Any], None], each: Sequence[Any]) -> None:
  """Runs with what the program's linear has of its own."""
  for index, own in enumerate(each):
    is_mine = lax.axis_index("linear") == index
    pl.when(is_mine)(functools.partial(run, own))


def _write(
  made: Any, byte: jax.Array | None, rows: Any, block: Any, refs: dict[str, Any]
) -> None:
  """Writes a tile of a block from shared memory, and its scale bytes."""
  if byte is not None:
    refs["scales"][rows, block] = byte
  columns = pl.ds(block * made.shape[1], made.shape[1])
  gpu.copy_smem_to_gmem(made, refs["out"].at[rows, columns])


def _kernel(x: Any, each: Sequence[dict[str, Any]], scratch: Any, work: Work) -> None:
  pair = lax.axis_index("pair")
  count = jnp.minimum(work.repeats, work.tiles - lax.axis_index("part") * work.repeats)

  def fetch(step: jax.Array) -> None:
    slot, rows = lax.rem(step, 2), pl.ds(work.start(step), ROWS)
    for block in range(BLOCKS):
      columns = pl.ds((pair * BLOCKS + block) * _BLOCK, _BLOCK)
      source, target = x.at[rows, columns], scratch["x"].at[slot, block]
      gpu.copy_gmem_to_smem(source, target, scratch["arrived"].at[slot])

  # On its way while the tables are prepared.
  fetch(jnp.int32(0))
  _of_linear(lambda refs: prepare(refs, scratch, work, pair), each)
  gpu.commit_smem()

  def run(step: jax.Array, carry: None) -> None:
    slot, rows = lax.rem(step, 2), pl.ds(work.start(step), ROWS)
    gpu.barrier_wait(scratch["arrived"].at[slot])

    @pl.when(step + 1 < count)
    def _() -> None:
      fetch(step + 1)

    # The tile before may still be on its way from this memory.
    gpu.wait_smem_to_gmem(0, wait_read_only=True)
    for block in range(BLOCKS):
      part = scratch["x"].at[slot, block]
      result, byte = outputs(*realize(part, block, scratch, work), work)
      scratch["out"][block] = result
      index = pair * BLOCKS + block
      # The copy reads what all threads wrote.
      gpu.commit_smem()
      write = functools.partial(_write, scratch["out"].at[block], byte, rows, index)
      _of_linear(write, each)
    return carry

  lax.fori_loop(0, count, run, None)
  gpu.wait_smem_to_gmem(0)


def launch(
  x: jax.Array, tables: Sequence[Any], *, form: str, interpret: bool = False
) -> list[tuple[jax.Array, ...]]:
  """Runs the kernel on bfloat16 `[n, d]` for linears that share these inputs.

  `tables` has a `tile.Tables` for each linear, all of one structure. Linears have
  programs of their own: several in one would take the registers of a third at once.

  Returns, for each, the values, bfloat16 `[n, d]`, or codes and scales, or float8 and
  scales.
  """
  wanted, x = len(x), device.in_eights(x)
  rows, width = x.shape
  blocks, tiles = width // _BLOCK, -(-rows // ROWS)
  # Registers and shared memory allow three programs a multiprocessor at once.
  at_once = 3 * lowering.multiprocessors()
  work = Work(
    rows,
    -(-tiles // max(1, min(tiles, at_once * BLOCKS // (len(tables) * blocks)))),
    tables[0].matrix is not None,
    tables[0].gram is not None,
    tables[0].cross is not None,
    tables[0].changes,
    tables[0].rounds_up,
    form,
    interpret,
  )
  given = [inputs(each, width, work) for each in tables]
  array = jax.ShapeDtypeStruct
  share, dtype = {
    "codes": (2, jnp.uint8),
    "values": (1, jnp.bfloat16),
    "float8": (1, float8.FORM),
  }[form]
  made = {"out": array((rows, width // share), dtype)}
  if form != "values":
    made["scales"] = array((rows, blocks), jnp.uint8)

  def mxjax_one_code(*refs: Any, **scratch: Any) -> None:
    rest, each = iter(refs[1:]), [{} for _ in tables]
    # References come linear by linear: first all operands, then all results.
    for names in (given[0], made):
      for one in each:
        one |= {name: next(rest) for name in names}
    _kernel(refs[0], each, scratch, work)

  call = gpu.kernel(
    mxjax_one_code,
    out_type=tuple(made.values()) * len(tables),
    scratch_types=_scratch(work, share, dtype),
    grid=(blocks // BLOCKS, -(-tiles // work.repeats), len(tables)),
    grid_names=("pair", "part", "linear"),
    interpret=device.mode(interpret),
  )
  results = call(x, *(array for one in given for array in one.values()))
  count, results = len(made), tuple(array[:wanted] for array in results)
  return [results[i : i + count] for i in range(0, len(results), count)]


def inputs(tables: Any, width: int, work: Work) -> dict[str, jax.Array]:
  """Returns the tables of a linear as the kernel reads them."""
  given = {}
  if work.has_map:
    shape = width // _BLOCK, _BLOCK, _BLOCK
    given["matrix"] = jnp.broadcast_to(tables.matrix, shape).reshape(width, _BLOCK)
  if work.has_gram:
    given["gram"] = tables.gram.reshape(-1)
  if work.has_cross:
    given["cross"] = tables.cross.reshape(width, _BLOCK)
  return given


def _scratch(work: Work, share: int, dtype: Any) -> dict[str, Any]:
  """Returns the shared memory of a program."""
  # 64 bytes are the columns of one term, which a product may take alone.
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
