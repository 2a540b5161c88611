"""The finished part of a run, in memory and optionally in a run folder."""

import dataclasses
import platform
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax

from mxjax.calibration.calibration import Calibration, Params
from mxjax.calibration.store import params_digest
from mxjax.calibration.streams import outer_params
from mxjax.devices import execution, processes
from mxjax.devices.placement import ONE_DEVICE, Placement
from mxjax.methods import scale_distillation
from mxjax.methods.program import Prepared, Program
from mxjax.numerics.contract import Contract
from mxjax.running import sanity
from mxjax.running.run_record import QuantizationRecord, StageClock
from mxjax.running.trajectories import Trajectories
from mxjax.storage.run_events import Event
from mxjax.storage.run_folder import RunFolder


class Result(NamedTuple):
  """Quantized params, the run's record, and the float params that were quantized.

  `reference` are the given params unless the program rewrote them.
  """

  params: MutableMapping[str, Any]
  record: QuantizationRecord
  reference: Params


def _calibration(calib: Calibration) -> dict[str, Any]:
  return {"fingerprint": calib.fingerprint, "shape": calib.shape}


def _identity(
  params: Params, calib: Calibration, program: Program, contract: Contract
) -> dict[str, Any]:
  """Returns what determines a run's output and must be equal to resume it.

  It is JSON-ready, and reads every weight.
  """
  config = getattr(calib.model, "config", None)
  return {
    "program": dict(program.describe()),
    "contract": contract.hash,
    "calibration": _calibration(calib),
    "model": None if config is None else config.to_dict(),
    "weights": params_digest(params),
  }


def _environment(placement: Placement, model: Any) -> dict[str, Any]:
  """Returns what may perturb a run's output and is reported on resume, JSON-ready."""
  device = jax.devices()[0]
  return {
    "jax": jax.__version__,
    "machine": platform.machine(),
    "platform": device.platform,
    "device": device.device_kind,
    "mesh": placement.describe(),
    "attention": getattr(model, "attention", None),
  }


def _prepare(
  folder: RunFolder | None,
  program: Program,
  params: Params,
  calib: Calibration,
  contract: Contract,
) -> Prepared:
  """Runs `Program.prepare`, or reads its result saved before the run was killed."""
  if folder and (saved := folder.read_prepared()):
    rewritten, learned, record = saved
    return Prepared(params if rewritten is None else rewritten, learned, record)
  prepared = program.prepare(params, calib, contract)
  rewritten = None if prepared.params is params else prepared.params
  if folder and (rewritten is not None or prepared.learned):
    folder.write_prepared(rewritten, prepared.learned, dict(prepared.record))
  return prepared


def _clock(folder: RunFolder, finished: Sequence[Event]) -> StageClock:
  """Returns the time that earlier processes took for what is not done again."""
  if not finished:
    return StageClock()
  before = finished[-1]["clock"]
  seconds = dict(before["seconds"])
  if ended := folder.event("finished"):
    seconds = dict(ended["seconds"])
  elif steps := [one for one in folder.events if one["event"] == "tuned"]:
    seconds["tuning"] = sum(one.get("seconds") or 0.0 for one in steps)
  return StageClock(seconds, dict(before["peak_bytes"]))


SAVED_BYTES_A_LAYER = 2**30
"""Hidden states that a run writes for each layer on average, at most, by default."""
MOST_LAYERS_AGAIN = 8
"""Layers after which hidden states are written at the latest, by default."""


