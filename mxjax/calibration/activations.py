"""Hidden states and taps of the calibration set, one decoder layer at a time.

An `Activations` object follows one trajectory: the float model, the layers quantized so
far, or the state that a recovery fit is measured on. With a store, a layer runs only if
a hook needs activations that no stored statistic covers, or if the next layer's inputs
are not saved yet.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration, Params, targets
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.calibration.store import CalibrationStore
from mxjax.calibration.streams import Chunks
from mxjax.devices import execution
from mxjax.devices.placement import ONE_DEVICE, Placement
from mxjax.devices.totals import Step, Totals
from mxjax.numerics.contract import Contract


class Activations:
  """One trajectory of the calibration set through the decoder layers.

  The hidden states in `placement` enter layer `index` next.
  """

  def __init__(
    self,
    calib: Calibration,
    hidden: Chunks | None,
    *,
    chunk: int,
    placement: Placement = ONE_DEVICE,
    index: int = 0,
    store: CalibrationStore | None = None,
    staged: str = "compute",
  ) -> None:
    """Starts before layer `index`, processing `chunk` sequences in a device call.

    `hidden` enters the layer, or is None if the store has it; its buffers are donated
    when the layer runs. `store` shares hidden states and reductions of a float model;
    it does not work on a mesh. `staged` is the dtype of captured taps; see
    `streams.capture`.
    """
    self.calib, self.placement, self.index = calib, placement, index
    self._hidden, self._chunk, self._store = hidden, chunk, store
    self._staged = staged
    self._layer: Params | None = None
    self._wanted: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
    self._taps: list[dict[str, jax.Array]] | None = None
    self._cotangents: Chunks | None = None
    self._gradients: list[dict[str, jax.Array]] = []
    self._leaving: Chunks | None = None

  @classmethod
  def embed(
    cls,
    params: Params,
    calib: Calibration,
    *,
    chunk: int,
    placement: Placement = ONE_DEVICE,
    **options: Any,
  ) -> "Activations":
    """Embeds the tokens and starts before the first layer; `options` as there."""
    hidden = streams.embed(calib.model, params, calib.tokens, chunk, placement)
    return cls(calib, hidden, chunk=chunk, placement=placement, **options)

  @property
  def hidden(self) -> Chunks:
    """Hidden states entering layer `index`, chunks of `[sequences, T, d]`."""
    if self._hidden is None:
      assert self._store is not None
      self._hidden = self._store.hidden(self.index, self._chunk)
    return self._hidden

  def to_host(self) -> Sequence[jax.Array | np.ndarray]:
    """Returns the hidden states entering layer `index`, for one process to write."""
    if self.placement.mesh is None:
      return self.hidden
    # No process holds a whole chunk, so every process fetches it.
    return [np.asarray(self.placement.to_primary(chunk)) for chunk in self.hidden]

  def copy(self) -> "Activations":
    """Copies the hidden states into new buffers."""
    twin = copy.copy(self)
    twin._hidden = [jax.tree.map(jnp.copy, chunk) for chunk in self.hidden]
    return twin

  def observe(
    self,
    layer: Params,
    contract: Contract,
    plain: tuple[str, ...] = (),
    cotangents: Chunks | None = None,
  ) -> None:
    """Registers a float layer whose taps are captured; without a store, runs it now.

    `contract` names the target linears, whose inputs are captured; `plain` names other
    taps, captured without reshaping. With `cotangents`, the gradients at the layer's
    output for the first tokens of each sequence, those at the outputs of its target
    linears are captured too.
    """
    taps = self.calib.model.projection_taps
    blocked = sorted({taps[path] for path in targets(self.calib.model, contract)})
    self._layer, self._wanted, self._taps = layer, (tuple(blocked), plain), None
    self._cotangents, self._gradients = cotangents, []
    self._targets = tuple(
      (block, name, layer[block][name]["weight"].shape[0])
      for block, name in targets(self.calib.model, contract)
    )
    if self._store is None:
      self._run()

  def _run(self) -> list[dict[str, jax.Array]]:
    if self._taps is not None:
      return self._taps
    assert self._layer is not None
    model, placement = self.calib.model, self.placement
    layer = placement.shard_rows(self._layer)
    # Hooks run with 64-bit types enabled; the model does not.
    with jax.enable_x64(False):
      if self._cotangents is not None:
        self._gradients = [
          streams.linear_gradients(model, layer, *pair, self._targets, placement)
          for pair in zip(self.hidden, self._cotangents, strict=True)
        ]
      capture = functools.partial(streams.capture, model, layer)
      outputs = [
        execution.block_on_cpu(capture(chunk, *self._wanted, placement, self._staged))
        for chunk in self.hidden
      ]
      # `capture` donated the buffers.
      self._hidden = None
      self._leaving = [output for output, _ in outputs]
      streams.check_finite(self._leaving, model.layer_name(self.index))
      self._taps = [taps for _, taps in outputs]
      if self._staged != "compute":
        streams.check_staged(self._taps, model.layer_name(self.index))
    if self._store is not None:
      self._store.put_hidden(self.index + 1, self._leaving)
    return self._taps

  @property
  def taps(self) -> list[dict[str, jax.Array]]:
    """Taps of the observed layer, one dict for each chunk."""
    return self._run()

  def inputs(self, contract: Contract) -> dict[str, LinearInputs]:
    """Returns the inputs of the observed layer's target linears, by tap."""
    assert self._layer is not None
    sequences = self.calib.count
    views: dict[str, LinearInputs] = {}
    for block, name in targets(self.calib.model, contract):
      tap = self.calib.model.projection_taps[block, name]
      width = self._layer[block][name]["weight"].shape[-1]
      store = self._store
      # Reading the shape would run the layer, which a store may make unnecessary.
      length = self.calib.tokens.shape[1] if store else self._run()[0][tap].shape[-1]
      views[tap] = LinearInputs(
        lambda tap=tap: [chunk[tap] for chunk in self._run()],
        contract.rules,
        extent=(sequences, width // contract.block_size, length),
        cache=store.reductions(self.index, tap) if store else None,
        placement=self.placement,
      )
    return views

  def gradients(self) -> list[dict[str, jax.Array]]:
    """Returns gradients at the outputs of the observed layer's targets, by name.

    One dict for each chunk; empty if `observe` got no cotangents.
    """
    self._run()
    return self._gradients

  def release_inputs(self) -> None:
    """Frees the inputs of the observed layer's linears but keeps its plain taps."""
    self._gradients = []
    if self._taps is not None:
      plain = self._wanted[1]
      self._taps = [{name: chunk[name] for name in plain} for chunk in self._taps]

  def leave(self) -> None:
    """Moves past the observed layer."""
    if self._store is not None and not self._store.has_hidden(self.index + 1):
      self._run()
    self._hidden, self._leaving = self._leaving, None
    self._layer = self._taps = None
    self.index += 1

  def advance(self, layer: Params) -> None:
    """Runs a layer without capturing taps and moves past it."""
    self._hidden = streams.advance(self.calib.model, layer, self.hidden, self.placement)
    self.index += 1

  def advance_with_totals(
    self,
    step: Step,
    totals: Any,
    layers: Any,
    taps: Sequence[dict[str, jax.Array]],
    constants: Any,
    static: tuple[Any, ...],
  ) -> Any:
    """Moves through a layer and returns a sum over its sequences, starting at `totals`.

    The `totals.Step` gets (hidden `[T, d]`, `taps`), `layers` and `constants`, and
    outputs the hidden states leaving the layer. `taps` belong to another trajectory,
    one dict of `[sequences, ...]` for each chunk.
    """
    running, params = Totals(totals, self.placement), self.placement.shard_rows(layers)
    constants = self.placement.replicate(constants)
    self._hidden = [
      running.add(step, other, constants, static=static, params=params, consumed=chunk)
      for chunk, other in zip(self.hidden, taps, strict=True)
    ]
    self.index += 1
    return running.value()
