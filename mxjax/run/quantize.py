"""Quantizes a model: `run` has the steps in their order.

What happens to a layer after a kill: `RunFolder` in `folder.py` keeps the finished
ones, and `_quantize_layers` takes them over by `replay_layer` in `recover.py`.
"""

import concurrent.futures
import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple, ParamSpec

from jax.sharding import Mesh

from mxjax.calibration.calibration import Calibration, Params
from mxjax.devices import execution, processes
from mxjax.devices.environment import environment
from mxjax.devices.placement import ONE_DEVICE, Placement
from mxjax.errors import ValueRefusal
from mxjax.layers import sizes
from mxjax.methods.program import Program
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.run import reporting, sanity
from mxjax.run.capture import Trajectories
from mxjax.run.folder import LayerWriter, RunFolder
from mxjax.run.loop import quantize_layer
from mxjax.run.progress import SANITY, OnProgress, Report, Stopped
from mxjax.run.record import QuantizationRecord, Result, StageClock
from mxjax.run.recover import replay_layer
from mxjax.run.setup import Setup

P = ParamSpec("P")


def run(
  params: Params,
  calib: Calibration,
  method: str | Program = "hires",
  *,
  contract: Contract = PAPER_CONTRACT,
  chunk: int = 1,
  run_dir: str | os.PathLike[str] | RunFolder | None = None,
  resume: bool = False,
  store: str | os.PathLike[str] | None = None,
  on_progress: OnProgress | None = None,
  stop: Callable[[], bool] | None = None,
  check: bool = True,
  probe: bool = True,
  into: MutableMapping[str, Any] | None = None,
  mesh: Mesh | None = None,
  save_every: int | None = None,
) -> Result:
  """Quantizes as `mxjax.quantize` does, and also returns the record of the run.

  `run_dir` may also be a `RunFolder` that the caller has opened, and closes.

  Returns:
    The quantized params, the record, and the float params that were quantized.
  """
  _check_options(save_every, run_dir, resume)
  with contextlib.ExitStack() as stack:
    if on_progress is None:
      name = getattr(method, "name", str(method))
      on_progress = stack.enter_context(reporting.logged(name))
    setup = Setup.of(
      params,
      calib,
      method,
      contract,
      chunk=chunk,
      mesh=mesh,
      probe=probe,
      store=store,
      into=into,
    )
    if run_dir is None or isinstance(run_dir, RunFolder):
      folder = run_dir
    else:
      folder = stack.enter_context(RunFolder(run_dir, resume=resume))
    # Before `prepare`, which may take long: a run of another identity is refused here.
    resumed, clock = _begin(folder, setup)
    report = Report(
      setup.program,
      setup.model.num_layers,
      clock,
      on_progress,
      sequences=setup.calib.count,
    )
    with clock.stage("preparation"):
      setup = setup.prepared(folder, report)
    # A caller's mapping receives layers unchanged; others are spread over the mesh.
    placement = setup.placement if into is None else ONE_DEVICE
    outcome = Outcome(placement, {} if into is None else into, [])
    outcome.params.update(placement.shard_rows(setup.outer))
    _quantize_layers(setup, folder, report, outcome, stop=stop, save_every=save_every)
    tuning = _tune(setup, folder, report, outcome)
    # A folder that has ended says how its gate went, if it had one.
    gate = folder.ended["sanity"] if folder and folder.ended else None
    if check and not gate:
      gate = _pass_gate(setup, report, outcome)
    if folder and not folder.ended:
      folder.finish(gate, clock.seconds)
  record = QuantizationRecord(
    program=dict(setup.program.describe()),
    contract_hash=setup.contract.hash,
    form=setup.contract.form,
    calibration=setup.data(),
    layers=outcome.records,
    clock=clock,
    sanity=gate,
    preparation=dict(setup.preparation),
    resumed=resumed,
    save_every=save_every if folder else None,
    mesh=setup.placement.describe(),
    tuning=tuning,
  )
  return Result(setup.joined(outcome.params), record, setup.reference)


class Outcome(NamedTuple):
  """The result so far: params outside the layers and of all finished ones, records."""

  placement: Placement
  params: MutableMapping[str, Any]
  records: list[dict[str, Any]]

  def add(self, name: str, layer: Any, record: dict[str, Any]) -> None:
    """Adds a finished layer."""
    self.params[name] = self.placement.shard_rows(layer)
    self.records.append(record)


