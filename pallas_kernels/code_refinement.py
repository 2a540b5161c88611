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

Of the fifteen candidates of a coordinate only the two legal values around the optimum
of its parabola can be best, so two scores decide, by the same `code_score`.
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
    curvature: The diagonal of G, float32 `[blocks, 32]`, or None.

  In split form each of the first three is bfloat16 `[blocks or 1, 3, 32, 32]`.
  """

  matrix: jax.Array | None
  gram: jax.Array | None
  mismatch: jax.Array | None
  curvature: jax.Array | None


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
  curvature = None if gram is None else jnp.diagonal(gram, axis1=-2, axis2=-1)
  if not split:
    return Tables(matrix, gram, cross, curvature)
  mismatch = None
  if gram is not None and cross is not None:
    mismatch = gram + cross
    if matrix is not None:
      wide = jnp.broadcast_to(matrix, gram.shape)
      mismatch = jnp.einsum("bij,bjk->bik", mismatch, wide, precision=HIGHEST)
  parts = (None if t is None else split3(t) for t in (matrix, gram, mismatch))
  return Tables(*parts, curvature)


def _best_code(
  nearest: jax.Array, scale: jax.Array, slope: jax.Array, curvature: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Score and code of the better legal value around the optimum of a coordinate."""
  optimum = nearest - slope / (curvature * scale)
  optimum = jnp.where(optimum > 6.0, 6.0, jnp.where(optimum < -6.0, -6.0, optimum))
  size = jnp.abs(optimum)
  below = jnp.zeros(size.shape, jnp.int32)
  for magnitude in mxfp4.MAGNITUDES[1:7]:
    below += (size >= magnitude).astype(jnp.int32)
  sign = (codec.bits(optimum) >> 28) & 8

  def candidate(index: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Zero is code 0: the lowest code of that value.
    code = jnp.where(index == 0, 0, index | sign)
    delta = (codec.element(code) - nearest) * scale
    return code_refinement.code_score(delta, slope, curvature), code

  (score, code), (other_score, other) = candidate(below), candidate(below + 1)
  # On a tie the first stays: its code is the lower one.
  better = other_score < score
  return jnp.where(better, other_score, score), jnp.where(better, other, code)


def _refine(
  codes: jax.Array, scale: jax.Array, slope: jax.Array, curvature: jax.Array
) -> jax.Array:
  """Changes the best code of each row where that helps; lowest coordinate on ties."""
  score, code = _best_code(codec.element(codes), scale, slope, curvature)
  lowest = jnp.min(score, axis=1)[:, None]
  coordinate = lax.broadcasted_iota(jnp.int32, score.shape, 1)
  ties = jnp.where(score == lowest, coordinate, _BLOCK)
  chosen = coordinate == jnp.min(ties, axis=1)[:, None]
  return jnp.where(chosen & (lowest < 0), code, codes)


def _split_dot(x: jax.Array, table: tuple[jax.Array, ...]) -> jax.Array:
  """X table^T with the table in three terms."""
  total = lowering.dot_bfloat16(x, table[0], transpose_b=True)
  for term in table[1:]:
    total += lowering.dot_bfloat16(x, term, transpose_b=True)
  return total


def _realize(x: jax.Array, t: Tables, split: bool) -> tuple[jax.Array, jax.Array]:
  """Refined codes and exponents of a tile `[rows, 32]`; `t` holds loaded tables."""
  if split:
    mapped = x.astype(jnp.float32) if t.matrix is None else _split_dot(x, t.matrix)
  else:
    x = x.astype(jnp.float32)
    product = functools.partial(lowering.dot_float32, transpose_b=True)
    mapped = x if t.matrix is None else product(x, t.matrix)
  codes, exponent = codec.encode(mapped)
  if t.gram is None or t.mismatch is None or t.curvature is None:
    return codes, exponent
  scale = codec.scale_of(exponent)
  nearest = codec.element(codes)
  if split:
    pulled = _split_dot(nearest.astype(jnp.bfloat16), t.gram) * scale
    slope = pulled - _split_dot(x, t.mismatch)
  else:
    slope = lowering.dot_float32(nearest * scale - mapped, t.gram)
    slope -= lowering.dot_float32(mapped, t.mismatch, transpose_b=True)
  return _refine(codes, scale, slope, t.curvature.reshape(1, _BLOCK)), exponent


def _load_table(ref: Any, split: bool) -> Any:
  if ref is None:
    return None
  return tuple(ref[i] for i in range(3)) if split else ref[...]


def _kernel(x_ref: Any, tables_ref: Any, *out_refs: Any, tile: Tile, rows: int) -> None:
  loaded = Tables(
    *(
      _load_table(getattr(tables_ref, name), tile.split)
      for name in ("matrix", "gram", "mismatch")
    ),
    None if tables_ref.curvature is None else tables_ref.curvature[...],
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
    codes, exponent = _realize(x, loaded, tile.split)
    if len(out_refs) == 1:
      values = codec.element(codes) * codec.scale_of(exponent)
      lowering.store(out_refs[0].at[here, :], values.astype(jnp.bfloat16), mask)
    else:
      byte = (exponent + mxfp4.SCALE_BIAS).astype(jnp.uint8).reshape(size)
      lowering.store(out_refs[0].at[here, :], codec.pack(codes), mask)
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
    functools.partial(_kernel, tile=tile, rows=rows),
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
