"""A clean stop on Ctrl-C or SIGTERM: after the layer in work, and how to go on."""

import contextlib
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from mxjax.evaluation.subjects import EVALUATING
from mxjax.run.progress import OnProgress, Progress, is_in_steps


class Stopper:
  """Stops a run after its current layer, or at once between layers or on a repeat."""

  def __init__(self, tell: Callable[[str], None]) -> None:
    self._tell, self._asked, self._in_layer = tell, False, False

  def follow(self, on_progress: OnProgress) -> OnProgress:
    """Wraps the callback so that the stopper learns when a layer begins."""

    def update(now: Progress) -> None:
      # A perplexity is measured again in less time than waiting for it would take, and
      # so is a step of learning or tuning; an interrupt writes the steps that
      # wait to be written.
      at_once = now.stage.startswith(EVALUATING) or is_in_steps(now.stage)
      self._in_layer = not at_once
      on_progress(now)

    return update

  def __call__(self) -> bool:
    """Tells the pipeline, which asks once a layer is on disk, whether to stop."""
    # The layer is on disk; a stage of the next one sets it again.
    self._in_layer = False
    return self._asked

  def ask(self, number: int, frame: FrameType | None) -> None:
    """Handles a signal by requesting a stop."""
    del frame
    # A second signal means now; and between layers nothing is lost.
    if self._asked or not self._in_layer:
      raise KeyboardInterrupt
    self._asked = True
    name = signal.Signals(number).name
    self._tell(
      f"{name}: stopping when this layer is finished and on disk; once more stops "
      "now, and this layer is done again on --resume"
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


def resume_command(words: Sequence[str]) -> str:
  """Returns the command line that continues `mxjax *words`."""
  kept = [word for word in words if word != "--resume"]
  return shlex.join(["mxjax", *kept, "--resume"])
