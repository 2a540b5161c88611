"""Attention on a GPU: checks of the kernels, and a prefill's by all who offer one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.models import functional
from mxjax.pallas_kernels.attention import prefill
from mxjax.pallas_kernels.refinement import fused_inputs

TILES = ((128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2))
"""Queries, keys, warps and stages to try; the first is the kernel's own choice."""


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


def attention_errors(rng, how, dtype, positions, new, window, head_dim):
  """Largest errors against the reference and float64, of the largest output.

  NaN if the cache after it is not the one before with the new tokens in it.
  """
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
    past = tuple(a.at[:, start:].set(behind) for a in every)
    got, filled = attend(newest, past, jnp.int32(start), implementation)
    for after, whole, before in zip(filled, every, past, strict=True):
      want = before.at[:, : start + new].set(whole[:, : start + new])
      same = jnp.array_equal(after, want, equal_nan=True)
      got = jnp.where(same, got, jnp.nan)
    return np.asarray(got.astype(jnp.float32), np.float64)

  errors = []
  for start in (0, int(rng.integers(1, positions - new)), positions - new):
    got = run(start, np.nan, how)
    exact = exact_attention(queries, *every, start, window)
    wanted = np.stack([run(start, 0.0, "xla"), exact])
    errors.append(np.abs(got - wanted).max((1, 2, 3)) / np.abs(exact).max())
  return np.max(errors, axis=0)


def check_cached(rng, how, size):
  """One token and five, over NaN where the cache holds nothing yet."""
  positions, head_dim = (size + 37, 16) if size < 64 else (2 * size + 37, 128)
  errors = {}
  for dtype, bound in ((jnp.float32, 1e-5), (jnp.bfloat16, 2.0**-6)):
    worst = [
      attention_errors(rng, how, dtype, positions, new, window, head_dim)
      for new, window in ((1, None), (5, None), (5, 30))
    ]
    of_xla, of_exact = (np.max(worst, axis=0) / bound).tolist()
    errors[jnp.dtype(dtype).name] = {"of xla": of_xla, "of float64": of_exact}
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


def by_cudnn(queries, keys, values):
  """Attention of whole sequences by cuDNN, in the shape of ours."""
  how = {"is_causal": True, "implementation": "cudnn"}
  outputs = jax.nn.dot_product_attention(queries, keys, values, **how)
  return outputs.reshape(*queries.shape[:2], -1)


def time_prefill(bench, shape):
  """A layer's attention of 2,048 tokens: by our kernel, by XLA, and by cuDNN.

  All are compared with XLA first; `choose` names the fastest that ran and agreed, so
  that the default can follow.
  """
  tokens, keys = bench.size(2048, 40), jax.random.split(jax.random.key(5), 3)
  draw = lambda key, heads: jax.random.normal(
    key, (1, tokens, heads, shape.head_dim), jnp.bfloat16
  )
  operands = draw(keys[0], shape.heads), *(draw(k, shape.kv_heads) for k in keys[1:])
  attend = functional.causal_attention
  runs = {"xla": jax.jit(functools.partial(attend, implementation="xla"))}
  for tile in TILES[: bench.size(len(TILES), 1)]:
    how = {"tile": prefill.Tile(*tile), "interpret": bench.smoke}
    name = "pallas, " + " x ".join(map(str, tile))
    runs[name] = jax.jit(functools.partial(prefill.launch, **how))
  if not bench.smoke:
    runs["cudnn"] = jax.jit(by_cudnn)
  want, errors, failed = None, {}, {}
  for name, run in runs.items():
    try:
      got = jax.block_until_ready(run(*operands)).astype(jnp.float32)
    except (RuntimeError, NotImplementedError, ValueError) as error:
      failed[name] = str(error)[:200]
      continue
    want = got if want is None else want
    errors[name] = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
  times = bench.measure_kernels({name: (runs[name], operands) for name in errors})
  for result in times.values():
    result["TFLOPs"] = shape.attention_flop(tokens) / result["ms"] / 1e9
  agree = [name for name, error in errors.items() if error < 2.0**-6]
  return {
    "times": times,
    "error_of_norm": errors,
    "failed": failed,
    "choose": min(agree, key=lambda name: times[name]["ms"]),
  }
