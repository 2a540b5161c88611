r"""Refinement of dynamic A4 that changes a few elements of each block, one at a time.

It is the one-code refinement without the weights' own error, K_Q = 0, for maps that are
refitted to the rounded weights (`map_refit`), repeated: every change is the best one
after those before it,

.. math::
  \Delta(i,c) = 2\delta_{ic}\,[G_Q d]_i + \delta_{ic}^2\,[G_Q]_{ii}, \qquad
  d \leftarrow d + \delta_{ic} e_i .

Each lowers `d' G_Q d`, where d is what rounding moved, and the first that cannot ends
it. Not in the paper.
"""

import dataclasses

import jax
import jax.numpy as jnp

from mxjax.numerics import implementations, jax_export, mxfp4
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.native import few_codes as native_few_codes
from mxjax.numerics.precision import block_products
from mxjax.numerics.realization.one_code import best_change, best_code


def scale_rules(rules: mxfp4.Rules, rounds_up: bool) -> mxfp4.Rules:
  """Returns the rules whose exponents `rounds_up` asks for: `even` instead of `floor`.

  The floor rule clips maxima above 6 scales. From 7 scales on, the next exponent, whose
  codes are half as fine, is the better one on average.
  """
  if rounds_up and rules.scale_rule == "floor":
    return dataclasses.replace(rules, scale_rule="even")
  return rules


def refine(
  x: jax.Array,
  gram: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  changes: int = 1,
) -> tuple[jax.Array, jax.Array]:
  """Encodes and refines activations `[blocks, 32, n]` in the installed coordinates.

  `gram` is G_Q, float32 `[blocks, 32, 32]`, and `changes` is at least 1. Returns
  elements in units of the scale, float32 as `x`, and exponents, int32 `[blocks, n]`.
  """
  exponent = mxfp4.block_exponent(x, rules)
  scale = mxfp4.scale_of(exponent)[..., None, :]
  elements = mxfp4.round_elements(x, exponent[..., None, :], rules)
  slope = block_products(gram, elements * scale - x)
  curvature = jnp.diagonal(gram, axis1=-2, axis2=-1)[..., None]

  def changed(elements: jax.Array, slope: jax.Array) -> jax.Array:
    scores, values = best_code(elements, scale, slope, curvature)
    _, accept = best_change(scores)
    return jnp.where(accept, values, elements)

  chosen = changed(elements, slope)
  # Where nothing has changed, slopes stay, and no later turn changes anything.
  for _ in range(changes - 1):
    slope += block_products(gram, (chosen - elements) * scale)
    elements, chosen = chosen, changed(chosen, slope)
  return chosen, exponent


def refined_blocks(
  x: jax.Array,
  gram: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  changes: int = 1,
  matrix: jax.Array | None = None,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Encodes, refines and decodes activations.

  `matrix`, float32 `[blocks, 32, 32]`, maps each block first; None if x is already in
  the installed coordinates. See `refine` for the other arguments and
  `one_code.refined_blocks` for `implementation`. Returns float32 in the shape of `x`.
  """
  place = "few_codes.refined_blocks"
  tables = (gram,) if matrix is None else (gram, matrix)
  named = dataclasses.asdict(rules)
  obstacle = native_few_codes.obstacle(x, **named)
  keywords = {**named, "changes": changes}
  if implementations.choose(place, implementation, native=obstacle) == "native":
    kernel = native_few_codes.refined
    return jax_export.kernel_or_reference(kernel, reference, x, *tables, **keywords)
  return reference(x, *tables, **keywords)


def reference(
  x: jax.Array,
  gram: jax.Array,
  matrix: jax.Array | None = None,
  *,
  scale_rule: mxfp4.ScaleRule,
  tie_rule: mxfp4.TieRule,
  changes: int,
) -> jax.Array:
  """Defines `refined_blocks`, in XLA operations."""
  rules = mxfp4.Rules(scale_rule=scale_rule, tie_rule=tie_rule)
  mapped = x if matrix is None else block_products(matrix, x)
  elements, exponent = refine(mapped, gram, rules, changes=changes)
  return elements * mxfp4.scale_of(exponent)[..., None, :]
