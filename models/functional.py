"""The arithmetic of a decoder layer as plain functions: norm, rotary, attention.

Nothing here knows of parameters' names or of flax. Sums and softmax run in float32
whatever the dtype of the operands, products at full precision.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import precision
from mxjax.models.config import RopeScaling

QUERY_CHUNK = 256
"""Queries attended at once: bounds the score array to `QUERY_CHUNK * length`."""


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  r"""Divides each row by its root mean square and scales it.

  .. math::
    y = w \odot x / \sqrt{\operatorname{mean}(x^2) + \epsilon}

  Args:
    x: Rows, `[..., d]`, float32 or bfloat16.
    weight: Scale of each coordinate, `[d]`, any float dtype.
    eps: Added to the mean square.

  Returns:
    The normalized rows, `[..., d]`, in the dtype of `x`.
  """
  wide = x.astype(jnp.float32)
  mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  normal = (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)
  return normal * weight.astype(x.dtype).reshape((1,) * (x.ndim - 1) + weight.shape)


def inverse_frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> np.ndarray:
  """Computes the rotary frequencies in numpy float32, as transformers does.

  Args:
    head_dim: Coordinates of a head, even.
    theta: Base of the geometric series.
    scaling: Llama-3 scaling, or None.

  Returns:
    Radians per token, float32 `[head_dim / 2]`.
  """
  exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
  frequencies = np.float32(1.0) / np.float32(theta) ** exponents
  return frequencies if scaling is None else _stretch(frequencies, scaling)


def _stretch(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
  """Applies Llama-3 scaling to float32 frequencies."""
  original = scaling.original_max_position
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  wavelengths = 2 * math.pi / frequencies
  is_long, is_short = wavelengths > original / low, wavelengths < original / high
  stretched = frequencies / scaling.factor
  blend = (original / wavelengths - low) / (high - low)
  blended = (1 - blend) * stretched + blend * frequencies
  scaled = np.where(is_long, stretched, np.where(is_short, frequencies, blended))
  return scaled.astype(np.float32)


def rotary(
  x: jax.Array, frequencies: np.ndarray, start: int | jax.Array = 0
) -> jax.Array:
  """Turns the halves of each head by an angle proportional to the position.

  Coordinate i is paired with coordinate i + head_dim/2, the layout of Hugging Face
  checkpoints. Positions count from `start` on the sequence axis.

  Args:
    x: Queries or keys, `[batch, length, heads, head_dim]`.
    frequencies: Radians per token, float32 `[head_dim / 2]`.
    start: Position of the first vector, int32 if an array.

  Returns:
    The turned vectors, same shape and dtype.
  """
  positions = (start + jnp.arange(x.shape[1], dtype=jnp.int32)).astype(jnp.float32)
  angles = positions[:, None] * jnp.asarray(frequencies)[None, :]
  cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def causal_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  *,
  window: int | None = None,
  query_chunk: int = QUERY_CHUNK,
) -> jax.Array:
  """Grouped-query softmax attention over the past.

  Queries go in chunks and each chunk sees only the keys from the start of its first
  query's window up to its own end, so the `length x length` scores never exist at
  once and nearly half the products are saved, or more with a window.

  Args:
    queries: `[batch, length, heads, head_dim]`, already rotated.
    keys: `[batch, length, kv_heads, head_dim]`, already rotated; query head h reads
      key-value head `h // (heads / kv_heads)`.
    values: `[batch, length, kv_heads, head_dim]`.
    window: Tokens that a query sees, itself included; None for all of the past.
    query_chunk: Queries at a time; the result does not depend on it.

  Returns:
    Outputs, `[batch, length, heads * head_dim]`, in the dtype of `values`.
  """
  batch, length, heads, head_dim = queries.shape
  kv_heads = keys.shape[2]
  grouped = queries.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
  # Heads before positions: the score product then needs no transpose of its output.
  grouped = grouped.transpose(0, 2, 3, 1, 4)
  keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
  chunks = []
  for start in range(0, length, query_chunk):
    stop = min(start + query_chunk, length)
    first = 0 if window is None else max(0, start - window + 1)
    seen = keys[:, :, first:stop], values[:, :, first:stop]
    chunks.append(_attend(grouped[:, :, :, start:stop], *seen, start, first, window))
  outputs = jnp.concatenate(chunks, axis=3).transpose(0, 3, 1, 2, 4)
  return outputs.reshape(batch, length, heads * head_dim)


def cached_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  start: jax.Array,
  *,
  window: int | None = None,
  query_chunk: int = QUERY_CHUNK,
) -> jax.Array:
  """Grouped-query softmax attention of the newest tokens over a cache.

  Args:
    queries: `[batch, new, heads, head_dim]`, rotated, at positions from `start`.
    keys: `[batch, positions, kv_heads, head_dim]`, the new ones already in place;
      what lies behind the newest token is not read.
    values: Same shape.
    start: Position of the first query, int32.
    window: Newest keys that a query sees, itself included; None for all.
    query_chunk: Queries at a time; the result does not depend on it.

  Returns:
    Outputs, `[batch, new, heads * head_dim]`, in the dtype of `values`.
  """
  batch, new, heads, head_dim = queries.shape
  kv_heads = keys.shape[2]
  grouped = queries.reshape(batch, new, kv_heads, heads // kv_heads, head_dim)
  grouped = grouped.transpose(0, 2, 3, 1, 4)
  past = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
  chunks = [
    _attend(
      grouped[:, :, :, first : first + query_chunk], *past, start + first, 0, window
    )
    for first in range(0, new, query_chunk)
  ]
  outputs = jnp.concatenate(chunks, axis=3).transpose(0, 3, 1, 2, 4)
  return outputs.reshape(batch, new, heads * head_dim)


def _attend(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  start: int | jax.Array,
  first: int,
  window: int | None,
) -> jax.Array:
  """Attends queries `[b, k, g, t, d]` from position `start` to keys from `first`."""
  scores = jnp.einsum(
    "bkgtd,bksd->bkgts",
    queries,
    keys,
    precision=precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
  query_positions = start + np.arange(queries.shape[3], dtype=np.int32)[:, None]
  key_positions = first + np.arange(keys.shape[2], dtype=np.int32)[None, :]
  is_seen = key_positions <= query_positions
  if window is not None:
    is_seen &= key_positions > query_positions - window
  scores = jnp.where(
    is_seen[None, None, None], scores * queries.shape[-1] ** -0.5, -jnp.inf
  )
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  return jnp.einsum("bkgts,bksd->bkgtd", weights, values, precision=precision.HIGHEST)


def gated_product(gate: jax.Array, up: jax.Array) -> jax.Array:
  """Computes `silu(gate) * up`.

  Args:
    gate: Gate outputs, `[..., hidden]`.
    up: Up outputs, same shape and dtype.

  Returns:
    The product, same shape and dtype.
  """
  return jax.nn.silu(gate) * up
