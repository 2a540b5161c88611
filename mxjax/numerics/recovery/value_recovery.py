r"""Attention recovery: one scale and one offset for each key-value head.

Paper: Eq. hires-vo-fit and Eq. p3-ols (Appendix, Structural Recovery).
"""

import dataclasses

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.numerics import precision, pytree_nodes
from mxjax.numerics.jax_export import register_dataclass


@register_dataclass
@dataclasses.dataclass(frozen=True)
class ValueRecovery:
  """The affine correction of one layer's value outputs.

  Attributes:
    scale: Coefficient a of each head, float32 `[kv_heads]`.
    offset: Coefficient b of each head, float32 `[kv_heads]`, in units of the value
      outputs; it is broadcast over the head's coordinates.
  """

  scale: jax.Array
  offset: jax.Array


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class ValueMoments:
  """Sums over scalar pairs (value x, target y) of each head, float64 `[kv_heads]`.

  They are N, S_x, S_y, S_xx, S_xy, and S_yy, which only `errors` uses.
  """

  count: jax.Array
  value: jax.Array
  target: jax.Array
  value_square: jax.Array
  product: jax.Array
  target_square: jax.Array


def moments(values: jax.Array, targets: jax.Array) -> ValueMoments:
  """Sums the pairs of each head over tokens and head coordinates, in float64.

  Realized values and the float model's targets for the same tokens are
  `[..., kv_heads, head_dim]`. Results of several calls can be added leaf by leaf.
  """
  x = values.astype(jnp.float64)
  y = targets.astype(jnp.float64)
  precision.require_float64("value_recovery.moments", x, y)
  axes = (*range(x.ndim - 2), x.ndim - 1)
  return ValueMoments(
    count=jnp.full(x.shape[-2], x.size // x.shape[-2], jnp.float64),
    value=x.sum(axes),
    target=y.sum(axes),
    value_square=(x * x).sum(axes),
    product=(x * y).sum(axes),
    target_square=(y * y).sum(axes),
  )


@compilation.jit()
def solve(sums: ValueMoments) -> ValueRecovery:
  r"""Fits the scale and offset of each head by least squares, in float64.

  .. math::
    a = \frac{S_{xy} - S_x S_y / N}{S_{xx} - S_x^2 / N}, \qquad
    b = \frac{S_y - a S_x}{N}

  A zero denominator (constant values) gives `(1, 0)`. Paper: Eq. p3-ols.
  """
  precision.require_float64("value_recovery.solve", sums.value_square)
  # Sums instead of centred values, so that one pass over the tokens is enough; what
  # cancels is why they are float64.
  variance = sums.value_square - sums.value * sums.value / sums.count
  covariance = sums.product - sums.value * sums.target / sums.count
  is_constant = variance == 0
  scale = covariance / jnp.where(is_constant, 1.0, variance)
  offset = (sums.target - scale * sums.value) / sums.count
  scale = jnp.where(is_constant, 1.0, scale)
  return ValueRecovery(scale, jnp.where(is_constant, 0.0, offset))


@compilation.jit()
def errors(sums: ValueMoments, recovery: ValueRecovery) -> tuple[jax.Array, jax.Array]:
  """Computes the relative squared error of values before and after a correction.

  Both are float64 scalars, ||v - v*||^2 / ||v*||^2 over all heads; if all targets are
  zero, the numerators alone.
  """
  energy = sums.target_square.sum()
  total = jnp.where(energy > 0, energy, 1.0)
  before = sums.value_square - 2.0 * sums.product + sums.target_square
  a, b = recovery.scale, recovery.offset
  # ||a v + b - v*||^2 multiplied out, so that the sums are enough.
  after = (
    a * a * sums.value_square
    + 2.0 * a * b * sums.value
    + b * b * sums.count
    - 2.0 * (a * sums.product + b * sums.target)
    + sums.target_square
  )
  return before.sum() / total, after.sum() / total


def apply(values: jax.Array, recovery: ValueRecovery) -> jax.Array:
  """Corrects `[..., kv_heads, head_dim]` values in float32 and keeps their dtype."""
  scale = recovery.scale[:, None].astype(jnp.float32)
  offset = recovery.offset[:, None].astype(jnp.float32)
  shape = (1,) * (values.ndim - 2) + scale.shape
  scaled = scale.reshape(shape) * values.astype(jnp.float32)
  return (scaled + offset.reshape(shape)).astype(values.dtype)
