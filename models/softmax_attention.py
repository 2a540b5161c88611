"""Softmax attention of grouped heads by XLA, with a backward pass of its own.

Arrays are feature-major: queries `[b, k, g, d, t]` for k key-value heads that g query
heads read, keys and values `[b, k, d, s]`.

Differentiated by JAX, a layer of 2,048 tokens takes XLA:CPU (jaxlib 0.10.2) 1.7 times
as long: the weights `[g t, s]` are transposed in memory for half of the products, and
every chunk of queries is padded to the length of the sequence. Here each product reads
the weights as they lie, and smaller operands are transposed.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.numerics import precision
from mxjax.numerics.elementwise import add_to_slice
from mxjax.numerics.precision import rounded

Part = tuple[jax.Array, jax.Array, jax.Array | np.ndarray | None]
"""Keys and values `[b, k, d, s]`, and the attention mask or None: bool `[t, s]`, or
`[b, 1, 1, t, s]`."""


class Span(NamedTuple):
  """Keys that a chunk of queries reads, `low` to `high`, and their mask or None."""

  low: int
  high: int
  mask: jax.Array | np.ndarray | None


class Chunk(NamedTuple):
  """Queries from `start` to `stop`, and what they read."""

  start: int
  stop: int
  spans: Sequence[Span]


class _Weighted(NamedTuple):
  """Outputs `[b, k, g, t, d]`, weights `[b, k, g, t, s]` by part, and their sums."""

  outputs: jax.Array
  weights: list[jax.Array]
  total: jax.Array


_Saved = tuple[jax.Array, jax.Array, jax.Array, list[_Weighted]]
"""Queries, keys, values, and what became of each chunk."""


def _weighted(queries: jax.Array, parts: Sequence[Part]) -> _Weighted:
  """Divides by the sum of the weights last: an output has fewer elements than they."""
  scale = queries.shape[3] ** -0.5
  scores = []
  for keys, _, is_seen in parts:
    product = jnp.einsum(
      "bkgdt,bkds->bkgts",
      queries,
      keys,
      precision=precision.HIGHEST,
      preferred_element_type=jnp.float32,
    )
    if is_seen is not None:
      mask = is_seen if is_seen.ndim == 5 else is_seen[None, None, None]
      product = jnp.where(mask, product, -jnp.inf)
    scores.append(product)
  # Over all parts, which are one softmax. It is finite, because every query sees its
  # own key.
  top = functools.reduce(jnp.maximum, [s.max(-1, keepdims=True) for s in scores])
  # The scale comes after the difference; it is positive, so that the maximum stays
  # where it is.
  weights = [jnp.exp((s - top) * scale) for s in scores]
  total = sum(w.sum(-1, keepdims=True) for w in weights)
  outputs = sum(
    jnp.einsum(
      "bkgts,bkds->bkgtd",
      rounded(weight.astype(values.dtype)),
      values,
      precision=precision.HIGHEST,
      preferred_element_type=jnp.float32,
    )
    for weight, (_, values, _) in zip(weights, parts, strict=True)
  )
  divided = rounded(jnp.divide(outputs, total).astype(parts[0][1].dtype))
  return _Weighted(divided, weights, jnp.asarray(total))


def attend(queries: jax.Array, parts: Sequence[Part]) -> jax.Array:
  """Attends over the keys of all parts together; `[b, k, g, t, d]`, as `values`."""
  return _weighted(queries, parts).outputs


def _parts(keys: jax.Array, values: jax.Array, chunk: Chunk) -> list[Part]:
  return [
    (keys[..., low:high], values[..., low:high], mask)
    for low, high, mask in chunk.spans
  ]


def attend_chunks(
  queries: jax.Array, keys: jax.Array, values: jax.Array, chunks: Sequence[Chunk]
) -> list[jax.Array]:
  """Attends chunk by chunk; returns `[b, k, g, t, d]` of each, as `values`.

  The masks are constants of the program, or arrays that have no gradient.
  """

  # Defined in here, so that masks are closed over and need no gradient.
  @jax.custom_vjp
  def run(queries: jax.Array, keys: jax.Array, values: jax.Array) -> list[jax.Array]:
    return [made.outputs for made in each(queries, keys, values)]

  def each(
    queries: jax.Array, keys: jax.Array, values: jax.Array
  ) -> Iterable[_Weighted]:
    for chunk in chunks:
      own = queries[..., chunk.start : chunk.stop]
      yield _weighted(own, _parts(keys, values, chunk))

  def forward(
    queries: jax.Array, keys: jax.Array, values: jax.Array
  ) -> tuple[list[jax.Array], _Saved]:
    made = list(each(queries, keys, values))
    return [one.outputs for one in made], (queries, keys, values, made)

  run.defvjp(forward, functools.partial(_backward, chunks))
  return run(queries, keys, values)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
  """Multiplies matrices `[b, k, m, n]` by `[b, k, n, p]` with float32 sums."""
  return jnp.einsum(
    "bkmn,bknp->bkmp",
    left,
    right,
    precision=precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def _backward(
  chunks: Sequence[Chunk], saved: _Saved, cotangents: list[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the gradients at queries, keys and values, in their dtypes."""
  queries, keys, values, made = saved
  batch, heads, group, width, _ = queries.shape
  scale = width**-0.5
  wide = lambda a: a.astype(jnp.float32)
  at_keys, at_values = (jnp.zeros(a.shape, jnp.float32) for a in (keys, values))
  at_queries = []
  for chunk, (outputs, weights, total), cotangent in zip(
    chunks, made, cotangents, strict=True
  ):
    rows = group * (chunk.stop - chunk.start)
    flat = lambda a, rows=rows: a.reshape(batch, heads, rows, -1)
    # From [b, k, g, d, t].
    turned = lambda a, rows=rows: a.swapaxes(2, 3).reshape(batch, heads, width, rows)
    # Divided by the sum of the weights, so that no weight has to be.
    given = wide(cotangent) / total
    level = (given * wide(outputs)).sum(-1, keepdims=True)
    by_row, by_feature = flat(given), turned(given.swapaxes(3, 4))
    own_by_feature = turned(wide(queries[..., chunk.start : chunk.stop]))
    total_gradient = 0.0
    for (low, high, _), weight in zip(chunk.spans, weights, strict=True):
      keys_here, values_here = wide(keys[..., low:high]), wide(values[..., low:high])
      at_weights = _product(by_row, values_here)
      # Softmax: dS = P (dP - sum(dO O)) scale. P is weight / total, and `given` has the
      # total already.
      at_scores = flat(weight) * ((at_weights - flat(level)) * scale)
      total_gradient += _product(at_scores, keys_here.swapaxes(2, 3))
      place = (..., slice(low, high))
      # All queries of a group add to the keys and values that they share.
      to_values = _product(by_feature, flat(weight))
      at_values = add_to_slice(at_values, place, to_values)
      to_keys = _product(own_by_feature, at_scores)
      at_keys = add_to_slice(at_keys, place, to_keys)
    at_queries.append(total_gradient.reshape(batch, heads, group, -1, width))
  joined = jnp.concatenate(at_queries, axis=3).swapaxes(3, 4)
  gradients = joined, at_keys, at_values
  return tuple(
    a.astype(like.dtype)
    for a, like in zip(gradients, (queries, keys, values), strict=True)
  )
