"""From the options of `mxjax reproduce` to its tables."""

import argparse
import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxjax import models
from mxjax.audit import plan
from mxjax.evaluation import results
from mxjax.evaluation.cli import inputs, progress
from mxjax.evaluation.cli import settings as timing
from mxjax.evaluation.measures.cost import running_cost
from mxjax.evaluation.measures.local_errors import local_errors
from mxjax.evaluation.report import numbers
from mxjax.evaluation.report.tables import Table
from mxjax.evaluation.reproduce import cells, driver, planning, settings, tables
from mxjax.evaluation.reproduce.cells import BUILD, Build, Job
from mxjax.evaluation.reproduce.declared import TABLES, Declared
from mxjax.evaluation.results import Result


def _declared(options: argparse.Namespace) -> dict[str, Declared]:
  """Returns the tables by name as the options select; none without a column."""
  extra = settings.extra_columns(options)
  found = {
    name: cells.selected(TABLES[name], options.without, options.instead)
    for name in options.tables
  }
  is_kept = lambda table: table.columns or (extra and not table.is_by_model)
  return {name: table for name, table in found.items() if is_kept(table)}


def _jobs(options: argparse.Namespace) -> list[Job]:
  extra = settings.extra_columns(options)
  return cells.jobs(
    _declared(options).values(), options.models, draws=options.seeds, extra=extra
  )


def _timed(options: argparse.Namespace) -> frozenset[Build]:
  """Returns the builds whose time is in a table."""
  with_times = [
    each for each in _declared(options).values() if "build_minutes" in each.columns
  ]
  found = cells.jobs(with_times, options.models, draws=options.seeds)
  return frozenset(job.build for job in found)


def planned(options: argparse.Namespace) -> tuple[Table, float | None]:
  """Plans the jobs that are not done; reads configs alone."""
  out = pathlib.Path(options.out) if options.out else None
  todo = [job for job in _jobs(options) if not (out and job.is_done(out))]
  plans = {
    model: plan.plan(
      models.load_config(cells.source(model), dtype=options.dtype),
      sequences=options.sequences,
      length=options.length,
    )
    for model in options.models
  }
  sizes = planning.Sizes(
    *(options.items, options.windows, options.window_length),
    *(options.local_sequences, options.length),
  )
  rate = functools.cache(timing.products_a_second)
  seconds = lambda made, names, tokens: timing.expected_seconds(
    made, names, None, tokens, rate(made.dtype)
  )
  return planning.plan_table(todo, plans, sizes, seconds, _timed(options))


def _measure(options: argparse.Namespace, job: Job, source: str | None = None) -> Any:
  """Does a job of `cells.MEASURES` on the folder or name of a model."""
  model, params, tokenizer = inputs.restore(source, dtype=options.dtype)
  tokens = settings.unseen_tokens(options, job, tokenizer)
  if job.what == "cost":
    return running_cost(model, params, tokens[0])
  exact = models.from_pretrained(cells.source(job.build.model))[1]
  return local_errors(model, exact, params, tokens)


def make(
  options: argparse.Namespace, call: Callable[[list[str]], Any], left: Table
) -> Mapping[Build, str]:
  """Does the jobs, by `call` of other commands; returns what failed, by build.

  First it says `left`, the plan of what is to be done.

  Raises:
    ValueError: The folder was made with other settings.
    KeyboardInterrupt: It was stopped; the message says how to go on.
  """
  work = driver.Work(
    pathlib.Path(options.out),
    settings.quantize_words(options),
    settings.evaluate_words(options),
    call,
    functools.partial(_measure, options),
    options.store,
    _timed(options),
  )
  found = {"quantize": work.quantize, "evaluate": work.evaluate}
  found |= {"local_sequences": options.local_sequences}
  if options.dtype is None:
    found["default dtype"] = "bfloat16 of folders and hub ids"
  driver.check_settings(work.out, found)
  jobs, tell = _jobs(options), progress.teller(options.log)
  for row in left.rows:
    parts = zip(left.head[1:], row[1:], strict=True)
    tell(f"{row[0]}: {'; '.join(f'{head}: {cell}' for head, cell in parts)}")
  clock, count = progress.Clock(), itertools.count()
  todo = sum(not job.is_done(work.out) for job in jobs)

  def on_job(job: Job, number: int) -> None:
    remaining = clock.update(next(count) / max(1, todo))[1]
    about = f"; about {numbers.about(remaining)} left" if remaining else ""
    tell(f"[{number + 1}/{len(jobs)}] {job}{about}")

  try:
    return driver.run(work, jobs, on_job, lambda why: tell(f"failed: {why}"))
  except KeyboardInterrupt as error:
    again = progress.resume_command(options.arguments).removesuffix(" --resume")
    raise KeyboardInterrupt(
      f"stopped; finished jobs are in {work.out}; go on with: {again}"
    ) from error


def tables_made(
  options: argparse.Namespace, failures: Mapping[Build, str]
) -> tuple[list[Table], Sequence[Result]]:
  """Builds the tables from the folder of a reproduction, with the results in it."""
  out = pathlib.Path(options.out)
  jobs = _jobs(options)
  done = [job for job in jobs if job.is_done(out)]
  places = [
    str(job.place(out)) for job in done if job.what not in (BUILD, *cells.MEASURES)
  ]
  found = results.read(places) if places else []
  results.references(found)
  key = lambda build: (build.name, build.method, build.seed)
  builds = dict.fromkeys(job.build for job in jobs)
  facts = {key(build): cells.measured(build, out) for build in builds}
  told = {key(build): f"{build}: {message}" for build, message in failures.items()}
  return tables_of(options, found, facts, told), found


def tables_of(
  options: argparse.Namespace,
  found: Sequence[Result],
  facts: Mapping[Any, Mapping[str, Any]] | None = None,
  failures: Mapping[Any, str] | None = None,
) -> list[Table]:
  """Builds tables from results; `facts` and `failures` are those of builds."""
  made: list[Table] = []
  extra = settings.extra_columns(options)
  for name, declared in _declared(options).items():
    needs = cells.needs(declared, extra)
    by_row = cells.table_cells(
      declared, found, facts or {}, failures or {}, options.seeds
    )
    if facts is None:
      partial = {
        f"{task}: first {n} of {of}": None
        for r in found
        for task, (n, of) in r.partial.items()
        if task in needs
      }
      less = list(partial)
    else:
      less = settings.reduced(TABLES[name], needs, options)
    made += tables.build(declared, by_row, extra=extra, reduced=less)
  return made
