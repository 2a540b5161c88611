"""The float8 product of W4A4 operands, and a kernel that corrects some of its rows.

Inputs are E5M2 in absolute units (`float8.py`), weights E4M3 with one power of two
(`mxfp4_decode.py`), and their products are exact. The library multiplies them, or
Mosaic's kernel, which decodes weights in registers (`choice.py`). A kernel recomputes
rows with a block outside E5M2's range in bfloat16. It always runs, because only the GPU
knows which rows these are; nearly always a program only checks the scales of its rows.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.errors import ValueRefusal
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.implementations import FLOAT8, Implementation
from mxjax.numerics.precision import HIGHEST
from mxjax.pallas_kernels import choice, codec, lowering, mxfp4_decode
from mxjax.pallas_kernels.mosaic import products
from mxjax.pallas_kernels.products import float8, planes
from mxjax.pallas_kernels.products.float8 import Float8Inputs

_TILE = 64
"""Rows, outputs and columns of a tile; small, because products rarely run."""
_SCALES = 64
"""Scales of a row that are checked per step."""
_PROGRAMS = 8
"""Programs that share the outputs of a tile of rows."""


class _Refs(NamedTuple):
  """Operands of the kernel: inputs by plane, packed weights, and their scales."""

  inputs: tuple[Any, ...]
  input_scales: Any
  words: Any
  weight_scales: Any


@dataclasses.dataclass(frozen=True)
class _Work:
  """Static properties of a launch: shapes, and `interpret` of `lowering.by_ptx`."""

  rows: int
  width: int
  outputs: int
  interpret: bool


def _part(step: jax.Array, size: int, total: int) -> tuple[Any, jax.Array | None]:
  """Returns a step's columns and which of them exist; None if every step is full."""
  exists = step * size + lax.iota(jnp.int32, size) < total
  return lowering.columns(step * size, size), exists if total % size else None


