"""The trajectories of a run, all measured in one pass over the layers.

Each recovery fit is measured on the model with all earlier fits installed and no later
ones (Eq. conditional-stage). What it finds for a layer depends only on the layers up to
that one, so each fit has its own trajectory and all of them share one pass.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mxjax.calibration.activations import Activations
from mxjax.calibration.calibration import Calibration, Params
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.calibration.output_gradients import OutputGradients
from mxjax.calibration.store import CalibrationStore
from mxjax.devices.placement import Placement
from mxjax.methods.program import Program
from mxjax.numerics.contract import Contract
from mxjax.running.progress import OUTPUT_GRADIENTS
from mxjax.running.run_record import StageClock
from mxjax.storage.run_folder import RunFolder


def _fit_names(program: Program) -> list[str]:
  return [f"recovery{place}-{fit.name}" for place, fit in enumerate(program.recover)]


def _joined(saved: Mapping[str, Sequence[Any]], name: str) -> list[Any]:
  """Returns chunks of several arrays, each array read from a stream of its own."""
  parts = [saved[f"{name}.{i}"] for i in range(len(saved)) if f"{name}.{i}" in saved]
  return [list(chunk) for chunk in zip(*parts, strict=True)]


@dataclasses.dataclass
class Trajectories:
  """Hidden states entering the next layer, for every model that a program measures.

  `fits` are the states that each recovery fit is measured on, in order. `upstream` is
  the layers quantized so far, if hooks see their outputs; else None. `output_gradients`
  are those of every layer, if the program needs them, and `keep_gradients` leaves them
  for other runs.
  """

  program: Program
  float_model: Activations
  fits: list[Activations]
  upstream: Activations | None
  output_gradients: OutputGradients | None = None
  keep_gradients: bool = False

  @classmethod
  def begin(
    cls,
    program: Program,
    params: Params,
    calib: Calibration,
    folder: RunFolder | None,
    *,
    chunk: int,
    placement: Placement,
    store: CalibrationStore | None,
    clock: StageClock,
    announce: Callable[[int, int], None] = lambda step, steps: None,
  ) -> "Trajectories":
    """Starts all trajectories before the first layer, or where a killed run stopped.

    If the program needs output gradients, the float model is differentiated, which is
    timed by `clock` and told to `announce` as `OutputGradients.compute` does.
    """
    options: dict[str, Any] = {"chunk": chunk, "placement": placement}
    gradients = None
    if program.weighting == "fisher":
      on_disk = (store or folder) if placement.mesh is None else None
      with clock.stage(OUTPUT_GRADIENTS):
        gradients = OutputGradients(on_disk.path / "gradients" if on_disk else None)
        gradients.compute(params, calib, **options, announce=announce)
    options["staged"] = program.staged
    if folder and folder.finished:
      saved = folder.read_streams(chunk, placement.put_sequences)
      options["index"] = len(folder.finished)
      entering = lambda name, **more: Activations(
        *(calib, saved[name] if name in saved else _joined(saved, name)),
        **options,
        **more,
      )
    else:
      entering = lambda _, **more: Activations.embed(params, calib, **options, **more)
    trajectories = cls(
      program,
      entering("float", store=store),
      [entering(name) for name in _fit_names(program)],
      entering("upstream") if program.upstream == "quantized" else None,
      gradients,
      keep_gradients=store is not None,
    )
    for finished in range(trajectories.float_model.index):
      trajectories.release_gradients(finished)
    return trajectories

  def release_gradients(self, index: int) -> None:
    """Frees the gradients at the output of a finished layer, unless they are kept."""
    if self.output_gradients and not self.keep_gradients:
      self.output_gradients.release(index)

  def leave_layer(self, *, is_last: bool) -> None:
    """Moves the float trajectory past its layer and frees that layer's gradients."""
    self.release_gradients(self.float_model.index)
    if not is_last:
      self.float_model.leave()

  def nbytes(self) -> int:
    """Bytes of all hidden states entering the next layer."""
    followed = [self.float_model, *self.fits]
    followed += [] if self.upstream is None else [self.upstream]
    return sum(leaf.nbytes for one in followed for leaf in jax.tree.leaves(one.hidden))

  def to_host(self) -> Mapping[str, Sequence[jax.Array | np.ndarray]]:
    """Returns all hidden states entering the next layer, by their name on disk."""
    named = {"float": self.float_model}
    named |= dict(zip(_fit_names(self.program), self.fits, strict=True))
    if self.upstream is not None:
      named["upstream"] = self.upstream
    streams = {}
    for name, activations in named.items():
      chunks = activations.to_host()
      if isinstance(chunks[0], list):  # A Flax module's: one stream for each array.
        parts = zip(*chunks, strict=True)
        streams |= {f"{name}.{place}": part for place, part in enumerate(parts)}
      else:
        streams[name] = chunks
    return streams

  def observe(self, layer: Params, contract: Contract) -> dict[str, LinearInputs]:
    """Observes a float layer and returns the inputs that hooks see, by tap."""
    plain = {name for fit in self.program.recover for name in fit.float_taps}
    gradients = self.output_gradients
    self.float_model.observe(
      layer,
      contract,
      tuple(sorted(plain)),
      gradients and gradients.leaving(self.float_model.index),
    )
    if self.upstream is None:
      return self.float_model.inputs(contract)
    # Run the float layer on the outputs of the quantized layers.
    seen = self.upstream.copy()
    seen.observe(layer, contract)
    return seen.inputs(contract)
