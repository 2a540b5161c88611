"""Cells of tables and the jobs that fill them; each job ends in a file of its own."""

import pathlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mxjax import methods
from mxjax.evaluation.cli.arguments import DEFAULT_MODEL, short_name
from mxjax.evaluation.reproduce.declared import Declared
from mxjax.evaluation.reproduce.quantities import QUANTITIES, Measured
from mxjax.evaluation.reproduce.tables import Key
from mxjax.evaluation.results import FLOAT, Result
from mxjax.evaluation.tasks.tasks import SEVEN
from mxjax.intake.reading import read_json
from mxjax.methods import reused
from mxjax.storage import sealed

BUILD = "build"
MEASURES = ("local", "cost")


def source(model: str) -> str | None:
  """Returns what loads a model of `--models`: None for the embedded one."""
  return None if model == DEFAULT_MODEL else model


class Build(NamedTuple):
  """A model, a method and a calibration seed; the float model has no seed."""

  model: str
  method: str
  seed: int | None

  def __str__(self) -> str:
    """Names it in progress and errors."""
    seed = "" if self.seed is None else f", seed {self.seed}"
    return f"{self.method} of {self.name}{seed}"

  @property
  def name(self) -> str:
    """The model's name in results."""
    return short_name(self.model)

  def folder(self, out: pathlib.Path) -> pathlib.Path:
    """Returns the folder of its jobs."""
    seed = "" if self.seed is None else f"-seed{self.seed}"
    return out / self.name / (re.sub(r"[^\w.+-]", "-", self.method) + seed)


class Job(NamedTuple):
  """One step of a build: `build`, a task, or one of `MEASURES`."""

  build: Build
  what: str

  def __str__(self) -> str:
    """Names it in progress and errors."""
    return f"{'quantize' if self.what == BUILD else self.what}: {self.build}"

  def place(self, out: pathlib.Path) -> pathlib.Path:
    """Returns its folder, or for a measure its file."""
    name = f"{self.what}.json" if self.what in MEASURES else self.what
    return self.build.folder(out) / name

  def is_done(self, out: pathlib.Path) -> bool:
    """Whether the file that it writes last is there."""
    place = self.place(out)
    if self.what == BUILD:
      return (place / sealed.OUTPUTS).is_file()
    return (place if self.what in MEASURES else place / "evaluation.json").is_file()

  def clear(self, out: pathlib.Path) -> None:
    """Removes what a killed process left of a job that cannot be resumed."""
    if self.what != BUILD and self.place(out).is_dir():
      shutil.rmtree(self.place(out))


def needs(declared: Declared, extra: Sequence[str] = ()) -> set[str]:
  """Returns the names of the jobs that a table's columns need."""
  named = (QUANTITIES[name].needs for name in (*declared.columns, *extra))
  return {need for each in named for need in each}


def selected(
  declared: Declared, left_out: Iterable[str], instead: Mapping[str, str]
) -> Declared:
  """Returns the table without rows of these labels and columns of these jobs.

  A table of seven tasks that keeps those of Fit-3 has that in the place of Fit-7.
  `instead` has methods by the labels of rows that are of another method.
  """
  absent = {*left_out}
  rows = {
    label: instead.get(label, row)
    for label, row in declared.rows.items()
    if label not in absent
  }
  is_left = lambda name: not {*QUANTITIES[name].needs} & absent
  kept = [name for name in declared.columns if is_left(name)]
  if "fit7" in declared.columns and not is_left("fit7") and is_left("fit3"):
    kept.append("fit3")
  return declared._replace(rows=rows, columns=tuple(kept))


def jobs(
  tables: Iterable[Declared],
  models: Iterable[str],
  *,
  draws: Sequence[int] | None,
  extra: Sequence[str] = (),
) -> list[Job]:
  """Lists every job of the tables once, in order: model, seed, method.

  `draws` replaces the paper's seeds, and `extra` are columns beside the declared ones.
  """
  wanted: dict[Job, None] = {}
  tables = list(tables)
  for model in models:
    for declared in tables:
      wants = needs(declared, extra)
      exact = wants & set(SEVEN)
      if FLOAT in declared.rows.values():
        exact |= wants & {"cost"}
      wanted |= {Job(Build(model, FLOAT, None), what): None for what in exact}
      for method in declared.rows.values():
        for seed in seeds(declared, draws) if method != FLOAT else ():
          build = Build(model, method, seed)
          wanted |= {Job(build, what): None for what in {BUILD} | wants}
  order = (BUILD, *SEVEN, *MEASURES)
  models = list(dict.fromkeys(job.build.model for job in wanted))
  first = list(dict.fromkeys(job.build.method for job in wanted))
  return sorted(
    wanted,
    key=lambda job: (
      models.index(job.build.model),
      -1 if job.build.seed is None else job.build.seed,
      first.index(job.build.method),
      order.index(job.what),
    ),
  )


