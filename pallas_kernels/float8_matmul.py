"""The library's float8 product of W4A4 operands, and a kernel for what it cannot take.

Inputs are E5M2 in absolute units (`float8.py`), weights E4M3 with one power of two
(`mxfp4_decode.py`), and their products are exact. Rows with a block outside of E5M2's
range are taken again in bfloat16. Which rows these are is known on the GPU only, and
asking from the host would stop it; so the kernel that mends is always launched. A
program looks at the scales of its rows, and nearly always that is all it does.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax import mxfp4
from mxjax.pallas_kernels import codec, float8, lowering, mxfp4_decode, planes
from mxjax.pallas_kernels.float8 import Float8Inputs
from mxjax.pallas_kernels.lowering import Implementation
from mxjax.precision import HIGHEST

_TILE = 64
"""Rows, outputs and columns of a tile: rarely run, so small."""
_SCALES = 64
"""Scales of a row that are looked at in a step."""
_PROGRAMS = 8
"""Programs that share the outputs of a tile of rows."""


def _mend_kernel(
  inputs: tuple[Any, ...],
  scales_ref: Any,
  words_ref: Any,
  weight_scales_ref: Any,
  product_ref: Any,
  out_ref: Any,
  *,
  shape: tuple[int, int, int],
  interpret: bool,
) -> None:
  del product_ref  # The same memory as `out_ref`.
  rows, width, outputs = shape
  x_rows = lowering.tail_mask(rows, _TILE, lowering.program_id(0))
  first, tiles = lowering.program_id(1), -(-outputs // _TILE)

  def scales(
    ref: Any,
    step: jax.Array,
    size: int,
    mask: jax.Array | None,
    some: Any = slice(None),
  ) -> jax.Array:
    here = lowering.columns(step * size, size)
    exists = step * size + lax.iota(jnp.int32, size) < width // mxfp4.BLOCK_SIZE
    is_cut = width % (size * mxfp4.BLOCK_SIZE) != 0
    return lowering.load(ref.at[some, here], mask, exists if is_cut else None)

  def look(step: jax.Array, found: jax.Array) -> jax.Array:
    exponent = float8.exponents(scales(scales_ref, step, _SCALES, x_rows))
    outside = float8.is_outside(exponent).astype(jnp.int32)
    return jnp.maximum(found, jnp.max(outside, axis=1))

  def tile(index: jax.Array, mended: jax.Array) -> None:
    weights = lowering.columns(index * _TILE, _TILE)
    mask = None
    if outputs % _TILE:
      mask = index * _TILE + lax.iota(jnp.int32, _TILE) < outputs

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
      size, blocks = _TILE // planes.COUNT, _TILE // mxfp4.BLOCK_SIZE
      here = lowering.columns(step * size, size)
      exists = step * size + lax.iota(jnp.int32, size) < width // planes.COUNT
      exists = exists if width % _TILE else None
      word = lowering.load(words_ref.at[weights, here], mask, exists)
      byte = scales(weight_scales_ref, step, blocks, mask, weights).astype(jnp.int16)
      scale = codec.spread(planes.scales(byte, interpret=interpret), planes.WORDS)
      exponent = float8.exponents(scales(scales_ref, step, blocks, x_rows))
      unit = codec.spread(float8.own_unit(exponent), planes.WORDS)
      for position, ref in enumerate(inputs):
        byte = lowering.load(ref.at[:, here], x_rows, exists).astype(jnp.int16)
        x = (float8.from_byte(byte) * unit).astype(jnp.bfloat16)
        w = planes.plane(word, scale, position, interpret=interpret)
        total += lowering.dot_bfloat16(x, w, transpose_b=True)
      return total

    total = jnp.zeros((_TILE, _TILE), jnp.float32)
    total = lax.fori_loop(0, -(-width // _TILE), add, total)
    target = out_ref.at[:, weights]
    lowering.store(target, total.astype(out_ref.dtype), mended, mask)

  steps = -(-width // (_SCALES * mxfp4.BLOCK_SIZE))
  found = lax.fori_loop(0, steps, look, jnp.zeros(_TILE, jnp.int32))

  @lowering.when(jnp.max(found, axis=0) > 0)
  def _() -> None:
    count = (tiles - first + _PROGRAMS - 1) // _PROGRAMS

    def run(step: jax.Array, carry: None) -> None:
      # Only those rows: what a row gets must not depend on its neighbours.
      tile(first + step * _PROGRAMS, found > 0)
      return carry

    lax.fori_loop(0, count, run, None)


def mend(
  product: jax.Array,
  x: Float8Inputs,
  weight: mxfp4.MXTensor,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Runs the kernel: rows `[n, m]` whose inputs have a block outside, in bfloat16."""
  (rows, width), outputs = x.shape, weight.shape[0]
  covered = lambda size, unit: -(-size // unit) * unit
  spec = lowering.BlockSpec
  columns = covered(width, _TILE)
  blocks = covered(width // mxfp4.BLOCK_SIZE, _SCALES)
  plane = lambda position: spec(
    (_TILE, columns // planes.COUNT, None), lambda i, j: (i, 0, position)
  )
  whole = lambda n: spec((covered(outputs, _TILE), n), lambda i, j: (0, 0))
  out = spec((_TILE, covered(outputs, _TILE)), lambda i, j: (i, 0))
  byte = lax.bitcast_convert_type(x.values, jnp.uint8)
  byte = byte.reshape(rows, width // planes.COUNT, planes.COUNT)
  operands = (
    (byte,) * planes.COUNT,
    x.scales,
    planes.words(weight.codes),
    weight.scales,
    product,
  )
  return lowering.launch(
    functools.partial(_mend_kernel, shape=(rows, width, outputs), interpret=interpret),
    *operands,
    name="float8_mend",
    grid=(-(-rows // _TILE), min(_PROGRAMS, -(-outputs // _TILE))),
    in_specs=[
      tuple(map(plane, range(planes.COUNT))),
      spec((_TILE, blocks), lambda i, j: (i, 0)),
      whole(columns // planes.COUNT),
      whole(columns // mxfp4.BLOCK_SIZE),
      out,
    ],
    out_specs=out,
    out_shape=jax.ShapeDtypeStruct(product.shape, product.dtype),
    in_place={len(jax.tree.leaves(operands)) - 1: 0},
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
  """`matmul.matmul` of W4A4 operands by the library's float8 product.

  The products are exact; how float8 sums are rounded is the GPU's and its library's:
  docs/kernels.md says what is known. Rows that have a block outside of E5M2's range are
  multiplied in bfloat16.

  Args:
    x: `[n, d]`.
    weight: Packed `[m, d]`, of which `mxfp4_decode.float8_range` says that it fits.
    unit: Of its values in float8, a float32 scalar, from there.
    dtype: Of the result.
    implementation: Of what is beside the library's product; see `lowering.choose`.

  Returns:
    `[n, m]`.

  Raises:
    NotImplementedError: A kernel was asked for and cannot run.
    ValueError: Widths differ.
  """
  if x.shape[-1] != weight.shape[-1]:
    raise ValueError(
      "pallas_kernels.float8_matmul: expected x [n, d] and weight [m, d], got "
      f"{x.shape} and {weight.shape}."
    )
  obstacle = None if x.shape[0] else "x has no rows"
  chosen = lowering.choose(implementation, "pallas_kernels.float8_matmul", obstacle)
  values = mxfp4_decode.decode_float8(weight, unit, implementation=chosen)
  # The highest precision is what keeps a GPU's library from its fast sums.
  product = lax.dot_general(
    x.values,
    values,
    (((1,), (1,)), ((), ())),
    precision=HIGHEST,
    preferred_element_type=dtype,
  )
  product = product * unit.astype(dtype)
  if chosen != "xla":
    return mend(product, x, weight, interpret=chosen == "interpret")
  total = jnp.einsum(
    "nd,md->nm",
    x.decoded(),
    mxfp4.decode(weight, jnp.bfloat16),
    preferred_element_type=jnp.float32,
  ).astype(dtype)
  outside = float8.is_outside(float8.exponents(x.scales)).any(axis=1)
  return jnp.where(outside[:, None], total, product)
