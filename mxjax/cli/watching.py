"""Shows the jobs of tables, their progress and the time left on a terminal."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence

from mxjax.cli import output, stopping
from mxjax.evaluation.builds import Begin
from mxjax.evaluation.evaluating import OnCount
from mxjax.evaluation.report import numbers
from mxjax.evaluation.tables.jobs import Job, Watch
from mxjax.run.reporting import Clock


class Terminal(Watch):
  """Follows `jobs` of the folder `out` on stderr, in the form of `output.teller`."""

  def __init__(self, form: str, jobs: Sequence[Job], out: pathlib.Path) -> None:
    self._form, self._jobs = form, jobs
    self._left = [job for job in jobs if not job.is_done(out)]
    self._clock = Clock()
    self._tell = output.teller(form)

  def tell(self, text: str) -> None:
    """Prints a sentence."""
    self._tell(text)

  def job(self, job: Job) -> None:
    """Says which job begins, and when all will be done."""
    # Of the jobs that were left at the start: finished ones take no time and would make
    # the estimate too short.
    remaining = self._clock.update(self._left.index(job) / len(self._left))[1]
    about = f"; about {numbers.about(remaining)} left" if remaining else ""
    self._tell(f"[{self._jobs.index(job) + 1}/{len(self._jobs)}] {job}{about}")

  def failure(self, job: Job, why: str) -> None:
    """Says at once what failed: the tables may come hours later."""
    del job
    self._tell(f"failed: {why}")

  @contextlib.contextmanager
  def building(self) -> Iterator[tuple[Begin, Callable[[], bool] | None]]:
    """Shows a build, which Ctrl-C stops after its layer."""
    with output.progress(self._form) as begin, stopping.stopper(self._tell) as stop:
      yield lambda name: stop.follow(begin(name)), stop

  @contextlib.contextmanager
  def counting(self) -> Iterator[OnCount]:
    """Shows a bar a task."""
    with output.task_bars() as bars:
      yield bars
