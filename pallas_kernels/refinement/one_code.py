"""Block transform, A4 encode and one-code refinement in one pass over activations.

The references are `input_maps.BlockDense` and `one_code.refine` of `mxjax.numerics`. A
program takes tiles of rows of one block of 32 features, for one of the linears that
share the input. `tile.py` processes a tile; `fused_inputs.py` computes its inputs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.errors import ValueRefusal
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.implementations import FLOAT8, Implementation
from mxjax.numerics.precision import HIGHEST
from mxjax.numerics.realization import few_codes, one_code
from mxjax.pallas_kernels import codec, lowering
from mxjax.pallas_kernels.products import float8, int8, planes
from mxjax.pallas_kernels.refinement import fused_inputs
from mxjax.pallas_kernels.refinement.tile import Loaded, Tables, load_tables, realize

FEW_ROWS = 32
"""Rows up to which products stay on FP32 units."""
_BLOCK = mxfp4.BLOCK_SIZE


@dataclasses.dataclass(frozen=True)
class Tile:
  """Rows at once, tiles per program, warps, and whether products are split.

  `stages` less one tiles are being loaded while one is processed.
  """

  rows: int
  repeats: int
  warps: int
  split: bool
  stages: int = 1

  @classmethod
  def of(cls, rows: int, dtype: jax.typing.DTypeLike, linears: int = 1) -> "Tile":
    """Returns the tile for `rows` inputs of `linears` that share a launch.

    Splitting does not pay off for few rows.
    """
    if rows <= fused_inputs.SINGLE_ROWS:
      return cls(1, 1, 4, split=False)
    if rows <= FEW_ROWS:
      return cls(16, 1, 4, split=False)
    # Every program prepares its tables, so with many rows it processes several tiles.
    # 2,048 rows of 4,096 features are one wave of four programs a multiprocessor, and
    # of three where a program takes several linears.
    repeats = (8 if linears == 1 else 11) if rows >= 512 else 1
    if jnp.dtype(dtype) == jnp.bfloat16:
      return cls(64, repeats, 4, split=True, stages=3)
    return cls(32, repeats, 4, split=False)


Form = Literal["codes", "values", "planes", "float8", "float8 by blocks", "int8"]
"""Form of the result: packed codes, bfloat16 values, those values as `planes.Planes`,
`float8.Float8Inputs`, in the order of its blocks or not, or `int8.Int8Inputs`."""
Refined = (
  jax.Array | mxfp4.MXTensor | planes.Planes | float8.Float8Inputs | int8.Int8Inputs
)


_PAIRS: dict[str, Any] = {
  "codes": mxfp4.MXTensor,
  "float8": float8.Float8Inputs,
  "float8 by blocks": functools.partial(float8.Float8Inputs, is_by_blocks=True),
  "int8": int8.Int8Inputs,
}
"""What holds the elements and scales of a form that has both."""


def _kernel(
  x_refs: Any,
  tables: Sequence[Tables],
  *out_refs: Any,
  tile: Tile,
  shape: tuple[int, int],
  form: Form,
  interpret: bool,
) -> None:
  part, linear, size = lowering.program_id(1), lowering.program_id(2), tile.rows
  load = [functools.partial(load_tables, refs, tile.split) for refs in tables]
  # On their way while the norm of a single row is computed.
  loaded = None if tile.split else lowering.switch(linear, load)
  # With a map, U and M lie in one table, so that x is an operand of one product;
  # without one x is encoded and multiplied by M.
  is_used_once = tile.split and tables[0].matrix is not None
  keywords = {"is_used_once": is_used_once, "interpret": interpret}
  make = fused_inputs.tiles(x_refs, shape[1], **keywords)
  first = part * size * tile.repeats
  is_cut = shape[0] % size != 0
  # The last program of a block may have fewer tiles.
  stop = jnp.minimum(tile.repeats, -(-shape[0] // size) - part * tile.repeats)

  def refine_tiles(loaded: Loaded, targets: Sequence[Any]) -> None:
    def run(step: jax.Array, carry: None) -> None:
      start = step * size
      offset = lax.iota(jnp.int32, size)
      mask = first + start + offset < shape[0] if is_cut else None
      here = lowering.columns(start, size)
      result = realize(make(here, mask), loaded, split=tile.split, interpret=interpret)
      write = functools.partial(_write, form, *result, here, mask)
      branches = [functools.partial(write, refs) for refs in targets]
      lowering.switch(linear, branches)
      return carry

    lax.fori_loop(0, stop, run, None)

  if not tile.split:
    refine_tiles(loaded, out_refs)
    return
  # One linear after the other, while the tiles of x stay in the cache: to walk over the
  # tiles once, or to choose between tables at run time, takes the registers of a third
  # program.
  for each, refs in zip(load, out_refs, strict=True):
    refine_tiles(each(), [refs])


def _write(
  form: Form,
  result: jax.Array,
  exponent: jax.Array,
  here: Any,
  mask: jax.Array | None,
  refs: Any,
) -> None:
  """Writes a tile to the references of its linear's output; see `_output`."""
  if form in _PAIRS:
    byte = (exponent + mxfp4.SCALE_BIAS).astype(jnp.uint8).reshape(result.shape[0])
    if form == "codes":
      first = codec.pack(codec.code_of(result))
    elif form == "int8":
      first = int8.of_values(result)
    else:
      first = float8.of_values(result, exponent)
      if form == "float8 by blocks":
        # Each word of four values goes to a place of its own; `_output` says where.
        first = first.reshape(-1, float8.WORDS, 4)
    for ref, part in zip(jax.tree.leaves(refs), (first, byte), strict=True):
      lowering.store(ref.at[here], part, mask)
    return
  values = (result * codec.scale_of(exponent)).astype(jnp.bfloat16)
  if form == "values":
    lowering.store(refs.at[here, :], values, mask)
  else:
    tile = planes.of_tile(values)
    lowering.store(refs.values.at[:, here, :], tile, None, mask)


