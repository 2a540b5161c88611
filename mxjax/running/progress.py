"""Progress reports of a run, and the exception that ends a stopped run."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mxjax.devices import execution
from mxjax.methods.program import Program
from mxjax.running.run_record import StageClock


class Progress(NamedTuple):
  """Position of a run: current layer, number of layers, current stage or linear.

  `fraction` is the finished share of the whole run.
  """

  layer: int
  layers: int
  stage: str
  fraction: float


OnProgress = Callable[[Progress], None]


BEFORE_TUNING = 0.5
"""Share of a run before the tuning, if the program tunes."""
DIFFERENTIATING = 0.1
"""Share of a run in which the float model is differentiated, where a program asks."""
OUTPUT_GRADIENTS = "output gradients"
"""The stage of differentiating the float model."""
TUNING = "scale distillation"
"""How the stages of tuning begin, each of which leaves its step on disk."""


def share_of_layers(program: Program) -> tuple[float, float]:
  """Returns where in a run the layers begin and where they end, from 0 to 1."""
  first = DIFFERENTIATING if program.weighting == "fisher" else 0.0
  return first, BEFORE_TUNING if program.tune else 1.0


def announce_gradients(
  on_progress: OnProgress | None, layers: int
) -> Callable[[int, int], None]:
  """Returns what tells the caller the steps of differentiating the float model."""

  def announce(step: int, steps: int) -> None:
    if on_progress:
      label = f"{OUTPUT_GRADIENTS} {step}/{steps}"
      on_progress(Progress(0, layers, label, DIFFERENTIATING * step / steps))

  return announce


def announce_tuning(
  on_progress: OnProgress | None, layers: int
) -> Callable[[int, int, float | None], None]:
  """Returns what tells the caller the steps of tuning and their divergence."""

  def announce(step: int, steps: int, divergence: float | None) -> None:
    if on_progress:
      label = f"{TUNING} {step}/{steps}"
      if divergence is not None:
        label += f", KL {divergence:.4f}"
      fraction = BEFORE_TUNING + (1 - BEFORE_TUNING) * step / steps
      on_progress(Progress(layers - 1, layers, label, fraction))

  return announce


class Stopped(Exception):
  """Raised when a run stops on request, after `layer` of `layers` are finished."""

  def __init__(self, layer: int, layers: int) -> None:
    super().__init__(f"stopped after layer {layer} of {layers}")
    self.layer, self.layers = layer, layers


@dataclasses.dataclass
class LayerStages:
  """Announces and times the stages of one layer, trimming memory before each.

  `place` is the layer's index and the number of layers, `steps` its number of stages,
  `largest` the bytes of its largest array, `share` that of `share_of_layers`.
  """

  clock: StageClock
  on_progress: OnProgress | None
  place: tuple[int, int]
  steps: int
  largest: int
  share: tuple[float, float] = (0.0, 1.0)

  def announce(self, label: str, step: int = 1) -> None:
    """Reports the current work within a stage to the caller."""
    if self.on_progress:
      index, layers = self.place
      first, last = self.share
      fraction = first + (last - first) * (index + step / self.steps) / layers
      self.on_progress(Progress(index, layers, label, fraction))

  @contextlib.contextmanager
  def stage(self, label: str, step: int) -> Iterator[None]:
    """Announces and times a stage, whose work is the `with` block."""
    self.announce(label, step)
    execution.trim_malloc(self.largest)
    with self.clock.stage(label):
      yield
