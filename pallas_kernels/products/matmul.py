"""Products with packed MXFP4 weights that decode nibbles in registers.

The kernel computes `y = x W^T` with W packed and x bfloat16 or packed. Each operand is
four planes with a quarter of the columns each (`planes.py`), and the product is the sum
of four products of planes. Decoded values are exact in bfloat16 and sums are float32,
so only the order of summation differs from the reference, `mxfp4.decode` and a product.

Weights are the left operand, so that decoded values stay in registers on their way to
the tensor cores. With few rows of x, reading the weights dominates the time, so the
columns are split over programs and the partial sums added in a fixed order. With many
rows it is cheaper to decode once and call the library's product: see `choice.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.errors import TypeRefusal, ValueRefusal
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.implementations import Implementation
from mxjax.pallas_kernels import choice, codec, lowering, mxfp4_decode
from mxjax.pallas_kernels.products import int8_matmul, planes
from mxjax.pallas_kernels.products.int8 import Int8Inputs
from mxjax.pallas_kernels.products.output_tiles import OutputTiles


@dataclasses.dataclass(frozen=True)
class Tile:
  """Rows of x and of the weight per program, columns per step, and launch parameters.

  Rows of x are at least 8, columns 64 times a power of two. `splits` programs share the
  columns of one output tile; `stages` steps have their loads in flight.
  """

  rows: int
  outputs: int
  columns: int
  splits: int = 1
  warps: int = 4
  stages: int = 3

  @classmethod
  def of(cls, rows: int, outputs: int, width: int) -> "Tile":
    """Returns the tile for x `[rows, width]` and W `[outputs, width]`."""
    if rows > 64:
      return cls(128, 128, 64, warps=8)
    # A power of two that divides the width, where one of 64 or more does: then no step
    # is masked.
    columns = max(64, math.gcd(width, 256))
    splits = lowering.shares(-(-outputs // 64), -(-width // columns))
    few = 8 if rows <= 8 else 16
    return cls(few if rows <= 16 else 64, 64, columns, splits)


@dataclasses.dataclass(frozen=True)
class _Work(OutputTiles):
  """Static properties of a launch: shapes, packing and tile sizes.

  `rows` counts those of every x, `width` the columns of every operand, `outputs` the
  rows of each weight; inputs that are not packed are by planes.
  """

  tile: Tile
  rows: int
  width: int
  outputs: tuple[int, ...]
  is_packed: bool
  interpret: bool

  @property
  def covered(self) -> int:
    """Columns in whole steps; those beyond the width are masked."""
    return -(-self.width // self.tile.columns) * self.tile.columns

  def columns(self, step: jax.Array, unit: int) -> Any:
    """Returns where a step's columns lie in an array of groups of `unit` columns."""
    count = self.tile.columns // unit
    return lowering.columns(step * count, count)

  def exist(self, step: jax.Array, unit: int) -> jax.Array | None:
    """Returns which of a step's groups of `unit` columns exist; None if all do."""
    if self.width % self.tile.columns == 0:
      return None
    count = self.tile.columns // unit
    return step * count + lax.iota(jnp.int32, count) < self.width // unit


def _matmul_kernel(operands: Any, *out_refs: Any, work: _Work) -> None:
  place = tuple(map(lowering.program_id, range(3)))
  branch = lambda i: functools.partial(
    _output_tile, *operands[i], out_refs[i], i, place, work
  )
  branches = list(map(branch, range(len(work.outputs))))
  lowering.switch(work.linear_of(place[1]), branches)


def _packed_planes(
  refs: tuple[Any, Any], step: jax.Array, mask: jax.Array | None, work: _Work
) -> list[jax.Array]:
  """Decodes a step's columns of a packed operand, words and scales, by planes."""
  word, byte = (
    lowering.load(ref.at[:, work.columns(step, unit)], mask, work.exist(step, unit))
    for ref, unit in zip(refs, (planes.COUNT, mxfp4.BLOCK_SIZE), strict=True)
  )
  scale = planes.scales(byte.astype(jnp.int16), interpret=work.interpret)
  scale = codec.spread(scale, planes.WORDS)
  decode = functools.partial(planes.plane, word, scale, interpret=work.interpret)
  return [decode(position) for position in range(planes.COUNT)]


