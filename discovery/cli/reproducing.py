"""`mxjax reproduce` of the discovery tables: runs studies beside the builds of models.

This package is above evaluation, so it adds the studies to evaluation's command.
"""

import argparse
import pathlib
from collections.abc import Sequence

from mxjax.discovery.cli import commands, parser
from mxjax.discovery.studies import tables
from mxjax.evaluation.cli import arguments
from mxjax.evaluation.cli import parser as cli
from mxjax.evaluation.cli.commands import reproduce
from mxjax.evaluation.report.tables import Table
from mxjax.evaluation.reproduce import page

FOLDER = "discovery"
"""Of the studies, below that of the builds."""
PAPER = "The paper's, with a language model on Qwen3-4B and Llama-3.1-8B"
SEEDS = 8


def run(options: argparse.Namespace) -> int:
  """Makes tables of studies, of builds or of both; returns 1 if a build failed."""
  names = arguments.split(options.tables)
  studies = [name for name in names if name in parser.PAPER_STUDIES]
  if names == ["all"] and options.studied:
    studies = list(parser.PAPER_STUDIES)
  if studies:
    _check(options)
    made = [table for name in studies for table in _tables(name, options)]
    if made:
      page.write(pathlib.Path(options.out) / FOLDER, made, [])
  builds = [name for name in names if name not in studies]
  if not builds:
    return 0
  options.tables = ",".join(builds)
  return reproduce.run(options)


def _check(options: argparse.Namespace) -> None:
  if not options.studied:
    raise ValueError(
      "reproduce: expected --studied for a discovery table, got none; give world, or "
      "MODEL,HELDOUT."
    )
  if not options.out:
    raise ValueError("reproduce: expected --out for the studies, got none; add it.")


def _tables(name: str, options: argparse.Namespace) -> list[Table]:
  """Runs or plans a study; returns its tables, each followed by the paper's."""
  folder = pathlib.Path(options.out) / FOLDER
  words = ["discover", "study", name, "--out", str(folder), *_task(options.studied)]
  words += ["--budget", str(options.study_calls)]
  if options.study_seeds:
    words += ["--seeds", *arguments.split(options.study_seeds)]
  given = cli.build_parser(parser.register).parse_args(words)
  given.plan = options.plan
  reduced = _reduced(given)
  return [
    table for found in commands.studied(given) for table in _beside(found, reduced)
  ]


def _task(studied: str) -> list[str]:
  """Returns the words that name the task of a study."""
  names = arguments.split(studied)
  if names == ["world"]:
    return ["--task", "world"]
  if len(names) != 2:
    raise ValueError(
      f"reproduce: expected --studied world or MODEL,HELDOUT, got {studied!r}; name "
      "the model that is searched and the one that is held out."
    )
  return ["--task", "ptq", "--model", names[0], "--holdout-model", names[1]]


def _reduced(given: argparse.Namespace) -> str:
  """Returns what the title of a study with less than the paper's calls says."""
  parts = [f"{given.budget} of {parser.CALLS} calls"] * (given.budget < parser.CALLS)
  if len(given.seeds) < SEEDS:
    parts.append(f"{len(given.seeds)} of {SEEDS} seeds")
  return f" (reduced: {', '.join(parts)})" if parts else ""


def _beside(found: tables.Table, reduced: str) -> Sequence[Table]:
  """Returns a table of a study, and the paper's if it has one."""
  own = Table(found.title + reduced, found.header, found.rows, " ".join(found.notes))
  if not found.paper:
    return [own]
  return [own, Table(f"{found.title}: paper", found.paper[0], found.paper[1:], PAPER)]
