"""`mxjax discover study`: plans, runs and resumes the paper's discovery studies."""

import argparse
import pathlib
from collections.abc import Mapping
from typing import Any

from mxjax.discovery.core import task as task_
from mxjax.discovery.sandbox.jail import LEVELS
from mxjax.discovery.search import runs
from mxjax.discovery.search.settings import SearchConfig
from mxjax.discovery.studies import reproducing, study
from mxjax.evaluation.cli.console import say
from mxjax.evaluation.report.tables import markdown

SHARED = ("screen", "start", "proposals_per_call", "revise_retired")
"""Fields of `SearchConfig` that the command line sets for all arms of a study."""

OWN: Mapping[str, Any] = {
  "arm": "quantforge",
  "width": 1,
  "seed": 0,
  "as_in_paper": False,
  "holdout": "after",
}
"""Options of a run that a study sets itself, as they are if nobody gave them."""


def options(
  parsed: argparse.Namespace, spec: Mapping[str, Any], run: runs.RunOptions
) -> study.StudyOptions:
  """Builds the options of a study folder, from those of a run on the task `spec`.

  Raises:
    ValueError: The sandbox is off for a proposer other than `embedded`; or an option is
      set that a study does not have.
  """
  if given := [
    f"--{name.replace('_', '-')}" + f" {value}" * (value is not True)
    for name, default in OWN.items()
    if (value := getattr(parsed, name)) != default
  ]:
    raise ValueError(
      "study: a study has its own arms, of one proposal from each state, seeds, "
      f"accounting and held-out marks; leave out {' and '.join(given)}."
    )
  proposer = run.proposer
  if proposer["kind"] != "embedded" and parsed.sandbox == "off":
    raise ValueError(
      f"study: programs of {proposer['kind']} run in a sandbox; use --sandbox "
      f"{LEVELS[0]}."
    )
  return study.StudyOptions(
    task=spec,
    seeds=tuple(parsed.seeds),
    tuning_seeds=tuple(parsed.tuned_on),
    budget=parsed.budget,
    gate=parsed.gate,
    gate_at=parsed.gate_at,
    is_allocated=parsed.paper_allocation,
    is_sequential=parsed.our_accounting,
    config={
      name: value
      for name, value in run.config.items()
      if name in SHARED and value != getattr(SearchConfig, name)
    },
    expects=parsed.expects,
    sandbox=parsed.sandbox,
    proposer=proposer,
  )


def measured(task: task_.Task, sandbox: str, calls: int) -> str:
  """Runs the default program twice and says what a number of calls would take."""
  first, later = runs.measure_calls(task, sandbox)
  low, high = (calls * seconds / 3600 for seconds in sorted((first, later)))
  return (
    f"A call of the default program took {first:.1f} s with start and compilation, and "
    f"{later:.1f} s again (sandbox {sandbox}); {calls} calls on one worker take "
    f"{low:.2f} to {high:.2f} h, depending on how many programs are new."
  )


def plan(name: str, settings: study.StudyOptions) -> None:
  """Prints the planned calls and hours; runs the default program, starts nothing."""
  planned = study.STUDIES[name]
  task = task_.load(settings.spec(settings.seeds[0]))
  count = len(planned.arms) * len(settings.seeds)
  calls = count * settings.budget
  say(f"{planned.title}: {', '.join(planned.arms)}")
  say(f"seeds: {list(settings.seeds)}; tuned on {list(settings.tuning_seeds)}")
  say(f"{count} runs, {calls} evaluator calls, held-out marks beside them")
  if settings.expects:
    say(f"expected: {settings.expects}")
  say(measured(task, settings.sandbox, calls))
  say("A computation that another run paid for is charged and not repeated.")


def conduct(name: str, folder: pathlib.Path, settings: study.StudyOptions) -> None:
  """Runs or resumes a study, and prints its tables."""
  study_folder = study.Folder(folder, settings)
  say(f"frozen: {study_folder.frozen['hash']}")
  try:
    print(markdown(reproducing.made(study_folder, name, say)))
  finally:
    study_folder.close()