def _check_options(save_every: Any, run_dir: Any, resume: bool) -> None:
  """Checks the options that `Setup` does not have."""
  is_count = isinstance(save_every, int) and not isinstance(save_every, bool)
  if save_every is not None and (not is_count or save_every < 1):
    raise ValueRefusal(
      "quantize",
      expected="save_every: a whole number of layers of at least 1, or None",
      got=repr(save_every),
      mend="leave it out to write no hidden states",
    )
  if resume and run_dir is None:
    raise ValueRefusal(
      "quantize",
      expected="a run_dir beside resume=True",
      got="none",
      mend="name the folder of the run to resume",
    )


def _begin(
  folder: RunFolder | None, setup: Setup
) -> tuple[list[dict[str, Any]], StageClock]:
  """Begins or resumes the run of a folder.

  A new run digests its weights in a thread behind the work on the first layer, because
  nothing needs them until that is written. One that resumes compares them first.

  Returns:
    The record of all resumes, and the clock of what is not done again.
  """
  if not folder:
    return [], StageClock()
  mesh = setup.placement.mesh
  here = environment(setup.placement, setup.model)
  # A process that resumes with other options than the rest would mix two runs.
  processes.check_same("versions, flags and device", here, mesh)
  # Params on a mesh or on disk are brought to a device where they are read.
  if mesh is None and isinstance(setup.params, dict):
    known = setup.identity_but_weights()
    pool = concurrent.futures.ThreadPoolExecutor(1, "mxjax-weights-digest")
    weights = pool.submit(lambda: setup.weights_digest)
    # The one task goes on, and the thread ends with it.
    pool.shutdown(wait=False)
    resumed = folder.begin(lambda: known | {"weights": weights.result()}, here)
  else:
    identity = setup.identity()
    processes.check_same("model, data and options", identity, mesh)
    resumed = folder.begin(identity, here)
  return resumed, StageClock(**folder.clock)


def _quantize_layers(
  setup: Setup,
  folder: RunFolder | None,
  report: Report,
  outcome: Outcome,
  *,
  stop: Callable[[], bool] | None,
  save_every: int | None,
) -> None:
  """Takes over the layers that a folder has, and quantizes and writes the others.

  The hidden states on which the next layer goes on are those that the killed run saved
  last, moved past the layers since then by a replay.

  Raises:
    Stopped: `stop` returned True; what is finished is on the disk.
  """
  count = setup.model.num_layers
  kept = folder.finished if folder else []
  # Nothing is left to measure, so that neither tokens are embedded nor gradients taken.
  if len(kept) == count:
    trajectories = None
  else:
    trajectories = Trajectories.begin(setup, folder, report)
  for index, layer in enumerate(kept):
    assert folder
    quantized = folder.read_layer(layer)
    # Saved hidden states have passed the layers before `trajectories.index`.
    if trajectories and index >= trajectories.index:
      with report.replay(index, len(kept)):
        replay_layer(setup, trajectories, quantized)
    outcome.add(layer["name"], quantized, layer["record"])
  with LayerWriter(folder) as writer:
    for number in range(len(kept) + 1, count + 1):
      assert trajectories
      made = quantize_layer(setup, trajectories, report)
      # All processes stop after the same layer: one that went on alone would wait for
      # the others.
      is_stopping = bool(stop and processes.any_of(stop(), setup.placement.mesh))
      # Nothing reads hidden states after the last layer, so that old ones go.
      streams = {} if number == count else None
      if folder and save_every and number < count:
        if is_stopping or number % save_every == 0:
          streams = trajectories.to_host()
      with report.clock.stage("writing"):
        # A copy: the clock goes on while the layer is written behind the next one.
        clock = dataclasses.asdict(report.clock)
        writer.write(*made, streams=streams, clock=clock)
        # No layer follows behind whose work this one could be written.
        if is_stopping or number == count:
          writer.wait()
      outcome.add(*made)
      if is_stopping:
        raise Stopped(number, count)


