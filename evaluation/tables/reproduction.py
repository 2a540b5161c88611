"""The paper's tables: what they need, what that would take, and how they are made."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax import models
from mxjax.audit import plan
from mxjax.evaluation import provenance, results
from mxjax.evaluation.report.tables import Table
from mxjax.evaluation.results import Result
from mxjax.evaluation.tables import (
  cells,
  jobs,
  paper,
  planning,
  rendering,
  runner,
)
from mxjax.evaluation.tables.declared import MEASURES, TABLES, Declared
from mxjax.evaluation.tables.jobs import BUILD, Build, Job
from mxjax.evaluation.tables.settings import Settings, keep_to


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """Tables of the paper to make, and what of them.

  Attributes:
    tables: Keys of `TABLES`.
    models: Folders or hub ids, or the name of the embedded model.
    seeds: Calibration draws instead of the paper's.
    without: Tasks, measures and labels of rows to leave out.
    instead: Methods by the labels of rows that are made by another method.
    settings: What all cells are made with.
  """

  tables: Sequence[str]
  models: Sequence[str] = ()
  seeds: Sequence[int] | None = None
  without: Sequence[str] = ()
  instead: Mapping[str, str] = dataclasses.field(default_factory=dict)
  settings: Settings = Settings()

  @property
  def declared(self) -> dict[str, Declared]:
    """The tables by name, as they are selected; none without a column."""
    found = {
      name: cells.selected(TABLES[name], self.without, self.instead)
      for name in self.tables
    }
    extra = self.settings.columns
    is_kept = lambda table: table.columns or (extra and not table.is_by_model)
    return {name: table for name, table in found.items() if is_kept(table)}

  @property
  def jobs(self) -> list[Job]:
    """All jobs of the tables, in order."""
    return jobs.jobs(
      self.declared.values(),
      self.models,
      draws=self.seeds,
      extra=self.settings.columns,
    )

  @property
  def builds(self) -> list[Build]:
    """All builds of the tables, float models too, in order."""
    return list(dict.fromkeys(job.build for job in self.jobs))

  @property
  def timed(self) -> frozenset[Build]:
    """The builds whose time is in a table."""
    with_times = [t for t in self.declared.values() if "build_minutes" in t.columns]
    found = jobs.jobs(with_times, self.models, draws=self.seeds)
    return frozenset(job.build for job in found)

  def reduced(self, name: str) -> list[str]:
    """Says in words what a table has less of, or otherwise, than the paper's."""
    whole, found = TABLES[name], []
    used = cells.seeds(whole, self.seeds)
    theirs = {row.model for row in paper.printed(whole)} - {*rendering.SUMMARIES}
    if len(self.models) < len(theirs):
      found.append(f"{len(self.models)} of {len(theirs)} models")
    if len(used) < len(whole.draws):
      found.append(f"{len(used)} of {len(whole.draws)} calibration draws")
    chosen = cells.selected(whole, self.without, self.instead)
    needs = cells.needs(chosen, self.settings.columns)
    found += self.settings.reduced(needs, self.models)
    absent = (cells.needs(whole) - needs) | whole.rows.keys()
    # What is left out is so of all tables; a title says what this one would have had.
    if left_out := [each for each in self.without if each in absent]:
      found.append(f"without {', '.join(left_out)}")
    found += [
      f"{label} as {method}"
      for label, method in self.instead.items()
      if label in whole.rows and label not in self.without
    ]
    return found


def planned(request: Request, out: pathlib.Path | None) -> tuple[Table, float | None]:
  """Plans the jobs that are not done; reads configs alone.

  Returns a table with a row a model, and the expected seconds, if anything tells.
  """
  todo = [job for job in request.jobs if not (out and job.is_done(out))]
  given = request.settings
  plans = {
    model: plan.plan(
      models.load_config(provenance.source(model), dtype=given.dtype),
      sequences=given.sample.sequences,
      length=given.sample.length,
    )
    for model in request.models
  }
  return planning.plan_table(todo, plans, given, request.timed)


def make(
  request: Request,
  out: pathlib.Path,
  *,
  keeps_store: bool = True,
  command: Sequence[str] = (),
  watch: jobs.Watch | None = None,
) -> dict[Build, str]:
  """Does the jobs that are not done; returns what failed, by build.

  Builds share hidden states and Hessians on disk with `keeps_store`; `command` are the
  words that asked for it.

  Raises:
    ValueError: The folder was made with other settings, or two calibration draws have
      the same tokens.
    FileExistsError: The folder has something else in it.
  """
  keep_to(out, request.settings.written)
  watch = watch or jobs.Watch()
  work = jobs.Reproduction(
    out=out,
    settings=request.settings,
    builds=request.builds,
    timed=request.timed,
    keeps_store=keeps_store,
    command=command,
    watch=watch,
  )
  failures: dict[Build, str] = {}

  def failed(job: Job, why: str) -> None:
    message = f"{job.what}: {why}"
    watch.failure(job, message)
    failures[job.build] = "; ".join(filter(None, (failures.get(job.build), message)))

  runner.run(work, request.jobs, on_job=watch.job, on_failure=failed)
  return failures


def tables_made(
  request: Request, out: pathlib.Path, failures: Mapping[Build, str]
) -> tuple[list[Table], list[Result]]:
  """Builds the tables from the folder of a reproduction, with the results in it."""
  done = [job for job in request.jobs if job.is_done(out)]
  places = [str(job.place(out)) for job in done if job.what not in (BUILD, *MEASURES)]
  found = results.read(places) if places else []
  key = lambda build: (build.name, build.method, build.seed)
  facts = {key(build): jobs.measured(build, out) for build in request.builds}
  messages = {key(build): f"{build}: {message}" for build, message in failures.items()}
  reduced = {name: request.reduced(name) for name in request.declared}
  return _tables(request, found, reduced, facts, messages), found


def tables_of(request: Request, found: Sequence[Result]) -> list[Table]:
  """Builds the tables from result files alone.

  Raises:
    ValueError: A method and its float model were evaluated on different tokens.
  """
  reduced = {}
  for name, declared in request.declared.items():
    needs = cells.needs(declared, request.settings.columns)
    parts = [
      f"{task}: first {n} of {of}"
      for result in found
      for task, (n, of) in result.partial.items()
      if task in needs
    ]
    reduced[name] = list(dict.fromkeys(parts))
  return _tables(request, found, reduced, {}, {})


def _tables(
  request: Request,
  found: Sequence[Result],
  reduced: Mapping[str, Sequence[str]],
  facts: Mapping[Any, Mapping[str, Any]],
  failures: Mapping[Any, str],
) -> list[Table]:
  # It refuses results that are not comparable.
  results.references(found)
  made: list[Table] = []
  for name, declared in request.declared.items():
    by_row = cells.table_cells(declared, found, facts, failures, request.seeds)
    extra = request.settings.columns
    made += rendering.build(declared, by_row, extra=extra, reduced=reduced[name])
  return made
