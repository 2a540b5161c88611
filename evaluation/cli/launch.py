"""Runs a parsed command, prints errors as one line, and returns the exit code."""

import argparse
import sys

from mxjax.devices import execution, processes

MODULE = "mxjax.evaluation.cli.parser"
MENDABLE = (ValueError, TypeError, OSError, NotImplementedError, FloatingPointError)
"""Errors that users can fix; others are bugs of ours and show a traceback."""


def run(options: argparse.Namespace) -> int:
  """Runs a command; a distributed process runs it in a supervised child.

  `options.run` is the command's function and `options.arguments` its words. Returns the
  exit code.
  """
  execution.keep_freed_memory()
  if options.compiled_kept:
    execution.keep_compiled(options.compiled_kept)
  if not options.distributed:
    return _run(options)
  if not processes.is_supervised():
    return processes.supervise([sys.executable, "-P", "-m", MODULE, *options.arguments])
  try:
    code = _run(options)
  except Exception as error:
    if (message := processes.lost_message(error)) is None:
      sys.excepthook(type(error), error, error.__traceback__)
      processes.leave(1)
    _report(options, "error", message)
    processes.leave(processes.LOST)
  if code:
    # On a normal exit JAX would wait for the other processes, and they for this one.
    processes.leave(code)
  return code


def _run(options: argparse.Namespace) -> int:
  try:
    return options.run(options) or 0
  except KeyboardInterrupt as error:
    _report(options, "stopped", str(error) or "interrupted")
    return 130
  except MENDABLE as error:
    if options.distributed and processes.lost_message(error):
      raise
    _report(options, "error", str(error))
    return 2


def _report(options: argparse.Namespace, event: str, message: str) -> None:
  if options.log == "json":
    # Imported here: the supervisor of a process has no use for the pipeline.
    from mxjax.evaluation.cli import progress

    progress.emit(event, message=message)
  else:
    from mxjax.evaluation.cli.console import printable

    print(printable(f"mxjax {options.command}: {message}"), file=sys.stderr)
