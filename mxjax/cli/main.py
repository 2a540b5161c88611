"""The command line: one parser of all commands, and what runs them."""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from mxjax.cli import options as shared
from mxjax.errors import OSRefusal, Refusal
from mxjax.intake import texts

GROUPS = {
  "quantize": {
    "plan": "plan models/trained/llama --sequences 16 --length 256",
    "quantize": "quantize models/trained/llama --sequences 16 --length 256 "
    "--out runs/first",
    "compare": "compare models/trained/llama --methods rtn,gptq --sequences 16 "
    "--length 256 --out runs/compare",
    "demo": "demo",
  },
  "measure": {
    "evaluate": "evaluate runs/first --model models/trained/llama --agreement",
    "verify": "verify runs/first",
    "reproduce": "reproduce stages --models models/trained/llama --plan",
  },
  "use": {
    "generate": "generate runs/first --prompt 'The moon is'",
    "chat": "chat --system 'Be brief.'",
    "export": "export runs/first --format dequant --out runs/float",
    "import": "import FOLDER --out runs/imported",
  },
  "search for methods": {"discover": "discover run --task world --out runs/search"},
  "the shell": {"completion": "completion bash"},
}
"""The commands in the order of the help text, by what they are for, with an example.

Each is a module of this package with `add_parser`, which defines the options and sets
`run`, a function of them. They import JAX only inside `run`, so that help is instant.
"""
COMMANDS = tuple(name for group in GROUPS.values() for name in group)
OF_A_MODEL = ("quantize", "evaluate", "compare", "reproduce", "generate", "chat")
"""Commands that read a model and run it."""
COMPILING = 5.0
"""Seconds of compiling one program after which a command says so."""
MENDABLE = (ValueError, TypeError, OSError, NotImplementedError, FloatingPointError)
"""Errors that users can fix; others are bugs of ours and show a traceback."""


def main(words: Sequence[str] | None = None) -> int:
  """Runs a command; errors that a user can fix become one line and exit code 2."""
  # A caller in Python passes words; its process is not ours to change for good.
  is_process = words is None
  words = list(sys.argv[1:] if words is None else words)
  with _dying_quietly():
    if not words:
      # Nobody who names no command knows which there are.
      build_parser().print_help()
      return 2
    options = build_parser().parse_args(words)
    options.arguments = words
    # Imported late: this imports JAX, which help must not wait for.
    importlib.import_module("mxjax.devices.processes")
  if is_process and options.command in OF_A_MODEL:
    _hurry(options)
  return _launch(options)


def _hurry(options: argparse.Namespace) -> None:
  """Shortens what a process of a command waits for before it can begin.

  The start of CUDA takes seconds, and so does torch, which `transformers` imports where
  it is installed and no command uses. Only for processes of the command line: both hold
  for as long as the process lives.
  """
  from mxjax.devices import execution

  execution.keep_freed_memory()  # Before XLA's first thread.
  # A process of several joins the others before any use of JAX.
  if not options.distributed:
    threading.Thread(target=_start_devices).start()
  from mxjax.models.families import hf_config

  hf_config.import_torch = False


def _start_devices() -> None:
  import jax

  with contextlib.suppress(Exception):  # Raised again where a device is needed.
    jax.devices()


