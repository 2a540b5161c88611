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
        "`mxjax.precision.float64_scope()` with float64 arrays."
      )


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