def _tune(
  setup: Setup, folder: RunFolder | None, report: Report, outcome: Outcome
) -> dict[str, Any] | None:
  """Tunes the quantized model, if the program does, and returns the record of it."""
  if not setup.program.tune:
    return None
  # Imported here, because nothing else in a run needs an optimizer library.
  from mxjax.run.tune import distill_scales

  # What the layers' passes freed has other sizes than what the steps allocate.
  execution.trim_malloc(execution.LARGE_BYTES)
  with report.clock.stage("tuning"):
    # Tuning works on one device; a mesh has the layers by rows.
    quantized = setup.placement.on_primary(outcome.params)
    tuned, record = distill_scales(setup, quantized, folder, report)
    for name, layer in tuned.items():
      outcome.params[name] = outcome.placement.shard_rows(layer)
  return record


def _pass_gate(setup: Setup, report: Report, outcome: Outcome) -> dict[str, Any]:
  """Compares the result with the float model on calibration tokens.

  Raises:
    FloatingPointError: The quantized model collapsed.
  """
  report.checking()
  with report.clock.stage(SANITY):
    quantized = setup.placement.on_primary(outcome.params)
    found = sanity.report(setup.calib, setup.params, quantized)
  found.check(setup.program.name)
  return dataclasses.asdict(found)


def _params_of(run: Callable[P, Result]) -> Callable[P, MutableMapping[str, Any]]:
  """Makes `quantize` of `run`: the same signature, and its params alone."""

  def quantize(  # noqa: D417 - its arguments are those of `run`.
    *args: P.args, **kwargs: P.kwargs
  ) -> MutableMapping[str, Any]:
    """Quantizes the decoder linears of a model to strict MXFP4 W4A4.

    It streams the calibration set layer by layer, so do not jit it; its measurements
    and solves are jitted. It does not change the global x64 flag.

    Paper: Algorithm hiresmx for the default method.

    Args:
      params: The model's params, with float weights `[out, in]`.
      calib: The model, used only to measure, and int32 tokens `[sequences, length]`; or
        a `FlaxModel` and whatever its module takes.
      method: A name in `mxjax.methods.METHODS`, optionally with options, or a
        `Program`.
      contract: The number format, its rules, and the target linears.
      chunk: Sequences in a device call; the result does not depend on it.
      run_dir: Where finished layers and the state of the run are written; None writes
        nothing.
      resume: Whether to resume the run in `run_dir`, to the same bits; unfinished
        layers there are done again.
      store: Where statistics shared by all runs on the same model and tokens, in the
        same environment, are written; the result does not depend on it.
      on_progress: Called with a `Progress` at every stage, every linear, and every step
        of learning or tuning. None logs a line a layer, and one after every 30 s of
        silence, at INFO of the logger `mxjax`; where no logging is configured they go
        to stderr.
      stop: Called after every layer; if it returns True, `Stopped` is raised.
      check: Whether logits are compared with the float model's at the end.
      probe: Whether each linear is measured on a few tokens for the record.
      into: A mapping that receives the finished layers, such as a `LayerStore`; it may
        have keys of this model alone.
      mesh: Devices that share sequences and output rows, with the axes `data` and
        `model`; the codes equal those of one device, see `docs/guides/devices.md`.
      save_every: After how many layers `run_dir` gets the hidden states that enter the
        next one. By default it gets none: a resumed run replays the finished layers,
        which costs one forward pass a layer for each set of hidden states and no
        quantizing, where writing costs gigabytes a layer in every run. Saved states
        spare the replay of the layers before them.

    Returns:
      The same tree with `QuantizedLinear` leaves in place of target weights, for the
      same `model.apply`; of a `FlaxModel`, for `mxjax.apply`.

    Raises:
      TypeError: The model lacks members of `CausalLanguageModel`.
      ValueError: The model lacks a target or what a recovery fit reads, a width, a
        weight or a Hessian cannot be quantized (the message names the layer), or
        `save_every` is no whole number of at least 1.
      FloatingPointError: Activations or a loss are not finite, or the quantized model
        collapsed.
      FileExistsError: `run_dir` is not empty.
      BlockingIOError: Another process is using `run_dir`.
      Stopped: `stop` returned True.
    """
    result = run(*args, **kwargs)
    if processes.is_leader():
      sizes.warn(result.record.program["name"], sizes.size_report(result.params))
    return result.params

  # Tools and `help` show the arguments of `run`, whose list is written once.
  signature = inspect.signature(run)
  returns = MutableMapping[str, Any]
  quantize.__signature__ = signature.replace(return_annotation=returns)
  quantize.__qualname__ = "quantize"
  return quantize


quantize = _params_of(run)
