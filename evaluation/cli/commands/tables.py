"""`mxjax tables`: builds the paper's tables from result files."""

import argparse
import sys
from typing import Any

from mxjax.evaluation.cli import arguments


def add_parser(commands: Any) -> argparse.ArgumentParser:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "tables",
    help="the paper's tables from results of `evaluate --tasks`",
    description="Prints complete results a model, Fit-7 across models, calibration "
    "seeds with paired intervals, and alternative aggregates; missing cells stay "
    "empty.",
  )
  told = "evaluation.json files, or folders searched for them"
  parser.add_argument("results", nargs="+", metavar="RESULT", help=told)
  told = "a new folder for tables.md, tables.csv, tables.html"
  arguments.add(parser, "--out", required=False, help=told)
  return parser


def run(options: argparse.Namespace) -> None:
  """Prints the tables, and writes them to files on request."""
  from mxjax.evaluation import paper_tables, results
  from mxjax.evaluation.report import tables
  from mxjax.storage import atomic_io

  measured = results.read(options.results)
  built = paper_tables.build(measured)
  if options.out:
    folder = atomic_io.create_output(options.out)
    for path in paper_tables.write(folder, built, measured):
      print(path, file=sys.stderr)
  print(tables.markdown(built), end="")
