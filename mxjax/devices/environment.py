"""What else than its inputs may change the bits of a computation: the environment.

A run folder and a store of statistics both say in which environment their numbers were
computed, and are not used in another one.
"""

import os
import pathlib
import platform
import shlex
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax

from mxjax.devices.placement import Placement

PACKAGES = ("mxjax", "jax", "jaxlib", "numpy", "scipy")
"""These packages compute a run's numbers; jaxlib takes its LAPACK from scipy."""
OPTIONS = (
  "jax_default_matmul_precision",
  "jax_default_prng_impl",
  "jax_disable_jit",
  "jax_disable_most_optimizations",
  "jax_enable_x64",
  "jax_exec_time_optimization_effort",
  "jax_optimization_level",
  "jax_random_seed_offset",
  "jax_threefry_partitionable",
)
"""These options of JAX choose arithmetic, random numbers, or how XLA compiles."""
VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
"""These environment variables do so, too, beside `XLA_FLAGS`."""
HARMLESS_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")
"""A flag of XLA that begins with one of these changes no program."""


def environment(placement: Placement, model: Any) -> dict[str, Any]:
  """Returns what else than its inputs may change a run's bits, JSON-ready.

  That is versions, the flags of XLA and of JAX, the device, the machine, what computes
  attention, and the mesh.
  """
  text = os.environ.get("XLA_FLAGS", "")
  if text and not text.lstrip().startswith("-"):  # XLA then takes it for a file.
    file = pathlib.Path(text.strip())
    text = file.read_text() if file.is_file() else ""
  words = [word for word in shlex.split(text) if not word.startswith(HARMLESS_FLAGS)]
  versions: dict[str, str | None] = {}
  for package in PACKAGES:
    try:
      versions[package] = metadata.version(package)
    except metadata.PackageNotFoundError:  # mxjax itself, in a bare checkout.
      versions[package] = None
  device = jax.devices()[0]
  return {
    **versions,
    # Of a flag that is repeated, XLA takes the last.
    "XLA_FLAGS": {name: value for name, _, value in (w.partition("=") for w in words)},
    **{name: os.environ.get(name) for name in VARIABLES},
    # None also where this version of JAX lacks the option.
    **{name: getattr(jax.config, name, None) for name in OPTIONS},
    "machine": platform.machine(),
    "platform": device.platform,
    "device": device.device_kind,
    "runtime": device.client.platform_version,
    "mesh": placement.describe(),
    "attention": getattr(model, "attention", None),
  }


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
  """Returns their values and ours where two environments differ, by key."""
  return {
    key: [theirs.get(key), ours.get(key)]
    for key in {**theirs, **ours}
    if theirs.get(key) != ours.get(key)
  }
