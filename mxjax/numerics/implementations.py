"""Selection of the implementation that runs an operation, and the device it is for.

XLA references define every operation. The choice of a kernel depends only on the
device, shapes and dtypes and is made before anything is launched. Where a platform's
kernel is passed over because it cannot run, the logger `mxjax` says so, once for each
operation.
"""

import dataclasses
import functools
import logging
import pathlib
import re
from collections.abc import Collection
from typing import Any, Literal, get_args

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

LOGGER = logging.getLogger("mxjax")

Capability = tuple[int, int]
"""Compute capability of an NVIDIA GPU, such as (9, 0) for Hopper."""
KERNELS: Capability = (8, 0)
"""The least for kernels: the first with bfloat16 on tensor cores."""
FLOAT8: Capability = (8, 9)
"""The least for float8: its conversions, and its products on tensor cores."""

_NO_CPU_KERNEL = "this operation has no kernel for CPUs"
_NO_GPU_KERNEL = "this operation has no kernel for GPUs"
_named: set[str] = set()
"""Operations of which a fallback was logged."""


@dataclasses.dataclass(frozen=True)
class Target:
  """The device that computations target, as far as the choice of kernels depends on it.

  Attributes:
    platform: `cpu`, `gpu` (of any vendor) or another.
    name: What the device calls itself; for messages, no choice depends on it.
    capability: Compute capability of an NVIDIA GPU; None of other devices, and where
      it is not known.
    multiprocessors: Of a GPU; None of other devices, and where it is not known.
  """

  platform: str
  name: str = "this device"
  capability: Capability | None = None
  multiprocessors: int | None = None

  def obstacle(self, least: Capability = KERNELS) -> str | None:
    """Returns why a kernel that needs a compute capability cannot run, or None."""
    needs = "compiled kernels need an NVIDIA GPU"
    if self.platform != "gpu":
      return f"the platform is {self.platform} and {needs}"
    if self.capability is None:
      return f"{needs}, and no compute capability is known of {self.name}"
    if self.capability < least:
      version = lambda capability: ".".join(map(str, capability))
      return (
        f"it needs compute capability {version(least)} and {self.name} has "
        f"{version(self.capability)}"
      )
    return None


_described: dict[str, Target] = {}
"""Devices that `describe` was told of, by the name that an abstract mesh has."""


def describe(device: Any) -> None:
  """Makes a device that is not present known to `target`, for compiling ahead of time.

  `device` is one of a topology (`jax.experimental.topologies`): the abstract device of
  a mesh has its name, but not its compute capability.
  """
  _described[device.device_kind] = target_of(device)


@functools.cache
def target_of(device: Any) -> Target:
  """Returns the target that a device of JAX, present or of a topology, is."""
  platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
  # AMD's are names, such as gfx942.
  capability = str(getattr(device, "compute_capability", ""))
  digits = re.fullmatch(r"(\d+)\.(\d+)", capability)
  return Target(
    platform,
    device.device_kind,
    (int(digits[1]), int(digits[2])) if digits else None,
    getattr(device, "core_count", None) if platform == "gpu" else None,
  )


def target() -> Target:
  """Returns the device that computations target.

  A mesh with an abstract device, which compiles for a machine that may not be present,
  takes precedence over the default device; what is not known of it is None.
  """
  abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
  if abstract is not None:
    # An abstract device has a kind and a number of cores, but no compute capability: a
    # device of that kind, described or present, knows it.
    if abstract.device_kind in _described:
      return _described[abstract.device_kind]
    for device in jax.local_devices():
      if device.device_kind == abstract.device_kind:
        return target_of(device)
    platform = "gpu" if abstract.platform in ("cuda", "rocm") else abstract.platform
    return Target(platform, abstract.device_kind, None, abstract.num_cores)
  config: Any = jax.config
  default = config.jax_default_device
  if default is None:
    return target_of(jax.local_devices()[0])
  # JAX takes the name of a platform, too, such as `cpu`.
  is_name = isinstance(default, str)
  return target_of(jax.local_devices(backend=default)[0] if is_name else default)


def target_platform() -> str:
  """Returns the platform that computations target: `cpu`, `gpu` or another."""
  return target().platform


def target_for(x: jax.Array) -> Target:
  """Returns the target of an operation on an array; `target()` if it is traced."""
  if isinstance(x, jax.core.Tracer):
    return target()
  # All devices of one array are of one platform.
  return target_of(next(iter(x.devices())))


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
  native: str | None = _NO_CPU_KERNEL,
  pallas: str | None = _NO_GPU_KERNEL,
  slower: Collection[Implementation] = (),
  capability: Capability = KERNELS,
  on: Target | None = None,
) -> Implementation:
  """Decides which implementation runs an operation.

  Args:
    place: Name of the operation, for messages.
    implementation: The caller's choice, which is accepted or rejected but never
      replaced; None selects the platform's kernel if it can run, else `xla`. That it
      cannot is logged the first time for each place: a warning, but on a CPU at level
      INFO.
    native: Why the CPU kernel cannot take these arguments, or None if it can.
    pallas: The same for the GPU kernel, compiled or interpreted.
    slower: Kernels that None skips because `xla` is faster on these arguments.
    capability: The least compute capability for which the GPU kernel compiles.
    on: Device of the operands if known; otherwise `target()`.

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
  on = target() if on is None else on
  is_cpu = on.platform == "cpu"
  needs_cpu = f"the platform is {on.platform} and native kernels need a CPU"
  obstacles = {
    "xla": None,
    "native": native or (None if is_cpu else needs_cpu),
    "pallas": pallas or on.obstacle(capability),
    # Interpreting needs no GPU, but arguments that the kernel knows.
    "interpret": pallas,
  }
  if implementation is None:
    fastest = "native" if is_cpu else "pallas"
    obstacle = obstacles[fastest]
    if obstacle is None:
      return "xla" if fastest in slower else fastest
    # What has no kernel on this platform cannot fall back from it.
    if obstacle not in (_NO_CPU_KERNEL, _NO_GPU_KERNEL) and place not in _named:
      _named.add(place)
      level = logging.INFO if is_cpu else logging.WARNING
      LOGGER.log(level, "%s runs through XLA, not by a kernel: %s", place, obstacle)
    return "xla"
  obstacle = obstacles[implementation]
  if obstacle is not None:
    raise NotImplementedRefusal(
      place,
      expected=f"a call that implementation={implementation!r} can run",
      got=f"an obstacle: {obstacle}",
      mend="pass implementation='xla' or None",
    )
  return implementation
