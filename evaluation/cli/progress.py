"""Progress of long runs as bars or JSON events, and a clean stop on Ctrl-C."""

import contextlib
import functools
import json
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from rich.progress import Progress as Display

from mxjax.evaluation import subjects
from mxjax.evaluation.cli import console
from mxjax.evaluation.report import numbers
from mxjax.run import progress
from mxjax.run.progress import TUNING

LEFT = "{task.fields[left]}"
Begin = Callable[[str], progress.OnProgress]


def emit(event: str, **values: Any) -> None:
  """Prints one event as a JSON line on stderr."""
  line = {"event": event, "time": round(time.time(), 3), **values}
  print(json.dumps(line), file=sys.stderr, flush=True)


class Clock:
  """Estimates the remaining time of work that reports its completed fraction."""

  def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
    self._now = now
    self._start: tuple[float, float] | None = None

  def update(self, fraction: float) -> tuple[float, float | None]:
    """Returns elapsed seconds, and remaining seconds once they can be estimated."""
    # It starts at the first report: work of an earlier process took no time here.
    self._start = self._start or (self._now(), fraction)
    begun, first = self._start
    spent = self._now() - begun
    if fraction <= first:
      return spent, None
    return spent, spent * (1 - fraction) / (fraction - first)


@contextlib.contextmanager
def progress(form: str) -> Iterator[Begin]:
  """Yields a function that starts a display: `bars`, events (`json`) or `none`."""
  if form == "bars":
    with console.bars("{task.fields[method]}", "{task.description}", LEFT) as shown:
      yield functools.partial(_begin_bar, shown)
  else:
    yield _begin_events if form == "json" else lambda method: lambda now: None


def _begin_bar(shown: Display, method: str) -> progress.OnProgress:
  task = shown.add_task("starting", total=1.0, method=method, left="")
  clock = Clock()
  first: int | None = None

  def update(now: progress.Progress) -> None:
    nonlocal first
    first = now.layer if first is None else first
    text = now.stage
    if not text.startswith(subjects.EVALUATING):
      # Later layers have the shapes of the first, whose programs are compiled.
      compiling = ", compiling" if now.layer == first else ""
      text = f"layer {now.layer + 1}/{now.layers}: {text}{compiling}"
    _, left = clock.update(now.fraction)
    told = f"{numbers.about(left)} left" if left else ""
    shown.update(task, completed=now.fraction, description=text, left=told)

  return update


def _begin_events(method: str) -> progress.OnProgress:
  clock = Clock()

  def update(now: progress.Progress) -> None:
    spent, left = clock.update(now.fraction)
    emit(
      "progress",
      method=method,
      layer=now.layer,
      layers=now.layers,
      stage=now.stage,
      fraction=round(now.fraction, 6),
      seconds=round(spent, 3),
      seconds_left=None if left is None else round(left, 3),
    )

  return update


class Stopper:
  """Stops a run after its current layer, or at once between layers or on a repeat."""

  def __init__(self, tell: Callable[[str], None]) -> None:
    self._tell, self._asked, self._in_layer = tell, False, False

  def follow(self, on_progress: progress.OnProgress) -> progress.OnProgress:
    """Wraps the callback so that the stopper learns when a layer begins."""

    def update(now: progress.Progress) -> None:
      # A perplexity is measured again in less time than waiting for it would take, and
      # so is a step of tuning, after which nobody asks whether to stop.
      self._in_layer = not now.stage.startswith((subjects.EVALUATING, TUNING))
      on_progress(now)

    return update

  def __call__(self) -> bool:
    """Tells the pipeline, which asks once a layer is on disk, whether to stop."""
    self._in_layer = False
    return self._asked

  def ask(self, number: int, frame: FrameType | None) -> None:
    """Handles a signal by requesting a stop."""
    del frame
    if self._asked or not self._in_layer:
      raise KeyboardInterrupt
    self._asked = True
    name = signal.Signals(number).name
    self._tell(
      f"{name}: stopping when this layer is finished and on disk; once more stops "
      "now, and this layer is done again on --resume"
    )


def teller(form: str) -> Callable[[str], None]:
  """Returns a function that prints sentences on stderr, as events for form `json`.

  For form `none` it prints nothing.
  """
  if form == "none":
    return lambda text: None
  if form == "json":
    return lambda text: emit("message", text=text)
  return lambda text: console.STDERR.print(
    console.printable(text), markup=False, highlight=False, soft_wrap=True
  )


@contextlib.contextmanager
def stopper(tell: Callable[[str], None]) -> Iterator[Stopper]:
  """Routes Ctrl-C and SIGTERM to a `Stopper` inside the `with` block."""
  result = Stopper(tell)
  # Only the main thread gets signals; elsewhere their handlers stay unchanged.
  is_main = threading.current_thread() is threading.main_thread()
  numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
  before = {number: signal.signal(number, result.ask) for number in numbers}
  try:
    yield result
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def resume_command(arguments: Sequence[str]) -> str:
  """Returns the command line that continues `mxjax *arguments`."""
  words = [word for word in arguments if word != "--resume"]
  return shlex.join(["mxjax", *words, "--resume"])
