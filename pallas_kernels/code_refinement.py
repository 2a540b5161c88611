"""Block transform, A4 encode and one-code refinement in one pass over activations.

The references are `mxjax.input_maps.BlockDense` and `mxjax.code_refinement.refine`. A
program takes tiles of rows of one block of 32 features; its 32 x 32 tables are read
once. With `x` the raw inputs of the block, U the map, G and K the refinement tables:

  y = U x,  q = nearest(y),  slope = G (q - y) - K y,  one code changed where it helps.

No product is rounded to TF32. Two arithmetics:

- `float32`: the products above on FP32 units.
- `split`: x is bfloat16 and q / scale has two bits, so both are exact in bfloat16; each
  float32 table is the sum of three bfloat16 tables, smallest first. With
  M = (G + K) U the slope is scale * G (q / scale) - M x: every product on the tensor
  cores is exact and only float32 sums round.

A coordinate's score is a parabola in its value, so the best of the fifteen candidates
is the legal value nearest to the optimum: a rounding, like the first one. In units of
the squared scale and in Horner's form, with d the change of the value,

  score = d (slope + d curvature / 2),  half of `code_refinement.code_score`.

What a tensor core multiplies costs next to nothing here; what limits the kernel is the
number of instructions for each value, so they are few: docs/kernels.md counts them.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mxjax import code_refinement, mxfp4
from mxjax.pallas_kernels import codec, lowering, planes
from mxjax.pallas_kernels.lowering import Implementation
from mxjax.precision import HIGHEST

_BLOCK = mxfp4.BLOCK_SIZE


@dataclasses.dataclass(frozen=True)
class Tile:
  """How the work is cut: rows at once, tiles a program, warps, and the arithmetic."""

  rows: int
  repeats: int
  warps: int
  split: bool

  @classmethod
  def of(cls, rows: int, dtype: jax.typing.DTypeLike) -> "Tile":
    """The tile for `rows` inputs of a dtype; few rows are not worth splitting."""
    if rows <= 32:
      return cls(16, 1, 4, split=False)
    # Every program prepares its tables, so with many rows it takes several tiles.
    repeats = 8 if rows >= 512 else 1
    if jnp.dtype(dtype) == jnp.bfloat16:
      return cls(64, repeats, 4, split=True)
    return cls(32, repeats, 4, split=False)


Form = Literal["codes", "values", "planes"]
"""What comes out: packed codes, bfloat16 values, or these as `planes.Planes`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
  """The tables of a linear as they are stored, float32 or bfloat16.

  Attributes:
    matrix: The map U, `[blocks or 1, 32, 32]`, or None for no map.
    gram: G, its triangle `[blocks, 528]`, or None for nearest rounding.
    cross: K, `[blocks, 32, 32]`, or None.
  """

  matrix: Any
  gram: Any
  cross: Any


class _Loaded(NamedTuple):
  """A block's tables in registers, each three bfloat16 terms if products are split."""

  matrix: Any
  gram: Any
  mismatch: Any
  """K, or M = (G + K) U in split form."""
  curvature: Any
  """The diagonal of G, float32 `[1, 32]`."""


