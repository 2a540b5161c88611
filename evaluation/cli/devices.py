"""Options of commands that share their work out over devices and processes."""

import argparse
import sys
from collections.abc import Callable, Sequence

from jax.sharding import Mesh

from mxjax.devices import mesh as meshes
from mxjax.devices import processes as distributed

MODULE = "mxjax.evaluation.cli.parser"


def add_options(parser: argparse.ArgumentParser, *, processes: bool) -> None:
  """Adds `--mesh`, and what joins several processes where a command can use them."""
  group = parser.add_argument_group("devices")
  group.add_argument(
    "--mesh",
    metavar="AXES",
    help="share the work out over devices, such as data=4,model=2: sequences over "
    "data, weights by output rows over model; one device when omitted",
  )
  if not processes:
    return
  group.add_argument(
    "--distributed",
    action="store_true",
    help="this is one process of several that run the same command on one --out; "
    "without --mesh all of their devices are on data",
  )
  group.add_argument(
    "--coordinator",
    metavar="HOST:PORT",
    help="process 0's address; this and the next two are taken from the cluster's "
    "environment when omitted",
  )
  group.add_argument("--processes", type=int, metavar="N", help="how many there are")
  group.add_argument("--process", type=int, metavar="I", help="which one this is")


def is_distributed(options: argparse.Namespace) -> bool:
  """Whether a command runs as one of several processes."""
  return getattr(options, "distributed", False)


def mesh_of(options: argparse.Namespace) -> Mesh | None:
  """Joins the other processes if there are any; the mesh that options name.

  Raises:
    ValueError: A process was named without `--distributed`, or a size does not fit.
  """
  named = [
    f"--{name}"
    for name in ("coordinator", "processes", "process")
    if getattr(options, name, None) is not None
  ]
  if is_distributed(options):
    distributed.connect(options.coordinator, options.processes, options.process)
  elif named:
    raise ValueError(
      f"devices: expected --distributed beside {', '.join(named)}, got none; add it, "
      "or leave these out."
    )
  if options.mesh is not None:
    return meshes.make(**meshes.sizes(options.mesh))
  return meshes.make() if is_distributed(options) else None


def run(
  options: argparse.Namespace,
  words: Sequence[str],
  command: Callable[[], int],
  complain: Callable[[str], None],
) -> int:
  """Runs a command; one of several processes runs it in a child that it watches.

  Args:
    options: Of the command.
    words: The command line.
    command: The command itself; returns an exit code.
    complain: Prints why a command ends early.
  """
  if not is_distributed(options):
    return command()
  if not distributed.is_supervised():
    return distributed.supervise([sys.executable, "-P", "-m", MODULE, *words])
  try:
    code = command()
  except Exception as error:
    if (message := distributed.lost_message(error)) is None:
      sys.excepthook(type(error), error, error.__traceback__)
      distributed.leave(1)
    complain(message)
    distributed.leave(distributed.LOST)
  if code:
    # At its end JAX would wait for the others, and they for this one.
    distributed.leave(code)
  return code
