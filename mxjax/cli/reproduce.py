"""`mxjax reproduce`: makes tables of the paper, from builds to printed numbers."""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

from mxjax.cli import options as shared
from mxjax.discovery.studies.arms import PAPER_CALLS, PAPER_STUDIES
from mxjax.errors import ValueRefusal
from mxjax.evaluation.provenance import DEFAULT_MODEL, short_name
from mxjax.evaluation.tables.declared import MEASURES, TABLES
from mxjax.evaluation.tasks.tasks import SEVEN
from mxjax.intake import texts


def add_parser(commands: Any) -> None:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "reproduce",
    help="the paper's tables: builds, evaluates, and prints them beside the paper's",
    description="Builds what the tables need by `quantize`, evaluates it by "
    "`evaluate`, and writes OUT/tables.md, tables.csv and tables.html beside the "
    "paper's numbers. The same command goes on where a killed one was. Settings are "
    "the paper's by default; a reduced table says so in its title.",
  )
  add = parser.add_argument
  add("tables", metavar="TABLES", help=f"comma list of {', '.join(TABLES)}, or all")
  help_text = f"comma list of folders or hub ids; {DEFAULT_MODEL} is embedded"
  add("--models", metavar="NAMES", help=help_text)
  help_text = "folder of all builds and tables, new or of an earlier reproduction"
  shared.add(parser, "--out", required=False, help=help_text)
  help_text = (
    "print tables of these results of `evaluate --tasks` instead; may be repeated"
  )
  add("--results", metavar="PLACE", action="append", default=[], help=help_text)
  add("--plan", action="store_true", help="print what it would take, and start nothing")
  help_text = "calibration draws instead of the paper's"
  add("--seeds", type=shared.whole_list, metavar="LIST", help=help_text)
  help_text = (
    f"comma list of what to leave out: tasks, {', '.join((*SEVEN, *MEASURES))}, or "
    "rows by their labels, in double quotes where they hold a comma"
  )
  add("--without", metavar="NAMES", help=help_text)
  help_text = "make a row of this method, such as one of fewer steps; may be repeated"
  add("--instead", metavar="ROW=METHOD", action="append", default=[], help=help_text)
  help_text = "share hidden states and Hessians between builds, on disk"
  add("--store", action=argparse.BooleanOptionalAction, default=True, help=help_text)
  _add_settings(parser)
  _add_studies(
    parser.add_argument_group(
      "discovery tables", f"TABLES may also hold {', '.join(PAPER_STUDIES)}."
    )
  )
  shared.add(parser, "--json", "--compiled", "--no-compiled")
  parser.set_defaults(run=run)


def _add_settings(parser: argparse.ArgumentParser) -> None:
  """Adds what is passed on to `quantize` and `evaluate`."""
  group = parser.add_argument_group("calibration")
  shared.add(group, "--calib", default="c4", help="embedded, or as of `quantize`")
  shared.add(group, "--sequences", "--length", "--sampling")
  shared.add(parser, "--dtype")
  group = parser.add_argument_group("evaluation")
  add = group.add_argument
  whole = shared.whole(1)
  add("--items", type=whole, metavar="N", help="first items of each task only")
  help_text = "first windows of wikitext2 and c4 only"
  shared.add(group, "--windows", default=None, help=help_text)
  shared.add(group, "--window-length")
  add("--task-source", choices=("embedded", "hub"), default="hub", help="of items")
  add("--wikitext2", metavar="DATA", help="instead of the hub's; embedded, or a file")
  add("--c4", metavar="DATA", help="instead of the hub's; embedded, or a file")
  help_text = "sequences for local errors, which calibration did not see"
  add("--local-sequences", type=whole, metavar="N", default=512, help=help_text)
  shared.add(group, "--replicates", "--operator-error", "--agreement")


def _add_studies(group: Any) -> None:
  """Adds what the tables of discovery studies need."""
  add = group.add_argument
  help_text = (
    "what is searched: world, or MODEL,HELDOUT; then all holds the studies, too"
  )
  add("--studied", metavar="TASK", help=help_text)
  add(
    "--study-calls",
    type=int,
    default=PAPER_CALLS,
    metavar="N",
    help="evaluator calls of each run of a study",
  )
  add("--study-seeds", metavar="LIST", help="comma list of seeds; default: 101 to 108")


def _check(options: argparse.Namespace) -> None:
  """Parses lists in place.

  Raises:
    ValueError: A name is unknown, models share a name, or what to do is not said.
  """
  names = texts.split(options.tables)
  options.tables = list(TABLES) if names == ["all"] else names
  for name in options.tables:
    texts.check("--tables", name, TABLES)
  options.models = texts.split(options.models or "")
  options.without = [
    each
    for name in texts.split(options.without or "")
    for each in (SEVEN if name == "tasks" else [name])
  ]
  # Rows of several tables can have one label.
  labels = dict.fromkeys(label for t in options.tables for label in TABLES[t].rows)
  for name in options.without:
    texts.check("--without", name, (*SEVEN, *MEASURES, *labels))
  options.instead = dict(_instead(text, labels) for text in options.instead)
  short = [short_name(model) for model in options.models]
  if len(set(short)) < len(short):
    raise ValueRefusal(
      "reproduce",
      expected="models of different names",
      got=", ".join(short),
      mend="rename a folder",
    )
  if bool(options.models) == bool(options.results):
    raise ValueRefusal(
      "reproduce",
      expected="--models to build, or --results to read",
      got="both" if options.models else "none",
      mend="give one of them",
    )
  if options.models and not (options.out or options.plan):
    raise ValueRefusal("reproduce", "--out for what is built", got="none")


