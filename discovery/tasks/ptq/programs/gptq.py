"""GPTQ as a program: codes in order, each making good the errors of those before."""

import jax
import jax.numpy as jnp

PLAN = {"curvature": "full"}


def exponent_of(block):
  """Floor of log2 of the largest magnitude, minus two, from float bits."""
  peak = jnp.max(jnp.abs(block))
  field = jax.lax.bitcast_convert_type(peak, jnp.int32) >> 23
  return jnp.clip(field - 129, -127, 127).astype(jnp.int32)


def encode_weight(block, curvature):
  """Codes of 32 weights of a row, given the upper factor of the inverse Hessian."""
  exponent = exponent_of(block)
  grid = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], block.dtype)
  edges = jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], block.dtype)

  def step(index, state):
    codes, errors = state
    target = block[index] - jnp.dot(curvature[:, index], errors)
    magnitude = jnp.sum(jnp.ldexp(jnp.abs(target), -exponent) >= edges)
    code = (magnitude + 8 * jnp.signbit(target)).astype(jnp.uint8)
    sign = jnp.where(jnp.signbit(target), -1, 1)
    value = sign * jnp.ldexp(grid[magnitude], exponent)
    error = (target - value) / curvature[index, index]
    return codes.at[index].set(code), errors.at[index].set(error)

  zeros = (jnp.zeros(32, jnp.uint8), jnp.zeros(32, block.dtype))
  return jax.lax.fori_loop(0, 32, step, zeros)[0], exponent
