"""`mxjax discover`: searches for better programs by controlled experiments."""

from typing import Any

from mxjax.cli.discover import config, doctor, folder, run, study, trial


def add_parser(commands: Any) -> None:
  """Adds the command and its verbs."""
  parser = commands.add_parser(
    "discover",
    help="search for better programs by controlled experiments (QuantForge)",
    description="Searches for better PTQ programs: every candidate is a registered "
    "experiment, and its verdict is a demand on later code.",
  )
  verbs = parser.add_subparsers(
    dest="verb", required=True, metavar="VERB", parser_class=config.Parser
  )
  for module in (run, folder, doctor, study, trial):
    module.add_parser(verbs)