def _instead(text: str, labels: Iterable[str]) -> tuple[str, str]:
  """Splits ROW=METHOD, where the row's label may hold an equals sign itself.

  Raises:
    ValueError: No row of a method has this label, or the method is unknown.
  """
  # By the known labels: the first equals sign may be within one.
  label = next((name for name in labels if text.startswith(f"{name}=")), None)
  if label is None:
    texts.check("--instead", text.split("=")[0], labels)
    raise ValueRefusal(
      "reproduce",
      expected="--instead ROW=METHOD",
      got=repr(text),
      mend=f"name a method, such as {text}=spinquant:steps=10",
    )
  method = text.removeprefix(f"{label}=")
  shared.check_method(method)
  return label, method


def requested(options: argparse.Namespace) -> Any:
  """Returns the `reproduction.Request` of options that `_check` has parsed."""
  from mxjax.evaluation.evaluating import TaskData
  from mxjax.evaluation.subjects import CalibrationSample
  from mxjax.evaluation.tables.reproduction import Request
  from mxjax.evaluation.tables.settings import Settings

  shared.fit_lengths(options)
  return Request(
    tables=options.tables,
    models=options.models,
    seeds=options.seeds,
    without=options.without,
    instead=options.instead,
    settings=Settings(
      sample=CalibrationSample(
        source=options.calib,
        sequences=shared.sequences(options),
        length=options.length,
        sampling=options.sampling,
      ),
      tasks=TaskData(
        items=options.items,
        item_source=options.task_source,
        wikitext2=options.wikitext2,
        c4=options.c4,
        windows=options.windows,
        window_length=options.window_length,
      ),
      replicates=options.replicates,
      operator_error=options.operator_error,
      agreement=options.agreement,
      local_sequences=options.local_sequences,
      dtype=options.dtype,
    ),
  )


def run(options: argparse.Namespace) -> int:
  """Makes tables of builds, of discovery studies or of both; 1 if a cell failed."""
  from mxjax.cli import reproduce_studies

  return reproduce_studies.run(options)


def run_builds(options: argparse.Namespace) -> int:
  """Makes the tables of builds; returns 1 if a cell failed."""
  from mxjax.cli import output
  from mxjax.evaluation import results
  from mxjax.evaluation.tables import page, reproduction, settings

  _check(options)
  request = requested(options)
  out = pathlib.Path(options.out) if options.out else None
  if out and not options.results:
    settings.check_folder(out)
  failures = {}
  if options.results:
    found = results.read(options.results)
    made = reproduction.tables_of(request, found)
  else:
    planned, seconds = reproduction.planned(request, out)
    if options.plan:
      if options.json:
        print(json.dumps({**planned._asdict(), "seconds": seconds}))
      else:
        output.print_table(planned)
      return 0
    assert out
    failures = _make(options, request, out, planned)
    made, found = reproduction.tables_made(request, out, failures)
  if out:
    for path in page.write(out, made, found):
      print(path, file=sys.stderr)
  if options.json:
    messages = {str(build): message for build, message in failures.items()}
    print(json.dumps({"tables": [t._asdict() for t in made], "failures": messages}))
  else:
    print("\n".join(table.markdown() for table in made), end="")
  for build, message in failures.items():
    print(f"mxjax reproduce: failed, {build}: {message}", file=sys.stderr)
  return int(bool(failures))


def _make(
  options: argparse.Namespace, request: Any, out: pathlib.Path, planned: Any
) -> Any:
  """Does the jobs, after a sentence on each model; returns what failed, by build.

  Raises:
    KeyboardInterrupt: It was stopped; the message says how to go on.
  """
  from mxjax.cli import output, stopping, watching
  from mxjax.evaluation.tables import reproduction
  from mxjax.run.progress import Stopped

  tell = output.teller(options.log)
  for row in planned.rows:
    parts = zip(planned.head[1:], row[1:], strict=True)
    tell(f"{row[0]}: {'; '.join(f'{head}: {cell}' for head, cell in parts)}")
  try:
    return reproduction.make(
      request,
      out,
      keeps_store=options.store,
      command=options.arguments,
      watch=watching.Terminal(options.log, request.jobs, out),
    )
  except (KeyboardInterrupt, Stopped) as error:
    # `reproduce` goes on without that option.
    again = stopping.resume_command(options.arguments).removesuffix(" --resume")
    raise KeyboardInterrupt(
      f"stopped; finished jobs are in {out}; go on with: {again}"
    ) from error
