"""WUSH as a program: a basis for each block, found when the rounding reaches it.

Blocks go from the last to the first. A block's only pass sums the second moment of its
weights, which carry the errors of the later blocks, and solves for the basis in which
these weights and the inputs are flat and equally large. Its codes are those of nearest
planes, from the last coordinate to the first.
"""

import jax
import jax.numpy as jnp

PLAN = {"transform": "reached"}
SPECTRUM_DAMPING = 0.01


def block_exponent(block):
  """Returns the floor of log2 of the largest magnitude, minus two."""
  field = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(block)), jnp.int32) >> 23
  return jnp.clip(field - 129, -127, 127).astype(jnp.int32)


def nearest_code(value, exponent):
  """Returns the nearest code of one value; a tie takes the larger magnitude."""
  edges = jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], value.dtype)
  index = jnp.sum(jnp.ldexp(jnp.abs(value), -exponent) >= edges)
  return (index + 8 * jnp.signbit(value)).astype(jnp.uint8)


def element(code, exponent):
  """Returns the value of one code."""
  table = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)
  magnitude = table[(code & 7).astype(jnp.int32)]
  return jnp.ldexp(jnp.where(code >= 8, -magnitude, magnitude), exponent)


def hadamard():
  """Returns the normalized matrix of size 32."""
  matrix = jnp.ones((1, 1), jnp.float64)
  for _ in range(5):
    matrix = jnp.block([[matrix, matrix], [matrix, -matrix]])
  return matrix / jnp.sqrt(32.0)


def measure_weights(tile, index, step, state):
  """Sums the second moment of the rows, and their number."""
  moment = jnp.dot(tile, tile.T, precision="highest")
  count = jnp.full((32, 32), 32.0, jnp.float64)
  return jnp.concatenate([moment[None], count[None], jnp.zeros_like(state[2:])])


def solve(step, input_sums, weight_sums, curvature, state):
  """Finds H Diag(sqrt s) V' R^-T, where R w = V Diag(s) U' sqrt(rows)."""
  moment, count = weight_sums[0], weight_sums[1, 0, 0]
  gram = curvature @ moment @ curvature.T
  values, vectors = jnp.linalg.eigh((gram + gram.T) / 2)
  spectrum = jnp.sqrt(jnp.maximum(values[::-1], 0.0) / count)
  spectrum = spectrum + SPECTRUM_DAMPING * jnp.mean(spectrum)
  spectrum = jnp.where(spectrum[0] > 0, spectrum, 1.0)
  scaled = vectors[:, ::-1] * jnp.sqrt(spectrum)[None, :]
  basis = jax.lax.linalg.triangular_solve(
    curvature, scaled, left_side=True, lower=False
  ).T
  transform = (hadamard() @ basis).astype(jnp.bfloat16).astype(jnp.float64)
  return jnp.concatenate([transform[None], state[1:]])


def encode_weight(block, curvature):
  """Rounds from the last coordinate; each answers the errors of those behind it."""
  exponent = block_exponent(block)

  def coordinate(count, state):
    codes, errors = state
    i = 31 - count
    goal = block[i] + jnp.dot(curvature[i], errors) / curvature[i, i]
    code = nearest_code(goal, exponent)
    error = block[i] - element(code, exponent)
    return codes.at[i].set(code), errors.at[i].set(error)

  start = jnp.zeros(32, jnp.uint8), jnp.zeros(32, block.dtype)
  return jax.lax.fori_loop(0, 32, coordinate, start)[0], exponent
