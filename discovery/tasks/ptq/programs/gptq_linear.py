"""GPTQ as a program of its own: Hessian, factor, and errors that go on to later blocks.

One pass of a linear sums the second moment of its inputs, in the coordinates of the
map, if another part of the program has one. Then rows are encoded whole.
"""

import jax
import jax.numpy as jnp

PLAN = {"curvature": "solved", "linear_passes": 1}
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


def factor(hessian):
  """Returns U with inv(H + .01 mean(diag H)) = U'U, tenfold damping if needed."""
  hessian = jnp.float32(hessian)
  mean = jnp.trace(hessian) / hessian.shape[0]
  eye = jnp.eye(hessian.shape[0], dtype=jnp.float32)

  def attempt(state):
    damping, _ = state
    shift = jnp.where(mean > 0, damping * mean, jnp.float32(1))
    upper = jnp.linalg.cholesky((hessian + shift * eye)[::-1, ::-1])[::-1, ::-1]
    solved = jax.lax.linalg.triangular_solve(upper, eye, left_side=True, lower=False)
    return damping * 10, solved

  again = lambda state: (state[0] < 50) & ~jnp.all(jnp.isfinite(state[1]))
  start = jnp.float32(0.01), jnp.full_like(hessian, jnp.nan)
  return jax.lax.while_loop(again, attempt, start)[1]


def measure_linear(inputs, index, step, state):
  """Sums x x', and counts the tokens."""
  moment = product(inputs, inputs.T)
  upper = jnp.triu(moment) + jnp.triu(moment, 1).T
  count = jnp.full_like(moment, inputs.shape[1])
  return jnp.stack([upper, count])


def solve_linear(step, sums, state):
  """Finds U of the Hessian in the coordinates of T."""
  width = state.shape[1]
  blocks = width // 32
  hessian = sums[0] / sums[1, 0, 0]
  of_blocks = state[0].reshape(blocks, 32, blocks, 32)
  maps = of_blocks[jnp.arange(blocks), :, jnp.arange(blocks)]
  tiles = hessian.reshape(blocks, 32, blocks, 32)
  left = jnp.einsum("aij,ajbk->aibk", maps, tiles, precision="highest")
  both = jnp.einsum("aibk,blk->aibl", left, maps, precision="highest")
  upper = factor(both.reshape(width, width))
  return jnp.stack([upper, jnp.zeros_like(upper)])


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
