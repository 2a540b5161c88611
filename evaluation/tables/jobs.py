"""The jobs that fill cells of the paper's tables; each ends in a file of its own."""

import contextlib
import dataclasses
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from mxjax import methods, models
from mxjax.errors import ValueRefusal
from mxjax.evaluation import builds, evaluating, provenance, subjects
from mxjax.evaluation.measures.cost import running_cost
from mxjax.evaluation.measures.local_errors import local_errors
from mxjax.evaluation.results import FLOAT
from mxjax.evaluation.tables import cells, runner
from mxjax.evaluation.tables.declared import MEASURES, Declared
from mxjax.evaluation.tables.settings import Settings
from mxjax.evaluation.tasks.tasks import SEVEN
from mxjax.intake.reading import read_json
from mxjax.methods import finished_linears
from mxjax.storage import atomic_io, digested_json

BUILD = "build"
STORE = "store"
"""Subfolder with statistics of the float model, kept while one draw is in work."""


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
    return provenance.short_name(self.model)

  def folder(self, out: pathlib.Path) -> pathlib.Path:
    """Returns the folder of its jobs."""
    seed = "" if self.seed is None else f"-seed{self.seed}"
    # Options in a method's name have signs that not every file system takes.
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
      return (place / digested_json.OUTPUTS).is_file()
    return (place if self.what in MEASURES else place / "evaluation.json").is_file()

  def clear(self, out: pathlib.Path) -> None:
    """Removes what a killed process left of a job that cannot be resumed."""
    if self.what != BUILD and self.place(out).is_dir():
      shutil.rmtree(self.place(out))


def jobs(
  tables: Iterable[Declared],
  of_models: Iterable[str],
  *,
  draws: Sequence[int] | None,
  extra: Sequence[str] = (),
) -> list[Job]:
  """Lists every job of the tables once, in order: model, seed, method.

  `draws` replaces the paper's seeds, and `extra` are columns beside the declared ones.
  """
  wanted: dict[Job, None] = {}
  tables = list(tables)
  for model in of_models:
    for declared in tables:
      wants = cells.needs(declared, extra)
      exact = wants & set(SEVEN)
      if FLOAT in declared.rows.values():
        exact |= wants & {"cost"}
      wanted |= {Job(Build(model, FLOAT, None), what): None for what in exact}
      for method in declared.rows.values():
        for seed in cells.seeds(declared, draws) if method != FLOAT else ():
          build = Build(model, method, seed)
          wanted |= {Job(build, what): None for what in {BUILD} | wants}
  # Jobs of one draw follow each other, because a store of statistics is that of one
  # draw. A build comes before what needs it.
  order = (BUILD, *SEVEN, *MEASURES)
  places = list(dict.fromkeys(job.build.model for job in wanted))
  first = list(dict.fromkeys(job.build.method for job in wanted))
  return sorted(
    wanted,
    key=lambda job: (
      places.index(job.build.model),
      -1 if job.build.seed is None else job.build.seed,
      first.index(job.build.method),
      order.index(job.what),
    ),
  )


def linears_key(build: Build) -> str | None:
  """Returns what decides a build's linears; None if nothing may be shared."""
  if build.method == FLOAT:
    return None
  return finished_linears.build_key(methods.get(build.method))


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


class Watch:
  """Follows the jobs of the paper's tables; this one is silent."""

  def tell(self, text: str) -> None:
    """Gets sentences on what happens."""

  def job(self, job: Job) -> None:
    """Gets a job that begins."""

  def failure(self, job: Job, why: str) -> None:
    """Gets a job that failed."""

  @contextlib.contextmanager
  def building(self) -> Iterator[tuple[builds.Begin, Callable[[], bool] | None]]:
    """Yields what begins to follow a method, and what asks a build to stop."""
    yield lambda name: lambda now: None, None

  @contextlib.contextmanager
  def counting(self) -> Iterator[evaluating.OnCount]:
    """Yields what is called with a task, how much of it is done, and all of it."""
    yield lambda name, done, total: None


