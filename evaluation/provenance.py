"""How a result names its model, and by what it was made.

It imports JAX only where a result is made, because help texts read the names.
"""

import datetime
import os
import pathlib
import platform
import shlex
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

FORMS = {
  "W4A4": "strict MXFP4 W4A4",
  "W4A16": "MXFP4 weights with float inputs (W4A16), outside the paper's contract",
}
"""What results call a `Contract.form`."""
DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""Name of the embedded model, whose weights are those of a Q4_1 file."""
PACKAGES = ("mxjax", "jax", "jaxlib", "flax", "numpy", "transformers")


def short_name(model: str) -> str:
  """Returns the last part of a model's path or hub id, also of `.` and `..`."""
  return os.path.basename(os.path.abspath(model))


def forms(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns what the rows of a result are, such as `strict MXFP4 W4A4`."""
  good = [row for row in rows if "error" not in row]
  found = {row.get("record", {}).get("form", "W4A4") for row in good} or {"W4A4"}
  return "; ".join(text for form, text in FORMS.items() if form in found)


def source(model: str) -> str | None:
  """Returns what loads a model of this name: None for the embedded one."""
  return None if model == DEFAULT_MODEL else model


def made_by(command: Sequence[str]) -> dict[str, Any]:
  """Returns date, command, device and versions for a result file, JSON-ready.

  `command` are the words after `mxjax`.
  """
  import jax

  device = jax.devices()[0]
  kind = f"{device.device_kind} x {jax.device_count()}"
  if device.platform == "cpu":
    # JAX calls every processor "cpu"; the system may tell its name.
    file = pathlib.Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    kind = f"{next(names, platform.machine())}, {os.cpu_count()} cores"
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
