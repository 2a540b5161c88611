"""By what a result was made: command, machine and versions."""

import datetime
import os
import pathlib
import platform
import shlex
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax

PACKAGES = ("mxjax", "jax", "jaxlib", "flax", "numpy", "transformers")


def _processor() -> str:
  """Returns the name of the processor, where the system tells, or its architecture."""
  file = pathlib.Path("/proc/cpuinfo")
  lines = file.read_text().splitlines() if file.is_file() else []
  names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
  return next(names, platform.machine())


def made_by(command: Sequence[str]) -> dict[str, Any]:
  """Returns date, command, device and versions for a result file, JSON-ready.

  `command` are the words after `mxjax`.
  """
  device = jax.devices()[0]
  kind = f"{device.device_kind} x {jax.device_count()}"
  if device.platform == "cpu":
    kind = f"{_processor()}, {os.cpu_count()} cores"
  installed = {}
  for name in PACKAGES:
    try:
      installed[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      installed[name] = "not installed"
  return {
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "command": shlex.join(["mxjax", *command]),
    "device": f"{device.platform}: {kind}",
    "versions": {"python": platform.python_version(), **installed},
  }
