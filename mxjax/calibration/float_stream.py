"""The float model on the calibration set, one layer at a time, run where needed.

Without a store every layer runs as it is entered. With one, a layer runs when a hook
asks for activations that no stored reduction answers, or when nobody has yet written
what it passes on.
"""

from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration, Params
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.calibration.store import CalibrationStore
from mxjax.devices import execution
from mxjax.devices import mesh as meshes
from mxjax.numerics.contract import Contract


class FloatStream:
  """Hidden states of the float model and what its linears see."""

  def __init__(
    self,
    params: Params,
    calib: Calibration,
    *,
    chunk: int,
    blocked: tuple[str, ...],
    plain: tuple[str, ...] = (),
    store: CalibrationStore | None = None,
    mesh: Mesh | None = None,
  ) -> None:
    """Plans the pass; nothing runs yet.

    Args:
      params: Float params.
      calib: Model and tokens.
      chunk: Sequences in a device call.
      blocked: Taps captured feature-major, as inputs of linears.
      plain: Taps captured as they are.
      store: Shared hidden states and reductions, or None.
      mesh: The devices to share sequences out over, or None for one; not with a store.
    """
    self._params, self._calib, self._chunk = params, calib, chunk
    self._blocked, self._plain, self._store = blocked, plain, store
    self._mesh = mesh
    self._index = -1
    self._taps: list[dict[str, jax.Array]] | None = None
    self._next: streams.Stream | None = None

  def _start(self) -> streams.Stream:
    model, tokens = self._calib.model, self._calib.tokens
    return streams.start(model, self._params, tokens, self._chunk, self._mesh)

  def resume_from(self, index: int, entering: streams.Stream) -> None:
    """Takes the hidden states that enter layer `index`, which is entered next."""
    self._index, self._next = index - 1, entering

  @property
  def leaving(self) -> streams.Stream:
    """Hidden states entering the next layer; `leave` comes first."""
    if self._next is not None:
      return self._next
    assert self._store is not None
    return self._store.hidden(self._index + 1, self._chunk)

  def enter(self, index: int) -> None:
    """Moves to a layer; layers come in order."""
    self._entering, self._next, self._taps = self._next, None, None
    self._index = index
    if self._store is None:
      self._capture()

  def leave(self) -> None:
    """Makes sure that the next layer can be entered."""
    if self._store is not None and not self._store.has_hidden(self._index + 1):
      self._capture()

  def _hidden(self) -> streams.Stream:
    if self._index == 0:
      return self._start()
    if self._entering is not None:
      return self._entering
    assert self._store is not None
    return self._store.hidden(self._index, self._chunk)

  def _capture(self) -> list[dict[str, jax.Array]]:
    if self._taps is not None:
      return self._taps
    model = self._calib.model
    name = model.layer_name(self._index)
    layer = meshes.shard_rows(self._params[name], self._mesh)
    # Hooks run with 64-bit types on; the model does not.
    with jax.enable_x64(False):
      outputs = [
        execution.block_on_cpu(
          streams.capture(model, layer, hidden, self._blocked, self._plain, self._mesh)
        )
        for hidden in self._hidden()
      ]
      self._next = [output for output, _ in outputs]
      streams.check_finite(self._next, name)
    self._taps = [kept for _, kept in outputs]
    if self._store is not None:
      self._store.put_hidden(self._index + 1, self._next)
    return self._taps

  @property
  def taps(self) -> list[dict[str, jax.Array]]:
    """The layer's taps, one dict a chunk."""
    return self._capture()

  def release_inputs(self) -> None:
    """Lets the inputs of the layer's linears go; taps captured as they are stay."""
    if self._taps is not None:
      self._taps = [{name: chunk[name] for name in self._plain} for chunk in self._taps]

  def inputs(self, tap: str, width: int, contract: Contract) -> LinearInputs:
    """The inputs of the linears that read a tap of `width` features."""
    sequences, length = self._calib.tokens.shape
    store, index = self._store, self._index
    return LinearInputs(
      lambda: [chunk[tap] for chunk in self._capture()],
      contract.rules,
      extent=(sequences, width // contract.block_size, length),
      cache=store.reductions(index, tap) if store else None,
      mesh=self._mesh,
    )


def inputs_of(
  taps: list[dict[str, jax.Array]], contract: Contract, mesh: Mesh | None = None
) -> Mapping[str, LinearInputs]:
  """The inputs of linears from captured taps, by tap."""
  return {
    name: LinearInputs([chunk[name] for chunk in taps], contract.rules, mesh=mesh)
    for name in taps[0]
  }
