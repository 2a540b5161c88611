"""`mxjax discover`: searches for better programs by controlled experiments."""

from typing import Any

from mxjax.cli.discover import config, doctor, folder, run, study, trial

EXAMPLES = {
  "plan": "--task world --budget 60",
  "run": "--task world --budget 60 --out runs/search",
  "resume": "runs/search",
  "close": "runs/search",
  "report": "runs/search",
  "status": "runs/search --follow",
  "explain": "runs/search",
  "verify": "runs/search --calls 3",
  "doctor": "",
  "study": "matched --task world --plan --out runs/studies",
  "trial": "tables benchmarks/results/discovery_trial_world.tar.xz",
}
"""What the help of each verb ends in."""


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
  for verb, words in EXAMPLES.items():
    verbs.choices[verb].epilog = f"Example: mxjax discover {verb} {words}".rstrip()
