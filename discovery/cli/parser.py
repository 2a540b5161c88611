"""`mxjax discover plan | run | resume | status | report | explain | verify | ...`.

This file is the console entry point of the whole command line: discovery depends on
evaluation, so it adds its commands to evaluation's parser. Commands are imported only
when they run, so that help is instant.
"""

import argparse
import importlib
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mxjax.discovery.cli import config
from mxjax.discovery.sandbox import jail
from mxjax.discovery.studies.arms import ARMS
from mxjax.evaluation.cli import arguments
from mxjax.evaluation.cli import parser as cli

STUDIES = (
  "checkers",
  "compilation",
  "controls",
  "matched",
  "payoff",
  "payoff-real",
  "placebos",
  "regimes",
  "replay",
)
"""Keys of `mxjax.discovery.studies.study.STUDIES`, whose import takes a second."""
PAPER_STUDIES = tuple(name for name in STUDIES if not name.startswith("payoff"))
CALLS = 240
"""Of a run, in the paper."""
FLAG = argparse.BooleanOptionalAction
"""So that the command line can take back what a file of options says."""


def amount(text: str) -> float:
  """Returns a number of dollars or of seconds, or a share.

  Raises:
    ValueError: It is negative or not finite.
  """
  if not 0 <= (value := float(text)) < float("inf"):
    raise ValueError
  return value


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the `mxjax` command."""
  return cli.main(arguments, extend=register)


def _later(module: str, function: str) -> Callable[[argparse.Namespace], int | None]:
  """Returns a command that is imported when it runs."""

  def run(options: argparse.Namespace) -> int | None:
    commands = importlib.import_module(f"mxjax.discovery.cli.{module}")
    return getattr(commands, function)(options)

  return run


def register(commands: Any) -> None:
  """Adds `discover` to the parser of `mxjax`, and its studies to `reproduce`."""
  _add_studies(commands.choices["reproduce"])
  discover = commands.add_parser(
    "discover",
    help="search for better programs by controlled experiments (QuantForge)",
    description="Searches for better PTQ programs: every candidate is a registered "
    "experiment, and its verdict is a demand on later code.",
  )
  verbs = discover.add_subparsers(
    dest="verb", required=True, metavar="VERB", parser_class=config.Parser
  )

  def verb(name: str, told: str, function: str) -> config.Parser:
    parser = verbs.add_parser(name, help=told, description=told)
    parser.set_defaults(run=_later("commands", function))
    return parser

  plan = verb(
    "plan", "what a run would cost; runs the default program, starts nothing", "plan"
  )
  run = plan.holder = verb("run", "start a run", "run")
  for parser in (plan, run):
    _add_task(parser)
    _add_limits(parser)
  run.add_argument("--out", required=True, metavar="DIR", help="a new folder")
  _add_workers(run)
  resume = verb("resume", "continue a run, paying nothing twice", "resume")
  resume.add_argument("folder", metavar="DIR", help="folder of the run")
  _add_workers(resume)
  report = verb("report", "write DIR/report.html", "write_report")
  report.add_argument("folder", metavar="DIR", help="folder of a run")
  status = verb("status", "how far a run is, also while it goes on", "status")
  status.add_argument("folder", metavar="DIR", help="folder of a run")
  status.add_argument(
    "--follow",
    type=amount,
    nargs="?",
    const=2.0,
    metavar="SECONDS",
    help="look again every 2 s, or so many, until the run has ended",
  )
  explain = verb("explain", "why a program exists", "explain_program")
  explain.add_argument("folder", metavar="DIR", help="folder of a run")
  explain.add_argument("program", metavar="PROGRAM", help="start of its identity")
  verify = verb(
    "verify", "compute every hash again, and run some programs again", "verify_run"
  )
  verify.add_argument("folder", metavar="DIR", help="folder of a run")
  verify.add_argument(
    "--calls", type=arguments.whole(0), default=3, metavar="K", help="programs"
  )
  doctor = verb("doctor", "what this machine can do", "doctor")
  doctor.add_argument("--endpoint", metavar="URL", help="ask this endpoint, too")
  study = verb(
    "study", "the paper's discovery studies: plan, run or resume, and tabulate", "study"
  )
  _add_study(study)


def _add_studies(reproduce: argparse.ArgumentParser) -> None:
  group = reproduce.add_argument_group(
    "discovery tables", f"TABLES may also hold {', '.join(PAPER_STUDIES)}."
  )
  add = group.add_argument
  told = "what is searched: world, or MODEL,HELDOUT; then all holds the studies, too"
  add("--studied", metavar="TASK", help=told)
  told = "evaluator calls of each run of a study"
  add("--study-calls", type=int, default=CALLS, metavar="N", help=told)
  add("--study-seeds", metavar="LIST", help="comma list of seeds; default: 101 to 108")
  reproduce.set_defaults(run=_later("reproducing", "run"))


def _add_limits(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--config",
    metavar="FILE",
    help="a TOML file with options of `run` under their names here; options of the "
    "command line win",
  )
  parser.add_argument(
    "--max-tokens",
    type=arguments.whole(1),
    metavar="N",
    help="end the run after the answer with which the proposer has used N, in and out",
  )
  parser.add_argument(
    "--max-cost", type=amount, metavar="DOLLARS", help="the same at the given prices"
  )


def _add_workers(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add("--workers", type=arguments.whole(1), default=1, metavar="N", help="processes")
  add("--ray", action=FLAG, help="workers on a Ray cluster")
  add(
    "--compiled",
    metavar="DIR",
    type=pathlib.Path,
    help="where jailed workers share compiled programs, also with later runs; they "
    "may write there",
  )
  parser.set_defaults(ray=False)


def _add_task(parser: argparse.ArgumentParser) -> None:
  add, whole = parser.add_argument, arguments.whole(1)
  add(
    "--task",
    default="ptq",
    help="ptq, world, noisy-world, package.module:function, or a folder with "
    "initial.py and evaluate.py",
  )
  add("--task-options", default="{}", metavar="JSON", help="options of the task")
  add("--model", metavar="MODEL", help="visible model of the ptq task")
  add("--holdout-model", metavar="MODEL", help="held-out model of the ptq task")
  told = "model of the ptq task on which a gain must hold to be built upon"
  add("--transfer-model", metavar="MODEL", help=told)
  told = "compute dtype of the models of the ptq task; float32 when omitted"
  arguments.add(parser, "--dtype", help=told)
  add("--budget", type=whole, default=240, metavar="CALLS", help="of the evaluator")
  add("--seed", type=int, default=0, help="of every random choice")
  add("--arm", default="quantforge", choices=sorted(ARMS), help="which search")
  told = "the program to begin from: a file, or gptq, wush or hires for the ptq task"
  add("--start", default="", metavar="PROGRAM", help=told)
  told = "revise programs whose own change a verdict retired, by taking it back"
  add("--revise-retired", action=FLAG, default=True, help=told)
  add("--width", type=whole, default=1, help="proposals made from one state")
  add(
    "--screen",
    type=amount,
    metavar="RATIO",
    help="measure the task's free proxy, and refuse candidates whose proxy is above "
    "RATIO of their parent's",
  )
  add(
    "--proposals-per-call",
    type=whole,
    default=6,
    metavar="N",
    help="after N proposals for each call of the budget the run ends",
  )
  add(
    "--as-in-paper",
    action=FLAG,
    help="run every registered control, and charge repeated executions",
  )
  add(
    "--paper-allocation",
    action=FLAG,
    help="divide the 240 calls among candidates, controls and probes as the paper does",
  )
  told = "how candidates are jailed"
  add("--sandbox", default="strict", choices=jail.LEVELS, help=told)
  add(
    "--holdout",
    default="after",
    choices=("after", "during", "off"),
    help="when champions are measured on held-out data",
  )
  _add_proposer(parser)
  flags = ("as_in_paper", "paper_allocation", "contested_accounts")
  parser.set_defaults(**dict.fromkeys(flags, False))


def _add_proposer(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add(
    "--proposer",
    default="embedded",
    metavar="KIND",
    help="embedded, expressions, llm, cassette or human",
  )
  add("--endpoint", metavar="URL", help="OpenAI-compatible base URL")
  add("--endpoint-model", metavar="NAME", help="the model to ask there")
  add(
    "--endpoints",
    metavar="JSON",
    help="several instead: a list of objects with url and model, and if need be "
    "weight, prices, deadline in seconds (600) and key-variable, the environment "
    "variable of its key",
  )
  add(
    "--prices",
    type=amount,
    nargs=2,
    metavar=("IN", "OUT"),
    help="dollars a million tokens, to count what llm costs",
  )
  add("--reasoning-effort", metavar="LEVEL", help="asked of the model, such as high")
  add(
    "--contested-accounts",
    action=FLAG,
    help="embedded edits register only accounts that a control must tell apart",
  )
  add("--cassette", metavar="FILE", help="record to it (llm) or replay it (cassette)")
  add("--tokenizer", metavar="FILE", help="tokenizer.json for exact budgets")
  add("--answers", metavar="DIR", help="folder of the human queue")


def _add_study(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add("name", choices=STUDIES, help="the study")
  add(
    "--out",
    required=True,
    metavar="DIR",
    help="new or begun folder; studies in one folder share runs",
  )
  add("--plan", action="store_true", help="tell the cost, start nothing")
  add(
    "--seeds",
    type=int,
    nargs="+",
    default=list(range(101, 109)),
    metavar="N",
    help="paired seeds; default: 101 to 108",
  )
  add(
    "--tuned-on",
    type=int,
    nargs="*",
    default=[1, 2, 3],
    metavar="N",
    help="seeds used while cards, margins and gate were set",
  )
  add(
    "--gate",
    type=amount,
    default=0.7,
    help="share of the way from the initial program to the ideal, held out",
  )
  add(
    "--gate-at",
    type=amount,
    metavar="TARGET",
    help="a held-out target that counts as success beside the share",
  )
  add(
    "--our-accounting",
    action="store_true",
    help="every arm skips controls that no longer tell anything apart and repeats "
    "executions for free; the paper charges both",
  )
  add(
    "--expects",
    default="",
    metavar="TEXT",
    help="what the study should show, frozen before its first run",
  )
  _add_task(parser)
  # The study sets its own arms, seeds, budgets and accounting.
  parser.set_defaults(sandbox="off", max_tokens=None, max_cost=None)


if __name__ == "__main__":
  sys.exit(main())
