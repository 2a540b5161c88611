"""Implements the subcommands of `mxjax discover`."""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
from typing import Any

from mxjax.discovery.audit import explain, report, verify
from mxjax.discovery.cli import study as studies
from mxjax.discovery.core import edit_templates
from mxjax.discovery.core import task as task_
from mxjax.discovery.core.proposal import OutageError
from mxjax.discovery.core.store import read_events
from mxjax.discovery.proposers.endpoint import HttpClient
from mxjax.discovery.sandbox import jail, supervisor
from mxjax.discovery.search import runs
from mxjax.discovery.search.search import SearchConfig
from mxjax.discovery.studies.arms import ARMS, AS_IN_PAPER
from mxjax.discovery.tasks.ptq import margins
from mxjax.evaluation.cli.console import say


def run_options(options: argparse.Namespace) -> runs.RunOptions:
  """Builds the options of a run folder.

  Raises:
    ValueError: The `llm` proposer was chosen without its endpoint and model.
  """
  spec = {**_task(options.task), **json.loads(options.task_options)}
  if options.task in task_.WORLDS:
    spec.setdefault("seed", options.seed)
  if options.model:
    spec["model"] = options.model
  if options.holdout_model:
    spec["holdout"] = options.holdout_model
  config = {
    "seed": options.seed,
    "budget": options.budget,
    "width": options.width,
    **ARMS[options.arm].changes,
  }
  if options.as_in_paper:
    config |= AS_IN_PAPER
  if options.paper_allocation:
    config["allocation"] = ARMS[options.arm].allocation
  proposer: dict[str, Any] = {"kind": options.proposer}
  if options.contested_accounts:
    proposer["contested"] = True
  if options.proposer == "llm":
    if not (options.endpoint and options.endpoint_model):
      raise ValueError("discover: llm needs --endpoint and --endpoint-model.")
    proposer |= {"base_url": options.endpoint, "model": options.endpoint_model}
  if options.proposer in ("llm", "cassette"):
    proposer |= {"cassette": options.cassette, "tokenizer": options.tokenizer}
    if options.prices:
      proposer["prices"] = options.prices
    proposer |= {"effort": options.reasoning_effort}
  if options.proposer == "human":
    proposer["folder"] = options.answers or "answers"
  return runs.RunOptions(
    task=spec,
    config=config,
    sandbox=options.sandbox,
    proposer=proposer,
    holdout=options.holdout,
  )


def _task(name: str) -> dict[str, Any]:
  """Returns the beginning of a task's specification, with the folder of its module."""
  if pathlib.Path(name).is_dir():
    return {"task": str(pathlib.Path(name).resolve())}
  module, _, function = name.partition(":")
  here = pathlib.Path.cwd()
  package = module.partition(".")[0]
  is_here = any((here / file).exists() for file in (f"{package}.py", package))
  # The command's own sys.path does not have the current folder.
  if function and is_here:
    return {"task": name, "path": str(here)}
  return {"task": name}


def _with_margins(spec: dict[str, Any]) -> dict[str, Any]:
  """Adds the margins of a `ptq` task, which are measured once per contract."""
  if spec["task"] != "ptq" or "margins" in spec:
    return spec
  say("measuring margins and thresholds of this contract, once")
  return dict(margins.calibrated(spec))


def study(options: argparse.Namespace) -> None:
  """Runs, resumes or plans a study (`mxjax discover study`)."""
  run_ = run_options(options)
  spec = dict(run_.task)
  if spec["task"] in task_.WORLDS:
    # Each run uses the world of its own seed.
    del spec["seed"]
  folder = pathlib.Path(options.out)
  if options.plan:
    studies.plan(options.name, studies.options(options, spec, run_.proposer))
    return
  spec = studies.begun_task(folder) or _with_margins(spec)
  studies.conduct(options.name, folder, studies.options(options, spec, run_.proposer))


def plan(options: argparse.Namespace) -> None:
  """Implements `mxjax discover plan`, which measures two calls."""
  run_ = run_options(options)
  task, config = task_.load(run_.task), SearchConfig(**run_.config)
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
  say(studies.measured(task, run_.sandbox, config.budget))
  say(
    f"The proposer is {options.proposer}; the task has {len(task.edit_templates)} edit "
    f"templates, hash {deck}."
  )
  say(f"The arm is {options.arm}: {config}.")


def run(options: argparse.Namespace) -> None:
  """Implements `mxjax discover run`."""
  run_, folder = run_options(options), pathlib.Path(options.out)
  task_.load(run_.task)  # Before anything is written.
  _probe(run_)
  spec = _with_margins(dict(run_.task))
  runs.write_options(folder, dataclasses.replace(run_, task=spec))
  _search(folder, options)


def resume(options: argparse.Namespace) -> None:
  """Implements `mxjax discover resume`."""
  folder = pathlib.Path(options.folder)
  if not runs.is_closed(folder):
    _probe(runs.read_options(folder))
  _search(folder, options)


def _probe(options: runs.RunOptions) -> None:
  """Asks the endpoint of a run for one word, before anything is paid for.

  Raises:
    OutageError: It does not answer.
  """
  settings = dict(options.proposer)
  if settings.pop("kind") == "llm":
    named = ("base_url", "model", "key_variable")
    client = HttpClient(**{k: v for k, v in settings.items() if k in named})
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
  ledger = read_events(folder)[-1]["ledger"]
  say(f"ledger: {ledger}")
  if paid := ledger["proposer"].get("micro_dollars"):
    say(f"the proposer's tokens cost {paid / 1e6:.2f} dollars at the given prices")
  say(f"report: {path}")


def write_report(options: argparse.Namespace) -> None:
  """Implements `mxjax discover report`."""
  say(f"report: {report.write(pathlib.Path(options.folder))}")


def explain_program(options: argparse.Namespace) -> None:
  """Implements `mxjax discover explain`."""
  folder = pathlib.Path(options.folder)
  margins_ = read_events(folder)[0]["margins"]
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
