"""`mxjax discover report | status | explain | verify`: what reads a run's folder."""

import argparse
import pathlib
import time
from typing import Any

from mxjax.cli import options as shared
from mxjax.cli.discover.options import add_trust
from mxjax.errors import ValueRefusal


def add_parser(verbs: Any) -> None:
  """Adds the four verbs and their options."""

  def verb(name: str, help_text: str, run: Any) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=help_text, description=help_text)
    parser.add_argument("folder", metavar="DIR", help="folder of a run")
    parser.set_defaults(run=run)
    return parser

  verb("report", "write DIR/report.html", report)
  follow = verb("status", "how far a run is, also while it goes on", status)
  follow.add_argument(
    "--follow",
    type=shared.amount,
    nargs="?",
    const=2.0,
    metavar="SECONDS",
    help="look again every 2 s, or so many, until the run has ended",
  )
  story = verb("explain", "what happened in a run, or why a program exists", explain)
  help_text = "start of its identity; the whole run when omitted"
  story.add_argument("program", metavar="PROGRAM", nargs="?", help=help_text)
  help_text = "compute every hash again, and run some programs again"
  audit = verb("verify", help_text, verify)
  add_trust(audit)
  audit.add_argument(
    "--calls", type=shared.whole(0), default=3, metavar="K", help="programs"
  )


def report(options: argparse.Namespace) -> None:
  """Writes the report."""
  from mxjax.cli.output import say
  from mxjax.discovery.audit import report as pages

  say(f"report: {pages.write(pathlib.Path(options.folder))}")


def status(options: argparse.Namespace) -> None:
  """Prints how far a run is, once or until it has ended; only reads."""
  from rich import live
  from rich.text import Text

  from mxjax.cli.output import STDOUT, say
  from mxjax.discovery.audit import status as progress
  from mxjax.intake.texts import printable

  folder = pathlib.Path(options.folder)
  text, is_closed = progress.read(folder)
  if not options.follow:
    say(text)
    return
  # Drawn only when the folder was read again.
  with live.Live(console=STDOUT, auto_refresh=False) as shown:
    while True:
      shown.update(Text(printable(text)), refresh=True)
      if is_closed:
        return
      time.sleep(options.follow)
      text, is_closed = progress.read(folder)


def explain(options: argparse.Namespace) -> None:
  """Prints why a program exists, or all that happened in a run."""
  from mxjax.discovery.audit import explain as stories
  from mxjax.discovery.core.store import begun_events

  folder = pathlib.Path(options.folder)
  if options.program is None:
    print(stories.whole(folder))
    return
  margins = begun_events(folder)[0]["margins"]
  for story in stories.find(folder, options.program):
    print(stories.text(story, margins))


def verify(options: argparse.Namespace) -> None:
  """Audits a run.

  Raises:
    ValueError: Checks failed; the message lists all of them.
  """
  from mxjax.cli.discover.run import trusted
  from mxjax.cli.output import say
  from mxjax.discovery.audit import verify as audits

  audit = audits.verify(
    pathlib.Path(options.folder), options.calls, trusted=trusted(options)
  )
  say(
    f"{audit.events} events, {audit.packets} packets, {audit.programs} programs, "
    f"{audit.ledger} calls charged, {audit.executed} executed again"
  )
  if audit.complaints:
    raise ValueRefusal(
      f"verify: {options.folder}",
      expected="a run in which everything holds",
      got=", ".join(audit.complaints),
      mend="do not trust it, or put back an intact copy of the folder",
    )
  say("everything holds")
