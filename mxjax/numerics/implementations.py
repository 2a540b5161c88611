"""Which implementation of an operation runs: one choice and one function that decides.

Every operation has a reference in XLA, which defines it. Some have a kernel for CPUs
(`native`), some a kernel for NVIDIA GPUs (`pallas`). The choice depends on platform,
shapes and dtypes alone and is made before anything is launched, so there is nothing to
fall back from.
"""

from collections.abc import Collection
from typing import Literal, get_args

import jax
import jax.core

Implementation = Literal["xla", "native", "pallas", "interpret"]
"""`xla` is the reference; `native` is a kernel in the vector instructions of this
machine's CPU; `pallas` is a compiled kernel for NVIDIA GPUs; `interpret` runs that
kernel operation by operation on any platform, for tests."""

_FASTEST: dict[str, Implementation] = {"cpu": "native", "gpu": "pallas"}


def target_platform() -> str:
  """Returns the platform that computations are for: `cpu`, `gpu` or another.

  A mesh with an abstract device is how code is compiled for a machine that is not
  there, so it decides if one is set; otherwise the default backend does.
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


def choose(
  place: str,
  implementation: Implementation | None,
  *,
  native: str | None = "this operation has no kernel for CPUs",
  pallas: str | None = "this operation has no kernel for GPUs",
  slower: Collection[Implementation] = (),
  platform: str | None = None,
) -> Implementation:
  """Decides what runs an operation.

  Args:
    place: Name of the operation, for error messages.
    implementation: The caller's choice, which is taken or refused and never replaced;
      None takes the platform's kernel where it can run, else `xla`.
    native: Why the CPU kernel cannot take these arguments, or None if it can.
    pallas: The same for the GPU kernel, compiled or interpreted.
    slower: Kernels that None passes over because `xla` is faster on these arguments.
    platform: Where the operands lie, if it is known; otherwise `target_platform()`.

  Returns:
    The implementation to run.

  Raises:
    NotImplementedError: The implementation that was asked for cannot run.
    ValueError: The choice is not a known name.
  """
  known = get_args(Implementation)
  if implementation not in (None, *known):
    raise ValueError(
      f"{place}: implementation must be None, {', '.join(map(repr, known))}, got "
      f"{implementation!r}."
    )
  platform = target_platform() if platform is None else platform
  obstacles = {"xla": None, "native": native, "pallas": pallas, "interpret": pallas}
  if implementation is None:
    fastest = _FASTEST.get(platform, "xla")
    can_run = obstacles[fastest] is None and fastest not in slower
    return fastest if can_run else "xla"
  obstacle = obstacles[implementation]
  if implementation == "native" and platform != "cpu":
    obstacle = obstacle or f"the platform is {platform} and native kernels need a CPU"
  if implementation == "pallas" and platform != "gpu":
    obstacle = obstacle or (
      f"the platform is {platform} and compiled kernels need an NVIDIA GPU"
    )
  if obstacle is not None:
    raise NotImplementedError(
      f"{place}: implementation={implementation!r} cannot run because {obstacle}; "
      "pass implementation='xla' or None."
    )
  return implementation