def seeds(declared: Declared, draws: Sequence[int] | None) -> tuple[int, ...]:
  """Returns the calibration seeds of a table: `draws`, or the paper's."""
  return tuple(draws or declared.draws)


def linears_key(build: Build) -> str | None:
  """Returns what decides a build's linears; None if nothing may be shared."""
  if build.method == FLOAT:
    return None
  return reused.build_key(methods.get(build.method))


def shared_linears(
  build: Build, others: Iterable[Build], out: pathlib.Path
) -> pathlib.Path | None:
  """Returns the folder of a finished build that differs only in recovery."""
  key = linears_key(build)
  for other in others if key else ():
    is_same_draw = (other.model, other.seed) == (build.model, build.seed)
    if other != build and is_same_draw and linears_key(other) == key:
      if Job(other, BUILD).is_done(out):
        return Job(other, BUILD).place(out)
  return None


def measured(build: Build, out: pathlib.Path) -> dict[str, Any]:
  """Reads the row and the measures of a build, those that are there."""
  facts: dict[str, Any] = {}
  made = Job(build, BUILD)
  if build.method != FLOAT and made.is_done(out):
    mend = "remove its folder to build it again"
    (facts[BUILD],) = read_json(
      made.place(out) / "result.json", list[Any], "a row", mend=mend
    )
  for what in MEASURES:
    if Job(build, what).is_done(out):
      mend = "remove it to measure again"
      place = Job(build, what).place(out)
      facts[what] = read_json(place, dict[str, Any], "a measure", mend=mend)
  return facts


def table_cells(
  declared: Declared,
  found: Sequence[Result],
  facts: Mapping[tuple[str, str, int | None], Mapping[str, Any]],
  failures: Mapping[tuple[str, str, int | None], str],
  draws: Sequence[int] | None,
) -> dict[Key, Measured]:
  """Collects the cells of a table in the order of model, seed and row.

  `found` are results; `facts` and `failures` are by model, method and seed. A result
  without a seed, or of another one, stands in a table of a single draw.
  """
  used = seeds(declared, draws)
  by_key: dict[tuple[str, str, int | None], Result] = {}
  for result in sorted(found, key=lambda r: -1 if r.seed is None else r.seed):
    method = _label(declared, result.method)
    by_key.setdefault((result.model, method, result.seed), result)
    if not facts and len(used) == 1:
      by_key.setdefault((result.model, method, used[0]), result)
  models = dict.fromkeys([*(r.model for r in found), *(key[0] for key in facts)])
  rows = dict(declared.rows)
  if declared.takes_others:
    others = dict.fromkeys(_label(declared, r.method) for r in found)
    rows |= {name: name for name in others if name not in {*rows, FLOAT}}
  if len(used) > 1 and not draws:
    extra = {r.seed for r in found if r.seed is not None} - set(used)
    used = (*used, *sorted(extra)) if declared.takes_others else used
  cells: dict[Key, Measured] = {}
  for model in models:
    exact = by_key.get((model, FLOAT, None))
    for seed in used:
      for label, method in rows.items():
        own = None if method == FLOAT else seed
        result = by_key.get((model, label, own))
        key = model, method, own
        cells[model, label, own] = Measured(
          result.tasks if result else {},
          exact.tasks if exact else {},
          facts.get(key, {}),
          # Without the float model's results no damage can be told.
          failures.get(key) or failures.get((model, FLOAT, None), ""),
        )
  return cells


def _label(declared: Declared, method: str) -> str:
  """Returns the label of a method's row; a result may bear either name."""
  by_method = {name: label for label, name in declared.rows.items()}
  return by_method.get(method, method)
