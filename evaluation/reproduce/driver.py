"""Runs the jobs of tables: once each, in order, going on after a kill or a failure."""

import json
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.errors import JaxRuntimeError

from mxjax.evaluation.reproduce import cells
from mxjax.evaluation.reproduce.cells import BUILD, MEASURES, Build, Job
from mxjax.evaluation.results import FLOAT
from mxjax.intake.reading import read_json
from mxjax.storage import atomic_io

SETTINGS = "settings.json"
STORE = "store"
"""Subfolder with statistics of the float model, kept while one draw is in work."""
FAILING = (
  *(ValueError, TypeError, OSError, NotImplementedError, FloatingPointError),
  *(MemoryError, JaxRuntimeError),
)
"""Errors that cost their own job; others are bugs and end the run."""


class Work(NamedTuple):
  """What a run is made with.

  Attributes:
    out: The folder of all jobs.
    quantize: Words of every `mxjax quantize`, such as its calibration.
    evaluate: Words of every `mxjax evaluate --tasks`.
    call: Runs a command of mxjax, given its words.
    measure: Does a job of `MEASURES`, given it and the folder or name of the model.
    keeps_store: Whether builds share hidden states and Hessians on disk.
    timed: Builds whose time is in a table: they share nothing.
  """

  out: pathlib.Path
  quantize: Sequence[str]
  evaluate: Sequence[str]
  call: Callable[[list[str]], Any]
  measure: Callable[..., Mapping[str, Any]]
  keeps_store: bool = True
  timed: frozenset[Build] = frozenset()

  def perform(self, job: Job, builds: Sequence[Build]) -> None:
    """Does one job; `builds` are all of the run."""
    build, place = job.build, job.place(self.out)
    job.clear(self.out)
    made = _source(build.model)
    if build.method != FLOAT:
      made = [str(Job(build, BUILD).place(self.out))]
    if job.what == BUILD:
      self.call(["quantize", *self._quantize(build, place, builds)])
    elif job.what in MEASURES:
      place.parent.mkdir(parents=True, exist_ok=True)
      atomic_io.write_json(place, dict(self.measure(job, *made)), indent=1)
    else:
      words = ["--tasks", job.what, "--out", str(place), *self.evaluate]
      self.call(["evaluate", *made, *words])

  def _quantize(
    self, build: Build, place: pathlib.Path, builds: Sequence[Build]
  ) -> list[str]:
    words = [*_source(build.model), "--method", build.method, "--seed", str(build.seed)]
    words += ["--out", str(place), "--resume", "--no-check", *self.quantize]
    if build in self.timed:
      return words
    linears = cells.shared_linears(build, builds, self.out)
    if linears:
      words += ["--linears", str(linears)]
    elif self.keeps_store:
      words += ["--store", str(self.out / STORE)]
    return words


def _source(model: str) -> list[str]:
  """Returns the word that names a model: none for the embedded one."""
  return [word] if (word := cells.source(model)) else []


def check_settings(out: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Writes the settings that cells depend on, or compares them with those there.

  Raises:
    ValueError: The folder was made with other settings.
    FileExistsError: The folder has something else in it.
  """
  path, given = out / SETTINGS, json.loads(json.dumps(settings))
  if not path.is_file():
    atomic_io.create_output(out)
    atomic_io.write_json(path, given, indent=1)
    return
  what, mend = "the settings of a reproduction", "name another --out"
  there = read_json(path, dict[str, Any], what, mend=mend)
  for name in {**there, **given}:
    if there.get(name) != given.get(name):
      raise ValueError(
        f"reproduce: {out} was made with {name} {_told(there.get(name))}, got "
        f"{_told(given.get(name))}; name another --out, or give the same settings."
      )


def _told(value: Any) -> str:
  return " ".join(value) if isinstance(value, list) else str(value)


def _check_draw(drawn: dict[Any, int | None], build: Build, out: pathlib.Path) -> None:
  """Rejects a finished build whose tokens are those of another seed of its model."""
  record = cells.measured(build, out)[BUILD]["record"]
  tokens = build.model, record["calibration"]["fingerprint"]
  if drawn.setdefault(tokens, build.seed) != build.seed:
    raise ValueError(
      f"reproduce: seeds {drawn[tokens]} and {build.seed} drew the same calibration "
      f"tokens of {build.name}; an array of ids is one exact draw, so give text, or "
      "one of --seeds."
    )


def run(
  work: Work,
  jobs: Sequence[Job],
  on_job: Callable[[Job, int], None],
  on_failure: Callable[[str], None],
) -> dict[Build, str]:
  """Does the jobs that are not done; returns what failed, by build.

  A failed build costs its own other jobs, which are not tried, and a failed task or
  measure only itself. `on_job` is called with each job to do and its place in `jobs`,
  `on_failure` with why the last one failed.

  Raises:
    ValueError: Two calibration draws have the same tokens.
  """
  failures: dict[Build, str] = {}
  unbuilt: set[Build] = set()
  builds = list(dict.fromkeys(job.build for job in jobs))
  drawn: dict[Any, int | None] = {}
  last = None
  for number, job in enumerate(jobs):
    draw = job.build.model, job.build.seed
    # What a killed process left of the draw in work is used again.
    if last not in (None, draw):
      shutil.rmtree(work.out / STORE, ignore_errors=True)
    last = draw
    if job.build in unbuilt:
      continue
    try:
      if not job.is_done(work.out):
        on_job(job, number)
        work.perform(job, builds)
    except FAILING as error:
      told = f"{job.what}: {' '.join(str(error).split()) or type(error).__name__}"
      on_failure(told)
      failures[job.build] = "; ".join(filter(None, (failures.get(job.build), told)))
      if job.what == BUILD:
        unbuilt.add(job.build)
      continue
    if job.what == BUILD:
      _check_draw(drawn, job.build, work.out)
  shutil.rmtree(work.out / STORE, ignore_errors=True)
  return failures
