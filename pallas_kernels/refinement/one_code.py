"""Block transform, A4 encode and one-code refinement in one pass over activations.

The references are `mxjax.numerics.shaping.input_maps.BlockDense` and
`mxjax.numerics.realization.one_code.refine`. A program takes tiles of rows of one block
of 32 features, for one of the linears that share the input, and reads its 32 x 32
tables once. `tile.py` processes a tile; `fused_inputs.py` computes its inputs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.precision import HIGHEST
from mxjax.numerics.realization import one_code
from mxjax.pallas_kernels import codec, lowering
from mxjax.pallas_kernels.products import float8, planes
from mxjax.pallas_kernels.refinement import fused_inputs
from mxjax.pallas_kernels.refinement.tile import Tables, load_tables, realize

FEW_ROWS = 32
"""Rows up to which products stay on FP32 units and linears share a launch. With more
rows, choosing between tables takes registers that tiles in flight need."""
_BLOCK = mxfp4.BLOCK_SIZE


@dataclasses.dataclass(frozen=True)
class Tile:
  """Rows at once, tiles per program, warps, and whether products are split."""

  rows: int
  repeats: int
  warps: int
  split: bool

  @classmethod
  def of(cls, rows: int, dtype: jax.typing.DTypeLike) -> "Tile":
    """Returns the tile for `rows` inputs; splitting does not pay off for few rows."""
    if rows <= fused_inputs.SINGLE_ROWS:
      return cls(1, 1, 4, split=False)
    if rows <= FEW_ROWS:
      return cls(16, 1, 4, split=False)
    # Every program prepares its tables, so with many rows it processes several tiles.
    repeats = 8 if rows >= 512 else 1
    if jnp.dtype(dtype) == jnp.bfloat16:
      return cls(64, repeats, 4, split=True)
    return cls(32, repeats, 4, split=False)


Form = Literal["codes", "values", "planes", "float8"]
"""Form of the result: packed codes, bfloat16 values, those values as `planes.Planes`,
or `float8.Float8Inputs`."""


def _kernel(
  x_refs: Any,
  tables: Sequence[Tables],
  *out_refs: Any,
  tile: Tile,
  shape: tuple[int, int],
  form: Form,
  interpret: bool,
) -> None:
  linear, rows, size = lowering.program_id(2), shape[0], tile.rows
  loaded = lowering.switch(
    linear, [functools.partial(load_tables, refs, tile.split) for refs in tables]
  )
  make = fused_inputs.tiles(x_refs, shape[1])
  first = lowering.program_id(1) * size * tile.repeats
  is_cut = rows % (size * tile.repeats) != 0

  def run(step: jax.Array, carry: None) -> None:
    start = step * size
    offset = lax.iota(jnp.int32, size)
    mask = first + start + offset < rows if is_cut else None
    here = lowering.columns(start, size)
    result, exponent = realize(
      make(here, mask),
      loaded,
      split=tile.split,
      decoded=form != "codes",
      interpret=interpret,
    )
    write = functools.partial(_write, form, result, exponent, here, mask)
    per_linear = len(out_refs) // len(tables)
    lowering.switch(
      linear,
      [
        functools.partial(write, out_refs[i * per_linear : (i + 1) * per_linear])
        for i in range(len(tables))
      ],
    )
    return carry

  lax.fori_loop(0, tile.repeats, run, None)


def _write(
  form: Form,
  result: jax.Array,
  exponent: jax.Array,
  here: Any,
  mask: jax.Array | None,
  refs: Sequence[Any],
) -> None:
  """Writes a tile to the outputs of its linear."""
  if form in ("codes", "float8"):
    byte = (exponent + mxfp4.SCALE_BIAS).astype(jnp.uint8).reshape(result.shape[0])
    is_packed = form == "codes"
    first = codec.pack(result) if is_packed else float8.of_values(result, exponent)
    lowering.store(refs[0].at[here, :], first, mask)
    lowering.store(refs[1].at[here], byte, mask)
    return
  values = (result * codec.scale_of(exponent)).astype(jnp.bfloat16)
  if form == "values":
    lowering.store(refs[0].at[here, :], values, mask)
  else:
    lowering.store(refs[0].at[:, here, :], planes.of_tile(values), None, mask)


def _table_spec(table: jax.Array | None) -> lowering.BlockSpec | None:
  """Returns the spec of one block of a table; a table of one block is shared by all."""
  if table is None:
    return None
  rest = table.shape[1:]
  is_shared = table.shape[0] == 1
  index = lambda b, *_: (0 if is_shared else b, *(0 for _ in rest))
  return lowering.BlockSpec((None, *rest), index)


def _outputs(
  shape: tuple[int, int], size: int, form: Form
) -> tuple[list[lowering.BlockSpec], list[jax.ShapeDtypeStruct]]:
  """Returns specs and shapes of the kernel's outputs for one linear."""
  rows, width = shape
  spec, array = lowering.BlockSpec, jax.ShapeDtypeStruct
  by_tile = lambda b, i, _: (i, b)
  match form:
    case "codes" | "float8":
      is_packed = form == "codes"
      columns = _BLOCK // 2 if is_packed else _BLOCK
      dtype = jnp.uint8 if is_packed else float8.FORM
      blocks = width // _BLOCK
      specs = [spec((size, columns), by_tile), spec((size, None), by_tile)]
      return specs, [
        array((rows, blocks * columns), dtype),
        array((rows, blocks), jnp.uint8),
      ]
    case "values":
      return [spec((size, _BLOCK), by_tile)], [array(shape, jnp.bfloat16)]
    case "planes":
      plane = array((planes.COUNT, rows, width // planes.COUNT), jnp.bfloat16)
      block = planes.COUNT, size, planes.WORDS
      return [spec(block, lambda b, i, _: (0, i, b))], [plane]


Refined = jax.Array | mxfp4.MXTensor | planes.Planes | float8.Float8Inputs


def launch(
  x: fused_inputs.Input,
  tables: Sequence[Tables],
  *,
  tile: Tile,
  form: Form,
  interpret: bool = False,
) -> list[Refined]:
  """Runs the kernel on x `[n, d]` for linears whose tables have one structure."""
  rows, width = x.shape
  blocks, size = width // _BLOCK, tile.rows * tile.repeats
  specs, shapes = _outputs((rows, width), size, form)
  out = lowering.launch(
    functools.partial(
      _kernel, tile=tile, shape=(rows, width), form=form, interpret=interpret
    ),
    fused_inputs.operands(x),
    tuple(tables),
    name="one_code" if tables[0].gram is not None else "transform_encode",
    grid=(blocks, -(-rows // size), len(tables)),
    in_specs=[fused_inputs.specs(x, size), jax.tree.map(_table_spec, tuple(tables))],
    out_specs=specs * len(tables),
    out_shape=shapes * len(tables),
    warps=tile.warps,
    interpret=interpret,
  )
  match form:
    case "codes" | "float8":
      kind = mxfp4.MXTensor if form == "codes" else float8.Float8Inputs
      return [kind(*pair) for pair in zip(out[::2], out[1::2], strict=True)]
    case "values":
      return out
    case "planes":
      return [planes.Planes(values) for values in out]


def _reference(x: jax.Array, tables: Tables, form: Form) -> Refined:
  """Computes the result with the reference functions, for `implementation="xla"`."""
  blocks = mxfp4.to_blocks(x.astype(jnp.float32))
  if tables.matrix is not None:
    wide = jnp.broadcast_to(tables.matrix, (blocks.shape[0], *tables.matrix.shape[1:]))
    blocks = jnp.einsum("bij,bjn->bin", wide, blocks, precision=HIGHEST)
  if tables.gram is None:
    tensor = mxfp4.encode(mxfp4.from_blocks(blocks))
  else:
    gram = one_code.unpack_symmetric(tables.gram).astype(jnp.float32)
    refined = one_code.refine(blocks, gram, tables.cross.astype(jnp.float32))
    elements = mxfp4.from_blocks(refined.elements)
    codes = mxfp4.nearest_codes(elements, jnp.zeros((1, 1), jnp.int32))
    tensor = mxfp4.pack_tensor(codes, refined.exponent.T)
  if form == "codes":
    return tensor
  if form == "float8":
    return float8.of_tensor(tensor)
  values = mxfp4.decode(tensor, jnp.bfloat16)
  return values if form == "values" else planes.split(values)


def refine_for(
  x: fused_inputs.Input,
  tables: Sequence[Tables],
  *,
  form: Form = "codes",
  implementation: Implementation | None = None,
) -> list[Refined]:
  """Maps and encodes the inputs of several linears, refining one code of each block.

  With few rows, linears whose tables have one structure share a launch. See `refine`
  for `x`, `form` and the tables. Returns `[n, d]` in that form for each linear.
  Paper: Eq. hires-code-score.

  Raises:
    NotImplementedError: A kernel was requested and cannot run.
    ValueError: The width is not a multiple of 32, gram comes without cross, or gram is
      not packed.
  """
  mxfp4.check_width("pallas_kernels.refine", x.shape[-1])
  for each in tables:
    _check_tables(each, x.shape[-1])
  obstacle = None
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    obstacle = f"x must be float32 or bfloat16, got {x.dtype}"
  elif len(x.shape) != 2 or x.shape[0] == 0:
    obstacle = f"x must be [n, d] with n at least 1, got {x.shape}"
  implementation = implementations.choose(
    "pallas_kernels.refine", implementation, pallas=obstacle
  )
  if implementation == "xla":
    rows = fused_inputs.as_array(x)
    return [_reference(rows, each, form) for each in tables]
  run = functools.partial(
    launch,
    fused_inputs.for_kernel(x),
    tile=Tile.of(x.shape[0], x.dtype),
    form=form,
    interpret=implementation == "interpret",
  )
  is_alike = len(set(map(jax.tree.structure, tables))) == 1
  if is_alike and x.shape[0] <= FEW_ROWS:
    return run(tables)
  return [run([each])[0] for each in tables]


def _check_tables(tables: Tables, width: int) -> None:
  if (tables.gram is None) != (tables.cross is None):
    raise ValueError(
      "pallas_kernels.refine: expected both gram and cross or neither, got one; pass "
      "both tables of the A4 rule."
    )
  packed = width // _BLOCK, _BLOCK * (_BLOCK + 1) // 2
  if tables.gram is not None and tables.gram.shape != packed:
    raise ValueError(
      f"pallas_kernels.refine: gram must be packed, of shape {packed}, got "
      f"{tables.gram.shape}; see one_code.pack_symmetric."
    )


def refine(
  x: fused_inputs.Input,
  matrix: jax.Array | None = None,
  gram: jax.Array | None = None,
  cross: jax.Array | None = None,
  *,
  form: Form = "codes",
  implementation: Implementation | None = None,
) -> Refined:
  """Maps and encodes the inputs of one linear; see `refine_for` for errors.

  Args:
    x: Raw inputs, `[n, d]`, bfloat16 or float32, or deferred inputs.
    matrix: Map of each block, float32 `[d/32, 32, 32]`, `[1, 32, 32]` for one map
      shared by all blocks, or None.
    gram: G_Q, packed as in `OneCode`, `[d/32, 528]`, float32 or bfloat16, or None for
      nearest rounding.
    cross: K_Q, `[d/32, 32, 32]`, float32 or bfloat16, or None with `gram`.
    form: Form of the result; values are exact in bfloat16.
    implementation: See `implementations.choose`.

  Returns:
    `[n, d]` in that form.
  """
  tables = Tables(matrix, gram, cross)
  return refine_for(x, [tables], form=form, implementation=implementation)[0]
