"""What a run tells its caller while it works, and how a stopped run ends."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mxjax.devices import execution
from mxjax.methods.program import Program
from mxjax.run.record import StageClock


class Progress(NamedTuple):
  """Position of a run: current layer, number of layers, current stage or linear.

  `fraction` is the finished share of the whole run, and `learned` the share that a
  program's own learning before the layers takes, as far as this process knows it.
  """

  layer: int
  layers: int
  stage: str
  fraction: float
  learned: float = 0.0


OnProgress = Callable[[Progress], None]


LEARNING_WORK = 8.0
"""The time in which a program learns on a sequence, over that in which all layers are
quantized on one: on a CPU 14 to 17 passes (`benchmarks/results/learning_work.json`)
over 2, which is what `mxjax.evaluation.estimates` counts for the layers."""
BEFORE_TUNING = 0.5
"""Share of a run before the tuning, if the program tunes."""
DIFFERENTIATING = 0.1
"""Share of a run in which the float model is differentiated, where a program asks."""
OUTPUT_GRADIENTS = "output gradients"
"""The stage of differentiating the float model."""
SANITY = "sanity gate"
"""The stage of comparing logits with the float model's, after the last layer."""
LEARNING = "learning"
"""How the stages of a program's own learning begin, a stage for each step."""
TUNING = "scale distillation"
"""How the stages of tuning begin, a stage for each step."""


_IN_STEPS = re.compile(rf"({LEARNING}|{TUNING}) \d+/\d+(,|$)")


def is_in_steps(stage: str) -> bool:
  """Whether a stage is a step of learning or tuning, beside the layers."""
  return _IN_STEPS.match(stage) is not None


class Stopped(Exception):
  """Raised when a run stops on request, after `layer` of `layers` are finished."""

  def __init__(self, layer: int, layers: int) -> None:
    super().__init__(f"stopped after layer {layer} of {layers}")
    self.layer, self.layers = layer, layers


@dataclasses.dataclass
class Report:
  """Times the stages of a run, and tells its caller of each one.

  A layer has two stages, calibration and quantization, and one for each recovery fit.
  The run calibrates on so many `sequences`.
  """

  program: Program
  layers: int
  clock: StageClock
  on_progress: OnProgress | None = None
  sequences: int = 1
  _layer: int = -1
  _step: int = 0
  _largest: int = 0
  _learned: float = 0.0

  def _tell(self, label: str, fraction: float, layer: int) -> None:
    if self.on_progress:
      # What a program learns of its own comes before all the rest.
      fraction = self._learned + (1 - self._learned) * fraction
      self.on_progress(Progress(layer, self.layers, label, fraction, self._learned))

  def begin_layer(self, index: int, largest: int) -> None:
    """Begins a layer, whose largest array has so many bytes."""
    # -1, because every stage counts it up, and so does the first.
    self._layer, self._step, self._largest = index, -1, largest

  @contextlib.contextmanager
  def stage(self, label: str) -> Iterator[None]:
    """Announces and times the next stage of the layer, the work of the `with` block.

    Freed memory is given back first, because a stage's arrays have other sizes than
    those of the one before.
    """
    self._step += 1
    self.linear(label)
    execution.trim_malloc(self._largest)
    with self.clock.stage(label):
      yield

  def replay(
    self, index: int, finished: int
  ) -> contextlib.AbstractContextManager[None]:
    """Announces and times that a finished layer is replayed after a kill.

    It is told as work of the first layer that is not finished.
    """
    label = f"replay of layer {index + 1}/{finished}"
    self._tell(label, self._share(finished), finished)
    return self.clock.stage("replay")

  def linear(self, label: str) -> None:
    """Tells of the work within a stage, such as the linear that is quantized."""
    # All stages count alike: their true shares depend on the method and the machine.
    done = self._layer + max(self._step, 0) / (2 + len(self.program.recover))
    self._tell(label, self._share(done), self._layer)

  def _share(self, layers: float) -> float:
    """Returns the share of the run that is finished with so many layers."""
    # The layers lie between the differentiation before them and the tuning behind them.
    first = DIFFERENTIATING if self.program.weighting == "fisher" else 0.0
    last = BEFORE_TUNING if self.program.tune else 1.0
    return first + (last - first) * layers / self.layers

  def differentiating(self, step: int, steps: int) -> None:
    """Tells how many passes of layers of the float model are differentiated."""
    label = f"{OUTPUT_GRADIENTS} {step}/{steps}"
    self._tell(label, DIFFERENTIATING * step / steps, 0)

  def checking(self) -> None:
    """Tells that the finished model is compared with the float model."""
    self._tell(SANITY, 1.0, self.layers - 1)

  def has_learned(self, sequences: int) -> None:
    """Notes on how many sequences in all steps a program learns before the layers."""
    work = LEARNING_WORK * sequences
    self._learned = work / (work + self.sequences)

  def learning(self, step: int, steps: int, loss: float | None) -> None:
    """Tells the finished steps that a program learns in, and the last one's loss."""
    label = f"{LEARNING} {step}/{steps}"
    if loss is not None:
      label += f", loss {loss:.4f}"
    if self.on_progress:
      share = self._learned
      self.on_progress(Progress(0, self.layers, label, share * step / steps, share))

  def tuning(self, step: int, steps: int, divergence: float | None) -> None:
    """Tells the finished steps of tuning, and the last one's divergence in nats."""
    label = f"{TUNING} {step}/{steps}"
    if divergence is not None:
      label += f", KL {divergence:.4f}"
    fraction = BEFORE_TUNING + (1 - BEFORE_TUNING) * step / steps
    self._tell(label, fraction, self.layers - 1)