def _dense_planes(
  refs: Sequence[Any], step: jax.Array, mask: jax.Array | None, work: _Work
) -> list[jax.Array]:
  """Loads a step's columns of a bfloat16 operand, by planes."""
  here, exist = (part(step, planes.COUNT) for part in (work.columns, work.exist))
  return [lowering.load(ref.at[:, here], mask, exist) for ref in refs]


def _output_tile(
  x_refs: Any,
  codes_ref: Any,
  scales_ref: Any,
  out_ref: Any,
  linear: int,
  place: tuple[jax.Array, jax.Array, jax.Array],
  work: _Work,
) -> None:
  """Computes and stores one tile of one linear's output, or a split's share of it."""
  tile = work.tile
  steps = work.covered // (tile.columns * tile.splits)
  first = place[2] * steps
  x_rows = lowering.tail_mask(work.rows, tile.rows, place[0])
  index = place[1] - work.first(linear)
  weight_rows = lowering.tail_mask(work.outputs[linear], tile.outputs, index)

  def add(step: jax.Array, total: jax.Array) -> jax.Array:
    step = first + step
    left = _packed_planes((codes_ref, scales_ref), step, weight_rows, work)
    x_planes = _packed_planes if work.is_packed else _dense_planes
    right = x_planes(x_refs, step, x_rows, work)
    for w, x in zip(left, right, strict=True):
      total += lowering.dot_bfloat16(w, x, transpose_b=True)
    return total

  total = jnp.zeros((tile.outputs, tile.rows), jnp.float32)
  total = lax.fori_loop(0, steps, add, total)
  lowering.store(out_ref, total.T.astype(out_ref.dtype), x_rows, weight_rows)


Operand = planes.Planes | mxfp4.MXTensor
Input = jax.Array | Operand | Int8Inputs


def _operands(x: Operand, weight: mxfp4.MXTensor) -> tuple[Any, jax.Array, jax.Array]:
  """Returns one linear's parts of x, words of the weight and its scales."""
  if isinstance(x, mxfp4.MXTensor):
    parts = planes.words(x.codes), x.scales
  else:
    # One array four times: each time the block spec takes another plane.
    parts = (x.values,) * planes.COUNT
  return parts, planes.words(weight.codes), weight.scales


def _specs(linear: int, work: _Work) -> tuple[Any, Any, lowering.BlockSpec]:
  """Returns block specs of `_operands` and of the output."""
  tile, spec = work.tile, lowering.BlockSpec
  size, blocks = work.covered // planes.COUNT, work.covered // mxfp4.BLOCK_SIZE
  if work.is_packed:
    x = tuple(spec((tile.rows, n), lambda i, j, k: (i, 0)) for n in (size, blocks))
  else:
    x = tuple(
      spec((None, tile.rows, size), lambda i, j, k, position=position: (position, i, 0))
      for position in range(planes.COUNT)
    )
  here = functools.partial(work.own, linear)
  weight = tuple(
    spec((tile.outputs, n), lambda i, j, k: (here(j), 0)) for n in (size, blocks)
  )
  out = spec((None, tile.rows, tile.outputs), lambda i, j, k: (k, i, here(j)))
  return (x, *weight), out


