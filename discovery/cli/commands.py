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
  spec = {"task": options.task, **json.loads(options.task_options)}
  if options.task == "world":
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
  if spec["task"] == "world":
    # Each run uses the world of its own seed.
    del spec["seed"]
  folder = pathlib.Path(options.out)
  if options.plan:
    studies.plan(options.name, studies.options(options, spec, run_.proposer))
    return
  spec = studies.begun_task(folder) or _with_margins(spec)
  studies.conduct(options.name, folder, studies.options(options, spec, run_.proposer))


def plan(options: argparse.Namespace) -> None:
  """Implements `mxjax discover plan`."""
  run_ = run_options(options)
  task, config = task_.load(run_.task), SearchConfig(**run_.config)
  hours = config.budget * task.call_seconds / 3600
  deck = edit_templates.fingerprint(task.edit_templates)[:12]
  rows = {
    "task": dict(task.spec),
    "evaluator calls": f"{config.budget}, candidates, controls and probes together",
    "proposer calls": f"at most {config.budget * config.proposals_per_call}",
    "one call": f"about {task.call_seconds:g} s on one worker",
    "in all": f"about {hours:.2f} h on one worker",
    "held-out": f"{config.budget // config.mark_every} champions, outside the budget",
    "proposer": f"{options.proposer}; {len(task.edit_templates)} edits, hash {deck}",
    "arm": f"{options.arm}: {config}",
    "sandbox": run_.sandbox,
  }
  for name, value in rows.items():
    say(f"{name}: {value}")


def run(options: argparse.Namespace) -> None:
  """Implements `mxjax discover run`."""
  run_, folder = run_options(options), pathlib.Path(options.out)
  spec = _with_margins(dict(run_.task))
  runs.write_options(folder, dataclasses.replace(run_, task=spec))
  _search(folder, options)


def resume(options: argparse.Namespace) -> None:
  """Implements `mxjax discover resume`."""
  _search(pathlib.Path(options.folder), options)


def _search(folder: pathlib.Path, options: argparse.Namespace) -> None:
  target = task_.load(runs.read_options(folder).task).target

  def show(event: dict[str, Any]) -> None:
    if event["event"] == "outcome" and event["charged"]:
      value = event["values"].get(target, event["status"])
      say(f"call {event['call']} {event['kind']} {event['condition']}: {value}")
    elif event["event"] == "verdict":
      say(f"  {event['verdict']} ({event['reason']})")

  champion = runs.run(
    folder,
    workers=options.workers,
    ray=options.ray,
    compiled=options.compiled,
    on_event=show,
  )
  path = report.write(folder)
  say(f"champion {champion.id[:12]}, found at call {champion.call}")
  say(f"ledger: {read_events(folder)[-1]['ledger']}")
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
  """Implements `mxjax discover doctor`."""
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
    client = HttpClient(base_url=options.endpoint, model="doctor", deadline=10.0)
    try:
      reply = client.complete({"messages": [{"role": "user", "content": "Say yes."}]})
      say(f"endpoint: {reply.model} answered")
    except RuntimeError as error:
      say(f"endpoint: {error}")
