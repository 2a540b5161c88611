r"""Fisher weights of tokens and of output directions, from a linear's output gradients.

With g_t the gradient at the linear's output for token t, a token counts by

.. math::
  \omega_t = (1 - a) + a \, w_t, \qquad w_t \propto \min(\|g_t\|^2 / \bar{w},\ 20),

both normalized to mean 1; it counts by 1 if it was not differentiated. The second
moment of what its outputs are used for is

.. math::
  B^F_b = \sum_t (W^\top g_t)_b (W^\top g_t)_b^\top \Big/ \sum_t \|g_t\|^2 .

For gradients of equal size in all directions B^F is W'W / m, the moment that HiRes uses
without gradients. The paper does not have this; GuidedQuant and YAQA weight
reconstruction errors by gradients as well.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.calibration.linear_inputs import HESSIAN_TILE, LinearInputs, mirrored
from mxjax.devices import execution
from mxjax.errors import ValueRefusal
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.elementwise import add_to_slice

SHARE = 0.7
"""The share a of the Fisher weights beside uniform ones."""
LARGEST = 20.0
"""Largest weight of a token before the second normalization, in units of the mean."""


@compilation.jit()
def _token_weights(squares: jax.Array) -> jax.Array:
  # The cap comes before the mean that normalizes: a few tokens with huge gradients
  # would else take the weight of all others.
  relative = jnp.minimum(squares / squares.mean(), LARGEST)
  return (1 - SHARE) + SHARE * relative / relative.mean()


@compilation.jit()
def _square_norms(gradients: jax.Array) -> jax.Array:
  # Widened first: bfloat16 would lose small terms of a long sum.
  return jnp.square(gradients.astype(jnp.float32)).sum(-1)


def weighted(inputs: LinearInputs) -> LinearInputs:
  """Returns inputs whose moments weight tokens by the Fisher information.

  Raises:
    ValueError: All gradients of the linear are zero.
  """
  parts = [
    inputs.placement.to_primary(_square_norms(part)) for part in inputs.gradients
  ]
  squares = jnp.concatenate(parts)
  # So written, NaN is refused, too.
  if not float(squares.sum()) > 0:
    raise ValueRefusal(
      "fisher",
      expected="gradients at the linear's output",
      got=f"zeros for all {squares.size} tokens",
      mend="its outputs have no influence on the predictions, so quantize it with "
      "weighting=uniform",
    )
  weights = _token_weights(squares)
  # Only the first half of a sequence is differentiated; the tokens behind it count by
  # 1.
  others = inputs.length - weights.shape[1]
  return inputs.weighted(jnp.pad(weights, ((0, 0), (0, others)), constant_values=1))


def _gram_step(
  carry: jax.Array, gradients: jax.Array, index: jax.Array, rules: mxfp4.Rules
) -> jax.Array:
  """Adds a sequence's sum of g g', only the tiles on and above the diagonal."""
  del index, rules
  rows = gradients.astype(jnp.float32)
  for start in range(0, len(carry), HESSIAN_TILE):
    tile = rows[:, start : start + HESSIAN_TILE], rows[:, start:]
    product = jnp.einsum("tm,tn->mn", *tile, precision=precision.HIGHEST)
    place = slice(start, start + HESSIAN_TILE), slice(start, None)
    carry = add_to_slice(carry, place, product)
  return carry


@compilation.jit()
def _mixed_gram(upper: jax.Array, places: jax.Array) -> jax.Array:
  """Mirrors the upper triangle, see `linear_inputs.mirrored`, and mixes in ones."""
  total = mirrored(upper, places)
  # The identity makes B definite where fewer tokens than outputs were differentiated.
  identity = jnp.eye(len(total), dtype=total.dtype)
  return (1 - SHARE) * identity + SHARE * len(total) * total / jnp.trace(total)


def gradient_moment(inputs: LinearInputs) -> jax.Array:
  """Computes B = .3 I + .7 m sum_t g_t g_t' / sum_t |g_t|^2, float32 `[m, m]`.

  Its diagonal has mean 1: without correlations it treats all m outputs alike.
  """

  def compute() -> jax.Array:
    width = inputs.gradients[0].shape[-1]
    start = execution.zeros(jax.ShapeDtypeStruct((width, width), jnp.float32))
    upper = inputs.reduce_gradients(_gram_step, start)
    places = np.arange(width, dtype=np.int32)
    return execution.block_on_cpu(_mixed_gram(upper, places))

  # A view that is not weighted shares its cache with other linears.
  is_own = inputs.token_weights is not None
  return inputs.cached("gradient_moment", compute) if is_own else compute()


@execution.jit()
def _used(weight: jax.Array, moment: jax.Array) -> jax.Array:
  product = lambda text, *operands: jnp.einsum(
    text, *operands, precision=precision.HIGHEST
  )
  pulled = product("bim,mn->bin", weight, moment)
  used = product("bin,bjn->bij", pulled, weight) / weight.shape[-1]
  # float32 products leave W'BW slightly asymmetric, and a moment is symmetric.
  return (used + used.mT).astype(jnp.float64) / 2


def output_moment(weight: jax.Array, inputs: LinearInputs) -> jax.Array:
  """Computes .3 W'W / m + .7 B^F = W'B W / m, float64 `[blocks, 32, 32]`.

  `weight` is feature-major, float32 `[blocks, 32, out_features]`; B is that of
  `gradient_moment`.
  """
  return _used(weight, gradient_moment(inputs))