@dataclasses.dataclass(kw_only=True)
class Reproduction(runner.Work[Job]):
  """The work of the paper's tables in one folder.

  Attributes:
    out: The folder.
    settings: What all cells are made with.
    builds: All builds of the run, some of which can share linears.
    timed: Builds whose time is in a table: they share nothing.
    keeps_store: Whether the others share hidden states and Hessians on disk.
    command: Words of the command that asked for it, for results.
    watch: What follows it.
  """

  out: pathlib.Path
  settings: Settings
  builds: Sequence[Build]
  timed: frozenset[Build] = frozenset()
  keeps_store: bool = True
  command: Sequence[str] = ()
  watch: Watch = dataclasses.field(default_factory=Watch)
  drawn: dict[Any, int | None] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    """Names the store in the folder."""
    self.store = self.out / STORE if self.keeps_store else None

  @override
  def is_done(self, job: Job) -> bool:
    return job.is_done(self.out)

  @override
  def draw(self, job: Job) -> Any:
    return job.build.model, job.build.seed

  @override
  def needs(self, job: Job) -> Job | None:
    """What measures a quantized model needs its build."""
    is_first = job.what == BUILD or job.build.method == FLOAT
    return None if is_first else Job(job.build, BUILD)

  @override
  def perform(self, job: Job) -> None:
    build, place = job.build, job.place(self.out)
    # A folder that has something in it would be refused as an output.
    job.clear(self.out)
    made = provenance.source(build.model)
    if build.method != FLOAT:
      made = str(Job(build, BUILD).place(self.out))
    if job.what == BUILD:
      self._build(build, place)
    elif job.what in MEASURES:
      place.parent.mkdir(parents=True, exist_ok=True)
      atomic_io.write_json(place, dict(self._measure(job, made)), indent=1)
    else:
      with self.watch.counting() as on_count:
        evaluating.evaluate_tasks(
          made,
          [job.what],
          self.settings.tasks,
          out=place,
          dtype=self.settings.dtype,
          command=self.command,
          on_count=on_count,
        )

  def _build(self, build: Build, place: pathlib.Path) -> None:
    shares = build not in self.timed
    linears = shared_linears(build, self.builds, self.out) if shares else None
    prepared = subjects.prepare(
      provenance.source(build.model),
      self.settings.sample_of(build.seed),
      self.settings.evaluation,
      dtype=self.settings.dtype,
    )
    with self.watch.building() as (begin, stop):
      builds.build(
        prepared,
        build.method,
        place,
        builds.BuildOptions(
          # A model that collapsed is a cell like any other: no gate refuses it.
          check=False,
          linears=linears,
          store=self.store if shares and not linears else None,
        ),
        resume=True,
        command=self.command,
        begin=begin,
        stop=stop,
        tell=self.watch.tell,
      )

  def _measure(self, job: Job, made: str | None) -> Mapping[str, Any]:
    """Does a job of `MEASURES` on the folder or name of a model."""
    settings, build = self.settings, job.build
    model, params, tokenizer = subjects.restore(made, dtype=settings.dtype)
    tokens = settings.unseen_tokens(build.seed, tokenizer)
    if job.what == "cost":
      return running_cost(model, params, tokens[0])
    exact = models.from_pretrained(provenance.source(build.model))[1]
    return local_errors(model, exact, params, tokens)

  def check(self, job: Job) -> None:
    """Rejects a build whose tokens are those of another seed of its model.

    Raises:
      ValueError: They are.
    """
    if job.what != BUILD:
      return
    build = job.build
    record = measured(build, self.out)[BUILD]["record"]
    tokens = build.model, record["calibration"]["fingerprint"]
    if self.drawn.setdefault(tokens, build.seed) != build.seed:
      raise ValueRefusal(
        "reproduce",
        expected=f"other calibration tokens of {build.name} for each seed",
        got=f"the same for seeds {self.drawn[tokens]} and {build.seed}",
        mend="give text, because an array of ids is one exact draw, or one of --seeds",
      )
