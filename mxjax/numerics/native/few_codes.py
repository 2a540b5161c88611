"""Refinement of a few codes with CPU kernels, callable inside jitted functions.

The reference is `mxjax.numerics.realization.few_codes.refined_blocks`, equal bit for
bit.
"""

import functools

import jax
import jax.numpy as jnp

from mxjax.numerics import native
from mxjax.numerics.native import refinement
from mxjax.numerics.native.encode import SCALE_RULES

KNOWN_RULES = "floor", "even"
"""Scale rules of the kernels; ties go away from zero."""


def obstacle(x: jax.Array, scale_rule: str, tie_rule: str) -> str | None:
  """Returns why the kernel cannot take blocks `[blocks, 32, n]`, or None."""
  if scale_rule not in KNOWN_RULES or tie_rule != "away":
    known = " and ".join(KNOWN_RULES)
    return (
      f"it knows the scale rules {known} with ties away from zero only, got "
      f"{scale_rule} with ties {tie_rule}"
    )
  return refinement.obstacle(x)


@native.once
def _register(changes: int, scale_rule: str) -> None:
  """Compiles and registers the kernels for a number of changes, once per process."""
  from mxjax.numerics.native import custom_call, few_codes_kernel

  name = functools.partial(kernel_name, changes=changes, scale_rule=scale_rule)
  carry, _ = SCALE_RULES[scale_rule]
  kernels = few_codes_kernel.kernels(name, changes, carry)
  custom_call.register(*kernels, native.cores() - 1)


def refined(
  x: jax.Array,
  gram: jax.Array,
  matrix: jax.Array | None = None,
  *,
  scale_rule: str,
  tie_rule: str,
  changes: int,
) -> jax.Array:
  """Encodes and refines blocks, after mapping each by its matrix if one is given.

  Call it only where `obstacle` returns None. Arguments and results are those of
  `few_codes.reference`. A table that cannot be broadcast to `[blocks, 32, 32]` is a
  ValueError.
  """
  del tie_rule  # That of `obstacle`.
  which = {"changes": changes, "scale_rule": scale_rule}
  _register(**which)
  name = kernel_name(maps=matrix is not None, **which)
  result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
  call = jax.ffi.ffi_call(name, result, vmap_method="sequential")
  tables = (gram,) if matrix is None else (gram, matrix)
  # The kernel reads one table per block, whatever the shape says.
  square = x.shape[0], refinement.BLOCK_SIZE, refinement.BLOCK_SIZE
  return call(x, *(jnp.broadcast_to(t.astype(jnp.float32), square) for t in tables))


def kernel_name(*, maps: bool, changes: int, scale_rule: str) -> str:
  """Returns the name under which a kernel is registered with XLA."""
  return f"mxjax_{changes}_codes_{scale_rule}" + ("_mapped" if maps else "")
