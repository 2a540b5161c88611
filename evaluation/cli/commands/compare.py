"""`mxjax compare`: runs several methods on the same calibration tokens."""

import argparse
import pathlib
import typing
from typing import Any, cast

from mxjax import methods
from mxjax.evaluation.cli import arguments


def add_parser(commands: Any) -> argparse.ArgumentParser:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "compare",
    help="run several methods on the same calibration tokens",
    description="Quantizes MODEL by each method and ends in one table and one report.",
  )
  arguments.add(parser, "model")
  add = parser.add_argument
  add(
    "--methods",
    default="rtn,gptq,brq,hires",
    metavar="NAMES",
    help="comma list: paper for the paper's ten, all for everything, or each "
    f"{arguments.METHOD_HELP}",
  )
  add(
    "--scale-rules",
    default="floor",
    metavar="NAMES",
    help="comma list of floor (the contract), even and rceil: every method under each",
  )
  told = "a new folder, or that of an unfinished comparison to continue"
  arguments.add(parser, "--out", help=told)
  arguments.add(parser, "--on-disk", "--dtype")
  arguments.add_run(parser)
  return parser


def run(options: argparse.Namespace) -> None:
  """Runs the methods without a finished row, and reports all of them."""
  from mxjax.evaluation.cli import inputs, outputs, progress
  from mxjax.evaluation.provenance import made_by
  from mxjax.evaluation.tables import comparing, settings
  from mxjax.numerics import mxfp4
  from mxjax.numerics.contract import Contract

  groups = {"all": tuple(methods.METHODS), "paper": methods.PAPER_METHODS}
  selected: dict[str, None] = {}
  for name in arguments.split(options.methods):
    selected |= dict.fromkeys(groups.get(name, (name,)))
  for name in selected:
    arguments.check_method(name)
  rules = []
  for rule in arguments.split(options.scale_rules):
    arguments.check("scale rule", rule, typing.get_args(mxfp4.ScaleRule))
    rules.append(mxfp4.Rules(scale_rule=cast(mxfp4.ScaleRule, rule)))
  if not (selected and rules):
    raise ValueError(
      "compare: expected at least one name in --methods and --scale-rules, got none; "
      "name one, or leave the option out."
    )
  contracts = {
    "" if rule == mxfp4.PAPER_RULES else f"[{rule.scale_rule}]": Contract(rules=rule)
    for rule in rules
  }
  folder = pathlib.Path(options.out)
  settings.check_folder(folder)
  prepared = inputs.prepare(options, selected)
  with progress.progress("bars") as begin:
    rows, _ = comparing.compare(
      prepared.subject,
      prepared.tokens,
      selected,
      folder=folder,
      contracts=contracts,
      on_method=begin,
      facts={"made_by": made_by(options.arguments)},
    )
  outputs.finish(folder, rows, "Comparison on", prepared.name)
  outputs.print_rows(rows, folder, as_json=options.json)
