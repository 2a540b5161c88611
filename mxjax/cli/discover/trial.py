"""`mxjax discover trial`: the paper's question, asked of a language model."""

import argparse
import pathlib
import tempfile
from typing import Any

from mxjax.cli import options as shared
from mxjax.cli.discover.options import add_trust
from mxjax.errors import FileNotFoundRefusal


def add_parser(verbs: Any) -> None:
  """Adds the verb and its steps."""
  help_text = (
    "ask the paper's question of a language model: runs, and replayed verdicts"
  )
  parser = verbs.add_parser("trial", help=help_text, description=help_text)
  steps = parser.add_subparsers(dest="step", required=True, metavar="STEP")

  def step(
    name: str, help_text: str, run: Any, more: str = ""
  ) -> argparse.ArgumentParser:
    example = f"Example: mxjax discover trial {name} runs/trial {more}".rstrip()
    made = steps.add_parser(name, help=help_text, description=help_text, epilog=example)
    made.add_argument("folder", metavar="DIR", help="folder of the trial")
    made.add_argument(
      "--data",
      default="data",
      metavar="DIR",
      help="folder of the texts that the plan names as data:FILE",
    )
    made.set_defaults(run=run)
    return made

  help_text = "measure the margins of a plan and freeze it"
  plan = "--plan benchmarks/discovery_trial_world.toml"
  freeze_ = step("freeze", help_text, freeze, plan)
  freeze_.add_argument("--plan", required=True, metavar="FILE", help="a TOML file")
  run_ = step("run", "run or resume runs of the plan, one after another", run)
  run_.add_argument("names", nargs="*", metavar="RUN", help="default: all")
  help_text = "end runs where they stand, and score them held out"
  close = step("close", help_text, run, "RUN")
  close.add_argument("names", nargs="+", metavar="RUN")
  help_text = "replay the verdicts of the closed runs"
  replay_ = step("replay", help_text, replay, "--recorded")
  replay_.add_argument("names", nargs="*", metavar="RUN", help="default: all")
  replay_.add_argument(
    "--recorded", action="store_true", help="ask nobody: from recorded replies alone"
  )
  replay_.add_argument(
    "--at-once",
    type=shared.whole(1),
    default=64,
    metavar="N",
    help="requests that wait for an answer at a time",
  )
  for executing in (run_, close, replay_):
    add_trust(executing)
  step("tables", "print every table of a folder or of a packed trial", tables)
  help_text = "pack a trial into one small archive"
  pack_ = step("pack", help_text, pack, "--out runs/trial.tar.xz")
  pack_.add_argument("--out", required=True, metavar="FILE", help="such as a.tar.xz")


def freeze(options: argparse.Namespace) -> None:
  """Freezes a plan."""
  from mxjax.cli.output import say
  from mxjax.discovery.studies import trial

  file, folder = pathlib.Path(options.plan), pathlib.Path(options.folder)
  made = trial.freeze(folder, file, options.data, tell=say)
  say(f"frozen: {made.plan['hash']}")


def run(options: argparse.Namespace) -> None:
  """Runs, resumes or closes runs."""
  from mxjax.cli.discover.run import trusted
  from mxjax.cli.output import say
  from mxjax.discovery.studies import trial

  opened = trial.Trial(pathlib.Path(options.folder), options.data, tell=say)
  opened.check_trusted(trusted(options), asks=options.step == "run")
  for name in trial.names_of(opened, options.names):
    scores = opened.run(name, closing=options.step == "close")
    say(f"{name}: held out {scores}")


def replay(options: argparse.Namespace) -> None:
  """Replays the verdicts of the closed runs."""
  from mxjax.cli.discover.run import trusted
  from mxjax.cli.output import say
  from mxjax.discovery.core.proposal import OutageError
  from mxjax.discovery.studies import trial

  opened = trial.Trial(pathlib.Path(options.folder), options.data, tell=say)
  asks, names = not options.recorded, options.names
  opened.check_trusted(trusted(options), asks=asks)
  # For its refusal of unknown names.
  trial.names_of(opened, names)
  if absent := opened.replay(names, asks=asks, at_once=options.at_once):
    again = "the same command" if asks else "the command without --recorded"
    raise OutageError(
      f"trial: {absent} successors have no answer; what is there is recorded, and "
      f"{again} asks for the rest."
    )


def tables(options: argparse.Namespace) -> None:
  """Prints the tables, without a model and without measuring anything."""
  from mxjax.discovery.studies import trial, trial_tables
  from mxjax.evaluation.report.tables import markdown

  path = pathlib.Path(options.folder)
  if not path.exists():
    raise FileNotFoundRefusal(
      path,
      expected="the folder of a trial, or an archive of one",
      got="nothing",
      mend="name one that is there",
    )
  with tempfile.TemporaryDirectory(prefix="mxjax-trial-") as scratch:
    if path.is_file():
      path = trial.unpack(path, pathlib.Path(scratch))
    print(markdown(trial_tables.tables(path)))


def pack(options: argparse.Namespace) -> None:
  """Packs a trial."""
  from mxjax.cli.output import say
  from mxjax.discovery.studies import trial
  from mxjax.models.loading import embedded

  opened = trial.Trial(pathlib.Path(options.folder), options.data, tell=say)
  places = {
    str(pathlib.Path(options.data).resolve()): "data",
    str(embedded.trained_folder("llama").parent): "models/trained",
    str(opened.path.resolve()): "trial",
  }
  out = pathlib.Path(options.out)
  trial.pack(opened, out, places)
  say(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
