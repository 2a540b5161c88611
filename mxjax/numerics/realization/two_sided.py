r"""GPTQ along both axes: errors of output rows are compensated in the rows after them.

GPTQ minimizes `tr(D H D')`, D = W - W^, where every output row is alone. What the
predictions lose is closer to a form that also has B, the second moment of the gradients
at the outputs,

.. math::
  \operatorname{tr}(B\, D\, H\, D^\top)

so that rows that matter together can make up for each other. Once a group g of rows is
rounded, the rows after it do best around targets moved by GPTQ's own compensation,

.. math::
  W_{>} \leftarrow W_{>} - (A_{gg}^{-1} A_{g>})^\top (W_g - \hat W_g), \qquad
  B^{-1} = A^\top A .

Inside a group rows are rounded as if they were alone. Not in the paper; YAQA (arXiv
2505.22988) rounds by the same objective.
"""

import math

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.native import row_rounding
from mxjax.numerics.precision import HIGHEST
from mxjax.numerics.realization import code_descent, gptq

GROUP = 16
"""Rows rounded at once. Larger groups lose what their rows could compensate."""
MANY_GROUPS = 32
"""Groups, one after the other, from which they grow with the rows of a linear."""


def group_size(rows: int) -> int:
  """Returns the rows of a group: a power of two that divides `rows`.

  It is the largest up to `GROUP`, or up to `rows / MANY_GROUPS` where that is more.
  """
  # Equal groups, because one compiled body of a scan rounds them all.
  most = max(GROUP, rows // MANY_GROUPS)
  return math.gcd(rows, 1 << (most.bit_length() - 1))


@compilation.jit()
def coupling(upper: jax.Array) -> jax.Array:
  """Computes what an error in one row takes off the targets of later groups.

  `upper` is A of B's `gptq.factor`, `[rows, rows]`. Returns A_gg^{-1} A_{g>} of every
  group g as the rows of one matrix, `[rows, rows]`, zero up to the group itself.
  """
  rows = upper.shape[0]
  size = group_size(rows)
  by_group = upper.reshape(rows // size, size, rows)
  index = jnp.arange(rows, dtype=jnp.int32).reshape(-1, size)
  # A_gg of all groups in one batch: each takes its own columns of its own rows.
  own = jnp.take_along_axis(by_group, index[:, None, :], axis=2)
  solved = jax.lax.linalg.triangular_solve(own, by_group, left_side=True, lower=False)
  is_later = jnp.arange(rows, dtype=jnp.int32)[None] > index[:, -1:]
  return jnp.where(is_later[:, None], solved, 0).reshape(rows, rows)


def round_rows(
  weight: jax.Array,
  upper: jax.Array,
  hessian: jax.Array,
  damping: jax.Array | float,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  scales: gptq.ScaleSource = "fresh",
  passes: int = 0,
  implementation: Implementation | None = None,
) -> gptq.Reconstruction:
  """Rounds rows `[blocks, 32, rows]`, each alone, by GPTQ and coordinate descent.

  Arguments are those of `reconstruct`. `implementation` is `native` or `xla`, which
  differ in the order of sums; None selects `native` on a CPU where it can run.
  """
  obstacle = row_rounding.obstacle(weight, scales, rules.tie_rule)
  place = "two-sided rounding"
  if implementations.choose(place, implementation, native=obstacle) == "native":
    shift = damping * jnp.trace(hessian) / hessian.shape[0]
    found = row_rounding.rounded(weight, upper, hessian, shift, passes)
    return gptq.Reconstruction(*found)
  result = gptq.reconstruct(weight, upper, rules, scales=scales)
  if passes:
    result = code_descent.descend(
      weight, result, hessian, damping, rules, passes=passes
    )
  return result


@compilation.jit(static_argnames=("rules", "scales", "passes", "implementation"))
def reconstruct(
  weight: jax.Array,
  upper: jax.Array,
  coupled: jax.Array,
  hessian: jax.Array,
  damping: jax.Array | float,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  scales: gptq.ScaleSource = "fresh",
  passes: int = 0,
  implementation: Implementation | None = None,
) -> gptq.Reconstruction:
  """Rounds a linear group by group of rows, each by GPTQ and coordinate descent.

  Args:
    weight: `[blocks, 32, rows]`, feature-major, float32 or float64.
    upper: U from `gptq.factor` of the inputs' Hessian, `[d, d]` with d = 32 * blocks.
    coupled: From `coupling`, `[rows, rows]`.
    hessian: X'X / n, `[d, d]`, for `passes` of `code_descent.descend`.
    damping: Relative damping of `hessian` in these passes.
    rules: Codec rules.
    scales: See `gptq.reconstruct`.
    passes: Passes of coordinate descent over a group, around its moved targets.
    implementation: See `round_rows`.
  """
  rows = weight.shape[-1]
  size = group_size(rows)

  def group(
    targets: jax.Array, first: jax.Array
  ) -> tuple[jax.Array, gptq.Reconstruction]:
    mine = jax.lax.dynamic_slice_in_dim(targets, first, size, axis=-1)
    keywords = {"scales": scales, "passes": passes, "implementation": implementation}
    result = round_rows(mine, upper, hessian, damping, rules, **keywords)
    onto = jax.lax.dynamic_slice_in_dim(coupled, first, size, axis=0)
    # Against the moved targets, as GPTQ takes its errors against compensated weights.
    error = mine - result.decoded
    moved = jnp.einsum("bir,rm->bim", error, onto, precision=HIGHEST)
    return targets - moved, result

  starts = jnp.arange(0, rows, size, dtype=jnp.int32)
  _, results = jax.lax.scan(group, weight, starts)
  # From [groups, ..., rows of a group] back to the axis of all rows.
  join = lambda a: jnp.moveaxis(a, 0, -2).reshape(*a.shape[1:-1], rows)
  return gptq.Reconstruction(*map(join, results))


@compilation.jit()
def loss(
  weight: jax.Array, decoded: jax.Array, hessian: jax.Array, moment: jax.Array
) -> jax.Array:
  """Computes tr(B D H D'), a scalar.

  `weight` and `decoded` are `[blocks, 32, rows]`, `hessian` `[d, d]`, `moment` is B,
  `[rows, rows]`.
  """
  error = (weight - decoded).reshape(-1, weight.shape[-1])
  pulled = jnp.einsum("de,em->dm", hessian, error, precision=HIGHEST)
  return jnp.einsum("dm,mn,dn->", pulled, moment, error, precision=HIGHEST)
