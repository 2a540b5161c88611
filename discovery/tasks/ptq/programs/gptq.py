"""GPTQ as a program: codes one after another, each making good earlier errors."""

import jax
import jax.numpy as jnp

PLAN = {"curvature": "full"}


def block_exponent(block):
  """Returns the floor of log2 of the largest magnitude, minus two."""
  peak = jnp.max(jnp.abs(block))
  field = jax.lax.bitcast_convert_type(peak, jnp.int32) >> 23
  return jnp.clip(field - 129, -127, 127).astype(jnp.int32)


def nearest_codes(block, exponent):
  """Returns E2M1 codes at an exponent; a tie takes the larger magnitude."""
  scaled = jnp.ldexp(jnp.abs(block), -exponent)
  edges = jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], block.dtype)
  index = jnp.sum(scaled[:, None] >= edges[None, :], axis=-1)
  return (index + 8 * jnp.signbit(block)).astype(jnp.uint8)


def element(codes, exponent):
  """Returns the values of codes."""
  table = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)
  magnitude = table[(codes & 7).astype(jnp.int32)]
  return jnp.ldexp(jnp.where(codes >= 8, -magnitude, magnitude), exponent)


def fed(block, curvature, exponent):
  """Returns codes whose errors go on to the columns after them."""

  def step(index, state):
    codes, errors = state
    target = block[index] - jnp.dot(curvature[:, index], errors)
    code = nearest_codes(target[None], exponent)
    error = (target - element(code, exponent)[0]) / curvature[index, index]
    return codes.at[index].set(code[0]), errors.at[index].set(error)

  zeros = (jnp.zeros(32, jnp.uint8), jnp.zeros(32, block.dtype))
  return jax.lax.fori_loop(0, 32, step, zeros)[0], exponent


def encode_weight(block, curvature):
  """encode_weight(fed(floor), curvature='full')"""  # noqa: D402, D415
  floor_1 = block_exponent(block)
  fed_2 = fed(block, curvature, floor_1)
  return fed_2
