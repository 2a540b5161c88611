"""`mxjax discover plan | run | resume | report | explain | verify | doctor | study`.

This file is the console entry of the whole command line: discovery stands above
evaluation, so it adds its commands to that floor's parser.
"""

import argparse
import json
import os
import pathlib
import platform
import sys
from collections.abc import Sequence
from typing import Any

from mxjax.discovery.audit import explain, report, verify
from mxjax.discovery.cli import study as study_cli
from mxjax.discovery.core import edit_templates
from mxjax.discovery.core import task as task_
from mxjax.discovery.core.store import read_events
from mxjax.discovery.sandbox import jail, supervisor
from mxjax.discovery.search import runs
from mxjax.discovery.search.search import SearchConfig
from mxjax.discovery.studies.arms import ARMS, AS_IN_PAPER
from mxjax.evaluation.cli import parser as cli
from mxjax.evaluation.cli.console import STDOUT


def main(arguments: Sequence[str] | None = None) -> int:
  """The `mxjax` command."""
  return cli.main(arguments, extend=register)


def register(commands: Any) -> None:
  """Adds `discover` to the parser of `mxjax`."""
  discover = commands.add_parser(
    "discover",
    help="search for better programs by controlled experiments (QuantForge)",
    description="Searches for better PTQ programs: every candidate is a registered "
    "experiment, and its verdict is a demand on later code.",
  )
  verbs = discover.add_subparsers(dest="verb", required=True, metavar="VERB")
  for name, function, told in (
    ("plan", plan, "what a run would cost; starts nothing"),
    ("run", run, "start a run"),
  ):
    verb = verbs.add_parser(name, help=told, description=told)
    _add_task(verb)
    verb.set_defaults(run=function)
    if name == "run":
      verb.add_argument("--out", required=True, metavar="DIR", help="a new folder")
      _add_workers(verb)
  resume_ = verbs.add_parser("resume", help="go on with a run, paying nothing twice")
  resume_.add_argument("folder", metavar="DIR")
  _add_workers(resume_)
  resume_.set_defaults(run=resume)
  report_ = verbs.add_parser("report", help="write DIR/report.html")
  report_.add_argument("folder", metavar="DIR")
  report_.set_defaults(run=write_report)
  explain_ = verbs.add_parser("explain", help="why a program exists")
  explain_.add_argument("folder", metavar="DIR")
  explain_.add_argument("program", metavar="PROGRAM", help="start of its identity")
  explain_.set_defaults(run=explain_program)
  verify_ = verbs.add_parser("verify", help="hash everything again, run some again")
  verify_.add_argument("folder", metavar="DIR")
  verify_.add_argument("--calls", type=int, default=3, metavar="K")
  verify_.set_defaults(run=verify_run)
  doctor_ = verbs.add_parser("doctor", help="what this machine can do")
  doctor_.add_argument("--endpoint", metavar="URL")
  doctor_.set_defaults(run=doctor)
  study_cli.add(verbs, _add_task)
  verbs.choices["study"].set_defaults(run=study)


