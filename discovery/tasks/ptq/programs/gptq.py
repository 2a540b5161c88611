"""GPTQ as a program: codes one after another, each making good earlier errors.

The default hooks of a linear sum its Hessian and factor it, in the coordinates of the
map, if another part of the program has one. Here rows are encoded whole.
"""

import jax
import jax.numpy as jnp

PLAN = {"curvature": "solved"}
GRID = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def exponents(columns):
  """Returns the floor of log2 of each column's largest magnitude, minus two."""
  peak = jnp.max(jnp.abs(columns), axis=0)
  field = jax.lax.bitcast_convert_type(peak, jnp.int32) >> 23
  return jnp.clip(field - 129, -127, 127).astype(jnp.int32)


def nearest(values, exponent):
  """Returns the nearest codes; a tie takes the larger magnitude."""
  scaled = jnp.ldexp(jnp.abs(values), -exponent)
  index = sum((scaled >= edge).astype(jnp.int32) for edge in EDGES)
  return (index + 8 * jnp.signbit(values)).astype(jnp.uint8)


def element(codes, exponent):
  """Returns the values of codes."""
  magnitude = jnp.array(GRID, jnp.float32)[(codes & 7).astype(jnp.int32)]
  return jnp.ldexp(jnp.where(codes >= 8, -magnitude, magnitude), exponent)


def product(a, b):
  """Multiplies at full precision."""
  return jnp.matmul(a, b, precision="highest")


def gptq(columns, upper, exponent):
  """Returns codes, values and scaled errors of a block, in the order of its rows."""

  def coordinate(i, state):
    codes, values, errors = state
    target = columns[i] - product(upper[:, i], errors)
    code = nearest(target, exponent)
    value = element(code, exponent)
    error = (target - value) / upper[i, i]
    return codes.at[i].set(code), values.at[i].set(value), errors.at[i].set(error)

  zeros = jnp.zeros(columns.shape, jnp.float32)
  start = jnp.zeros(columns.shape, jnp.uint8), zeros, zeros
  return jax.lax.fori_loop(0, 32, coordinate, start)


def encode_linear(row, state):
  """Encodes block by block; each is told of the errors of those before it."""
  upper = state[0]

  def group(block, carry):
    codes, scales, errors = carry
    columns = jax.lax.dynamic_slice_in_dim(upper, 32 * block, 32, axis=1)
    diagonal = jax.lax.dynamic_slice_in_dim(columns, 32 * block, 32)
    target = jax.lax.dynamic_slice_in_dim(row, 32 * block, 32)
    target = (target - product(columns.T, errors))[:, None]
    exponent = exponents(target)
    code, _, error = gptq(target, diagonal, exponent)
    put = jax.lax.dynamic_update_slice_in_dim
    codes = put(codes, code[:, 0], 32 * block, 0)
    errors = put(errors, error[:, 0], 32 * block, 0)
    return codes, scales.at[block].set(exponent[0]), errors

  blocks = row.shape[0] // 32
  start = jnp.zeros(row.shape, jnp.uint8), jnp.zeros(blocks, jnp.int32)
  return jax.lax.fori_loop(0, blocks, group, (*start, jnp.zeros_like(row)))[:2]