def _is_outside(refs: _Refs, x_rows: jax.Array | None, work: _Work) -> jax.Array:
  """Finds the rows of the tile with a block outside the range, int32 `[_TILE]`."""
  blocks = work.width // mxfp4.BLOCK_SIZE

  def look(step: jax.Array, before: jax.Array) -> jax.Array:
    here, exists = _part(step, _SCALES, blocks)
    byte = lowering.load(refs.input_scales.at[:, here], x_rows, exists)
    outside = float8.is_outside(float8.exponents(byte)).astype(jnp.int32)
    return jnp.maximum(before, jnp.max(outside, axis=1))

  return lax.fori_loop(0, -(-blocks // _SCALES), look, jnp.zeros(_TILE, jnp.int32))


def _product_tile(
  refs: _Refs,
  weights: Any,
  masks: tuple[jax.Array | None, jax.Array | None],
  work: _Work,
) -> jax.Array:
  """Multiplies some rows by some weights in bfloat16, float32 `[_TILE, _TILE]`."""
  x_rows, weight_rows = masks

  def add(step: jax.Array, total: jax.Array) -> jax.Array:
    here, exists = _part(step, _TILE // planes.COUNT, work.width // planes.COUNT)
    blocks, has_block = _part(
      step, _TILE // mxfp4.BLOCK_SIZE, work.width // mxfp4.BLOCK_SIZE
    )
    word = lowering.load(refs.words.at[weights, here], weight_rows, exists)
    byte = lowering.load(refs.weight_scales.at[weights, blocks], weight_rows, has_block)
    scale = planes.scales(byte.astype(jnp.int16), interpret=work.interpret)
    scale = codec.spread(scale, planes.WORDS)
    byte = lowering.load(refs.input_scales.at[:, blocks], x_rows, has_block)
    unit = codec.spread(float8.own_unit(float8.exponents(byte)), planes.WORDS)
    for position, ref in enumerate(refs.inputs):
      byte = lowering.load(ref.at[:, here], x_rows, exists).astype(jnp.int16)
      x = (float8.from_byte(byte) * unit).astype(jnp.bfloat16)
      w = planes.plane(word, scale, position, interpret=work.interpret)
      total += lowering.dot_bfloat16(x, w, transpose_b=True)
    return total

  total = jnp.zeros((_TILE, _TILE), jnp.float32)
  return lax.fori_loop(0, -(-work.width // _TILE), add, total)


def _mend_kernel(refs: _Refs, product_ref: Any, out_ref: Any, *, work: _Work) -> None:
  del product_ref  # The same memory as `out_ref`.
  x_rows = lowering.tail_mask(work.rows, _TILE, lowering.program_id(0))
  first = lowering.program_id(1)
  count = (-(-work.outputs // _TILE) - first + _PROGRAMS - 1) // _PROGRAMS
  # Store only those rows, because a row's result must not depend on its neighbours.
  mended = _is_outside(refs, x_rows, work) > 0

  def tile(step: jax.Array, carry: None) -> None:
    index = first + step * _PROGRAMS
    weights = lowering.columns(index * _TILE, _TILE)
    weight_rows = lowering.tail_mask(work.outputs, _TILE, index)
    total = _product_tile(refs, weights, (x_rows, weight_rows), work)
    target = out_ref.at[:, weights]
    lowering.store(target, total.astype(out_ref.dtype), mended, weight_rows)
    return carry

  @lowering.when(jnp.max(mended.astype(jnp.int32), axis=0) > 0)
  def _() -> None:
    lax.fori_loop(0, count, tile, None)


def mend(
  product: jax.Array,
  x: Float8Inputs,
  weight: mxfp4.MXTensor,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Recomputes in bfloat16 the rows of `[n, m]` whose inputs have a block outside."""
  (rows, width), outputs = x.shape, weight.shape[0]
  covered = lambda size, unit: -(-size // unit) * unit
  spec = lowering.BlockSpec
  columns = covered(width, _TILE)
  blocks = covered(width // mxfp4.BLOCK_SIZE, _SCALES)
  tile = _TILE, columns // planes.COUNT, None
  plane = lambda position: spec(tile, lambda i, j: (i, 0, position))
  whole = lambda n: spec((covered(outputs, _TILE), n), lambda i, j: (0, 0))
  out = spec((_TILE, covered(outputs, _TILE)), lambda i, j: (i, 0))
  byte = lax.bitcast_convert_type(x.values, jnp.uint8)
  byte = (byte.reshape(rows, width // planes.COUNT, planes.COUNT),) * planes.COUNT
  read = _Refs(byte, x.scales, planes.words(weight.codes), weight.scales)
  work = _Work(rows, width, outputs, interpret)
  return lowering.launch(
    functools.partial(_mend_kernel, work=work),
    read,
    product,
    name="float8_mend",
    grid=(-(-rows // _TILE), min(_PROGRAMS, -(-outputs // _TILE))),
    in_specs=[
      _Refs(
        tuple(map(plane, range(planes.COUNT))),
        spec((_TILE, blocks), lambda i, j: (i, 0)),
        whole(columns // planes.COUNT),
        whole(columns // mxfp4.BLOCK_SIZE),
      ),
      out,
    ],
    out_specs=out,
    out_shape=jax.ShapeDtypeStruct(product.shape, product.dtype),
    in_place={len(jax.tree.leaves(read)): 0},
    warps=4,
    interpret=interpret,
  )


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
  see docs/concepts/kernels.md. `choice.product` says what multiplies. Rows with a block
  outside E5M2's range are multiplied in bfloat16. `x` is `[n, d]`, the packed weight
  `[m, d]` must be accepted by `mxfp4_decode.float8_range`, and `unit` is the scale from
  there. `implementation` concerns everything but the library's product. Returns
  `[n, m]` in `dtype`; raises ValueError if the widths differ.
  """
  if x.shape[-1] != weight.shape[-1]:
    raise ValueRefusal(
      "pallas_kernels.float8_matmul",
      expected="x [n, d] and weight [m, d]",
      got=f"{x.shape} and {weight.shape}",
    )
  implementation = implementations.choose(
    "pallas_kernels.float8_matmul",
    implementation,
    pallas=None if x.shape[0] else "x has no rows",
    capability=FLOAT8,
  )
  chosen = choice.product(x.shape[0], *weight.shape, has_float8=True)
  if implementation != "xla" and chosen is choice.FLOAT8_MOSAIC:
    interpret = implementation == "interpret"
    how = {"dtype": dtype, "interpret": interpret}
    product = products.float8_product(x.values, weight, unit, **how)
    return mend(product, x, weight, interpret=interpret)
  values = mxfp4_decode.decode_float8(weight, unit, implementation=implementation)
  # The highest precision keeps a GPU's library from using its fast sums.
  by_columns = ((1,), (1,)), ((), ())
  how = {"precision": HIGHEST, "preferred_element_type": dtype}
  product = lax.dot_general(x.values, values, by_columns, **how) * unit.astype(dtype)
  if implementation != "xla":
    return mend(product, x, weight, interpret=implementation == "interpret")
  wide = x.decoded(), mxfp4.decode(weight, jnp.bfloat16)
  total = jnp.einsum("nd,md->nm", *wide, preferred_element_type=jnp.float32)
  total = total.astype(dtype)
  outside = float8.is_outside(float8.exponents(x.scales)).any(axis=1)
  return jnp.where(outside[:, None], total, product)
