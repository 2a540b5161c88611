"""Implements the subcommands of `mxjax discover`."""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import time
from typing import Any

from rich import live
from rich.text import Text

from mxjax.discovery.audit import explain, report, verify
from mxjax.discovery.audit import status as progress
from mxjax.discovery.cli import config
from mxjax.discovery.cli import study as studies
from mxjax.discovery.cli.options import run_options
from mxjax.discovery.core import candidate_source, edit_templates
from mxjax.discovery.core import task as task_
from mxjax.discovery.core.proposal import OutageError
from mxjax.discovery.core.store import begun_events
from mxjax.discovery.proposers import weighted
from mxjax.discovery.sandbox import jail, supervisor
from mxjax.discovery.search import runs
from mxjax.discovery.studies.reproducing import begun_task
from mxjax.discovery.tasks.ptq import margins
from mxjax.evaluation.cli.console import STDOUT, printable, say
from mxjax.storage import atomic_io


def _fitting(run_: runs.RunOptions) -> task_.Task:
  """Returns the task of a run, before anything is written or paid for.

  Raises:
    ValueError: The task, budgets, proposer or initial program do not go together.
  """
  task, settings = task_.load(run_.task), run_.search
  settings.ledger()
  runs.make_proposer(run_, task)
  if settings.screen is not None:
    runs.proxy_of(task)
  if settings.start:
    try:
      candidate_source.admit(settings.start, task.interface)
    except candidate_source.RejectedError as error:
      raise ValueError(f"discover: --start: {error}") from error
  return task


def study(options: argparse.Namespace) -> None:
  """Implements `mxjax discover study`."""
  run_ = run_options(options)
  spec = dict(run_.task)
  if spec["task"] in task_.WORLDS:
    # Each run uses the world of its own seed.
    del spec["seed"]
  folder = pathlib.Path(options.out)
  if options.plan:
    studies.plan(options.name, studies.options(options, spec, run_))
    return
  spec = begun_task(folder) or margins.completed(spec, options.start, tell=say)
  studies.conduct(options.name, folder, studies.options(options, spec, run_))


def plan(options: argparse.Namespace) -> None:
  """Implements `mxjax discover plan`, which measures two calls."""
  run_ = run_options(options)
  task, config = _fitting(run_), run_.search
  deck = edit_templates.fingerprint(task.edit_templates)[:12]
  proposals = config.budget * config.proposals_per_call
  held_out = "nothing is scored on held-out data"
  if task.holdout() is not None and run_.holdout != "off":
    marks = config.budget // config.mark_every
    held_out = f"{marks} champions are scored on held-out data outside the budget"
  say(f"The task is {json.dumps(dict(task.spec))}.")
  say(
    f"A run pays {config.budget} evaluator calls, for candidates, controls and probes "
    f"together, and asks the proposer at most {proposals} times; {held_out}."
  )
  if limits := {k: v for k, v in run_.config.items() if k.startswith("max_")}:
    say(f"It asks nothing more once the proposer has used {limits}.")
  say(studies.measured(task, run_.sandbox, config.budget))
  say(
    f"The proposer is {options.proposer}; the task has {len(task.edit_templates)} edit "
    f"templates, hash {deck}."
  )
  say(f"The arm is {options.arm}: {config}.")


def run(options: argparse.Namespace) -> None:
  """Implements `mxjax discover run`."""
  run_, folder = run_options(options), pathlib.Path(options.out)
  _fitting(run_)
  _probe(run_)
  spec = margins.completed(run_.task, options.start, tell=say)
  runs.write_options(folder, dataclasses.replace(run_, task=spec))
  resolved = config.text(options.resolved).encode()
  atomic_io.write_durably(folder / "config.toml", resolved)
  _search(folder, options)


def resume(options: argparse.Namespace) -> None:
  """Implements `mxjax discover resume`."""
  folder = pathlib.Path(options.folder)
  if not runs.is_closed(folder):
    _probe(runs.read_options(folder))
  _search(folder, options)


def _probe(options: runs.RunOptions) -> None:
  """Asks every endpoint of a run for one word, before anything is paid for.

  Raises:
    OutageError: One does not answer.
  """
  if options.proposer["kind"] == "llm":
    for client in weighted.clients(options.proposer, metered=options.search.is_metered):
      say(f"endpoint: {client.probe().model!r} answered")


def _search(folder: pathlib.Path, options: argparse.Namespace) -> None:
  target = task_.load(runs.read_options(folder).task).target

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


def status(options: argparse.Namespace) -> None:
  """Implements `mxjax discover status`, which only reads."""
  folder = pathlib.Path(options.folder)
  text, is_closed = progress.read(folder)
  if not options.follow:
    say(text)
    return
  with live.Live(console=STDOUT, auto_refresh=False) as shown:
    while True:
      shown.update(Text(printable(text)), refresh=True)
      if is_closed:
        return
      time.sleep(options.follow)
      text, is_closed = progress.read(folder)


def write_report(options: argparse.Namespace) -> None:
  """Implements `mxjax discover report`."""
  say(f"report: {report.write(pathlib.Path(options.folder))}")


def explain_program(options: argparse.Namespace) -> None:
  """Implements `mxjax discover explain`."""
  folder = pathlib.Path(options.folder)
  margins_ = begun_events(folder)[0]["margins"]
  for story in explain.find(folder, options.program):
    print(explain.text(story, margins_))


def verify_run(options: argparse.Namespace) -> None:
  """Implements `mxjax discover verify`.

  Raises:
    ValueError: Checks failed; the message lists all of them.
  """
  audit = verify.verify(pathlib.Path(options.folder), options.calls)
  say(
    f"{audit.events} events, {audit.packets} packets, {audit.programs} programs, "
    f"{audit.ledger} calls charged, {audit.executed} executed again"
  )
  if audit.complaints:
    raise ValueError("verify: " + "; ".join(audit.complaints))
  say("everything holds")


def doctor(options: argparse.Namespace) -> None:
  """Implements `mxjax discover doctor`.

  Raises:
    OutageError: The endpoint does not answer.
  """
  say(f"{platform.system()} {platform.release()} {platform.machine()}")
  say(f"Landlock version {jail.landlock_version()}")
  for level in jail.JAILED:
    try:
      tracer = supervisor.Tracer(level)
    except supervisor.WorkerError as error:
      say(f"sandbox {level}: no. {error}")
      continue
    walls = ", ".join(f"{k} {v}" for k, v in tracer.features.items())
    tracer.close()
    say(f"sandbox {level}: yes ({walls})")
  key = "set" if os.environ.get("OPENAI_API_KEY") else "not set"
  say(f"OPENAI_API_KEY is {key}")
  if options.endpoint:
    settings = {"base_url": options.endpoint, "model": "doctor"}
    _probe(runs.RunOptions(task={}, config={}, proposer={"kind": "llm", **settings}))
