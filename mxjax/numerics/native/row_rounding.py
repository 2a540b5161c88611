"""GPTQ and coordinate descent of rows with a CPU kernel, callable in jitted functions.

The reference is `mxjax.numerics.realization.two_sided.round_rows`. Sums run in the
order of the features, where XLA may take another.
"""

import jax
import jax.numpy as jnp

from mxjax.numerics import native
from mxjax.numerics.native import ROWS
from mxjax.numerics.native.refinement import BLOCK_SIZE, machine_obstacle


def obstacle(weight: jax.Array, scales: str, tie_rule: str) -> str | None:
  """Returns why the kernel cannot take rows `[blocks, 32, n]`, or None."""
  if scales != "searched":
    return f"it searches exponents, got scales={scales!r}"
  if tie_rule != "away":
    return f"it sends ties away from zero, got tie_rule={tie_rule!r}"
  if weight.dtype != jnp.float32:
    return f"it takes float32, got {weight.dtype}"
  if weight.ndim != 3 or weight.shape[1] != BLOCK_SIZE or weight.shape[2] % ROWS:
    return f"it takes [blocks, {BLOCK_SIZE}, n], n in {ROWS}s, got {weight.shape}"
  return machine_obstacle()


@native.once
def _register(passes: int) -> None:
  """Compiles and registers the kernel for a number of passes, once per process."""
  from mxjax.numerics.native import custom_call, row_rounding_kernel

  kernels = row_rounding_kernel.kernels(kernel_name(passes), passes)
  custom_call.register(*kernels, native.cores() - 1)


def rounded(
  weight: jax.Array,
  upper: jax.Array,
  hessian: jax.Array,
  shift: jax.Array,
  passes: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Rounds rows; returns codes, exponents and decoded weights.

  Call it only where `obstacle` returns None. `shift` is the scalar that damping adds to
  the diagonal of `hessian`; the rest is as in `two_sided.round_rows`. A table that is
  not `[d, d]`, with d the features of the weight, is a ValueError.
  """
  _register(passes)
  blocks, size, rows = weight.shape
  width = blocks * size
  shapes = (
    jax.ShapeDtypeStruct(weight.shape, jnp.uint8),
    jax.ShapeDtypeStruct(weight.shape, jnp.float32),
    jax.ShapeDtypeStruct((blocks, rows), jnp.int32),
    # Room that the kernel works in: XLA allocates it as a result, which is dropped.
    jax.ShapeDtypeStruct((rows // ROWS, width, ROWS), jnp.float32),
  )
  call = jax.ffi.ffi_call(kernel_name(passes), shapes, vmap_method="sequential")
  # The kernel reads tables of this size, whatever the shape says.
  tables = (jnp.broadcast_to(t, (width, width)) for t in (upper, hessian))
  codes, decoded, exponent, _ = call(weight, *tables, shift.reshape(1))
  return codes, exponent, decoded


def kernel_name(passes: int) -> str:
  """Returns the name under which a kernel is registered with XLA."""
  return f"mxjax_rounded_rows_{passes}"
