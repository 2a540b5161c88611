"""Processor time of an evaluator call, by what it was spent on.

Processor time is that of this process, all its threads together: seconds of one core. A
busy machine stretches the time of a clock on the wall, and this hardly.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from mxjax.compilation import COMPILED, LOWERED

COMPILING, REST = "compiling", "the rest"
"""Names of the two parts of a call that are no hook."""
TRACED = "/jax/core/compile/jaxpr_trace_duration"
"""JAX's event for a traced program, which is lowered and compiled next, if it is."""
RECORD = 4096
"""Bytes of what `Meter.tell` writes and `answers.unfinished` reads."""
Seconds = Mapping[str, float]
"""Processor seconds by part: the name of a hook, `COMPILING` or `REST`."""


class _Measurement(threading.local):
  """What a thread measures: without walls, threads run calls beside each other."""

  def __init__(self) -> None:
    self.spent: dict[str, float] = {}
    self.open: list[str] = []
    self.since = 0.0
    self.traced: float | None = None


class Meter:
  """Charges processor time to the part that is being worked on.

  A part within another one interrupts it, and so does compiling: each second is charged
  once. Each thread has a measurement of its own, by the clock of the process.
  """

  def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
    """Starts to listen to what JAX compiles; `clock` returns processor seconds."""
    self._clock = clock
    self._now = _Measurement()
    self._told_to: int | None = None
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def tell(self, file: int) -> None:
    """Writes into an open file, from now on, what each second was spent on.

    A call that uses up its time is ended within a part and cannot answer. This is what
    remains of it; see `answers.unfinished`.
    """
    self._told_to = file

  def _tell(self) -> None:
    if self._told_to is not None:
      now = self._now.open[-1] if self._now.open else ""
      told = json.dumps([now, self._now.spent]).encode()[:RECORD]
      os.pwrite(self._told_to, told.ljust(RECORD), 0)

  def _charge(self, part: str, until: float) -> None:
    # Never below 0: what is compiled within a part may have been traced before it
    # began.
    before = self._now.spent.get(part, 0.0)
    self._now.spent[part] = before + max(until - self._now.since, 0.0)
    self._now.since = max(until, self._now.since)
    self._tell()

  def _listen(self, event: str, duration: float, **about: Any) -> None:
    del duration, about
    # What a thread compiles while it measures nothing is charged to no part.
    if not self._now.open:
      return
    now = self._clock()
    if event == TRACED or (event == LOWERED and self._now.traced is None):
      self._now.traced = now
    elif event == COMPILED:
      # What came before the program was traced belongs to the part that called it.
      self._charge(
        self._now.open[-1], now if self._now.traced is None else self._now.traced
      )
      self._charge(COMPILING, now)
      self._now.traced = None

  @contextlib.contextmanager
  def measured(self) -> Iterator[dict[str, float]]:
    """Measures what runs inside; yields the seconds by part, complete at the end."""
    self._now.spent, self._now.traced = {}, None
    self._now.since = self._clock()
    spent = self._now.spent
    try:
      with self._within(REST):
        yield spent
    finally:
      self._now.open.clear()

  @contextlib.contextmanager
  def on(self, part: str) -> Iterator[None]:
    """Charges what runs inside to a part, if this thread is being measured."""
    if not part or not self._now.open:
      yield
      return
    self._charge(self._now.open[-1], self._clock())
    with self._within(part):
      yield

  @contextlib.contextmanager
  def _within(self, part: str) -> Iterator[None]:
    self._now.open.append(part)
    self._tell()
    try:
      yield
    finally:
      self._charge(self._now.open.pop(), self._clock())


METER = Meter()
"""The meter of this process, which runs one call at a time."""


def spent_on(function: Any) -> contextlib.AbstractContextManager[None]:
  """Charges what runs inside to a hook of `ArtifactTable`, which knows its name."""
  return METER.on(getattr(function, "hook", ""))


def checked(seconds: Any) -> dict[str, float]:
  """Returns processor seconds that a worker sent.

  Raises:
    ValueError: They are not finite numbers from 0, by name.
  """
  is_number = lambda n: isinstance(n, int | float) and not isinstance(n, bool)
  if not isinstance(seconds, dict) or not all(
    isinstance(name, str) and is_number(n) and math.isfinite(n) and n >= 0
    for name, n in seconds.items()
  ):
    raise ValueError(f"processor seconds that are none: {seconds!r:.100}")
  return {name: float(n) for name, n in seconds.items()}
