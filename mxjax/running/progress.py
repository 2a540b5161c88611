"""What a run tells its caller: where it is, and that it stopped."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mxjax.devices import execution
from mxjax.running.run_record import StageClock


class Progress(NamedTuple):
  """Where a run is.

  Attributes:
    layer: Index of the layer in work.
    layers: Layers in all.
    stage: What is being done.
    fraction: Share of the whole run that is done.
  """

  layer: int
  layers: int
  stage: str
  fraction: float


OnProgress = Callable[[Progress], None]


class Stopped(Exception):
  """A run that was asked to stop did, after a finished layer.

  Attributes:
    layer: How many layers are finished.
    layers: Layers in all.
  """

  layer: int
  layers: int

  def __init__(self, layer: int, layers: int) -> None:
    """Says where."""
    super().__init__(f"stopped after layer {layer} of {layers}")
    self.layer, self.layers = layer, layers


class LayerStages:
  """The stages of one layer: announced, timed, and begun with trimmed memory."""

  def __init__(
    self,
    clock: StageClock,
    on_progress: OnProgress | None,
    place: tuple[int, int],
    steps: int,
    largest: int,
  ) -> None:
    """Prepares; nothing is announced yet.

    Args:
      clock: Where the time of each stage is added.
      on_progress: The caller's callback, or None.
      place: Index of the layer, and layers in all.
      steps: Stages of the layer.
      largest: Bytes of its largest array.
    """
    self._clock, self._on_progress = clock, on_progress
    self._place, self._steps, self._largest = place, steps, largest

  def announce(self, label: str, step: int = 1) -> None:
    """Tells the caller what is being done within a stage."""
    if self._on_progress:
      index, layers = self._place
      fraction = (index + step / self._steps) / layers
      self._on_progress(Progress(index, layers, label, fraction))

  @contextlib.contextmanager
  def stage(self, label: str, step: int) -> Iterator[None]:
    """A stage: the `with` block is its work."""
    self.announce(label, step)
    execution.trim_malloc(self._largest)
    with self._clock.stage(label):
      yield
