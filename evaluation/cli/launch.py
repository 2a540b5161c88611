"""Runs a parsed command, prints errors as one line, and returns the exit code."""

import argparse
import os
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
    try:
      execution.keep_compiled(options.compiled_kept)
    except OSError as error:
      _report(options, "error", _sentence(error))
      return 2
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
    code = options.run(options) or 0
    sys.stdout.flush()
    return code
  except KeyboardInterrupt as error:
    _report(options, "stopped", str(error) or "interrupted")
    return 130
  except BrokenPipeError:
    # Whoever read the output has enough; what is still to be flushed goes nowhere.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except MENDABLE as error:
    if options.distributed and processes.lost_message(error):
      raise
    _report(options, "error", _sentence(error))
    return 2


def _sentence(error: Exception) -> str:
  """Returns an error's text; of the system's own errors, with expectation and mend."""
  if not (isinstance(error, OSError) and error.errno and error.strerror):
    return str(error)
  return (
    f"{error.filename or 'output'}: expected to read or write here, got "
    f"{error.strerror!r}; check the path, its permissions and the room on the disk."
  )


def _report(options: argparse.Namespace, event: str, message: str) -> None:
  if options.log == "json":
    # Imported here: the supervisor of a process has no use for the pipeline.
    from mxjax.evaluation.cli import progress

    progress.emit(event, message=message)
  else:
    from mxjax.evaluation.cli.console import printable

    # Errors of the library name their place, which may be the command.
    text = message.removeprefix(f"{options.command}: ")
    print(printable(f"mxjax {options.command}: {text}"), file=sys.stderr)
