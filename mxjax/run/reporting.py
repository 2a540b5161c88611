"""Progress in words: a line a layer, and one after every half minute of silence.

`quantize` logs these lines unless its caller follows the progress; the command line
prints them where no terminal shows bars.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import jax

from mxjax.run.progress import SANITY, OnProgress, Progress, is_in_steps

LOGGER = logging.getLogger("mxjax")
"""Of everything that mxjax says in Python."""
SILENCE = 30.0
"""Seconds after which a `Heartbeat` says what goes on."""
COMPILING = "/jax/core/compile/backend_compile_duration"
"""JAX's event of compiling: a scalar when it begins, a duration at its end."""
BRIEF = 1.0
"""Seconds of compiling after which a `Heartbeat` names the program."""
_COUNTED = re.compile(r"(.+?) \d+/\d+")
Estimate = tuple[float, float | None]
"""Elapsed seconds, and remaining ones if they are known."""


def span(seconds: float) -> str:
  """Writes seconds for people: `45 s`, `3.5 min`, `2.1 h`."""
  if seconds < 120:
    return f"{seconds:.0f} s"
  return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Clock:
  """Estimates the remaining time of work that reports its completed fraction.

  Work compiles its programs in its first layer, or its first step, which may take
  longer than all that follow. So an estimate counts from the second one on, and anew
  from the second layer on where layers follow steps.
  """

  def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
    self._now = now
    self._begun: float | None = None
    self._first: int | str | None = None
    self._start: tuple[float, float] | None = None

  def follow(self, now: Progress) -> Estimate:
    """Notes where a run is; returns what `update` does."""
    part = now.stage if is_in_steps(now.stage) else now.layer
    return self.update(now.fraction, part)

  def update(self, fraction: float, part: int | str | None = None) -> Estimate:
    """Notes what is finished, and in which `part` of the work if it has such.

    Returns:
      Elapsed seconds, and remaining seconds once they can be estimated: never in the
      first part that is reported.
    """
    now = self._now()
    if self._begun is None:
      self._begun, self._first = now, part
    if isinstance(self._first, str) and isinstance(part, int):
      self._first, self._start = part, None
    spent = now - self._begun
    if part is not None and part == self._first:
      return spent, None
    # Nor does it count what an earlier process did, in no time of this one.
    self._start = self._start or (now, fraction)
    began, first = self._start
    if fraction <= first:
      return spent, None
    return spent, (now - began) * (1 - fraction) / (fraction - first)


class Heartbeat:
  """Says what goes on after every `interval` seconds in which nothing was said.

  A daemon thread speaks inside the `with` block, also while XLA compiles a program,
  which it names. All methods may be called from any thread.
  """

  def __init__(
    self, tell: Callable[[str], None], stage: str, interval: float | None = None
  ) -> None:
    """Takes what prints a sentence, and what is done at first; waits for `SILENCE`."""
    self._tell, self._interval = tell, SILENCE if interval is None else interval
    self._stage, self._since = stage, time.monotonic()
    self._end: float | None = None
    self._spoke = self._since
    # Programs in the compiler now, by thread: name, and when it began.
    self._compiling: dict[int, tuple[str, float]] = {}
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._beat, daemon=True)

  def at(self, stage: str, left: float | None = None) -> None:
    """Notes which stage has begun, and how many seconds are left if that is known."""
    self._end = None if left is None else time.monotonic() + left
    if stage != self._stage:
      self._stage, self._since = stage, time.monotonic()

  def spoke(self) -> None:
    """Notes that something was said, so that it is silent for another interval."""
    self._spoke = time.monotonic()

  def line(self) -> str:
    """Returns the sentence for now."""
    now = time.monotonic()
    text = f"still at {self._stage}, for {span(now - self._since)}"
    # A copy: other threads begin and end programs meanwhile.
    for name, began in list(self._compiling.values()):
      # Programs that have just begun come and go.
      if now - began >= BRIEF:
        text += f"; compiling {name}, for {span(now - began)}"
    # Read once: another thread may change it.
    end = self._end
    if end is not None and end > now:
      text += f"; about {span(end - now)} left"
    return text

  def _beat(self) -> None:
    while True:
      left = self._spoke + self._interval - time.monotonic()
      if self._ended.wait(max(left, 0.0)):
        return
      # Someone else may have spoken while this thread slept.
      if time.monotonic() - self._spoke >= self._interval:
        self.spoke()
        self._tell(self.line())

  def _begun(self, event: str, value: Any, **facts: Any) -> None:
    if event == COMPILING:
      name = facts.get("fun_name", "a program")
      self._compiling[threading.get_ident()] = (name, time.monotonic())

  def _compiled(self, event: str, duration_secs: float, **facts: Any) -> None:
    del duration_secs, facts
    if event == COMPILING:
      self._compiling.pop(threading.get_ident(), None)

  def __enter__(self) -> Self:
    jax.monitoring.register_scalar_listener(self._begun)
    jax.monitoring.register_event_duration_secs_listener(self._compiled)
    self._thread.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self._ended.set()
    # Joined, so that no line comes after the block has ended.
    self._thread.join()
    jax.monitoring.unregister_scalar_listener(self._begun)
    jax.monitoring.unregister_event_duration_listener(self._compiled)


def place(now: Progress) -> str:
  """Says where a run is: in a stage of a layer, or in one beside the layers."""
  is_beside = now.stage == SANITY or _COUNTED.match(now.stage)
  layer = "" if is_beside else f"layer {now.layer + 1}/{now.layers}: "
  return f"{layer}{now.stage}"


def lines(
  method: str, tell: Callable[[str], None], heartbeat: Heartbeat | None = None
) -> OnProgress:
  """Returns what tells a line for each layer, and for each stage outside the layers.

  `heartbeat` learns of every stage, so that it can name the one that takes long.
  """
  clock, last, first = Clock(), None, None

  def update(now: Progress) -> None:
    nonlocal last, first
    first = now.layer if first is None else first
    counted = _COUNTED.match(now.stage)
    text, where, about = now.stage, counted[1] if counted else now.stage, ""
    if not counted and now.stage != SANITY:
      text, where = f"layer {now.layer + 1}/{now.layers}", now.layer
      about = ", compiling as the first" if now.layer == first else ""
    spent, left = clock.follow(now)
    if heartbeat:
      heartbeat.at(f"{method}, {place(now)}", left)
    # One line for each layer, and for each counted stage whatever its count.
    if where == last:
      return
    last = where
    about = f", about {span(left)} left" if left else about
    tell(f"{method}, {text} ({now.fraction:.0%} after {span(spent)}{about})")

  return update


@contextlib.contextmanager
def logged(method: str) -> Iterator[OnProgress]:
  """Yields what logs the progress of a method, at INFO of the logger `mxjax`.

  A program that has configured logging gets the lines where it sends all others, at the
  level that it has set. Without any handler they go to stderr while the block lasts.
  """
  handler = None
  level = LOGGER.level
  if not LOGGER.hasHandlers():
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    LOGGER.addHandler(handler)
    if level == logging.NOTSET:
      LOGGER.setLevel(logging.INFO)
  try:
    with Heartbeat(LOGGER.info, f"{method}, reading the weights") as heartbeat:

      def tell(text: str) -> None:
        heartbeat.spoke()
        LOGGER.info(text)

      yield lines(method, tell, heartbeat)
  finally:
    if handler:
      LOGGER.removeHandler(handler)
      LOGGER.setLevel(level)
