"""`mxjax verify`: audits a quantized model."""

import argparse
import json
from typing import Any

from mxjax.cli import options as shared


def add_parser(commands: Any) -> None:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "verify",
    help="audit a folder of `quantize` as an outsider would",
    description="Checks contract, checksums, coverage, payloads, maps, operands and "
    "recovery of a quantized model; prints a sentence a fault and exits with 1.",
  )
  shared.add(parser, "checkpoint")
  shared.add(parser, "--seed", help="of the inputs")
  shared.add(parser, "--json")
  parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
  """Prints the audit; returns 0 if every check passes, otherwise 1."""
  from mxjax.audit import verify
  from mxjax.cli import output

  audit = verify.verify(options.checkpoint, seed=options.seed)
  if options.json:
    print(json.dumps(audit.to_dict()))
  else:
    # Faults name files, and whoever made the folder named them.
    for line in (*audit.faults, *audit.lines()):
      output.say(line)
  return 1 if audit.faults else 0
