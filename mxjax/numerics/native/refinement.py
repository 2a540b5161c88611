"""One-code refinement with CPU kernels, callable inside jitted functions.

The references are `mxjax.numerics.realization.one_code.refined_blocks`, equal bit for
bit, and `refined_objective`, whose sum over 32 coordinates runs in another order.
"""

import functools
import pathlib
import re
import sys

import jax
import jax.numpy as jnp

from mxjax.numerics import native

BLOCK_SIZE = 32
KNOWN_INTERFACE = "0"
"""Major version of XLA's C interface whose field offsets `custom_call` uses."""


@functools.cache
def machine_obstacle() -> str | None:
  """Returns why custom calls cannot run on this machine, or None."""
  if sys.platform not in ("linux", "darwin"):
    return f"it is written for Linux and macOS, and this is {sys.platform}"
  if missing := native.missing():
    return missing
  from mxjax.numerics.native.custom_call import multiplies_and_adds_at_once

  if not multiplies_and_adds_at_once():
    return "this processor has no fused multiply-add"
  major = _interface_version()
  if major != KNOWN_INTERFACE:
    known = f"version {KNOWN_INTERFACE} of XLA's C interface"
    return f"it knows {known}, and here it is {major}"
  return None


def _interface_version() -> str:
  """Reads the major version of XLA's C interface from jaxlib's header."""
  header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
  if not header.is_file():
    return "unknown"
  major = re.search(r"#define\s+XLA_FFI_API_MAJOR\s+(\d+)", header.read_text())
  return major.group(1) if major else "unknown"


def obstacle(x: jax.Array) -> str | None:
  """Returns why the kernel cannot take blocks `[blocks, 32, n]`, or None."""
  if x.dtype != jnp.float32:
    return f"it takes float32, got {x.dtype}"
  if x.ndim != 3 or x.shape[1] != BLOCK_SIZE:
    return f"it takes blocks of shape [blocks, {BLOCK_SIZE}, n], got {x.shape}"
  if x.shape[2] < native.LANES:
    return f"it takes at least {native.LANES} tokens, got {x.shape[2]}"
  return machine_obstacle()


@native.once
def _register() -> None:
  """Compiles and registers the kernels, once per process."""
  from mxjax.numerics.native import custom_call, refinement_kernel

  kernels = refinement_kernel.kernels(kernel_name)
  custom_call.register(*kernels, native.cores() - 1)


def refined(
  x: jax.Array,
  gram: jax.Array,
  cross: jax.Array,
  matrix: jax.Array | None = None,
  *,
  decodes: bool,
) -> jax.Array:
  """Encodes and refines blocks, after mapping each by its matrix if one is given.

  Call it only where `obstacle` returns None. Arguments and results are those of
  `one_code.reference`. A table that cannot be broadcast to `[blocks, 32, 32]` is a
  ValueError.
  """
  _register()
  blocks, _, tokens = x.shape
  shape = x.shape if decodes else (blocks, tokens)
  name = kernel_name(maps=matrix is not None, decodes=decodes)
  call = jax.ffi.ffi_call(
    name, jax.ShapeDtypeStruct(shape, jnp.float32), vmap_method="sequential"
  )
  tables = (gram, cross) if matrix is None else (gram, cross, matrix)
  # The kernel reads one table per block, whatever the shape says.
  square = blocks, BLOCK_SIZE, BLOCK_SIZE
  return call(x, *(jnp.broadcast_to(t.astype(jnp.float32), square) for t in tables))


def kernel_name(*, maps: bool, decodes: bool) -> str:
  """Returns the name under which a kernel is registered with XLA."""
  what = "decoded" if decodes else "objective"
  return f"mxjax_refined_{what}" + ("_mapped" if maps else "")
