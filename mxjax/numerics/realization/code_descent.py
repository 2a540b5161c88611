r"""Coordinate descent on weight codes, starting from the result of GPTQ.

With `D = W - W^` and the damped Hessian `H`, changing a decoded value by delta changes
the loss `tr(D H D')` by

.. math::
  \Delta_j(\delta) = \delta^2 H_{jj} - 2 \delta [D H]_j

so the best legal value at the exponent that GPTQ froze is the one nearest to
`w^_j + [D H]_j / H_jj`. A code changes only where Delta is negative. Not in the paper;
`HiResDescent` states the benefit.
"""

from typing import Any

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.numerics import mxfp4
from mxjax.numerics.precision import HIGHEST
from mxjax.numerics.realization import gptq


@compilation.jit(static_argnames=("rules", "passes"))
def descend(
  weight: jax.Array,
  start: gptq.Reconstruction,
  hessian: jax.Array,
  damping: jax.Array | float,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  passes: int = 1,
) -> gptq.Reconstruction:
  """Revisits every code of a linear, column by column, in `passes` passes.

  `weight` is `[blocks, 32, rows]`, feature-major, float32 or float64; `start` has its
  legal codes with one exponent per block; `hessian` is X'X / n, `[d, d]` with d = 32 *
  blocks, same dtype; `damping` is relative, as in `gptq.factor`. Returns codes at the
  same exponents; each row depends on that row alone.
  """
  blocks, size, rows = weight.shape
  width = blocks * size
  shift = damping * jnp.trace(hessian) / width

  def group(state: Any, index: jax.Array) -> tuple[Any, None]:
    codes, decoded = state
    first = index * size
    panel = jax.lax.dynamic_slice_in_dim(hessian, first, size, axis=0)
    tile = jax.lax.dynamic_slice_in_dim(panel, first, size, axis=1)
    tile += shift * jnp.eye(size, dtype=tile.dtype)
    gap = (weight - decoded).reshape(width, rows)
    here = jax.lax.dynamic_slice_in_dim(gap, first, size, axis=0)
    # Damped as for GPTQ, so that descent goes on lowering the loss that GPTQ lowered.
    # From the current codes, so that rounding errors do not add up over groups.
    slope = jnp.einsum("id,dm->im", panel, gap, precision=HIGHEST) + shift * here
    exponent = start.exponent[index]
    moved = descend_group(codes[index], decoded[index], slope, tile, exponent, rules)
    put = lambda array, new: jax.lax.dynamic_update_index_in_dim(array, new, index, 0)
    return (put(codes, moved[0]), put(decoded, moved[1])), None

  order = jnp.arange(blocks, dtype=jnp.int32)
  once = lambda _, state: jax.lax.scan(group, state, order)[0]
  state = start.codes, start.decoded
  codes, decoded = jax.lax.fori_loop(0, passes, once, state)
  return gptq.Reconstruction(codes, start.exponent, decoded)


def descend_group(
  codes: jax.Array,
  decoded: jax.Array,
  slope: jax.Array,
  tile: jax.Array,
  exponent: jax.Array,
  rules: mxfp4.Rules,
) -> tuple[jax.Array, jax.Array]:
  """Passes once over a group's 32 columns; `slope` is D H, `tile` their tile of H."""
  scale = mxfp4.scale_of(exponent).astype(decoded.dtype)

  def column(j: jax.Array, state: Any) -> Any:
    codes, decoded, slope = state
    coupling = jax.lax.dynamic_index_in_dim(tile, j, axis=0, keepdims=False)
    pivot, old, pull = coupling[j], decoded[j], slope[j]
    # A column that no input excites has zero slope and curvature and stays unchanged.
    vertex = old + jnp.where(pivot > 0, pull / jnp.where(pivot > 0, pivot, 1), 0)
    code, value = gptq.round_value(vertex, exponent, scale, rules)
    step = value - old
    # Delta of the module's formula; that of a step of zero is not below zero.
    is_better = step * (step * pivot - 2 * pull) < 0
    step = jnp.where(is_better, step, 0)
    put = lambda array, new: jax.lax.dynamic_update_index_in_dim(array, new, j, 0)
    return (
      put(codes, jnp.where(is_better, code, codes[j])),
      put(decoded, jnp.where(is_better, value, old)),
      # D falls by the step, and D H by the step times this row of H.
      slope - coupling[:, None] * step[None],
    )

  state = codes, decoded, slope
  return jax.lax.fori_loop(0, mxfp4.BLOCK_SIZE, column, state)[:2]
