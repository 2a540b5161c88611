"""`mxjax discover plan | run | resume | close`: one search, and what it will cost."""

import argparse
import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Any

from mxjax import errors
from mxjax.cli.discover import config
from mxjax.cli.discover.options import (
  add_config,
  add_limits,
  add_task,
  add_trust,
  add_workers,
)

if TYPE_CHECKING:
  from mxjax.discovery.core.task import Task
  from mxjax.discovery.search.runs import RunOptions, Trusted


def add_parser(verbs: Any) -> None:
  """Adds the four verbs and their options."""
  help_text = "what a run would cost; runs the default program, starts nothing"
  planned = verbs.add_parser("plan", help=help_text, description=help_text)
  started = verbs.add_parser("run", help="start a run", description="start a run")
  # Both read one file of options.
  planned.holder = started
  for parser in (planned, started):
    add_task(parser)
    add_config(parser, "run")
    add_limits(parser)
  started.add_argument("--out", required=True, metavar="DIR", help="a new folder")
  add_workers(started)
  help_text = "continue a run, paying nothing twice"
  resumed = verbs.add_parser("resume", help=help_text, description=help_text)
  resumed.add_argument("folder", metavar="DIR", help="folder of the run")
  add_trust(resumed)
  add_workers(resumed)
  help_text = "end a run early, with its held-out score; nothing more is proposed"
  closed = verbs.add_parser("close", help=help_text, description=help_text)
  closed.add_argument("folder", metavar="DIR", help="folder of the run")
  add_trust(closed)
  closed.set_defaults(run=close)
  planned.set_defaults(run=plan)
  started.set_defaults(run=run)
  resumed.set_defaults(run=resume)


def plan(options: argparse.Namespace) -> None:
  """Prints what a run would cost; measures two calls, starts nothing."""
  from mxjax.cli.discover.inputs import measured, run_options
  from mxjax.cli.output import say
  from mxjax.discovery.core import edit_templates

  run_ = run_options(options)
  task, search = _fitting(run_), run_.search
  deck = edit_templates.fingerprint(task.edit_templates)[:12]
  proposals = search.budget * search.proposals_per_call
  held_out = "nothing is scored on held-out data"
  if task.holdout() is not None and run_.holdout != "off":
    # And the last one, where it came after the last multiple.
    marks = -(-search.budget // search.mark_every)
    held_out = f"at most {marks} champions are scored held out, outside the budget"
  say(f"The task is {json.dumps(dict(task.spec))}.")
  say(
    f"A run pays {search.budget} evaluator calls, for candidates, controls and probes "
    f"together, and asks the proposer at most {proposals} times; {held_out}."
  )
  if limits := {k: v for k, v in run_.config.items() if k.startswith("max_")}:
    say(f"It asks nothing more once the proposer has used {limits}.")
  say(measured(task, run_.sandbox, search.budget))
  say(
    f"The proposer is {options.proposer}; the task has {len(task.edit_templates)} edit "
    f"templates, hash {deck}."
  )
  say(f"The arm is {options.arm}: {search}.")


def run(options: argparse.Namespace) -> None:
  """Starts a run in a new folder, with the options that it keeps."""
  from mxjax.cli.discover.inputs import run_options
  from mxjax.cli.output import say
  from mxjax.discovery.core import store
  from mxjax.discovery.search import runs
  from mxjax.discovery.tasks.ptq import margins

  run_, folder = run_options(options), pathlib.Path(options.out)
  # First what costs nothing, then the endpoint, and then measuring; the folder is
  # written last.
  _fitting(run_)
  probe(run_)
  spec = margins.completed(run_.task, options.start, tell=say)
  run_ = dataclasses.replace(run_, task=spec)
  runs.write_options(folder, run_)
  resolved = config.text(options.resolved).encode()
  store.write_for_people(folder, "config.toml", resolved)
  _search(folder, options, runs.Trusted.own(run_))


def resume(options: argparse.Namespace) -> None:
  """Continues a run from its folder."""
  from mxjax.discovery.search import runs

  folder, trusts = pathlib.Path(options.folder), trusted(options)
  trusts.check(read := runs.read_options(folder))
  if not runs.is_closed(folder):
    trusts.check_endpoint(read, folder)
    probe(read)
  _search(folder, options, trusts)


def close(options: argparse.Namespace) -> None:
  """Ends a run early with its held-out score."""
  from mxjax.cli.output import say
  from mxjax.discovery.search import runs

  champion = runs.close(pathlib.Path(options.folder), trusted=trusted(options))
  say(f"champion {champion.id[:12]}, found at call {champion.call}")


def trusted(options: argparse.Namespace) -> "Trusted":
  """Returns what the command line lets a folder execute."""
  from mxjax.cli.discover.inputs import task_spec
  from mxjax.discovery.search import runs

  given = None if options.task is None else task_spec(options.task)
  named = {"key_variable": options.key_variable} if options.key_variable else {}
  return runs.Trusted(
    task=given, sandbox=options.sandbox, endpoint=options.endpoint, **named
  )


def probe(options: "RunOptions") -> None:
  """Asks the endpoint of a run for one word, before anything is paid for.

  Raises:
    OutageError: It refuses, or is not there.
  """
  from mxjax.cli.output import say
  from mxjax.discovery.proposers import llm

  if options.proposer["kind"] == "llm":
    say(llm.greet(options.proposer, metered=options.search.is_metered))


def _fitting(options: "RunOptions") -> "Task":
  """Returns the task of a run, before anything is written or paid for.

  Raises:
    ValueError: The task, budgets, proposer or initial program do not go together.
  """
  from mxjax.discovery.core import candidate_source
  from mxjax.discovery.core import task as tasks
  from mxjax.discovery.search import runs

  task, search = tasks.load(options.task), options.search
  # Both are made for their checks alone.
  search.ledger()
  runs.make_proposer(options, task)
  if search.start:
    with errors.within("discover: --start"):
      candidate_source.admit(search.start, task.interface)
  return task


def _search(
  folder: pathlib.Path, options: argparse.Namespace, trusts: "Trusted"
) -> None:
  """Searches until the run ends, saying every outcome and verdict."""
  from mxjax.cli.output import say
  from mxjax.discovery.audit import report
  from mxjax.discovery.core import task as tasks
  from mxjax.discovery.core.proposal import OutageError
  from mxjax.discovery.core.store import begun_events
  from mxjax.discovery.search import runs

  target = tasks.load(runs.read_options(folder).task).target

  def show(event: dict[str, Any]) -> None:
    if event["event"] == "outcome" and event["charged"]:
      value = event["values"].get(target, event["status"])
      say(f"call {event['call']} {event['kind']} {event['condition']}: {value}")
    elif event["event"] == "verdict":
      say(f"  {event['verdict']} ({event['reason']})")

  try:
    champion = runs.run(
      folder,
      workers=options.workers,
      ray=options.ray,
      compiled=options.compiled,
      on_event=show,
      trusted=trusts,
    )
  except OutageError as error:
    raise OutageError(
      f"{error} Nothing is lost; go on with `mxjax discover resume {folder}`."
    ) from error
  path = report.write(folder)
  say(f"champion {champion.id[:12]}, found at call {champion.call}")
  ledger = begun_events(folder)[-1]["ledger"]
  say(f"ledger: {ledger}")
  if paid := ledger["proposer"].get("micro_dollars"):
    say(f"the proposer's tokens cost {paid / 1e6:.2f} dollars at the given prices")
  say(f"report: {path}")
