"""The typed leaf of a quantized linear, and the one function that looks at it."""

import jax
import jax.numpy as jnp

from mxjax import precision


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
  """Computes `x @ weight.T`.

  Args:
    x: Inputs, `[..., in_features]`, float32 or bfloat16.
    weight: `[out_features, in_features]`.

  Returns:
    Outputs, `[..., out_features]`, in the dtype of `x`.
  """
  return jnp.einsum(
    "...d,md->...m", x, weight.astype(x.dtype), precision=precision.HIGHEST
  )
