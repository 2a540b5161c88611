"""The command line: `mxjax plan | quantize | evaluate | compare | reproduce | ...`."""

import argparse
import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mxjax.evaluation.cli import arguments

COMMANDS = (
  *("plan", "quantize", "verify", "evaluate", "compare", "reproduce"),
  *("generate", "demo", "export", "import_"),
)
"""Files of `commands`, in the order of the help text."""
Extend = Callable[[Any], None]
"""Adds commands to the parser; each sets `run`, a function of its options."""


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


def build_parser(extend: Extend | None = None) -> argparse.ArgumentParser:
  """Builds the parser of all commands; `extend` adds those of a higher package."""
  parser = arguments.Parser(
    prog="mxjax",
    description="Strict MXFP4 W4A4 post-training quantization of decoder LLMs in JAX.",
    epilog="Example: mxjax quantize --sequences 8 --out runs/smollm2; "
    "mxjax generate runs/smollm2 --prompt 'The moon is'",
  )
  parser.set_defaults(distributed=False, compiled_kept=None, log="bars")
  parser.add_argument("--version", nargs=0, action=_Version, help="print the version")
  commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
  for name in COMMANDS:
    command = importlib.import_module(f"mxjax.evaluation.cli.commands.{name}")
    command.add_parser(commands).set_defaults(run=command.run)
  if extend:
    extend(commands)
  return parser


def main(words: Sequence[str] | None = None, extend: Extend | None = None) -> int:
  """Runs a command; errors that a user can fix become one line and exit code 2."""
  words = list(sys.argv[1:] if words is None else words)
  with _dying_quietly():
    options = build_parser(extend).parse_args(words)
    options.arguments = words
    # Imported late: this imports JAX, which help must not wait for.
    from mxjax.evaluation.cli import launch

  return launch.run(options)


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


if __name__ == "__main__":
  sys.exit(main())
