"""`quantize`: runs Algorithm 1 over the layers, and keeps what each one made."""

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, MutableMapping
from typing import Any, ParamSpec

from jax.sharding import Mesh

from mxjax.calibration.calibration import Calibration, Params
from mxjax.devices import execution, processes
from mxjax.devices.placement import ONE_DEVICE
from mxjax.errors import ValueRefusal
from mxjax.methods.program import Program
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.run import sanity
from mxjax.run.capture import Trajectories
from mxjax.run.folder import RunFolder, environment
from mxjax.run.loop import quantize_layer
from mxjax.run.progress import OnProgress, Report, Stopped
from mxjax.run.record import QuantizationRecord, Result, StageClock
from mxjax.run.setup import Setup

P = ParamSpec("P")

SAVED_BYTES_A_LAYER = 2**30
"""Hidden states that a run writes for each layer on average, at most, by default."""
MOST_LAYERS_AGAIN = 8
"""Layers after which hidden states are written at the latest, by default."""


def default_save_every(nbytes: int) -> int:
  """Returns after how many layers hidden states of so many bytes are written.

  Three sets of 128 x 2,048 tokens of width 4,096 in bfloat16 are 6.4 GB; writing them
  after every layer would take a GPU longer than quantizing the layer.
  """
  return min(max(-(-nbytes // SAVED_BYTES_A_LAYER), 1), MOST_LAYERS_AGAIN)


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
  if save_every is not None and save_every < 1:
    raise ValueRefusal("quantize", "save_every of at least 1", got=save_every)
  if resume and run_dir is None:
    raise ValueRefusal(
      "quantize",
      expected="a run_dir beside resume=True",
      got="none",
      mend="name the folder of the run to resume",
    )
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
    opened = contextlib.nullcontext(run_dir)
  else:
    opened = RunFolder(run_dir, resume=resume)
  with opened as folder:
    return _run_in(
      folder,
      setup,
      on_progress=on_progress,
      stop=stop,
      check=check,
      into=into,
      every=save_every,
    )


def _run_in(
  folder: RunFolder | None,
  setup: Setup,
  *,
  on_progress: OnProgress | None,
  stop: Callable[[], bool] | None,
  check: bool,
  into: MutableMapping[str, Any] | None,
  every: int | None,
) -> Result:
  """Runs what the folder lacks, all of it without a folder."""
  placement, count = setup.placement, setup.model.num_layers
  resumed, clock = [], StageClock()
  if folder:
    # A process that resumes with other options than the rest would mix two runs.
    identity = setup.identity()
    processes.check_same("model, data and options", identity, placement.mesh)
    here = environment(placement, setup.model)
    processes.check_same("versions, flags and device", here, placement.mesh)
    resumed = folder.begin(identity, here)
    clock = StageClock(**folder.clock)
  report = Report(setup.program, count, clock, on_progress)
  with clock.stage("preparation"):
    setup = setup.prepared(folder)

  # A caller's mapping receives layers unchanged; others are placed on the mesh.
  place = (placement if into is None else ONE_DEVICE).shard_rows
  result: MutableMapping[str, Any] = {} if into is None else into
  result.update(place(setup.outer))
  records = []
  for layer in folder.finished if folder else ():
    assert folder
    result[layer["name"]] = place(folder.read_layer(layer))
    records.append(layer["record"])

  if len(records) < count:
    trajectories = Trajectories.begin(setup, folder, report)
    if folder and every is None:
      every = default_save_every(trajectories.nbytes())
    for finished in range(len(records) + 1, count + 1):
      made = quantize_layer(setup, trajectories, report)
      is_stopping = bool(stop and processes.any_of(stop(), placement.mesh))
      if folder:
        saves = finished < count and (is_stopping or finished % (every or 1) == 0)
        with clock.stage("writing"):
          folder.write_layer(
            made.name,
            made.params,
            made.record,
            streams=_streams(trajectories, saves=saves, is_last=finished == count),
            clock=dataclasses.asdict(clock),
          )
      result[made.name] = place(made.params)
      records.append(made.record)
      if is_stopping:
        raise Stopped(finished, count)
  else:
    # No layer was left to do, so that nothing was saved after any.
    every = None

  tuning = None
  if setup.program.tune:
    # Imported here, because nothing else in a run needs an optimizer library.
    from mxjax.run.tune import distill_scales

    # What the layers' passes freed has other sizes than what the steps allocate.
    execution.trim_malloc(execution.LARGE_BYTES)
    with clock.stage("tuning"):
      tuned, tuning = distill_scales(
        setup, placement.on_primary(result), folder, report
      )
      for name, layer in tuned.items():
        result[name] = place(layer)

  ended = folder.ended if folder else None
  compared = ended["sanity"] if ended else None
  if check and not compared:
    with clock.stage("sanity gate"):
      found = sanity.report(setup.calib, setup.params, placement.on_primary(result))
    compared = dataclasses.asdict(found)
    found.check(setup.program.name)
  if folder and not ended:
    folder.finish(compared, clock.seconds)
  params = setup.joined(result)
  record = QuantizationRecord(
    program=dict(setup.program.describe()),
    contract_hash=setup.contract.hash,
    calibration=setup.data(),
    layers=records,
    clock=clock,
    sanity=compared,
    preparation=dict(setup.preparation),
    resumed=resumed,
    save_every=every if folder else None,
    mesh=placement.describe(),
    tuning=tuning,
  )
  return Result(params, record, setup.reference)


def _streams(trajectories: Trajectories, *, saves: bool, is_last: bool) -> Any:
  """Returns the hidden states that are written with a layer, by name.

  Without a turn to save it is None, and the folder keeps those of an earlier layer.
  After the last layer it is empty, and the folder removes those it has: nothing reads
  them any more.
  """
  if is_last:
    return {}
  return trajectories.to_host() if saves else None


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
      store: Where statistics shared by all runs on the same model and tokens are
        written; the result does not depend on it.
      on_progress: Called with a `Progress` at every stage and every linear.
      stop: Called after every layer; if it returns True, `Stopped` is raised.
      check: Whether logits are compared with the float model's at the end.
      probe: Whether each linear is measured on a few tokens for the record.
      into: A mapping that receives the finished layers, such as a `LayerStore`.
      mesh: Devices that share sequences and output rows, with the axes `data` and
        `model`; the codes equal those of one device, see `docs/guides/devices.md`.
      save_every: After how many layers `run_dir` gets the hidden states from which a
        killed run goes on; a kill costs that many layers at most. None saves after
        every layer if they take up to 1 GiB, and after up to eight layers if they take
        more.

    Returns:
      The same tree with `QuantizedLinear` leaves in place of target weights, for the
      same `model.apply`; of a `FlaxModel`, for `mxjax.apply`.

    Raises:
      TypeError: The model lacks members of `CausalLanguageModel`.
      ValueError: The model lacks a target or what a recovery fit reads, a width, a
        weight or a Hessian cannot be quantized (the message names the layer), or
        `save_every` is below 1.
      FloatingPointError: Activations are not finite, or the quantized model collapsed.
      FileExistsError: `run_dir` is not empty.
      BlockingIOError: Another process is using `run_dir`.
      Stopped: `stop` returned True.
    """
    return run(*args, **kwargs).params

  signature = inspect.signature(run)
  returns = MutableMapping[str, Any]
  quantize.__signature__ = signature.replace(return_annotation=returns)
  quantize.__qualname__ = "quantize"
  return quantize


quantize = _params_of(run)
