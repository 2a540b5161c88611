"""Euclidean projections and shrinkage, all batched over leading axes."""

from typing import Any

import jax
import jax.numpy as jnp


def project_zero_sum_box(x: jax.Array, bound: float) -> jax.Array:
  """Projects each row onto {z : sum(z) = 0, |z_i| <= bound}, by sorted breakpoints.

  The solution is `clip(x - shift, -bound, bound)` for the one `shift` that makes the
  sum zero. The sum falls piecewise linearly in `shift`, with kinks at `x_i - bound` and
  `x_i + bound`, so interpolation between the two sorted kinks where it changes sign
  gives `shift` exactly. Rows are `[..., n]`, floating point, and `bound` is positive.
  Paper: the projection inside Eq. hires-spectral-cap.

  Example:
    >>> project_zero_sum_box(jnp.array([3.0, 0.0, 0.0]), 0.5).tolist()
    [0.5, -0.25, -0.25]
  """
  # Every kink against every entry: [..., 2n, n] before the sum.
  kinks = jnp.sort(jnp.concatenate([x - bound, x + bound], axis=-1), axis=-1)
  sums = jnp.clip(x[..., None, :] - kinks[..., :, None], -bound, bound).sum(-1)
  # All z are at `bound` at the first kink and at `-bound` at the last, so the sign
  # changes between two of them. The clip is for rows with NaN, which compare false.
  left = (sums >= 0).sum(-1, keepdims=True, dtype=jnp.int32) - 1
  left = jnp.clip(left, 0, kinks.shape[-1] - 2)

  def take(array: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(array, index, axis=-1)

  sum_left, sum_right = take(sums, left), take(sums, left + 1)
  kink_left, kink_right = take(kinks, left), take(kinks, left + 1)
  # The sums are equal only for a bound of zero, that is a condition number of 1, where
  # every shift gives zeros. The division must not make them NaN.
  drop = jnp.where(sum_left > sum_right, sum_left - sum_right, 1)
  shift = kink_left + sum_left * (kink_right - kink_left) / drop
  return jnp.clip(x - shift, -bound, bound)


def project_zero_sum_box_bisection(
  x: jax.Array, bound: float, *, steps: int = 80
) -> jax.Array:
  """Projects like `project_zero_sum_box`, by `steps` bisections of the shift.

  Paper: Eq. serb-proposal uses 80 scalar steps.
  """
  # At these shifts all z are at one end of the box, so a sum of zero lies between.
  low = x.min(-1, keepdims=True) - bound
  high = x.max(-1, keepdims=True) + bound

  def halve(_: int, bracket: Any) -> Any:
    low, high = bracket
    middle = 0.5 * (low + high)
    # The sum falls as the shift grows. It is never negative at `low`, nor positive at
    # `high`.
    too_low = jnp.clip(x - middle, -bound, bound).sum(-1, keepdims=True) > 0
    return jnp.where(too_low, middle, low), jnp.where(too_low, high, middle)

  low, high = jax.lax.fori_loop(0, steps, halve, (low, high))
  return jnp.clip(x - 0.5 * (low + high), -bound, bound)


def project_ball(
  x: jax.Array, radius: float, axes: tuple[int, ...] = (-1,)
) -> jax.Array:
  """Projects onto the Euclidean ball of a positive radius, norm over `axes`."""
  norm = jnp.sqrt((x * x).sum(axes, keepdims=True))
  return x * jnp.where(norm > radius, radius / jnp.where(norm > 0, norm, 1), 1)


def soft_threshold(x: jax.Array, threshold: jax.Array) -> jax.Array:
  """Shrinks `x` towards zero: sign(x) max(|x| - threshold, 0), with sign(0) = 0."""
  return jnp.sign(x) * jnp.maximum(jnp.abs(x) - threshold, 0)
