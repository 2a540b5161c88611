"""`mxjax compare`: runs several methods on the same calibration tokens."""

import argparse
import pathlib
import typing
from typing import Any, cast

from mxjax.cli import options as shared
from mxjax.errors import ValueRefusal
from mxjax.intake import texts


def add_parser(commands: Any) -> None:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "compare",
    help="run several methods on the same calibration tokens",
    description="Quantizes MODEL by each method and ends in one table and one report.",
  )
  shared.add(parser, "model")
  add = parser.add_argument
  add(
    "--methods",
    default="rtn,gptq,brq,hires",
    metavar="NAMES",
    help="comma list: paper for the paper's ten, all for everything, or each "
    f"{shared.METHOD_HELP}",
  )
  add(
    "--scale-rules",
    default="floor",
    metavar="NAMES",
    help="comma list of floor (the contract), even and rceil: every method under each",
  )
  help_text = "a new folder, or that of an unfinished comparison to continue"
  shared.add(parser, "--out", help=help_text)
  shared.add(parser, "--on-disk", "--dtype")
  shared.add_run(parser)
  parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
  """Runs the methods without a finished row, and reports all of them."""
  from mxjax.cli import inputs, output
  from mxjax.evaluation import builds
  from mxjax.evaluation.provenance import made_by
  from mxjax.evaluation.tables import comparing, settings
  from mxjax.numerics import mxfp4
  from mxjax.numerics.contract import Contract

  selected = shared.method_names(options.methods)
  rules = []
  for rule in texts.split(options.scale_rules):
    texts.check("--scale-rules", rule, typing.get_args(mxfp4.ScaleRule))
    rules.append(mxfp4.Rules(scale_rule=cast(mxfp4.ScaleRule, rule)))
  if not (selected and rules):
    raise ValueRefusal(
      "compare",
      expected="at least one name in --methods and --scale-rules",
      got="none",
      mend="name one, or leave the option out",
    )
  contracts = {
    # The paper's rules add nothing to the name of a method.
    "" if rule == mxfp4.PAPER_RULES else f"[{rule.scale_rule}]": Contract(rules=rule)
    for rule in rules
  }
  folder = pathlib.Path(options.out)
  # Before a model is loaded, which may take minutes.
  settings.check_folder(folder)
  prepared = inputs.prepare(options, selected)
  with output.progress("bars") as begin:
    rows, _ = comparing.compare(
      prepared.subject,
      prepared.tokens,
      selected,
      folder=folder,
      contracts=contracts,
      on_method=begin,
      facts={"made_by": made_by(options.arguments)},
    )
  builds.finish(folder, rows, "Comparison on", prepared.name)
  output.print_rows(rows, folder, as_json=options.json)