def build_parser() -> argparse.ArgumentParser:
  """Builds the parser of all commands."""
  parser = shared.Parser(
    prog="mxjax",
    usage="mxjax COMMAND ...",
    description="Quantizes decoder language models to strict MXFP4 W4A4, in JAX.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  # For commands that do not have these options and run by the same code.
  parser.set_defaults(distributed=False, compiled_kept=None, log="bars")
  parser.add_argument("--version", nargs=0, action=_Version, help="print the version")
  commands = parser.add_subparsers(
    dest="command",
    required=True,
    metavar="COMMAND",
    help=argparse.SUPPRESS,
    prog="mxjax",
  )
  for name in COMMANDS:
    # `import` is a word of the language.
    module = "import_" if name == "import" else name
    importlib.import_module(f"mxjax.cli.{module}").add_parser(commands)
  # argparse lists commands in one group; they are shown here by what they are for.
  helps = {action.dest: action.help for action in commands._choices_actions}
  lines = []
  for group, examples in GROUPS.items():
    lines.append(f"{group}:")
    for name, words in examples.items():
      lines.append(f"  {name:12}{helps[name]}")
      commands.choices[name].epilog = f"Example: mxjax {words}"
  parser.epilog = "\n".join(
    [*lines, "", "Each command has --help, which ends in an example."]
  )
  return parser


class _Version(argparse.Action):
  """Prints the version, which is looked up only on request."""

  def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
    from importlib import metadata

    try:
      version = metadata.version("mxjax")
    except metadata.PackageNotFoundError:
      version = "(a checkout that is not installed)"
    print(f"mxjax {version}")
    parser.exit()


@contextlib.contextmanager
def _dying_quietly() -> Iterator[None]:
  """Lets Ctrl-C end the process at once: an interrupted import prints a traceback."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = signal.signal(signal.SIGINT, signal.SIG_DFL)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, before)


def _launch(options: argparse.Namespace) -> int:
  """Runs a parsed command; a distributed process runs it in a supervised child."""
  from mxjax.devices import execution, kept_programs, processes

  execution.keep_freed_memory()
  if options.compiled_kept is None:
    kept_programs.keep_compiled_on_gpu()
  elif options.compiled_kept is False:
    kept_programs.keep_none()
  else:
    try:
      kept_programs.keep_compiled(options.compiled_kept)
    except OSError as error:
      _report(options, "error", _sentence(error, options.command))
      return 2
  if not options.distributed:
    return _run(options)
  if not processes.is_supervised():
    # -P: otherwise -m puts the current folder first on the import path.
    command = [sys.executable, "-P", "-m", "mxjax", *options.arguments]
    return processes.supervise(command)
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
  """Runs a command in this process; returns its exit code."""
  from mxjax import compilation
  from mxjax.cli import output
  from mxjax.devices import processes

  def tell(name: str) -> None:
    output.teller(options.log)(f"XLA has been compiling {name} for {COMPILING:g} s")

  try:
    with (
      output.heartbeat(options.command, options.log),
      compilation.on_long_compile(tell, COMPILING),
    ):
      code = options.run(options) or 0
    # Here, where a pipe that its reader has closed is still caught.
    sys.stdout.flush()
    return code
  except KeyboardInterrupt as error:
    _report(options, "stopped", str(error) or "interrupted")
    # 128 + SIGINT, as shells have it.
    return 130
  except BrokenPipeError:
    # Whoever read the output has enough; what is still to be flushed goes nowhere.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except MENDABLE as error:
    # `_launch` reports it and leaves without waiting for the others.
    if options.distributed and processes.lost_message(error):
      raise
    _report(options, "error", _sentence(error, options.command))
    return 2


def _sentence(error: Exception, command: str) -> str:
  """Returns an error's text; of the system's own errors, with expectation and mend.

  Of a place that begins with the command, which is printed anyway, the rest is told.
  """
  if isinstance(error, OSError) and error.errno and error.strerror:
    error = OSRefusal(
      error.filename or "output",
      expected="to read or write here",
      got=repr(error.strerror),
      mend="check the path, its permissions and the room on the disk",
    )
  if not isinstance(error, Refusal):
    return str(error)
  if error.place == command:
    return error.complaint
  return str(error.at(error.place.removeprefix(f"{command}: ")))


def _report(options: argparse.Namespace, event: str, message: str) -> None:
  """Says on stderr how a command ended, as an event with `--log json`."""
  if options.log == "json":
    from mxjax.cli import output

    output.emit(event, message=message)
  else:
    print(texts.printable(f"mxjax {options.command}: {message}"), file=sys.stderr)
