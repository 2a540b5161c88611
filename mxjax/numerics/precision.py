"""Scoped float64 and checks that it is on.

The library never changes the process-wide x64 flag. FP64 solvers run inside
`float64_scope()`, which the pipeline enters around every program hook. Each solver
checks its operands, because outside the scope it would silently work in float32.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from mxjax.errors import TypeRefusal
from mxjax.numerics import implementations

HIGHEST = jax.lax.Precision.HIGHEST
"""Full float32 products; the NVIDIA default for float32 dots is TF32."""


@contextlib.contextmanager
def float64_scope() -> Iterator[None]:
  """Turns on 64-bit types for the calling thread inside the `with` block."""
  with jax.enable_x64(True):
    yield


def require_float64(place: str, *arrays: jax.Array) -> None:
  """Checks that every array is float64; `place` names the caller in the message.

  Raises:
    TypeError: An array has another dtype: the call is outside `float64_scope()`, or an
      operand was not converted.
  """
  for array in arrays:
    if array.dtype != jnp.float64:
      raise TypeRefusal(
        place,
        expected="float64 operands",
        got=array.dtype,
        mend="call it inside `mxjax.numerics.precision.float64_scope()` with float64 "
        "arrays",
      )


def rounded(x: jax.Array) -> jax.Array:
  """Rounds a bfloat16 result where transformers does; float32 is returned as it is.

  XLA computes neighbouring bfloat16 operations in float32 and leaves out the rounding
  between them, unless it is an operation of its own.
  """
  if x.dtype != jnp.bfloat16:
    return x
  # The exponent and mantissa bits of bfloat16. XLA keeps this operation, where it may
  # leave out a conversion to bfloat16 and back.
  wide = jax.lax.reduce_precision(x.astype(jnp.float32), 8, 7)
  return wide.astype(x.dtype)


def float32_sums(left: jax.Array, right: jax.Array) -> jax.Array:
  """Multiplies `[m, d]` by `[d, n]`, both bfloat16 or float32, with float32 sums."""
  if left.dtype == jnp.bfloat16:
    # XLA:CPU (jaxlib 0.10.2) chooses the bfloat16 implementation early and fails at run
    # time if it later merges a transpose of the result into the product.
    left, right = jax.lax.optimization_barrier((left, right))
  product = jnp.einsum(
    "md,dn->mn", left, right, precision=HIGHEST, preferred_element_type=jnp.float32
  )
  if left.dtype == jnp.bfloat16:
    product = jax.lax.optimization_barrier(product)
  return product


def block_products(matrices: jax.Array, blocks: jax.Array) -> jax.Array:
  """Multiplies `[blocks, 32, n]` by `[blocks, 32, 32]` matrices at full precision."""
  rows = matrices.shape[-2]
  if implementations.target_platform() == "cpu":
    # XLA:CPU (jaxlib 0.10) uses a second core only for products above a size that 32 x
    # 32 just misses; rows of zeros do not change the bits of the others.
    matrices = jnp.pad(matrices, ((0, 0), (0, 4), (0, 0)))
  return jnp.einsum("bij,bjn->bin", matrices, blocks, precision=HIGHEST)[:, :rows]
