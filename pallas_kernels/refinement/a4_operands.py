"""The legal A4 operands of linears by the fused kernel, from maps and roundings."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.numerics import mxfp4
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.realization.activation_quantizers import OneCode, Rounding
from mxjax.numerics.shaping.input_maps import BlockDense, Hadamard, InputMap, hadamard
from mxjax.pallas_kernels.refinement import fused_inputs, one_code
from mxjax.pallas_kernels.refinement.one_code import Form, Tables


def make(
  x: fused_inputs.Input,
  operators: Sequence[tuple[InputMap | None, Rounding]],
  form: Form,
  implementation: Implementation,
) -> list[Any]:
  """Each linear's legal A4 operand of the same inputs.

  Args:
    x: Inputs, `[n, d]`, float32 or bfloat16, or what is to become them.
    operators: Each linear's map and rounding, `Nearest` or `OneCode`.
    form: What to return; see `code_refinement.refine`.
    implementation: See `implementations.choose`.

  Returns:
    `[n, d]` in that form for each linear.

  Raises:
    NotImplementedError: A kernel was asked for and cannot run.
    ValueError: The width is not a multiple of 32, or tables do not fit it.
  """
  refine = functools.partial(
    one_code.refine_for, form=form, implementation=implementation
  )
  maps = [_split(input_map) for input_map, _ in operators]
  tables = [
    _tables(matrix, rounding)
    for (_, matrix), (_, rounding) in zip(maps, operators, strict=True)
  ]
  if all(before is None for before, _ in maps):
    return refine(x, tables)
  made = fused_inputs.as_array(x)
  return [
    refine(made if before is None else _mapped(made, before), [each])[0]
    for (before, _), each in zip(maps, tables, strict=True)
  ]


def _split(
  input_map: InputMap | None,
) -> tuple[InputMap | None, jax.Array | None]:
  """The map that must run before the kernel, across blocks, and the kernel's own."""
  match input_map:
    case None:
      return None, None
    case BlockDense(matrix=blocks):
      return None, blocks.astype(jnp.float32)
    case Hadamard(size=mxfp4.BLOCK_SIZE, signs=None):
      return None, hadamard(mxfp4.BLOCK_SIZE)[None]
    case other:
      return other, None


def _tables(matrix: jax.Array | None, rounding: Rounding) -> Tables:
  if isinstance(rounding, OneCode):
    return Tables(matrix, rounding.gram, rounding.cross)
  return Tables(matrix, None, None)


def _mapped(x: jax.Array, input_map: InputMap) -> jax.Array:
  """Inputs `[n, d]` mapped by XLA, float32."""
  blocks = mxfp4.to_blocks(x.astype(jnp.float32))
  return mxfp4.from_blocks(input_map.apply(blocks))