def _table_spec(table: jax.Array) -> lowering.BlockSpec:
  """Returns the spec of one block of a table; a table of one block is shared by all."""
  rest = table.shape[1:]
  is_shared = table.shape[0] == 1
  index = lambda b, *_: (0 if is_shared else b, *(0 for _ in rest))
  return lowering.BlockSpec((None, *rest), index)


def _output(rows: int, width: int, size: int, form: Form) -> tuple[Any, Any]:
  """Returns one linear's result with specs, and with shapes, as its leaves."""
  spec: Any = lowering.BlockSpec
  array: Any = jax.ShapeDtypeStruct
  by_tile = lambda b, i, _: (i, b)
  if form == "planes":
    block = spec((planes.COUNT, size, planes.WORDS), lambda b, i, _: (0, i, b))
    plane = array((planes.COUNT, rows, width // planes.COUNT), jnp.bfloat16)
    return planes.Planes(block), planes.Planes(plane)
  share, dtype = {
    "codes": (2, jnp.uint8),
    "float8": (1, float8.FORM),
    "float8 by blocks": (1, float8.FORM),
    "int8": (1, jnp.int8),
    "values": (1, jnp.bfloat16),
  }[form]
  values = spec((size, _BLOCK // share), by_tile), array((rows, width // share), dtype)
  if form == "values":
    return values
  if form == "float8 by blocks":
    group = float8.BLOCKS
    # The axes are rows, groups of four blocks, words of a block, blocks of a group, and
    # values of a word: a block's words lie four words apart.
    places = spec(
      (size, None, float8.WORDS, None, 4),
      lambda b, i, _: (i, b // group, 0, b % group, 0),
    )
    split = rows, width // (group * _BLOCK), float8.WORDS, group, 4
    values = places, array(split, dtype)
  scales = spec((size, None), by_tile), array((rows, width // _BLOCK), jnp.uint8)
  kind = _PAIRS[form]
  return kind(values[0], scales[0]), kind(values[1], scales[1])


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
  spec, result = _output(rows, width, size, form)
  kernel = functools.partial(
    _kernel, tile=tile, shape=(rows, width), form=form, interpret=interpret
  )
  results = lowering.launch(
    kernel,
    fused_inputs.operands(x),
    tuple(tables),
    name="one_code" if tables[0].gram is not None else "transform_encode",
    # In split form one program takes all linears; see `_kernel`.
    grid=(blocks, -(-rows // size), 1 if tile.split else len(tables)),
    in_specs=[fused_inputs.specs(x, size), jax.tree.map(_table_spec, tuple(tables))],
    out_specs=[spec] * len(tables),
    out_shape=[result] * len(tables),
    warps=tile.warps,
    stages=tile.stages,
    interpret=interpret,
  )
  if form != "float8 by blocks":
    return results
  flat = lambda made: made.values.reshape(rows, width)
  return [dataclasses.replace(made, values=flat(made)) for made in results]


def _reference(x: jax.Array, tables: Tables, form: Form) -> Refined:
  """Computes the result with the reference functions, for `implementation="xla"`."""
  blocks = mxfp4.to_blocks(x.astype(jnp.float32))
  if tables.matrix is not None:
    # One map may be shared by all blocks.
    wide = jnp.broadcast_to(tables.matrix, (blocks.shape[0], *tables.matrix.shape[1:]))
    blocks = jnp.einsum("bij,bjn->bin", wide, blocks, precision=HIGHEST)
  if tables.gram is None:
    tensor = mxfp4.encode(mxfp4.from_blocks(blocks))
  else:
    refined, exponent = _refined(blocks, tables)
    elements = mxfp4.from_blocks(refined)
    # The elements are legal and in units of the scale: at the exponent 0 they are
    # exact.
    codes = mxfp4.nearest_codes(elements, jnp.zeros((1, 1), jnp.int32))
    tensor = mxfp4.pack_tensor(codes, exponent.T)
  if form == "codes":
    return tensor
  if form == "float8":
    return float8.of_tensor(tensor)
  if form == "float8 by blocks":
    return float8.of_tensor(tensor).by_blocks()
  if form == "int8":
    return int8.of_tensor(tensor)
  values = mxfp4.decode(tensor, jnp.bfloat16)
  return values if form == "values" else planes.split(values)


def _refined(blocks: jax.Array, tables: Tables) -> tuple[jax.Array, jax.Array]:
  """Returns elements and exponents by the reference of the rule with these tables."""
  gram = one_code.unpack_symmetric(tables.gram).astype(jnp.float32)
  if tables.cross is None:
    rules = few_codes.scale_rules(mxfp4.PAPER_RULES, tables.rounds_up)
    return few_codes.refine(blocks, gram, rules, changes=tables.changes)
  refined = one_code.refine(blocks, gram, tables.cross.astype(jnp.float32))
  return refined.elements, refined.exponent


def refine_for(
  x: fused_inputs.Input,
  tables: Sequence[Tables],
  *,
  form: Form = "codes",
  implementation: Implementation | None = None,
) -> list[Refined]:
  """Maps and encodes the inputs of several linears, refining codes of each block.

  Linears whose tables have one structure share a launch, but those of more than
  `FEW_ROWS` rows in float32. See `refine` for the arguments. Returns `[n, d]` in `form`
  for each linear. Paper: Eq. hires-code-score.

  Raises:
    ValueError: The width is not a multiple of 32, gram is not packed, cross comes
      without gram, or several changes or rounded exponents with cross.
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
    "pallas_kernels.refine",
    implementation,
    pallas=obstacle,
    capability=FLOAT8 if form.startswith("float8") else implementations.KERNELS,
  )
  if implementation == "xla":
    rows = fused_inputs.as_array(x)
    return [_reference(rows, each, form) for each in tables]
  shares = x.dtype == jnp.bfloat16 or x.shape[0] <= FEW_ROWS
  # One kernel is traced for all, and chooses the references of its linear at run time.
  shares &= len(set(map(jax.tree.structure, tables))) == 1
  results: list[Refined] = []
  for some in [tables] if shares else [[each] for each in tables]:
    tile = Tile.of(x.shape[0], x.dtype, len(some))
    keywords = {"tile": tile, "form": form, "interpret": implementation == "interpret"}
    results += launch(fused_inputs.for_kernel(x), some, **keywords)
  return results


def _check_tables(tables: Tables, width: int) -> None:
  if tables.gram is None and tables.cross is not None:
    raise ValueRefusal(
      "pallas_kernels.refine",
      expected="gram beside cross",
      got="cross alone",
      mend="pass both tables of the A4 rule",
    )
  if tables.changes != 1 or tables.rounds_up:
    if tables.gram is None or tables.cross is not None:
      raise ValueRefusal(
        "pallas_kernels.refine",
        expected=f"gram alone for a rule of {tables.changes} changes and "
        f"rounds_up={tables.rounds_up}",
        got=f"gram {tables.gram is not None} and cross {tables.cross is not None}",
        mend="only the rule FewCodes has these, and it has no cross",
      )
  packed = width // _BLOCK, _BLOCK * (_BLOCK + 1) // 2
  if tables.gram is not None and tables.gram.shape != packed:
    raise ValueRefusal(
      "pallas_kernels.refine",
      expected=f"gram packed, of shape {packed}",
      got=tables.gram.shape,
      mend="see one_code.pack_symmetric",
    )


def refine(
  x: fused_inputs.Input,
  matrix: jax.Array | None = None,
  gram: jax.Array | None = None,
  cross: jax.Array | None = None,
  *,
  changes: int = 1,
  rounds_up: bool = False,
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
    cross: K_Q, `[d/32, 32, 32]`, float32 or bfloat16, or None for zero.
    changes: The most codes of a block that change, 1 with `cross`.
    rounds_up: Whether exponents are those of the scale rule `even`; not with `cross`.
    form: Form of the result, `[n, d]`; values are exact in bfloat16.
    implementation: See `implementations.choose`.
  """
  tables = Tables(matrix, gram, cross, changes, rounds_up)
  return refine_for(x, [tables], form=form, implementation=implementation)[0]