def _add_workers(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--workers", type=int, default=1, metavar="N")
  parser.add_argument("--ray", action="store_true", help="workers on a Ray cluster")
  parser.add_argument("--compiled", metavar="DIR", type=pathlib.Path,
      help="where jailed workers share compiled programs, also with later runs; they "
      "may write there")  # fmt: skip


def _add_task(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add("--task", default="ptq", help="ptq, world, or package.module:function")
  add("--task-options", default="{}", metavar="JSON", help="options of the task")
  add("--model", metavar="MODEL", help="visible model of the ptq task")
  add("--holdout-model", metavar="MODEL", help="held-out model of the ptq task")
  add("--budget", type=int, default=240, metavar="CALLS")
  add("--seed", type=int, default=0)
  add("--arm", default="quantforge", choices=sorted(ARMS))
  add("--width", type=int, default=1, help="proposals made from one state")
  add("--as-in-paper", action="store_true", help="run every registered control, and "
      "charge repeated executions")  # fmt: skip
  add("--sandbox", default="strict", choices=jail.LEVELS)
  add("--proposer", default="embedded", metavar="KIND",
      help="embedded, llm, cassette or human")  # fmt: skip
  add("--endpoint", metavar="URL", help="OpenAI-compatible base URL")
  add("--endpoint-model", metavar="NAME")
  add("--cassette", metavar="FILE", help="record to it (llm) or replay it (cassette)")
  add("--tokenizer", metavar="FILE", help="tokenizer.json for exact budgets")
  add("--answers", metavar="DIR", help="folder of the human queue")
  add("--holdout", default="after", choices=("after", "during", "off"))


def _options(options: argparse.Namespace) -> runs.RunOptions:
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
  told: dict[str, Any] = {"kind": options.proposer}
  if options.proposer == "llm":
    if not (options.endpoint and options.endpoint_model):
      raise ValueError("discover: llm needs --endpoint and --endpoint-model.")
    told |= {"base_url": options.endpoint, "model": options.endpoint_model}
  if options.proposer in ("llm", "cassette"):
    told |= {"cassette": options.cassette, "tokenizer": options.tokenizer}
  if options.proposer == "human":
    told["folder"] = options.answers or "answers"
  return runs.RunOptions(
    task=spec,
    config=config,
    sandbox=options.sandbox,
    proposer=told,
    holdout=options.holdout,
  )


def _calibrated(spec: dict[str, Any]) -> dict[str, Any]:
  """A specification with what is measured once for a contract."""
  if spec["task"] != "ptq" or "margins" in spec:
    return spec
  from mxjax.discovery.tasks.ptq import margins as ptq_margins

  STDOUT.print("measuring margins and thresholds of this contract, once")
  return dict(ptq_margins.calibrated(spec))


def study(options: argparse.Namespace) -> None:
  """`mxjax discover study`."""
  made = _options(options)
  spec = dict(made.task)
  if spec["task"] == "world":
    # Each run takes the world of its own seed.
    del spec["seed"]
  folder = pathlib.Path(options.out)
  if options.plan:
    study_cli.plan(options.name, study_cli.options(options, spec, made.proposer))
    return
  if (begun := study_cli.begun_task(folder)) is not None:
    spec = begun
  made_study = study_cli.options(options, _calibrated(spec), made.proposer)
  study_cli.conduct(options.name, folder, made_study)


def plan(options: argparse.Namespace) -> None:
  """`mxjax discover plan`."""
  made = _options(options)
  task, config = task_.load(made.task), SearchConfig(**made.config)
  hours = config.budget * task.call_seconds / 3600
  deck = edit_templates.fingerprint(task.edit_templates)[:12]
  rows = {
    "task": dict(task.spec),
    "evaluator calls": f"{config.budget}, candidates, controls and probes together",
    "proposer calls": f"at most {config.budget * config.proposals_per_call}",
    "one call": f"about {task.call_seconds:g} s on one worker",
    "in all": f"about {hours:.2f} h on one worker",
    "held-out": f"{config.budget // config.mark_every} champions, outside the budget",
    "proposer": f"{options.proposer}; {len(task.edit_templates)} cards, hash {deck}",
    "arm": f"{options.arm}: {config}",
    "sandbox": made.sandbox,
  }
  for name, value in rows.items():
    STDOUT.print(f"{name}: {value}", markup=False, highlight=False)


def run(options: argparse.Namespace) -> None:
  """`mxjax discover run`."""
  made, folder = _options(options), pathlib.Path(options.out)
  made = runs.RunOptions(**{**vars(made), "task": _calibrated(dict(made.task))})
  runs.write_options(folder, made)
  _go(folder, options)


def resume(options: argparse.Namespace) -> None:
  """`mxjax discover resume`."""
  _go(pathlib.Path(options.folder), options)


def _go(folder: pathlib.Path, options: argparse.Namespace) -> None:
  target = task_.load(runs.read_options(folder).task).target

  def show(event: dict[str, Any]) -> None:
    if event["event"] == "outcome" and event["charged"]:
      value = event["values"].get(target, event["status"])
      STDOUT.print(
        f"call {event['call']} {event['kind']} {event['condition']}: {value}",
        highlight=False,
      )
    elif event["event"] == "verdict":
      STDOUT.print(f"  {event['verdict']} ({event['reason']})", highlight=False)

  champion = runs.run(
    folder,
    workers=options.workers,
    ray=options.ray,
    compiled=options.compiled,
    on_event=show,
  )
  path = report.write(folder)
  totals = read_events(folder)[-1]["ledger"]
  STDOUT.print(f"champion {champion.id[:12]}, found at call {champion.call}")
  STDOUT.print(f"ledger: {totals}", markup=False)
  STDOUT.print(f"report: {path}")


def write_report(options: argparse.Namespace) -> None:
  """`mxjax discover report`."""
  STDOUT.print(f"report: {report.write(pathlib.Path(options.folder))}")


def explain_program(options: argparse.Namespace) -> None:
  """`mxjax discover explain`."""
  folder = pathlib.Path(options.folder)
  margins = read_events(folder)[0]["margins"]
  for story in explain.find(folder, options.program):
    print(explain.text(story, margins))


def verify_run(options: argparse.Namespace) -> None:
  """`mxjax discover verify`."""
  found = verify.verify(pathlib.Path(options.folder), options.calls)
  STDOUT.print(
    f"{found.events} events, {found.packets} packets, {found.programs} programs, "
    f"{found.ledger} calls charged, {found.executed} executed again"
  )
  if found.complaints:
    raise ValueError("verify: " + "; ".join(found.complaints))
  STDOUT.print("everything holds")


def doctor(options: argparse.Namespace) -> None:
  """`mxjax discover doctor`."""
  STDOUT.print(f"{platform.system()} {platform.release()} {platform.machine()}")
  STDOUT.print(f"Landlock version {jail.landlock_version()}")
  for level in ("strict", "standard"):
    try:
      tracer = supervisor.Tracer(level)
    except supervisor.WorkerError as error:
      STDOUT.print(f"sandbox {level}: no. {error}", markup=False)
      continue
    walls = ", ".join(f"{k} {v}" for k, v in tracer.features.items())
    tracer.close()
    STDOUT.print(f"sandbox {level}: yes ({walls})", markup=False)
  key = "set" if os.environ.get("OPENAI_API_KEY") else "not set"
  STDOUT.print(f"OPENAI_API_KEY is {key}")
  if options.endpoint:
    from mxjax.discovery.proposers.endpoint import HttpClient

    client = HttpClient(base_url=options.endpoint, model="doctor", deadline=10.0)
    try:
      reply = client.complete({"messages": [{"role": "user", "content": "Say yes."}]})
      STDOUT.print(f"endpoint: {reply.model} answered")
    except RuntimeError as error:
      STDOUT.print(f"endpoint: {error}", markup=False)


if __name__ == "__main__":
  sys.exit(main())
