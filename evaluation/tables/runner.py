"""The runner of all tables: each job once, in order, going on after kill or failure."""

import abc
import pathlib
import shutil
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from jax.errors import JaxRuntimeError

FAILING = (
  ValueError,
  TypeError,
  OSError,
  NotImplementedError,
  FloatingPointError,
  MemoryError,
  JaxRuntimeError,
)
"""Errors that cost their own job; others are bugs and end the run."""
J = TypeVar("J", bound=Hashable)


class Work(abc.ABC, Generic[J]):
  """Says of jobs of one kind when they are done, and does them.

  Attributes:
    store: Folder of statistics of the float model that jobs of one draw share, which is
      removed when the next draw begins; None if they share none.
  """

  store: pathlib.Path | None = None

  @abc.abstractmethod
  def is_done(self, job: J) -> bool:
    """Tells whether the job was done, in this call or an earlier one.

    Raises:
      ValueError: It was, with other settings.
    """

  @abc.abstractmethod
  def perform(self, job: J) -> None:
    """Does a job, so that it is done."""

  def check(self, job: J) -> None:
    """Checks a job that is done; an error ends the run."""

  def draw(self, job: J) -> Hashable:
    """Returns what jobs have in common that can share statistics."""
    del job

  def needs(self, job: J) -> J | None:
    """Returns the job without which this one cannot be done, if there is one."""
    del job


def run(
  work: Work[J],
  jobs: Sequence[J],
  *,
  on_job: Callable[[J], Any] | None = None,
  on_failure: Callable[[J, str], Any] | None = None,
) -> dict[J, str]:
  """Does the jobs that are not done; returns why jobs failed, those that did.

  A failed job costs those that need it, which are not tried, and no others. The same
  call tries it again, with the statistics that it could share, if they are still there.
  `on_job` is called with each job to do, `on_failure` with one that failed and why.

  Raises:
    ValueError: A job was done with other settings, or what it made is refused.
  """
  failures: dict[J, str] = {}
  at_work: Hashable = None
  for job in jobs:
    if work.needs(job) in failures:
      continue
    if not work.is_done(job):
      # What a killed process left of the draw in work is used again.
      if at_work not in (None, work.draw(job)):
        _remove_store(work)
      at_work = work.draw(job)
      if on_job:
        on_job(job)
      try:
        work.perform(job)
      except FAILING as error:
        failures[job] = " ".join(str(error).split()) or type(error).__name__
        if on_failure:
          on_failure(job, failures[job])
        continue
    work.check(job)
  # A failed job that needs no other is tried again by the next call, with these
  # statistics.
  if all(work.needs(job) for job in failures):
    _remove_store(work)
  return failures


def _remove_store(work: Work[Any]) -> None:
  if work.store:
    shutil.rmtree(work.store, ignore_errors=True)
