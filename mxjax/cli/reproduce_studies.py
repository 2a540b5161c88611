"""`mxjax reproduce` of the discovery tables: studies beside the builds of models."""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from mxjax.cli import options as shared
from mxjax.cli import reproduce
from mxjax.cli.discover import study as studies
from mxjax.cli.output import say
from mxjax.discovery.studies import study_jobs
from mxjax.discovery.studies.arms import PAPER_STUDIES
from mxjax.errors import ValueRefusal
from mxjax.evaluation.report.tables import markdown
from mxjax.evaluation.tables import page, runner
from mxjax.intake import texts

FOLDER = "discovery"
"""Of the studies, below that of the builds."""


def run(options: argparse.Namespace) -> int:
  """Makes tables of studies, of builds or of both; returns 1 if something failed."""
  # Two makers share one list of tables: studies here, builds in `reproduce`.
  names = texts.split(options.tables)
  asked = [name for name in names if name in PAPER_STUDIES]
  if names == ["all"] and options.studied:
    asked = list(PAPER_STUDIES)
  code = _studies(asked, options) if asked else 0
  builds = [name for name in names if name not in asked]
  if not builds:
    return code
  options.tables = ",".join(builds)
  return max(code, reproduce.run_builds(options))


def _studies(names: Sequence[str], options: argparse.Namespace) -> int:
  """Plans studies, or makes their tables; returns 1 if one failed."""
  settings = study_jobs.planned(
    _models(options.studied),
    options.study_calls,
    shared.whole_list(options.study_seeds or ""),
  )
  if not options.out:
    raise ValueRefusal("reproduce", "--out for the studies", got="none")
  if options.plan:
    for name in names:
      studies.plan(name, settings)
    return 0
  place = pathlib.Path(options.out) / FOLDER
  folder = study_jobs.opened(place, settings, say)
  say(f"frozen: {folder.frozen['hash']}")
  try:
    work = study_jobs.Studies(folder, say)
    failures = runner.run(
      work,
      names,
      on_failure=lambda name, why: print(
        f"mxjax reproduce: failed, {name}: {why}", file=sys.stderr
      ),
    )
  finally:
    folder.close()
  made = [table for found in work.tables.values() for table in found]
  if made:
    print(markdown(made))
    page.write(place, made, [])
  return int(bool(failures))


def _models(studied: str | None) -> list[str]:
  """Returns the models of a study: two of them, or none for the world.

  Raises:
    ValueError: It is not said what is studied.
  """
  names = texts.split(studied or "")
  if names == ["world"]:
    return []
  if len(names) != 2:
    raise ValueRefusal(
      "reproduce",
      expected="--studied world or MODEL,HELDOUT for a discovery table",
      got=studied or "none",
      mend="name the model that is searched and the one that is held out",
    )
  return names
