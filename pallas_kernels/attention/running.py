"""Softmax over keys that come in parts: what the kernels of attention carry along."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mxjax.pallas_kernels import lowering


class Running(NamedTuple):
  """Running state of each row: weighted values, largest score, and sum of weights."""

  sums: jax.Array
  top: jax.Array
  total: jax.Array

  @classmethod
  def none(cls, rows: int, head_dim: int) -> "Running":
    """Returns the state before any key."""
    return cls(
      jnp.zeros((rows, head_dim), jnp.float32),
      jnp.full((rows,), -jnp.inf, jnp.float32),
      jnp.zeros((rows,), jnp.float32),
    )

  def with_keys(
    self,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    is_seen: jax.Array | None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    interpret: bool,
  ) -> "Running":
    """Adds keys and values `[s, head_dim]`; `is_seen` is bool `[rows, s]`, None all.

    `scales`, powers of two `[s]` in float32, are factors of keys and of values, None
    ones. A score and a weight are multiplied by them, with the bits of the products by
    each element where nothing is subnormal. `interpret` is that of `lowering.by_ptx`.
    """
    # The GPU has an instruction for powers of two alone: e^x is 2^(x / ln 2).
    dtype, unit = values.dtype, queries.shape[1] ** -0.5 / math.log(2)
    dot = lowering.dot_float32 if dtype == jnp.float32 else lowering.dot_bfloat16
    scores = dot(queries, keys, transpose_b=True)
    if scales is not None:
      scores *= scales[0][None, :]
    if is_seen is not None:
      scores = jnp.where(is_seen, scores, -jnp.inf)
    higher = jnp.maximum(self.top, jnp.max(scores, axis=1))
    # A row that has seen no key yet would compute infinity minus infinity: NaN.
    origin = jnp.where(higher == -jnp.inf, 0.0, higher)
    weights = _power_of_two((scores - origin[:, None]) * unit, interpret)
    decay = _power_of_two((self.top - origin) * unit, interpret)
    total = decay * self.total + jnp.sum(weights, axis=1)
    if scales is not None:
      # After the total: the scale belongs to the value, the weight of the key stays.
      weights *= scales[1][None, :]
    sums = decay[:, None] * self.sums + dot(weights.astype(dtype), values)
    return Running(sums, higher, total)


def _power_of_two(x: jax.Array, interpret: bool) -> jax.Array:
  """Returns 2^x within two units in the last place, zero where that is subnormal.

  One instruction: an exponential, or one without a flush, takes up to eight a score.
  """
  ptx = "ex2.approx.ftz.f32 $0, $1;"
  return lowering.by_ptx(ptx, jnp.exp2, x, interpret=interpret)
