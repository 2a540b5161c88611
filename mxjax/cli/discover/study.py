"""`mxjax discover study`: plans, runs and resumes the paper's discovery studies."""

import argparse
import pathlib
from typing import TYPE_CHECKING, Any

from mxjax.cli import options as shared
from mxjax.cli.discover.options import FLAG, add_config, add_task
from mxjax.discovery.studies.arms import STUDIES

if TYPE_CHECKING:
  from mxjax.discovery.studies.study import StudyOptions


def add_parser(verbs: Any) -> None:
  """Adds the verb and its options."""
  help_text = "the paper's discovery studies: plan, run or resume, and tabulate"
  parser = verbs.add_parser("study", help=help_text, description=help_text)
  parser.add_argument("name", choices=sorted(STUDIES), help="the study")
  parser.add_argument(
    "--out",
    required=True,
    metavar="DIR",
    help="new or begun folder; studies in one folder share runs",
  )
  add = parser.add_argument_group("the study").add_argument
  add("--plan", action=FLAG, default=False, help="tell the cost, start nothing")
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
    type=shared.amount,
    default=0.7,
    help="share of the way from the initial program to the ideal, held out",
  )
  add(
    "--gate-at",
    type=shared.amount,
    metavar="TARGET",
    help="a held-out target that counts as success beside the share",
  )
  add(
    "--our-accounting",
    action=FLAG,
    default=False,
    help="every arm skips controls that no longer tell anything apart and repeats "
    "executions for free; the paper charges both",
  )
  add(
    "--expects",
    default="",
    metavar="TEXT",
    help="what the study should show, frozen before its first run",
  )
  add_task(parser)
  add_config(parser, "study")
  # The study sets its own arms, seeds, budgets and accounting.
  parser.set_defaults(run=run, sandbox="off", max_tokens=None, max_cost=None)


def run(options: argparse.Namespace) -> None:
  """Runs, resumes or plans a study."""
  from mxjax.cli.discover.inputs import run_options, study_options
  from mxjax.cli.output import say
  from mxjax.discovery.core.task import WORLDS
  from mxjax.discovery.studies import study, study_jobs
  from mxjax.discovery.tasks.ptq import margins
  from mxjax.evaluation.report.tables import markdown

  run_ = run_options(options)
  spec = dict(run_.task)
  if spec["task"] in WORLDS:
    # Each run uses the world of its own seed.
    del spec["seed"]
  if options.plan:
    plan(options.name, study_options(options, spec, run_))
    return
  folder = pathlib.Path(options.out)
  begun = study_jobs.begun_task(folder)
  # A study that has begun keeps the margins that were measured for it.
  spec = begun or margins.completed(spec, options.start, tell=say)
  opened = study.Folder(folder, study_options(options, spec, run_))
  say(f"frozen: {opened.frozen['hash']}")
  try:
    print(markdown(study_jobs.made(opened, options.name, say)))
  finally:
    opened.close()


def plan(name: str, settings: "StudyOptions") -> None:
  """Prints the planned calls and hours; runs the default program, starts nothing."""
  from mxjax.cli.discover.inputs import measured
  from mxjax.cli.output import say
  from mxjax.discovery.core import task as tasks

  planned = STUDIES[name]
  task = tasks.load(settings.spec(settings.seeds[0]))
  count = len(planned.arms) * len(settings.seeds)
  calls = count * settings.budget
  say(f"{planned.title}: {', '.join(planned.arms)}")
  say(f"seeds: {list(settings.seeds)}; tuned on {list(settings.tuning_seeds)}")
  say(f"{count} runs, {calls} evaluator calls, held-out marks beside them")
  if settings.expects:
    say(f"expected: {settings.expects}")
  say(measured(task, settings.sandbox, calls))
  say("A computation that another run paid for is charged and not repeated.")