def save_every(nbytes: int) -> int:
  """Returns after how many layers hidden states of so many bytes are written.

  Three sets of 128 x 2,048 tokens of width 4,096 in bfloat16 are 6.4 GB; writing them
  after every layer would take a GPU longer than quantizing the layer.
  """
  return min(max(-(-nbytes // SAVED_BYTES_A_LAYER), 1), MOST_LAYERS_AGAIN)


class RunState:
  """The finished part of a run: its layers and their records.

  `params` and `learned` come from `Program.prepare`. `result` maps names to the
  finished layers and the params outside the layers.
  """

  def __init__(
    self,
    params: Params,
    calib: Calibration,
    program: Program,
    contract: Contract,
    placement: Placement,
    folder: RunFolder | None,
    into: MutableMapping[str, Any] | None,
  ) -> None:
    """Prepares the program and restores the layers that a killed run finished."""
    self._calib, self._program = calib, program
    self._placement, self._folder = placement, folder
    finished, resumed, clock = [], [], StageClock()
    if folder:
      identity = _identity(params, calib, program, contract)
      processes.check_same("model, data and options", identity, placement.mesh)
      resumed = folder.begin(identity, _environment(placement, calib.model))
      finished = folder.finished
      clock = _clock(folder, finished)
    with clock.stage("preparation"):
      prepared = _prepare(folder, program, params, calib, contract)
    self.params, self.learned = prepared.params, prepared.learned
    self.record = QuantizationRecord(
      program=dict(program.describe()),
      contract_hash=contract.hash,
      calibration=_calibration(calib),
      layers=[event["record"] for event in finished],
      clock=clock,
      preparation=dict(prepared.record),
      resumed=resumed,
      mesh=placement.describe(),
    )
    # A caller's mapping receives layers unchanged; others are placed on the mesh.
    self._results_on = placement if into is None else ONE_DEVICE
    self.result: MutableMapping[str, Any] = {} if into is None else into
    self.result.update(
      self._results_on.shard_rows(outer_params(calib.model, self.params))
    )
    for event in finished:
      assert folder
      layer = folder.read_layer(event)
      self.result[event["name"]] = self._results_on.shard_rows(layer)

  @property
  def finished(self) -> int:
    """Number of finished layers."""
    return len(self.record.layers)

  def save_after(self, layers: int | None, trajectories: Trajectories) -> None:
    """Sets after how many layers hidden states are written, by default by their size.

    Raises:
      ValueError: The number is below 1.
    """
    if layers is not None and layers < 1:
      raise ValueError(f"quantize: expected save_every of at least 1, got {layers}.")
    if self._folder:
      every = save_every(trajectories.nbytes()) if layers is None else layers
      self.record = dataclasses.replace(self.record, save_every=every)

  def finish_layer(
    self,
    name: str,
    quantized: dict[str, Any],
    record: dict[str, Any],
    trajectories: Trajectories,
    *,
    is_stopping: bool,
  ) -> None:
    """Adds a finished layer; with a run folder, writes it durably.

    `name` is such as `layers_3`; `trajectories` enter the next layer, and are written
    too after `record.save_every` layers and if the run `is_stopping`.
    """
    if self._program.tune:
      scale_distillation.check(quantized, self._calib.model)
    is_last = self.finished + 1 == self._calib.model.num_layers
    trajectories.leave_layer(is_last=is_last)
    if self._folder:
      every = self.record.save_every or 1
      saves = is_stopping or (self.finished + 1) % every == 0
      with self.record.clock.stage("writing"):
        streams = trajectories.to_host() if saves and not is_last else None
        self._folder.write_layer(
          name,
          quantized,
          record,
          streams={} if is_last else streams,
          clock=dataclasses.asdict(self.record.clock),
        )
    self.result[name] = self._results_on.shard_rows(quantized)
    self.record.layers.append(record)

  def tune(self, announce: Callable[[int, int, float | None], None]) -> None:
    """Runs the program's tuning, if any, and installs what it learned."""
    if self._program.tune is None:
      return
    # Imported here, because nothing else in a run needs an optimizer library.
    from mxjax.running import tuning

    quantized = self._placement.on_primary(self.result)
    # What the layers' passes freed has other sizes than what the steps allocate.
    execution.trim_malloc(execution.LARGE_BYTES)
    with self.record.clock.stage("tuning"):
      learned, record = tuning.distill_scales(
        *(self._program.tune, self._placement.on_primary(self.params), quantized),
        *(self._calib, self._folder, announce),
      )
      for index, own in enumerate(learned):
        name = self._calib.model.layer_name(index)
        layer = tuning.installed(quantized[name], own, self._calib)
        self.result[name] = self._results_on.shard_rows(layer)
    self.record = dataclasses.replace(self.record, tuning=record)

  def finish(self, *, check: bool) -> Result:
    """Runs the sanity gate if asked for and ends the journal.

    Raises:
      FloatingPointError: The quantized model collapsed.
    """
    record, folder = self.record, self._folder
    ended = folder.event("finished") if folder else None
    if ended and ended["sanity"]:
      record = dataclasses.replace(record, sanity=ended["sanity"])
    elif check:
      with record.clock.stage("sanity gate"):
        quantized = self._placement.on_primary(self.result)
        report = sanity.report(self._calib, self.params, quantized)
      record = dataclasses.replace(record, sanity=dataclasses.asdict(report))
      report.check(self._program.name)
    if folder and not ended:
      folder.journal("finished", sanity=record.sanity, seconds=record.clock.seconds)
    return Result(self.result, record, self.params)
