"""The two recovery fits of HiRes as a program: what they sum, and what they solve."""

import jax
import jax.numpy as jnp

PLAN = {"attention": True, "mlp": True}


def measure_value(value, target, index):
  """Sums the pairs of a head."""
  x, y = jnp.float64(value), jnp.float64(target)
  sums = [jnp.sum(each) for each in (jnp.ones_like(x), x, y, x * x, x * y)]
  return jnp.zeros((32, 32)).at[0, :5].set(jnp.stack(sums))


def recover_value(sums):
  """Least squares of a head's values; constant values are left alone."""
  count, x, y, square, cross = sums[0, :5]
  variance = square - x * x / count
  scale = (cross - x * y / count) / jnp.where(variance == 0, 1, variance)
  fit = jnp.stack([scale, (y - scale * x) / count])
  return jnp.where(variance == 0, jnp.array([1.0, 0.0]), fit)


def column_weights(down):
  """Returns omega: the energy of each column, bounded, with mean one."""
  energy = jnp.sum(jnp.square(jnp.float64(down)), axis=0)
  bounded = jnp.clip(energy / (jnp.mean(energy) + 2.0**-20), 0.25, 4.0)
  return bounded / jnp.mean(bounded)


def measure_mlp(gate, up, gate_target, up_target, down, index):
  """Sums the weighted moments of design, product and error, by quarter and residue."""
  g, u = jnp.float64(gate), jnp.float64(up)
  silu = lambda x: x * jax.nn.sigmoid(x)
  slope = jax.nn.sigmoid(g) * (1 + g * (1 - jax.nn.sigmoid(g)))
  error = silu(jnp.float64(gate_target)) * jnp.float64(up_target) - silu(g) * u
  design = jnp.stack([slope * u, g * slope * u, silu(g) * u, error])
  weighted = design * column_weights(down)[:, None]
  length = g.shape[1] // 4
  rows = []
  for quarter in range(4):
    part = slice(quarter * length, None if quarter == 3 else (quarter + 1) * length)
    own = g[:, part]
    moments = jnp.einsum("iht,jht->ij", weighted[..., part], design[..., part])
    gates = jnp.stack([jnp.float64(own.size), jnp.sum(own), jnp.sum(own * own)])
    rows.append(jnp.concatenate([moments.reshape(-1), gates, jnp.zeros(13)]))
  return jnp.zeros((8, 4, 32)).at[index % 8].set(jnp.stack(rows)).reshape(32, 32)


def recover_mlp(sums):
  """Ridge regression of every cell, and their robust, bounded aggregate."""
  count, total = sums[:, 16], jnp.sum(sums[:, 16:19], axis=0)
  mean, square = total[1] / total[0], total[2] / total[0]
  variance = jnp.maximum(square - mean * mean, 0.0)
  deviation = jnp.sqrt(variance + 2.0**-12 * square + 2.0**-20)
  scale = jnp.stack([deviation, jnp.ones_like(deviation), jnp.ones_like(deviation)])
  moments = sums[:, :16].reshape(32, 4, 4) / count[:, None, None]
  gram, target = moments[:, :3, :3] * scale[:, None] * scale, moments[:, :3, 3] * scale
  trace = jnp.trace(gram, axis1=1, axis2=2)
  damping = 2.0**-8 * trace / 3 + 2.0**-20 * gram[:, 2, 2] + 2.0**-30
  system = gram + damping[:, None, None] * jnp.eye(3)
  of_cells = jnp.linalg.solve(system, target[..., None])[..., 0]
  median = lambda x: jnp.sort(x, axis=0)[15]
  center = median(of_cells)
  spread = 1.4826 * median(jnp.abs(of_cells - center))
  shrunk = jnp.maximum(jnp.abs(center) - spread / jnp.sqrt(jnp.float64(32)), 0)
  theta = jnp.sign(center) * shrunk
  bounded = theta * jnp.minimum(1, 1 / 8 / (jnp.sum(jnp.abs(theta)) + 2.0**-20))
  return jnp.append(bounded, deviation)
