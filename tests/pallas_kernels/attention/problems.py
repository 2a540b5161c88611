"""Operands of attention, its definition, and how far a result is from it."""

import jax.numpy as jnp
import numpy as np


def problem(batch, new, heads, kv_heads, positions, head_dim, dtype, seed=0):
  """Queries long enough that weights differ by orders of magnitude."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  queries = 3 * draw(batch, new, heads, head_dim)
  past = [draw(batch, positions, kv_heads, head_dim) for _ in range(2)]
  return [jnp.asarray(a).astype(dtype) for a in (queries, *past)]


def exact(queries, keys, values, start, window=None):
  """The definition in float64, head by head."""
  queries, keys, values = (
    np.asarray(a.astype(jnp.float32), np.float64) for a in (queries, keys, values)
  )
  batch, new, heads, head_dim = queries.shape
  group = heads // keys.shape[2]
  result = np.zeros((batch, new, heads, head_dim))
  for b, t, h in np.ndindex(batch, new, heads):
    stop = start + t + 1
    seen = slice(0 if window is None else max(0, stop - window), stop)
    scores = keys[b, seen, h // group] @ queries[b, t, h] * head_dim**-0.5
    weights = np.exp(scores - scores.max())
    result[b, t, h] = weights @ values[b, seen, h // group] / weights.sum()
  return result.reshape(batch, new, -1)


def error(got, want):
  """The largest error in units of the largest output."""
  got, want = (np.asarray(a.astype(np.float32), np.float64) for a in (got, want))
  return np.abs(got - want).max() / np.abs(want).max()
