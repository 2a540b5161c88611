"""Scoped float64 and the assertion that it is really on.

The library never flips the process-wide x64 flag. FP64 solvers run inside
`float64_scope()`, which the pipeline enters around every program hook; each solver
checks its operands at the door, because the same function called outside the scope
would silently work in float32.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
"""Full float32 products: TF32 is the default for float32 dots on NVIDIA GPUs."""


@contextlib.contextmanager
def float64_scope() -> Iterator[None]:
  """Turns on 64-bit types for the calling thread inside the `with` block."""
  with jax.enable_x64(True):
    yield


def require_float64(place: str, *arrays: jax.Array) -> None:
  """Checks that every array is float64.

  Args:
    place: Name of the calling function, for the message.
    *arrays: Arrays of any shape.

  Raises:
    TypeError: An array has another dtype, which means the call is outside
      `float64_scope()` or an operand was not converted.
  """
  for array in arrays:
    if array.dtype != jnp.float64:
      raise TypeError(
        f"{place}: expected float64 operands, got {array.dtype}; call it inside "
        "`mxjax.numerics.precision.float64_scope()` with float64 arrays."
      )


def float32_sums(left: jax.Array, right: jax.Array) -> jax.Array:
  """Multiplies matrices with float32 sums; operands may be bfloat16.

  Args:
    left: `[m, d]`, bfloat16 or float32.
    right: `[d, n]`, same dtype.

  Returns:
    float32 `[m, n]`.
  """
  if left.dtype == jnp.bfloat16:
    # XLA:CPU (jaxlib 0.10.2) decides early who multiplies bfloat16, and fails when run
    # if it has merged a transpose of the result into the product since then.
    left, right = jax.lax.optimization_barrier((left, right))
  product = jnp.einsum(
    "md,dn->mn", left, right, precision=HIGHEST, preferred_element_type=jnp.float32
  )
  if left.dtype == jnp.bfloat16:
    product = jax.lax.optimization_barrier(product)
  return product


def block_products(matrices: jax.Array, blocks: jax.Array) -> jax.Array:
  """Multiplies each block of columns by its own matrix, at full precision.

  Args:
    matrices: `[blocks, 32, 32]`.
    blocks: `[blocks, 32, n]`, same dtype.

  Returns:
    `[blocks, 32, n]`.
  """
  rows = matrices.shape[-2]
  if jax.default_backend() == "cpu":
    # XLA:CPU (jaxlib 0.10) takes a second core for a product only from some size on,
    # which 32 x 32 just misses; rows of zeros do not change the others' bits.
    matrices = jnp.pad(matrices, ((0, 0), (0, 4), (0, 0)))
  return jnp.einsum("bij,bjn->bin", matrices, blocks, precision=HIGHEST)[:, :rows]
