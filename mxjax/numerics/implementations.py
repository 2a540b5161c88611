"""Selection of the implementation that runs an operation.

XLA references define every operation. The choice of a kernel depends only on the
platform, shapes and dtypes and is made before anything is launched: no fallback.
"""

import functools
import pathlib
from collections.abc import Collection
from typing import Literal, get_args

import jax
import jax.core
import jax.numpy as jnp

from mxjax.errors import NotImplementedRefusal, ValueRefusal

Implementation = Literal["xla", "native", "pallas", "interpret"]
"""`xla` is the reference; `native` is a kernel in this CPU's vector instructions;
`pallas` is a compiled kernel for NVIDIA GPUs; `interpret` runs the Pallas kernel
operation by operation on any platform, for tests."""

CPU_FACTS = pathlib.Path("/proc/cpuinfo")
"""Where Linux lists the instructions of the processor."""

_FASTEST: dict[str, Implementation] = {"cpu": "native", "gpu": "pallas"}


def target_platform() -> str:
  """Returns the platform that computations target: `cpu`, `gpu` or another.

  A mesh with an abstract device, which compiles for a machine that is not present,
  takes precedence over the default backend.
  """
  device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
  platform = jax.default_backend() if device is None else device.platform
  return "gpu" if platform in ("gpu", "cuda") else platform


def platform_of(x: jax.Array) -> str:
  """Returns the platform of an array; `target_platform()` if it is traced."""
  if isinstance(x, jax.core.Tracer):
    return target_platform()
  platform = next(iter(x.devices())).platform
  return "gpu" if platform in ("gpu", "cuda") else platform


@functools.cache
def has_bfloat16_products(file: pathlib.Path = CPU_FACTS) -> bool:
  """Whether this machine's CPU multiplies bfloat16 by instructions of its own.

  `file` lists them; where there is none, False.
  """
  words = set(file.read_text().split()) if file.is_file() else set()
  return bool(words & {"avx512_bf16", "amx_bf16"})


def product_dtype() -> jax.typing.DTypeLike:
  """Returns the dtype in which a strict linear is multiplied fastest.

  Legal MXFP4 values are exact in bfloat16 and in float32; sums are in float32. XLA:CPU
  (jaxlib 0.10.2) is slower in bfloat16 where the processor has no instructions for it
  (`benchmarks/products_cpu.py`).
  """
  if target_platform() == "cpu" and not has_bfloat16_products():
    return jnp.float32
  return jnp.bfloat16


def choose(
  place: str,
  implementation: Implementation | None,
  *,
  native: str | None = "this operation has no kernel for CPUs",
  pallas: str | None = "this operation has no kernel for GPUs",
  slower: Collection[Implementation] = (),
  platform: str | None = None,
) -> Implementation:
  """Decides which implementation runs an operation.

  Args:
    place: Name of the operation, for error messages.
    implementation: The caller's choice, which is accepted or rejected but never
      replaced; None selects the platform's kernel if it can run, else `xla`.
    native: Why the CPU kernel cannot take these arguments, or None if it can.
    pallas: The same for the GPU kernel, compiled or interpreted.
    slower: Kernels that None skips because `xla` is faster on these arguments.
    platform: Platform of the operands if known; otherwise `target_platform()`.

  Raises:
    NotImplementedError: The requested implementation cannot run. So does every function
      that passes its `implementation` on to here.
    ValueError: `implementation` is not a known name.
  """
  known = get_args(Implementation)
  if implementation not in (None, *known):
    raise ValueRefusal(
      place,
      expected=f"implementation None or one of {', '.join(map(repr, known))}",
      got=repr(implementation),
    )
  platform = target_platform() if platform is None else platform
  obstacles = {"xla": None, "native": native, "pallas": pallas, "interpret": pallas}
  if implementation is None:
    fastest = _FASTEST.get(platform, "xla")
    can_run = obstacles[fastest] is None and fastest not in slower
    return fastest if can_run else "xla"
  obstacle = obstacles[implementation]
  needs = {
    "native": ("cpu", "native kernels need a CPU"),
    "pallas": ("gpu", "compiled kernels need an NVIDIA GPU"),
  }
  needed, why = needs.get(implementation, (platform, ""))
  if obstacle is None and platform != needed:
    obstacle = f"the platform is {platform} and {why}"
  if obstacle is not None:
    raise NotImplementedRefusal(
      place,
      expected=f"a call that implementation={implementation!r} can run",
      got=f"an obstacle: {obstacle}",
      mend="pass implementation='xla' or None",
    )
  return implementation
