"""Options of a run and of a study of `mxjax discover`."""

import argparse
import pathlib
from typing import Any

from mxjax.cli import options as shared
from mxjax.discovery.sandbox import jail
from mxjax.discovery.studies.arms import ARMS

FLAG = argparse.BooleanOptionalAction
"""So that the command line can take back what a file of options says."""
ENDPOINT, EXECUTION = "the endpoint of llm, or its cassette", "how candidates run"
"""Titles of groups to which several functions add."""


def _group(parser: argparse.ArgumentParser, title: str) -> Any:
  """Returns the group of that title, to which several functions here add."""
  known = {group.title: group for group in parser._action_groups}
  return known.get(title) or parser.add_argument_group(title)


def add_config(parser: argparse.ArgumentParser, verb: str) -> None:
  """Adds the file of options of a verb, and single lines of one."""
  add = _group(parser, "options from a file").add_argument
  add(
    "--config",
    metavar="FILE",
    help=f"a TOML file with options of `{verb}` under their names here; options of the "
    "command line win",
  )
  add(
    "--set",
    metavar="KEY=VALUE",
    action="append",
    help="a line of such a file, as in seed=3 or task-options.objective=kl; wins over "
    "the file, and may be given often",
  )


def add_limits(parser: argparse.ArgumentParser) -> None:
  """Adds limits of what the proposer may use."""
  add = _group(parser, ENDPOINT).add_argument
  add(
    "--max-tokens",
    type=shared.whole(1),
    metavar="N",
    help="end the run after the answer with which the proposer has used N, in and out",
  )
  add(
    "--max-cost",
    type=shared.amount,
    metavar="DOLLARS",
    help="the same at the given prices",
  )


def add_workers(parser: argparse.ArgumentParser) -> None:
  """Adds what executes candidates; a run may be resumed with other workers."""
  add = _group(parser, EXECUTION).add_argument
  add("--workers", type=shared.whole(1), default=1, metavar="N", help="processes")
  add("--ray", action=FLAG, help="workers on a Ray cluster")
  add(
    "--compiled",
    metavar="DIR",
    type=pathlib.Path,
    help="where jailed workers share compiled programs, also with later runs; they "
    "may write there",
  )
  parser.set_defaults(ray=False)


def add_task(parser: argparse.ArgumentParser) -> None:
  """Adds what is searched and how."""
  group, whole = _group(parser, "the task"), shared.whole(1)
  add = group.add_argument
  add(
    "--task",
    default="ptq",
    help="ptq, world, package.module:function, or a folder with "
    "initial.py and evaluate.py",
  )
  add("--task-options", default="{}", metavar="JSON", help="options of the task")
  add("--model", metavar="MODEL", help="visible model of the ptq task")
  add("--holdout-model", metavar="MODEL", help="held-out model of the ptq task")
  help_text = "model of the ptq task on which a gain must hold to be built upon"
  add("--transfer-model", metavar="MODEL", help=help_text)
  help_text = "compute dtype of the models of the ptq task; float32 when omitted"
  shared.add(group, "--dtype", help=help_text)
  help_text = (
    "the program to begin from: a file, or gptq, wush or hires for the ptq task; "
  )
  help_text += "the task's default program when omitted"
  add("--start", default="", metavar="PROGRAM", help=help_text)
  add(
    "--holdout",
    default="after",
    choices=("after", "during", "off"),
    help="when champions are measured on held-out data",
  )
  add = _group(parser, "the search").add_argument
  add("--budget", type=whole, default=240, metavar="CALLS", help="of the evaluator")
  add("--seed", type=int, default=0, help="of every random choice")
  add("--arm", default="quantforge", choices=sorted(ARMS), help="which search")
  help_text = "revise programs whose own change a verdict retired, by taking it back"
  add("--revise-retired", action=FLAG, default=True, help=help_text)
  add("--width", type=whole, default=1, help="proposals made from one state")
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
  _add_proposer(parser)
  add = _group(parser, EXECUTION).add_argument
  help_text = "how candidates are jailed"
  add("--sandbox", default="strict", choices=jail.LEVELS, help=help_text)
  flags = ("as_in_paper", "paper_allocation", "contested_accounts")
  parser.set_defaults(**dict.fromkeys(flags, False))


def add_trust(parser: argparse.ArgumentParser) -> None:
  """Adds what a folder may execute: it decides none of it itself."""
  add = _group(parser, "what the folder may execute and ask").add_argument
  help_text = "the run's task, if it has code of its own that you trust"
  add("--task", metavar="TASK", help=help_text)
  help_text = "the run's sandbox level, if you trust its programs to run so"
  add("--sandbox", default="strict", choices=jail.LEVELS, help=help_text)
  help_text = "the run's endpoint, if the key in your environment may go there"
  add("--endpoint", metavar="URL", help=help_text)
  help_text = "the environment variable of that key, if the run has one of its own"
  add("--key-variable", metavar="NAME", help=help_text)


def _add_proposer(parser: argparse.ArgumentParser) -> None:
  add = _group(parser, "the proposer").add_argument
  add(
    "--proposer",
    default="embedded",
    metavar="KIND",
    help="embedded, llm, cassette or human",
  )
  add(
    "--contested-accounts",
    action=FLAG,
    help="embedded edits keep only explanations that need a control to separate them",
  )
  add("--answers", metavar="DIR", help="folder of the human queue")
  add = _group(parser, ENDPOINT).add_argument
  add("--endpoint", metavar="URL", help="OpenAI-compatible base URL")
  add("--endpoint-model", metavar="NAME", help="the model to ask there")
  seconds = {"type": shared.amount, "metavar": "SECONDS"}
  help_text = "for a request with all its retries; 600 when omitted"
  add("--deadline", **seconds, help=help_text)
  help_text = (
    "for the one word that the endpoint is asked before a run begins; 10 when "
  )
  help_text += "omitted. A model that is still loading is no failure"
  add("--probe-seconds", **seconds, help=help_text)
  help_text = "the environment variable with its key; OPENAI_API_KEY when omitted"
  add("--key-variable", metavar="NAME", help=help_text)
  add(
    "--prices",
    type=shared.amount,
    nargs=2,
    metavar=("IN", "OUT"),
    help="dollars a million tokens, to count what llm costs",
  )
  add("--reasoning-effort", metavar="LEVEL", help="asked of the model, such as high")
  add("--cassette", metavar="FILE", help="record to it (llm) or replay it (cassette)")
  add("--tokenizer", metavar="FILE", help="tokenizer.json for exact budgets")
