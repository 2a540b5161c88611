"""Checks of the attention kernels for `gpu_checks.py`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.models import functional
from mxjax.numerics import e4m3
from mxjax.pallas_kernels.refinement import fused_inputs


def exact_attention(queries, keys, values, start, window):
  """The definition in float64: `[1, new, heads * head_dim]`."""
  queries, keys, values = (
    np.asarray(a.astype(jnp.float32), np.float64)[0] for a in (queries, keys, values)
  )
  new, heads, head_dim = queries.shape
  group, result = heads // keys.shape[1], np.zeros(queries.shape)
  for token, head in np.ndindex(new, heads):
    stop = start + token + 1
    seen = slice(0 if window is None else max(0, stop - window), stop), head // group
    scores = keys[seen] @ queries[token, head] * head_dim**-0.5
    weights = np.exp(scores - scores.max())
    result[token, head] = weights @ values[seen] / weights.sum()
  return result.reshape(1, new, -1)


def attention_errors(
  rng, how, dtype, positions, new, window, head_dim, *, is_e4m3=False
):
  """Largest errors against the reference and float64, of the largest output.

  NaN if the cache after it is not the one before with the new tokens in it. With
  `is_e4m3` the cache is, and float64 attends to rounded keys and values.
  """
  kept = e4m3.encode if is_e4m3 else lambda a: a
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) * 2, dtype)
  queries = draw(1, new, 8, head_dim)
  every = [draw(1, positions, 2, head_dim) for _ in range(2)]

  @functools.partial(jax.jit, static_argnames="implementation")
  def attend(newest, past, start, implementation):
    outputs, filled = functional.cached_attention(
      queries, *newest, past, start, window=window, implementation=implementation
    )
    return fused_inputs.as_array(outputs), filled

  def run(start, behind, implementation):
    """With a cache that holds one value from the new tokens on."""
    newest = [a[:, start : start + new] for a in every]
    past = tuple(kept(a.at[:, start:].set(behind)) for a in every)
    got, filled = attend(newest, past, jnp.int32(start), implementation)
    for after, whole, before in zip(filled, every, past, strict=True):
      stop = start + new
      leaves = map(jax.tree.leaves, (after, kept(whole), before))
      for a, b, c in zip(*leaves, strict=True):
        want = c.at[:, :stop].set(b[:, :stop])
        same = jnp.array_equal(a, want, equal_nan=a.dtype != jnp.uint8)
        got = jnp.where(same, got, jnp.nan)
    return np.asarray(got.astype(jnp.float32), np.float64)

  errors = []
  for start in (0, int(rng.integers(1, positions - new)), positions - new):
    got = run(start, np.nan, how)
    seen = [kept(a).decode(dtype) for a in every] if is_e4m3 else every
    exact = exact_attention(queries, *seen, start, window)
    wanted = np.stack([run(start, 0.0, "xla"), exact])
    errors.append(np.abs(got - wanted).max((1, 2, 3)) / np.abs(exact).max())
  return np.max(errors, axis=0)


def check_cached(rng, how, size):
  """One token and five, over NaN where the cache holds nothing yet; E4M3 caches too."""
  positions, head_dim = (size + 37, 16) if size < 64 else (2 * size + 37, 128)
  errors = {}
  bounds = {jnp.float32: 1e-5, jnp.bfloat16: 2.0**-6}
  for dtype, is_e4m3 in itertools.product(bounds, (False, True)):
    bound, kind = bounds[dtype], {"is_e4m3": is_e4m3}
    worst = [
      attention_errors(rng, how, dtype, positions, new, window, head_dim, **kind)
      for new, window in ((1, None), (5, None), (5, 30))
    ]
    of_xla, of_exact = (np.max(worst, axis=0) / bound).tolist()
    name = jnp.dtype(dtype).name + ", E4M3 cache" * is_e4m3
    errors[name] = {"of xla": of_xla, "of float64": of_exact}
  # A NaN is not at most anything.
  passed = all(e <= 1 for pair in errors.values() for e in pair.values())
  return {"error_in_bounds": errors, "passed": passed}


def check_prefill(rng, how, size):
  """Whole sequences, a window, and a prompt behind cached tokens over NaN."""
  heads, kv_heads = (2, 1) if size < 64 else (8, 2)
  start, new = (2 * size + 5, 3 * size + 9) if size < 64 else (size + 5, size + 9)
  draw = lambda n: jnp.asarray(
    rng.standard_normal((1, start + new, n, 128)) * 2, jnp.bfloat16
  )
  queries, keys, values = draw(heads), draw(kv_heads), draw(kv_heads)
  late = [a[:, start:] for a in (queries, keys, values)]
  past = tuple(a.at[:, start:].set(jnp.nan) for a in (keys, values))
  errors = {}
  for window in (None, size + 3):
    same = {"window": window, "implementation": how}
    attend = functools.partial(functional.causal_attention, **same)
    beside = functools.partial(functional.cached_attention, **same)
    got = {
      "whole": jax.jit(attend)(queries, keys, values),
      "prompt": jax.jit(beside)(*late, past, jnp.int32(start))[0],
    }
    exact = exact_attention(queries, keys, values, 0, window)
    for name, made in got.items():
      want = exact[:, -made.shape[1] :]
      error = np.abs(np.asarray(made.astype(jnp.float32), np.float64) - want).max()
      errors[f"{name}, window {window}"] = float(error / np.abs(want).max() / 2.0**-6)
  passed = all(e <= 1 for e in errors.values())
  return {"error_in_bounds": errors, "passed": passed}
