"""GPTQ with one kernel program per 32 columns and tile of rows.

The reference, `mxjax.numerics.realization.gptq.reconstruct`, loops over small
operations on all rows, which on a GPU means d launches per linear; this kernel keeps 32
columns of some rows in registers and needs d/32. It subtracts each error from all later
columns as soon as it is known, the reference sums the earlier errors, so a weight
within float32 rounding of a rounding boundary may take the other code.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import float_bits, implementations, mxfp4
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.precision import HIGHEST
from mxjax.numerics.realization import gptq
from mxjax.pallas_kernels import codec, lowering

_BLOCK = mxfp4.BLOCK_SIZE
_ROWS = 32
"""Weight rows per program."""


def _group_kernel(
  weight_ref: Any,
  upper_ref: Any,
  codes_ref: Any,
  exponent_ref: Any,
  error_ref: Any,
  *,
  rows: int,
  interpret: bool,
) -> None:
  mask = lowering.tail_mask(rows, _ROWS, lowering.program_id(0))
  weight = lowering.load(weight_ref, None, mask)
  # The exponent is that of the weights before any column of the group is rounded, and
  # stays: it is frozen for the group, as in the reference.
  magnitude = codec.bits(weight) & codec.UPPER_HALF
  exponent = codec.block_exponent(jnp.max(magnitude, axis=0))[:, None]
  scale = codec.scale_of(exponent)
  lowering.store(exponent_ref, exponent.reshape(_ROWS), mask)
  axis = lax.broadcasted_iota(jnp.int32, weight.shape, 0)

  def column(j: jax.Array, weight: jax.Array) -> jax.Array:
    here = lowering.columns(j, 1)
    # Triton cannot index an array in registers: the column is a sum of it and zeros.
    target = jnp.sum(jnp.where(axis == j, weight, 0.0), axis=0)[:, None]
    index = codec.magnitude_index(
      codec.bits(target), exponent, has_subnormals=not interpret
    )
    code = codec.with_sign(index, target)
    # Row j of the upper triangle is zero before column j, so columns that are rounded
    # already stay as they are without a mask.
    coupling = upper_ref[here, :].reshape(_BLOCK)[:, None]
    pivot = upper_ref[here, here]
    error = (target - codec.copy_sign(codec.magnitude(index), target) * scale) / pivot
    as_row = lambda a: a.reshape(1, _ROWS)
    code_row = as_row(code.astype(jnp.uint8))
    lowering.store(codes_ref.at[here, :], code_row, None, mask)
    lowering.store(error_ref.at[here, :], as_row(error), None, mask)
    return weight - coupling * as_row(error)

  lax.fori_loop(0, _BLOCK, column, weight)


def launch(
  weight: jax.Array, upper: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Rounds one group of 32 columns.

  `weight` is float32 `[32, rows]`, compensated for all earlier groups; `upper` is the
  group's diagonal block of U, float32 `[32, 32]`. Returns uint8 codes `[32, rows]`,
  int32 exponents `[rows]` and float32 errors (w - q) / U_jj `[32, rows]`.
  """
  rows = weight.shape[1]
  spec, array = lowering.BlockSpec, jax.ShapeDtypeStruct
  columns = spec((_BLOCK, _ROWS), lambda i: (0, i))
  return lowering.launch(
    functools.partial(_group_kernel, rows=rows, interpret=interpret),
    weight,
    upper,
    name="gptq_group",
    grid=(-(-rows // _ROWS),),
    in_specs=[columns, spec((_BLOCK, _BLOCK), lambda i: (0, 0))],
    out_specs=[columns, spec((_ROWS,), lambda i: (i,)), columns],
    out_shape=[
      array(weight.shape, jnp.uint8),
      array((rows,), jnp.int32),
      array(weight.shape, jnp.float32),
    ],
    warps=1,
    interpret=interpret,
  )


@functools.partial(jax.jit, static_argnames="interpret")
def _reconstruct(
  weight: jax.Array, upper: jax.Array, *, interpret: bool
) -> gptq.Reconstruction:
  blocks, size, rows = weight.shape

  def group(
    errors: jax.Array, item: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    index, target = item
    start = index * size
    columns = lax.dynamic_slice_in_dim(upper, start, size, axis=1)
    # Groups that are not reached yet have zero errors, so that one product over all d
    # serves every group of the scan.
    target -= jnp.einsum("di,dm->im", columns, errors, precision=HIGHEST)
    diagonal = lax.dynamic_slice_in_dim(columns, start, size, axis=0)
    codes, exponent, error = launch(target, diagonal, interpret=interpret)
    errors = lax.dynamic_update_slice_in_dim(errors, error, start, axis=0)
    return errors, (codes, exponent)

  errors = jnp.zeros((blocks * size, rows), weight.dtype)
  groups = jnp.arange(blocks, dtype=jnp.int32), weight
  _, (codes, exponent) = lax.scan(group, errors, groups)
  wide = codes.astype(jnp.int32)
  # Bit 3 of a code is its sign.
  sign = jnp.where(wide >= 8, -1.0, 1.0).astype(weight.dtype)
  elements = sign * mxfp4.magnitude(wide & 7).astype(weight.dtype)
  scale = float_bits.power_of_two(exponent).astype(weight.dtype)
  return gptq.Reconstruction(codes, exponent, elements * scale[:, None, :])


def reconstruct(
  weight: jax.Array,
  upper: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  implementation: Implementation | None = None,
) -> gptq.Reconstruction:
  """Rounds a whole linear by GPTQ; `mxjax.numerics.realization.gptq` defines it.

  `weight` is `[blocks, 32, rows]`, feature-major, and `upper`, `[d, d]` in the same
  dtype, is U from `gptq.factor`. The kernel takes float32 and the paper's rules. See
  `implementations.choose` for `implementation`.
  """
  obstacle = None
  if rules != mxfp4.PAPER_RULES:
    obstacle = f"it knows the paper's rules only, got {rules}"
  elif weight.dtype != jnp.float32 or upper.dtype != jnp.float32:
    obstacle = f"it takes float32, got {weight.dtype} and {upper.dtype}"
  implementation = implementations.choose(
    "pallas_kernels.gptq.reconstruct", implementation, pallas=obstacle
  )
  if implementation == "xla":
    return gptq.reconstruct(weight, upper, rules)
  return _reconstruct(weight, upper, interpret=implementation == "interpret")
