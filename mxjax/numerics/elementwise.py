"""Reference implementations of RMSNorm and the SwiGLU product; sums into a slice."""

from types import EllipsisType

import jax
import jax.numpy as jnp

from mxjax.numerics.precision import rounded


def rms_norm(
  x: jax.Array, weight: jax.Array, eps: float, *, rounds_once: bool = False
) -> jax.Array:
  r"""Divides rows `[..., d]` by their root mean square and multiplies by `weight`.

  .. math::
    y = w \odot x / \sqrt{\operatorname{mean}(x^2) + \epsilon}

  The weight is `[d]`. The mean is in float32; the result has the shape and dtype of
  `x`. With `rounds_once` the product with the weight is in float32, too, as
  transformers computes it in OLMo-2; without, what is normalized is rounded to the
  dtype first, as in its other families. In float32 the two are the same.
  """
  wide = x.astype(jnp.float32)
  mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  scale = weight.astype(x.dtype).reshape((1,) * (x.ndim - 1) + weight.shape)
  normal = wide * jax.lax.rsqrt(mean_square + eps)
  if rounds_once:
    return rounded((normal * scale.astype(jnp.float32)).astype(x.dtype))
  return rounded(rounded(normal.astype(x.dtype)) * scale)


def gated_product(gate: jax.Array, up: jax.Array) -> jax.Array:
  """Computes `silu(gate) * up` for `[..., hidden]` arrays of one shape and dtype.

  The silu is in float32, rounded to the dtype before the product.
  """
  # Feature-major, the layout that linears produce and consume: fusing a transpose with
  # the exponential would cost XLA:CPU its vector instructions.
  rows, columns = (a.reshape(-1, a.shape[-1]).T for a in (gate, up))
  passed = rounded(jax.nn.silu(rows.astype(jnp.float32)).astype(gate.dtype))
  return rounded(passed * columns).T.reshape(gate.shape)


def add_to_slice(
  total: jax.Array, place: tuple[slice | EllipsisType, ...], part: jax.Array
) -> jax.Array:
  """Returns `total` with `part`, of its dtype, added at the static slices `place`.

  Where the slices are all of the array this is a plain sum. As a scatter it would have
  an array of no elements for its indices, and jaxlib 0.11.2 ends the process with a
  segmentation fault when it compiles one inside `shard_map`.
  """
  if part.shape == total.shape:
    return total + part
  return total.at[place].add(part)
