"""What benchmarks write: how a result was made, and tables for the documents."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import sys

PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def cpu():
  """The processor's name."""
  file = pathlib.Path("/proc/cpuinfo")
  lines = file.read_text().splitlines() if file.is_file() else []
  names = (line.split(":")[1].strip() for line in lines if "model name" in line)
  return next(names, platform.machine())


def command(hidden=()):
  """The command line of this script, without the options that name places."""
  words, skip = ["python", f"benchmarks/{pathlib.Path(sys.argv[0]).name}"], False
  for word in sys.argv[1:]:
    name = word.split("=")[0]
    if skip or name in hidden:
      skip = not skip and "=" not in word
      continue
    words.append(word)
  return " ".join(words)


def stamp(packages=(), hidden=()):
  """Entries for the top of a result file.

  Args:
    packages: distributions beside PACKAGES whose versions matter.
    hidden: options (with a value) that only say where something lies here.
  """
  return {
    "command": command(hidden),
    "machine": {
      "cpu": cpu(),
      "cores": os.cpu_count(),
      "load_at_start": os.getloadavg()[0],
      "python": platform.python_version(),
    },
    "versions": {
      name: importlib.metadata.version(name) for name in (*PACKAGES, *packages)
    },
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
  }


def markdown(head, lines):
  """A Markdown table of text cells."""
  rows = [head, ["---"] * len(head), *lines]
  return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