def launch(
  inputs: Sequence[Operand],
  weights: Sequence[mxfp4.MXTensor],
  *,
  dtype: jax.typing.DTypeLike = jnp.float32,
  tile: Tile | None = None,
  interpret: bool = False,
) -> list[jax.Array]:
  """Runs the kernel on each x `[n, d]` and W `[m, d]`; returns `[n, m]` for each.

  All x have one kind and shape; the number of outputs may differ.
  """
  (rows, width), outputs = inputs[0].shape, tuple(w.shape[0] for w in weights)
  tile = Tile.of(rows, sum(outputs), width) if tile is None else tile
  is_packed = isinstance(inputs[0], mxfp4.MXTensor)
  work = _Work(tile, rows, width, outputs, is_packed, interpret)
  specs = [_specs(i, work) for i in range(len(outputs))]
  # Partial sums stay in float32 and are rounded once, after they are added.
  partial_dtype = dtype if tile.splits == 1 else jnp.float32
  partials = lowering.launch(
    functools.partial(_matmul_kernel, work=work),
    tuple(map(_operands, inputs, weights)),
    name="mxfp4_matmul",
    grid=(-(-rows // tile.rows), work.first(len(outputs)), tile.splits),
    in_specs=[tuple(operands for operands, _ in specs)],
    out_specs=[out for _, out in specs],
    out_shape=[
      jax.ShapeDtypeStruct((tile.splits, rows, m), partial_dtype) for m in outputs
    ],
    warps=tile.warps,
    stages=tile.stages,
    interpret=interpret,
  )
  if tile.splits == 1:
    return [y[0] for y in partials]
  return [y.sum(0).astype(dtype) for y in partials]


def _library(
  x: Input,
  weight: mxfp4.MXTensor,
  dtype: jax.typing.DTypeLike,
  implementation: Implementation,
) -> jax.Array:
  """Decodes to bfloat16 (exact) and multiplies with float32 sums."""
  decode = functools.partial(mxfp4_decode.decode, implementation=implementation)
  if isinstance(x, mxfp4.MXTensor):
    x = decode(x)
  elif isinstance(x, planes.Planes):
    x = x.whole()
  elif isinstance(x, Int8Inputs):
    x = x.decoded()
  # A GPU's library sums in float32 and writes the requested dtype; XLA on a CPU might
  # also sum in that dtype.
  wanted = jnp.float32 if implementation == "xla" else dtype
  total = jnp.einsum("nd,md->nm", x, decode(weight), preferred_element_type=wanted)
  return total.astype(dtype)


def _check(x: Input, weight: mxfp4.MXTensor) -> None:
  if isinstance(x, jax.Array) and x.dtype != jnp.bfloat16:
    raise TypeRefusal(
      "pallas_kernels.matmul", expected="x in bfloat16 or packed", got=x.dtype
    )
  if x.shape[-1] != weight.shape[-1] or len(x.shape) != 2 or len(weight.shape) != 2:
    raise ValueRefusal(
      "pallas_kernels.matmul",
      expected="x [n, d] and weight [m, d]",
      got=f"{x.shape} and {weight.shape}",
    )


def matmul(
  x: Input,
  weight: mxfp4.MXTensor,
  *,
  dtype: jax.typing.DTypeLike = jnp.float32,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Multiplies one pair; see `matmul_each`."""
  return matmul_each([x], [weight], dtype=dtype, implementation=implementation)[0]


def matmul_each(
  inputs: Sequence[Input],
  weights: Sequence[mxfp4.MXTensor],
  *,
  dtype: jax.typing.DTypeLike = jnp.float32,
  onto: Sequence[jax.Array] | None = None,
  implementation: Implementation | None = None,
) -> list[jax.Array]:
  """Computes `x @ decode(weight).T` of each pair with float32 sums, in one launch.

  Args:
    inputs: Each x `[n, d]`: bfloat16 (else TypeError), by planes (the kernel's layout),
      packed, or integers of a few rows; all of one kind and shape.
    weights: Packed, each `[m, d]`, by the paper's scale rule; other widths are a
      ValueError.
    dtype: Dtype of the results.
    onto: What the results, once rounded, are added to, `[n, m]` in `dtype` for each
      pair; or None. Only where `choice.product` chooses a product that adds.
    implementation: See `implementations.choose`; None also takes the library's products
      where `choice.product` does.

  Returns:
    Each `[n, m]`. A scale byte of 255 on either side gives NaN.
  """
  for x, weight in zip(inputs, weights, strict=True):
    _check(x, weight)
  rows = inputs[0].shape[0]
  resolved = implementations.choose(
    "pallas_kernels.matmul",
    implementation,
    pallas=None if rows else "x has no rows",
  )
  # All share a launch, so the first weight decides for all.
  chosen = choice.product(rows, *weights[0].shape, has_float8=False)
  # The library takes the place of a kernel only where nobody asked for the kernel.
  if resolved == "xla" or (implementation is None and chosen is choice.LIBRARY):
    pairs = zip(inputs, weights, strict=True)
    return [_library(x, weight, dtype, resolved) for x, weight in pairs]
  keywords = {"dtype": dtype, "interpret": resolved == "interpret"}
  integers = [x for x in inputs if isinstance(x, Int8Inputs)]
  if integers:
    is_undivided = chosen is choice.INT8_UNDIVIDED
    sizes = [weight.shape[0] for weight in weights], weights[0].shape[1]
    tile = int8_matmul.Tile.undivided(*sizes) if is_undivided else None
    return int8_matmul.launch(integers, weights, tile=tile, onto=onto, **keywords)
  operands: Any = [planes.split(x) if isinstance(x, jax.Array) else x for x in inputs]
  return launch(operands, weights, **keywords)