def split3(table: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Three bfloat16 terms that add up to a float32 table, smallest first."""
  first = table.astype(jnp.bfloat16)
  rest = table - first.astype(jnp.float32)
  second = rest.astype(jnp.bfloat16)
  return (rest - second.astype(jnp.float32)).astype(jnp.bfloat16), second, first


def _load_tables(refs: Tables, split: bool) -> _Loaded:
  """Reads a program's tables once and prepares them: no launch does it before.

  G's triangle is read where `code_refinement.pack_symmetric` puts an entry, most of it
  twice.
  """
  form = split3 if split else lambda table: table
  load = lambda ref: None if ref is None else ref[...].astype(jnp.float32)
  matrix, cross = load(refs.matrix), load(refs.cross)
  mapping = None if matrix is None else form(matrix)
  if refs.gram is None:
    return _Loaded(mapping, None, None, None)
  place = lambda low, high: (low * (2 * _BLOCK - 1 - low) >> 1) + high
  row, column = (lax.broadcasted_iota(jnp.int32, (_BLOCK, _BLOCK), i) for i in (0, 1))
  diagonal = lax.broadcasted_iota(jnp.int32, (1, _BLOCK), 1)
  gram, curvature = (
    refs.gram[place(jnp.minimum(i, j), jnp.maximum(i, j))].astype(jnp.float32)
    for i, j in ((row, column), (diagonal, diagonal))
  )
  mismatch = cross
  if split:
    mismatch = gram + cross
    if matrix is not None:
      mismatch = lowering.dot_float32(mismatch, matrix)
  return _Loaded(mapping, form(gram), form(mismatch), curvature)


def _best_change(
  nearest: jax.Array, slope: jax.Array, curvature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The best legal value of a coordinate: the nearest one to its parabola's optimum.

  Args:
    nearest: Element values, float32 `[rows, 32]`.
    slope: In units of the scale, likewise.
    curvature: float32 `[1, 32]`.

  Returns:
    Its score, value and int32 magnitude index, `[rows, 32]` each.
  """
  # A slope of 0 times infinity would be NaN.
  reciprocal = jnp.minimum(1.0 / curvature, jnp.finfo(jnp.float32).max)
  optimum = nearest - slope * reciprocal
  # Of two values as good as each other the one toward zero has the lower code. The
  # optimum is rounded, so that a tie is one only to within that.
  index = codec.nearest_index(jnp.abs(optimum), shy=True)
  value = codec.copy_sign(codec.magnitude(index), optimum)
  delta = value - nearest
  return delta * (slope + delta * (0.5 * curvature)), value, index


def _is_changed(score: jax.Array) -> jax.Array:
  """Where a row changes: its lowest score if that is negative, first of equal ones."""
  lowest = jnp.min(score, axis=1)[:, None]
  coordinate = lax.broadcasted_iota(jnp.int32, score.shape, 1)
  ties = jnp.where(score == lowest, coordinate, _BLOCK)
  return (coordinate == jnp.min(ties, axis=1)[:, None]) & (lowest < 0)


def _split_dot(x: jax.Array, table: tuple[jax.Array, ...]) -> jax.Array:
  """X table^T with the table in three terms."""
  total = lowering.dot_bfloat16(x, table[0], transpose_b=True)
  for term in table[1:]:
    total += lowering.dot_bfloat16(x, term, transpose_b=True)
  return total


def _realize(
  x: jax.Array, t: _Loaded, *, split: bool, decoded: bool, interpret: bool
) -> tuple[jax.Array, jax.Array]:
  """A tile `[rows, 32]` realized; `t` holds loaded tables.

  Returns:
    Values in units of the scale or, not decoded, int32 codes; and the exponents.
  """
  if split:
    mapped = x.astype(jnp.float32) if t.matrix is None else _split_dot(x, t.matrix)
  else:
    x = x.astype(jnp.float32)
    product = functools.partial(lowering.dot_float32, transpose_b=True)
    mapped = x if t.matrix is None else product(x, t.matrix)
  index, exponent = codec.encode(mapped, has_subnormals=not interpret)
  nearest = codec.copy_sign(codec.magnitude(index), mapped)
  result = nearest if decoded else codec.with_sign(index, mapped)
  if t.gram is None:
    return result, exponent
  inverse = codec.inverse_scale_of(exponent)
  if split:
    slope = _split_dot(nearest.astype(jnp.bfloat16), t.gram)
    slope -= _split_dot(x, t.mismatch) * inverse
  else:
    scaled = mapped * inverse
    slope = lowering.dot_float32(nearest - scaled, t.gram)
    slope -= lowering.dot_float32(scaled, t.mismatch, transpose_b=True)
  score, value, index = _best_change(nearest, slope, t.curvature)
  # Zero is code 0: the lowest code of that value.
  code = jnp.where(index == 0, 0, codec.with_sign(index, value))
  changed = value if decoded else code
  return jnp.where(_is_changed(score), changed, result), exponent


def _kernel(
  x_ref: Any,
  tables_ref: Any,
  *out_refs: Any,
  tile: Tile,
  rows: int,
  form: Form,
  interpret: bool,
) -> None:
  loaded = _load_tables(tables_ref, tile.split)
  realize = functools.partial(
    _realize, split=tile.split, decoded=form != "codes", interpret=interpret
  )
  size = tile.rows
  first = lowering.program_id(1) * size * tile.repeats
  is_cut = rows % (size * tile.repeats) != 0

  def run(step: jax.Array, carry: None) -> None:
    start = step * size
    offset = lax.iota(jnp.int32, size)
    mask = first + start + offset < rows if is_cut else None
    here = lowering.columns(start, size)
    x = lowering.load(x_ref.at[here, :], mask)
    result, exponent = realize(x, loaded)
    if form == "codes":
      byte = (exponent + mxfp4.SCALE_BIAS).astype(jnp.uint8).reshape(size)
      lowering.store(out_refs[0].at[here, :], codec.pack(result), mask)
      lowering.store(out_refs[1].at[here], byte, mask)
      return carry
    values = (result * codec.scale_of(exponent)).astype(jnp.bfloat16)
    if form == "values":
      lowering.store(out_refs[0].at[here, :], values, mask)
    else:
      lowering.store(out_refs[0].at[:, here, :], planes.of_tile(values), None, mask)
    return carry

  lax.fori_loop(0, tile.repeats, run, None)


def _table_spec(table: jax.Array | None) -> lowering.BlockSpec | None:
  """One block of a table; a table of one block serves them all."""
  if table is None:
    return None
  rest = table.shape[1:]
  is_shared = table.shape[0] == 1
  index = lambda b, i: (0 if is_shared else b, *(0 for _ in rest))
  return lowering.BlockSpec((None, *rest), index)


def launch(
  x: jax.Array,
  tables: Tables,
  *,
  tile: Tile,
  form: Form,
  interpret: bool = False,
) -> jax.Array | mxfp4.MXTensor | planes.Planes:
  """Runs the kernel on x `[n, d]`."""
  rows, width = x.shape
  blocks, size = width // _BLOCK, tile.rows * tile.repeats
  spec, array = lowering.BlockSpec, jax.ShapeDtypeStruct
  match form:
    case "codes":
      out_specs = [
        spec((size, _BLOCK // 2), lambda b, i: (i, b)),
        spec((size, None), lambda b, i: (i, b)),
      ]
      out_shape = [
        array((rows, width // 2), jnp.uint8),
        array((rows, blocks), jnp.uint8),
      ]
    case "values":
      out_specs = [spec((size, _BLOCK), lambda b, i: (i, b))]
      out_shape = [array((rows, width), jnp.bfloat16)]
    case "planes":
      out_specs = [spec((planes.COUNT, size, planes.WORDS), lambda b, i: (0, i, b))]
      out_shape = [array((planes.COUNT, rows, width // planes.COUNT), jnp.bfloat16)]
  out = lowering.launch(
    functools.partial(_kernel, tile=tile, rows=rows, form=form, interpret=interpret),
    x,
    tables,
    name="one_code" if tables.gram is not None else "transform_encode",
    grid=(blocks, -(-rows // size)),
    in_specs=[
      spec((size, _BLOCK), lambda b, i: (i, b)),
      jax.tree.map(_table_spec, tables),
    ],
    out_specs=out_specs,
    out_shape=out_shape,
    warps=tile.warps,
    interpret=interpret,
  )
  if form == "codes":
    return mxfp4.MXTensor(out[0], out[1])
  return planes.Planes(out[0]) if form == "planes" else out[0]


def _reference(
  x: jax.Array,
  matrix: jax.Array | None,
  gram: jax.Array | None,
  cross: jax.Array | None,
) -> mxfp4.MXTensor:
  """The same from the functions of `mxjax`, for `implementation="xla"`."""
  blocks = mxfp4.to_blocks(x.astype(jnp.float32))
  if matrix is not None:
    wide = jnp.broadcast_to(matrix, (blocks.shape[0], *matrix.shape[1:]))
    blocks = jnp.einsum("bij,bjn->bin", wide, blocks, precision=HIGHEST)
  if gram is None or cross is None:
    return mxfp4.encode(mxfp4.from_blocks(blocks))
  gram = code_refinement.unpack_symmetric(gram).astype(jnp.float32)
  refined = code_refinement.refine(blocks, gram, cross.astype(jnp.float32))
  magnitude = jnp.abs(mxfp4.from_blocks(refined.elements))
  codes = sum(
    (magnitude >= m).astype(jnp.int32) for m in mxfp4.MAGNITUDES[1:]
  ) + 8 * jnp.signbit(mxfp4.from_blocks(refined.elements)).astype(jnp.int32)
  byte = (refined.exponent.T + mxfp4.SCALE_BIAS).astype(jnp.uint8)
  return mxfp4.MXTensor(mxfp4.pack(codes), byte)


def refine(
  x: jax.Array,
  matrix: jax.Array | None = None,
  gram: jax.Array | None = None,
  cross: jax.Array | None = None,
  *,
  form: Form = "codes",
  implementation: Implementation | None = None,
) -> jax.Array | mxfp4.MXTensor | planes.Planes:
  """Maps and encodes activations, with one code of each block refined.

  Paper: Eq. hires-code-score.

  Args:
    x: Raw inputs, `[n, d]`, bfloat16 or float32.
    matrix: The map of each block, float32 `[d/32, 32, 32]`, one for all blocks
      `[1, 32, 32]`, or None.
    gram: G_Q as `OneCode` stores it, packed `[d/32, 528]`, float32 or bfloat16, or None
      for nearest rounding.
    cross: K_Q, `[d/32, 32, 32]`, likewise.
    form: What to return; values are exact in bfloat16.
    implementation: See `lowering.choose`.

  Returns:
    `[n, d]` in that form.

  Raises:
    NotImplementedError: A kernel was asked for and cannot run.
    ValueError: The width is not a multiple of 32, gram comes without cross, or is not
      packed.
  """
  mxfp4.check_width("pallas_kernels.refine", x.shape[-1])
  if (gram is None) != (cross is None):
    raise ValueError("pallas_kernels.refine: gram and cross belong together.")
  packed = x.shape[-1] // _BLOCK, _BLOCK * (_BLOCK + 1) // 2
  if gram is not None and gram.shape != packed:
    raise ValueError(
      f"pallas_kernels.refine: gram must be packed, of shape {packed}, got "
      f"{gram.shape}; see code_refinement.pack_symmetric."
    )
  obstacle = None
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    obstacle = f"x must be float32 or bfloat16, got {x.dtype}"
  elif x.ndim != 2 or x.shape[0] == 0:
    obstacle = f"x must be [n, d] with n at least 1, got {x.shape}"
  chosen = lowering.choose(implementation, "pallas_kernels.refine", obstacle)
  if chosen == "xla":
    tensor = _reference(x, matrix, gram, cross)
    if form == "codes":
      return tensor
    values = mxfp4.decode(tensor, jnp.bfloat16)
    return values if form == "values" else planes.split(values)
  tile = Tile.of(x.shape[0], x.dtype)
  tables = Tables(matrix, gram, cross)
  return launch(x, tables, tile=tile, form=form, interpret=chosen == "interpret")
