"""The calibration set on its way through the layers: what enters, what linears read.

The float model has one trajectory. Each recovery fit has another, because it is
measured on the model with all earlier fits installed and no later ones
(Eq. conditional-stage); what it finds for a layer depends only on the layers up to that
one, so all trajectories share one pass over the layers.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mxjax.calibration import fisher, streams
from mxjax.calibration.calibration import Params
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.calibration.output_gradients import OutputGradients
from mxjax.calibration.store import CalibrationStore
from mxjax.calibration.streams import Chunks
from mxjax.devices import execution
from mxjax.devices import mesh as meshes
from mxjax.methods.program import Program
from mxjax.run.folder import RunFolder
from mxjax.run.progress import OUTPUT_GRADIENTS, Report
from mxjax.run.setup import Setup


class Captured:
  """What a float layer shows on the calibration set.

  With a store the layer runs only if a hook needs activations that no stored statistic
  covers, or if the inputs of the next layer are not stored yet; otherwise at once.

  Attributes:
    views: The inputs of the target linears by tap; linears on one tensor share a view.
  """

  def __init__(
    self,
    setup: Setup,
    trajectories: "Trajectories",
    float_layer: Params,
    *,
    for_linears: bool = True,
  ) -> None:
    """Captures the layer that the trajectories enter; what enters it is donated.

    Without `for_linears` there are no gradients and no views, as in a replay.
    """
    self._setup, self._trajectories = setup, trajectories
    self._for_linears = for_linears
    self._layer, self._index = float_layer, trajectories.index
    self._name = setup.layers[self._index]
    taps = setup.model.projection_taps
    # Sorted, because they are static arguments of a compiled function: the order of a
    # set differs from process to process, and another order is another program.
    self._read = tuple(sorted({taps[path] for path in setup.targets}))
    plain = {name for fit in setup.program.recover for name in fit.float_taps}
    self._plain = tuple(sorted(plain))
    self._taps: list[dict[str, jax.Array]] | None = None
    self._gradients: list[dict[str, jax.Array]] = []
    self._leaving: Chunks | None = None
    if trajectories.store is None:
      self._run()
    self.views = self._shared_views() if for_linears else {}

  def _run(self) -> list[dict[str, jax.Array]]:
    if self._taps is not None:
      return self._taps
    setup, trajectories = self._setup, self._trajectories
    model, placement = setup.model, setup.placement
    layer, hidden = placement.shard_rows(self._layer), trajectories.entering()
    # Hooks run with 64-bit types enabled; the model does not.
    with jax.enable_x64(False):
      if trajectories.gradients is not None and self._for_linears:
        # Before `capture`, which takes the buffers of `hidden`.
        rows = tuple(
          (sublayer, name, self._layer[sublayer][name]["weight"].shape[0])
          for sublayer, name in setup.targets
        )
        leaving = trajectories.gradients.leaving(self._index)
        self._gradients = [
          streams.linear_gradients(model, layer, states, part, rows, placement)
          for states, part in zip(hidden, leaving, strict=True)
        ]
      # `streams.capture` does not wait by itself, so that each chunk waits here: on a
      # CPU one computation is in flight at a time.
      capture = functools.partial(streams.capture, model, layer)
      outputs = [
        execution.block_on_cpu(capture(chunk, self._read, self._plain, placement))
        for chunk in hidden
      ]
      self._leaving = [output for output, _ in outputs]
      streams.check_finite(self._leaving, self._name)
      self._taps = [taps for _, taps in outputs]
    if trajectories.store is not None:
      trajectories.store.put_hidden(self._index + 1, self._leaving)
    return self._taps

  @property
  def taps(self) -> list[dict[str, jax.Array]]:
    """What recovery fits take from the float model, one dict for each chunk."""
    return self._run()

  def leaving(self) -> Chunks | None:
    """Returns the hidden states leaving the layer; None if only the store has them."""
    store = self._trajectories.store
    if store is not None and not store.has_hidden(self._index + 1):
      self._run()
    return self._leaving

  def release_inputs(self) -> None:
    """Frees what linears read, and their gradients, but keeps what fits take."""
    # Views hold what linears read, and through their cache the Hessians.
    self._gradients, self.views = [], {}
    if self._taps is not None:
      self._taps = [{name: part[name] for name in self._plain} for part in self._taps]

  def inputs(self, sublayer: str, name: str, group: Any) -> LinearInputs:
    """Returns what the hooks of one linear see; `group` is that of its tap.

    Raises:
      ValueError: All gradients of the linear are zero, if tokens are weighted by them.
    """
    setup = self._setup
    view = self.views[setup.model.projection_taps[sublayer, name]]
    learned = setup.learned.get(f"{self._name}/{sublayer}/{name}")
    if setup.program.weighting == "uniform":
      return view.for_linear(name, learned=learned, group=group)
    self._run()
    gradients = [chunk[name] for chunk in self._gradients]
    # Each linear has weights of its own, so that none of its moments is shared.
    return fisher.weighted(
      view.for_linear(name, learned=learned, group=group, gradients=gradients)
    )

  def _shared_views(self) -> dict[str, LinearInputs]:
    """Returns the inputs of the layer's linears by tap."""
    setup, store = self._setup, self._trajectories.store
    views: dict[str, LinearInputs] = {}
    for sublayer, name in setup.targets:
      tap = setup.model.projection_taps[sublayer, name]
      width = self._layer[sublayer][name]["weight"].shape[-1]
      # Reading the shape would run the layer, which a store may make unnecessary.
      length = setup.calib.tokens.shape[1] if store else self._run()[0][tap].shape[-1]
      views[tap] = LinearInputs(
        # Bound now: the loop's variable is another tap when this is called.
        lambda tap=tap: [chunk[tap] for chunk in self._run()],
        setup.contract.rules,
        extent=(setup.calib.count, width // setup.contract.block_size, length),
        cache=store.reductions(self._index, tap) if store else None,
        placement=setup.placement,
      )
    return views


def fit_names(program: Program) -> list[str]:
  """Returns the names of the trajectories of the recovery fits, in order."""
  return [f"recovery{number}-{fit.name}" for number, fit in enumerate(program.recover)]


class Trajectories:
  """Hidden states entering the next layer, of every model that a program measures.

  Attributes:
    index: The layer that they enter.
    fits: The states that each recovery fit is measured on, in order.
    gradients: Output gradients of every layer, if the program needs them.
    store: Statistics of the float model shared with other runs, or None.
  """

  def __init__(
    self,
    setup: Setup,
    index: int,
    entering: Chunks | None,
    fits: list[Chunks],
    *,
    gradients: OutputGradients | None = None,
    store: CalibrationStore | None = None,
  ) -> None:
    """Starts before layer `index`; the store has what enters the float one if None."""
    self._setup, self._entering = setup, entering
    self.index, self.fits = index, fits
    self.gradients, self.store = gradients, store

  @classmethod
  def begin(
    cls, setup: Setup, folder: RunFolder | None, report: Report
  ) -> "Trajectories":
    """Starts before the first layer, or where hidden states of a killed run were saved.

    Layers finished behind these are replayed by the caller. If the program needs output
    gradients, the float model is differentiated, once for all layers.
    """
    params, calib, placement = setup.params, setup.calib, setup.placement
    store = None
    if setup.store is not None:
      store = CalibrationStore(setup.store, params, calib, setup.weights_digest)
      store.open()
    gradients = None
    if setup.program.weighting == "fisher":
      # What is read back from a file lies on one device, so that on a mesh gradients
      # stay in memory, spread as they are.
      on_disk = (store or folder) if placement.mesh is None else None
      with report.clock.stage(OUTPUT_GRADIENTS):
        gradients = OutputGradients(on_disk.path / "gradients" if on_disk else None)
        gradients.compute(
          params,
          calib,
          chunk=setup.chunk,
          placement=placement,
          announce=report.differentiating,
        )
    names = ["float", *fit_names(setup.program)]
    index = folder.saved_index if folder else 0
    if folder and index:
      saved = folder.read_streams(setup.chunk, placement.put_sequences)

      def joined(name: str) -> Chunks:
        if name in saved:
          return list(saved[name])
        # Of a Flax module: a stream for each array of what enters a layer.
        numbers = range(len(saved))
        parts = [saved[f"{name}.{i}"] for i in numbers if f"{name}.{i}" in saved]
        chunks: Any = [list(chunk) for chunk in zip(*parts, strict=True)]
        return chunks

      entering, *fits = map(joined, names)
    else:
      entering, *fits = [
        streams.embed(setup.model, params, calib.tokens, setup.chunk, placement)
        for _ in names
      ]
    begun = cls(setup, index, entering, fits, gradients=gradients, store=store)
    # They are computed for all layers, and no trajectory leaves those before `index`.
    for finished in range(index):
      begun._release_gradients(finished)
    return begun

  def entering(self) -> Chunks:
    """Hands out what enters the float layer, whose buffers its run donates."""
    hidden, self._entering = self._entering, None
    if hidden is None:
      assert self.store is not None
      return self.store.hidden(self.index, self._setup.chunk)
    return hidden

  def leave(self, captured: Captured) -> None:
    """Moves the float trajectory past a layer and frees that layer's gradients."""
    self._release_gradients(self.index)
    # Nothing reads what leaves the last layer, and with a store asking for it would run
    # that layer.
    if self.index + 1 < self._setup.model.num_layers:
      self._entering = captured.leaving()
    self.index += 1

  def _release_gradients(self, index: int) -> None:
    """Frees the gradients at the output of a layer; a store keeps them for others."""
    if self.gradients and self.store is None:
      self.gradients.release(index)

  def _named(self) -> dict[str, Chunks]:
    if self._entering is None:
      # Read from the store and kept here: the next layer's run takes it again.
      self._entering = self.entering()
    names = fit_names(self._setup.program)
    return {"float": self._entering, **dict(zip(names, self.fits, strict=True))}

  def to_host(self) -> Mapping[str, Sequence[np.ndarray]]:
    """Copies all hidden states entering the next layer, by their name on disk.

    They are copies, because the next layer's run takes the buffers.
    """
    placement, found = self._setup.placement, {}

    def copied(array: Any) -> np.ndarray:
      # On a mesh no process holds a whole chunk, so every process fetches it.
      whole = placement.to_primary(array)
      return np.array(meshes.alias(whole) if isinstance(whole, jax.Array) else whole)

    for name, chunks in self._named().items():
      if isinstance(chunks[0], list):  # Of a Flax module: a stream for each array.
        for number, parts in enumerate(zip(*chunks, strict=True)):
          found[f"{name}.{number}"] = [copied(part) for part in parts]
      else:
        found[name] = [copied(chunk) for chunk in chunks]
    return found
