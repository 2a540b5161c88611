"""Legal A4 operands of linears, computed by the fused kernel from maps and A4 rules."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from mxjax.numerics import mxfp4
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.realization.activation_quantizers import (
  ActivationQuantizer,
  KernelTables,
)
from mxjax.numerics.shaping.input_maps import InputMap
from mxjax.pallas_kernels.refinement import fused_inputs, one_code
from mxjax.pallas_kernels.refinement.one_code import Form, Tables

Operator = tuple[InputMap | None, ActivationQuantizer]
"""A linear's operations on its inputs: a map, then a rule that has kernel tables."""


def a4_operands(
  x: fused_inputs.Input,
  operators: Sequence[Operator],
  form: Form,
  implementation: Implementation,
) -> list[Any]:
  """Returns each linear's legal A4 operand of the same inputs, `[n, d]` in `form`.

  `x` is `[n, d]`, float32 or bfloat16, or deferred inputs; `operators` has each
  linear's map and A4 rule. See `one_code.refine_for` for the rest and for errors.
  """
  keywords = {"form": form, "implementation": implementation}
  refine = functools.partial(one_code.refine_for, **keywords)
  tables = [tables_of(*operator) for operator in operators]
  outside = [map_outside(input_map) for input_map, _ in operators]
  # All linears in one call, so that those whose tables have one structure share a
  # launch.
  if not any(outside):
    return refine(x, tables)
  rows = fused_inputs.as_array(x)
  blocks = mxfp4.to_blocks(rows.astype(jnp.float32))
  return [
    # One call a linear: after maps of their own their inputs differ.
    refine(mxfp4.from_blocks(mapped.apply(blocks)) if mapped else rows, [table])[0]
    for mapped, table in zip(outside, tables, strict=True)
  ]


def map_outside(input_map: InputMap | None) -> InputMap | None:
  """Returns the map if XLA must apply it, in float32, before the kernel; else None."""
  is_inside = input_map is None or input_map.block_matrices() is not None
  return None if is_inside else input_map


def tables_of(input_map: InputMap | None, rounding: ActivationQuantizer) -> Tables:
  """Returns the kernel's tables of a linear whose A4 rule has them."""
  matrices = None if input_map is None else input_map.block_matrices()
  if matrices is not None:
    matrices = matrices.astype(jnp.float32)
  return Tables(matrices, *(rounding.kernel_tables() or KernelTables()))
