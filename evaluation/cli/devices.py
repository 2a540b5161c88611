"""Sets up the devices and processes that command-line options name."""

import argparse

from jax.sharding import Mesh

from mxjax.devices import mesh as meshes
from mxjax.devices import processes


def is_distributed(options: argparse.Namespace) -> bool:
  """Tells whether a command runs as one of several processes."""
  return getattr(options, "distributed", False)


def mesh_of(options: argparse.Namespace) -> Mesh | None:
  """Joins the other processes, if any, and returns the mesh that the options name.

  Raises:
    ValueError: A process was named without `--distributed`, or a size does not fit.
  """
  named = [
    f"--{name}"
    for name in ("coordinator", "processes", "process")
    if getattr(options, name, None) is not None
  ]
  if is_distributed(options):
    processes.connect(options.coordinator, options.processes, options.process)
  elif named:
    raise ValueError(
      f"devices: expected --distributed beside {', '.join(named)}, got none; add it, "
      "or leave these out."
    )
  if options.mesh is not None:
    return meshes.make(**meshes.sizes(options.mesh))
  return meshes.make() if is_distributed(options) else None
