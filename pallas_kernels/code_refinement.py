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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax import code_refinement, mxfp4
from mxjax.pallas_kernels import codec, lowering
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
    repeats = 4 if rows >= 256 else 1
    if jnp.dtype(dtype) == jnp.bfloat16:
      return cls(64, repeats, 4, split=True)
    return cls(32, repeats, 4, split=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
  """What the kernel reads of a block, beside its inputs.

  Attributes:
    matrix: The map U, `[blocks or 1, 32, 32]`, or None for no map.
    gram: G, `[blocks, 32, 32]`, or None for nearest rounding.
    mismatch: K, or M = (G + K) U in split form, or None.
    half_curvature: Half the diagonal of G, float32 `[blocks, 32]`, or None.
    reciprocal: One over the diagonal of G, finite where that is 0; likewise.

  In split form each of the first three is bfloat16 `[blocks or 1, 3, 32, 32]`.
  """

  matrix: jax.Array | None
  gram: jax.Array | None
  mismatch: jax.Array | None
  half_curvature: jax.Array | None
  reciprocal: jax.Array | None


def split3(table: jax.Array) -> jax.Array:
  """Three bfloat16 terms that add up to a float32 table, smallest first, axis -3."""
  rest, terms = table, []
  for _ in range(3):
    term = rest.astype(jnp.bfloat16)
    terms.append(term)
    rest = rest - term.astype(jnp.float32)
  return jnp.stack(terms[::-1], axis=-3)


def tables(
  matrix: jax.Array | None,
  gram: jax.Array | None,
  cross: jax.Array | None,
  *,
  split: bool,
) -> Tables:
  """Prepares the tables of a linear, float32 `[blocks, 32, 32]` each, for a kernel."""
  diagonals = None, None
  if gram is not None:
    curvature = jnp.diagonal(gram, axis1=-2, axis2=-1)
    # A slope of 0 times infinity would be NaN.
    largest = jnp.finfo(jnp.float32).max
    diagonals = 0.5 * curvature, jnp.minimum(1.0 / curvature, largest)
  if not split:
    return Tables(matrix, gram, cross, *diagonals)
  mismatch = None
  if gram is not None and cross is not None:
    mismatch = gram + cross
    if matrix is not None:
      wide = jnp.broadcast_to(matrix, gram.shape)
      mismatch = jnp.einsum("bij,bjk->bik", mismatch, wide, precision=HIGHEST)
  parts = (None if t is None else split3(t) for t in (matrix, gram, mismatch))
  return Tables(*parts, *diagonals)


def _best_change(
  nearest: jax.Array,
  slope: jax.Array,
  half_curvature: jax.Array,
  reciprocal: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The best legal value of a coordinate: the nearest one to its parabola's optimum.

  Args:
    nearest: Element values, float32 `[rows, 32]`.
    slope: In units of the scale, likewise.
    half_curvature: float32 `[1, 32]`.
    reciprocal: One over the curvature, likewise.

  Returns:
    Its score, value and int32 magnitude index, `[rows, 32]` each.
  """
  optimum = nearest - slope * reciprocal
  # Of two values as good as each other the one toward zero has the lower code. The
  # optimum is rounded, so that a tie is one only to within that.
  index = codec.nearest_index(jnp.abs(optimum), shy=True)
  value = codec.copy_sign(codec.magnitude(index), optimum)
  delta = value - nearest
  return delta * (slope + delta * half_curvature), value, index


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
  x: jax.Array, t: Tables, *, split: bool, decoded: bool, interpret: bool
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
  if t.gram is None or t.half_curvature is None or t.reciprocal is None:
    return result, exponent
  inverse = codec.inverse_scale_of(exponent)
  if split:
    slope = _split_dot(nearest.astype(jnp.bfloat16), t.gram)
    slope -= _split_dot(x, t.mismatch) * inverse
  else:
    scaled = mapped * inverse
    slope = lowering.dot_float32(nearest - scaled, t.gram)
    slope -= lowering.dot_float32(scaled, t.mismatch, transpose_b=True)
  by_column = (a.reshape(1, _BLOCK) for a in (t.half_curvature, t.reciprocal))
  score, value, index = _best_change(nearest, slope, *by_column)
  # Zero is code 0: the lowest code of that value.
  code = jnp.where(index == 0, 0, codec.with_sign(index, value))
  changed = value if decoded else code
  return jnp.where(_is_changed(score), changed, result), exponent


def _load_table(ref: Any, split: bool) -> Any:
  if ref is None:
    return None
  return tuple(ref[i] for i in range(3)) if split else ref[...]


def _kernel(
  x_ref: Any, tables_ref: Any, *out_refs: Any, tile: Tile, rows: int, interpret: bool
) -> None:
  loaded = Tables(
    *(
      _load_table(getattr(tables_ref, name), tile.split)
      for name in ("matrix", "gram", "mismatch")
    ),
    *(
      _load_table(getattr(tables_ref, name), False)
      for name in ("half_curvature", "reciprocal")
    ),
  )
  realize = functools.partial(
    _realize, split=tile.split, decoded=len(out_refs) == 1, interpret=interpret
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
    if len(out_refs) == 1:
      values = result * codec.scale_of(exponent)
      lowering.store(out_refs[0].at[here, :], values.astype(jnp.bfloat16), mask)
    else:
      byte = (exponent + mxfp4.SCALE_BIAS).astype(jnp.uint8).reshape(size)
      lowering.store(out_refs[0].at[here, :], codec.pack(result), mask)
      lowering.store(out_refs[1].at[here], byte, mask)
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
  prepared: Tables,
  *,
  tile: Tile,
  decoded: bool,
  interpret: bool = False,
) -> jax.Array | mxfp4.MXTensor:
  """Runs the kernel on x `[n, d]` with tables prepared for `tile.split`."""
  rows, width = x.shape
  blocks, size = width // _BLOCK, tile.rows * tile.repeats
  spec = lowering.BlockSpec
  if decoded:
    out_specs = [spec((size, _BLOCK), lambda b, i: (i, b))]
    out_shape = [jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)]
  else:
    out_specs = [
      spec((size, _BLOCK // 2), lambda b, i: (i, b)),
      spec((None, size), lambda b, i: (b, i)),
    ]
    out_shape = [
      jax.ShapeDtypeStruct((rows, width // 2), jnp.uint8),
      jax.ShapeDtypeStruct((blocks, rows), jnp.uint8),
    ]
  out = lowering.launch(
    functools.partial(_kernel, tile=tile, rows=rows, interpret=interpret),
    x,
    prepared,
    name="one_code" if prepared.gram is not None else "transform_encode",
    grid=(blocks, -(-rows // size)),
    in_specs=[
      spec((size, _BLOCK), lambda b, i: (i, b)),
      jax.tree.map(_table_spec, prepared),
    ],
    out_specs=out_specs,
    out_shape=out_shape,
    warps=tile.warps,
    interpret=interpret,
  )
  return out[0] if decoded else mxfp4.MXTensor(out[0], out[1].T)


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
  refined = code_refinement.refine(blocks, gram, cross)
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
  decoded: bool = False,
  implementation: Implementation | None = None,
) -> jax.Array | mxfp4.MXTensor:
  """Maps and encodes activations, with one code of each block refined.

  Args:
    x: Raw inputs, `[n, d]`, bfloat16 or float32.
    matrix: The map of each block, float32 `[d/32, 32, 32]`, one for all blocks
      `[1, 32, 32]`, or None.
    gram: G_Q, float32 `[d/32, 32, 32]`, or None for nearest rounding.
    cross: K_Q, likewise.
    decoded: Whether to return values instead of codes.
    implementation: See `lowering.choose`.

  Returns:
    A packed `[n, d]`, or bfloat16 values `[n, d]` (exact).

  Raises:
    NotImplementedError: A kernel was asked for and cannot run.
    ValueError: The width is not a multiple of 32, or gram comes without cross.
  """
  mxfp4.check_width("pallas_kernels.refine", x.shape[-1])
  if (gram is None) != (cross is None):
    raise ValueError("pallas_kernels.refine: gram and cross belong together.")
  obstacle = None
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    obstacle = f"x must be float32 or bfloat16, got {x.dtype}"
  elif x.ndim != 2 or x.shape[0] == 0:
    obstacle = f"x must be [n, d] with n at least 1, got {x.shape}"
  chosen = lowering.choose(implementation, "pallas_kernels.refine", obstacle)
  if chosen == "xla":
    tensor = _reference(x, matrix, gram, cross)
    return mxfp4.decode(tensor, jnp.bfloat16) if decoded else tensor
  tile = Tile.of(x.shape[0], x.dtype)
  prepared = tables(matrix, gram, cross, split=tile.split)
  interpret = chosen == "interpret"
  return launch(x, prepared, tile=tile, decoded=decoded, interpret=interpret)
