"""`quantize`: Algorithm 1 with one decoder layer in memory at a time.

For each layer, the float model runs on the calibration set and the inputs of its
linears are captured; every target linear is shaped and quantized; recovery fits are
measured and installed in turn; the finished layer is journaled.
"""

import contextlib
import os
from collections.abc import Callable, MutableMapping
from typing import Any

import jax
from jax.sharding import Mesh

from mxjax import methods
from mxjax.calibration.calibration import Calibration, Params
from mxjax.calibration.store import CalibrationStore
from mxjax.devices import processes
from mxjax.devices.placement import Placement
from mxjax.methods.program import Program
from mxjax.numerics import precision
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.running import entrance
from mxjax.running.layer_quantization import check_params, quantize_layer
from mxjax.running.progress import (
  LayerStages,
  OnProgress,
  Stopped,
  announce_gradients,
  announce_tuning,
  share_of_layers,
)
from mxjax.running.progress import Progress as Progress
from mxjax.running.recovery import recover
from mxjax.running.run_state import Result, RunState
from mxjax.running.trajectories import Trajectories
from mxjax.storage.run_folder import RunFolder


def quantize_with_record(
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
  """Like `quantize`, and also returns the record and the reference params."""
  placement = Placement.of(mesh)
  if mesh is not None and store is not None:
    raise ValueError(
      "quantize: expected a store or a mesh, got both; what a store holds was computed "
      "by one device, so leave one of them out."
    )
  entered = entrance.enter(
    *(params, calib, methods.get(method), contract), store=store, into=into, mesh=mesh
  )
  params, calib, program, contract = entered[:4]
  params = placement.on_primary(params)
  check_params(calib.model, params, contract)
  chunk = placement.chunk_size(calib.count, chunk)
  if run_dir is None or isinstance(run_dir, RunFolder):
    opened = contextlib.nullcontext(run_dir)
  else:
    opened = RunFolder(run_dir, resume=resume)
  with opened as folder:
    run = RunState(params, calib, program, contract, placement, folder, into)
    count = calib.model.num_layers
    if run.finished < count:
      measured = run.params, calib, program.staged
      shared = None if store is None else CalibrationStore(store, *measured)
      trajectories = Trajectories.begin(
        *(program, run.params, calib, folder),
        chunk=chunk,
        placement=placement,
        store=shared,
        clock=run.record.clock,
        announce=announce_gradients(on_progress, count),
      )
      run.save_after(save_every, trajectories)
      for index in range(run.finished, count):
        made = _quantize_next(run, trajectories, contract, probe, on_progress)
        is_stopping = bool(stop and processes.any_of(stop(), placement.mesh))
        run.finish_layer(*made, trajectories, is_stopping=is_stopping)
        if is_stopping:
          raise Stopped(index + 1, count)
    run.tune(announce_tuning(on_progress, count))
    return entrance.leave(run.finish(check=check), entered)


def _quantize_next(
  run: RunState,
  trajectories: Trajectories,
  contract: Contract,
  probe: bool,
  on_progress: OnProgress | None,
) -> tuple[str, dict[str, Any], dict[str, Any]]:
  """Runs Algorithm hiresmx for the next layer, in the order of its lines.

  Returns the layer's name, its quantized params and its record.
  """
  float_model, program = trajectories.float_model, trajectories.program
  model, index = float_model.calib.model, float_model.index
  name = model.layer_name(index)
  float_layer = run.params[name]
  largest = 4 * max(leaf.size for leaf in jax.tree.leaves(float_layer))
  place, steps = (index, model.num_layers), 2 + len(program.recover)
  clock, share = run.record.clock, share_of_layers(program)
  stages = LayerStages(clock, on_progress, place, steps, largest, share)
  # Rerun calibration: capture the inputs of each target linear.
  with stages.stage("calibration", 0):
    inputs = trajectories.observe(float_layer, contract)
  # Construct and fold T and D; realize legal W4 with GPTQ; install dynamic A4.
  with stages.stage("quantization", 1), precision.float64_scope():
    quantized, linears = quantize_layer(
      *(model, name, float_layer, program, inputs, run.learned, contract),
      stages.announce,
      gradients=float_model.gradients() if program.weighting == "fisher" else (),
      probe=probe,
    )
    jax.block_until_ready(quantized)
    mesh = float_model.placement.mesh
    processes.check_same(f"the codes of {name}", quantized, mesh)
  # Free the layer's largest arrays, inputs and Hessians, before recovery.
  del inputs
  float_model.release_inputs()
  if trajectories.upstream is not None:
    with stages.stage("calibration", 1):
      trajectories.upstream.advance(quantized)
  # Fit and install attention recovery; remeasure, fit and install MLP recovery.
  quantized, fits = recover(trajectories, float_layer, quantized, stages)
  return name, quantized, {"name": name, "linears": linears, "recovery": fits}


def quantize(
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
) -> MutableMapping[str, Any]:
  """Quantizes the decoder linears of a model to strict MXFP4 W4A4.

  It streams the calibration set layer by layer, so do not jit it; its measurements and
  solves are jitted. It does not change the global x64 flag.

  Paper: Algorithm hiresmx for the default method.

  Args:
    params: The model's params, with float weights `[out, in]`.
    calib: The model, used only to measure, and int32 tokens `[sequences, length]`; or a
      `FlaxModel` and whatever its module takes.
    method: A name in `mxjax.methods.METHODS`, optionally with options, or a `Program`.
    contract: The number format, its rules, and the target linears.
    chunk: Sequences in a device call; the result does not depend on it.
    run_dir: Where finished layers and the journal are written; None writes nothing.
    resume: Whether to resume the run in `run_dir`, to the same bits; unfinished layers
      there are done again.
    store: Where statistics shared by all runs on the same model and tokens are written;
      the result does not depend on it.
    on_progress: Called with a `Progress` at every stage and every linear.
    stop: Called after every layer; if it returns True, `Stopped` is raised.
    check: Whether logits are compared with the float model's at the end.
    probe: Whether each linear is measured on a few tokens for the record.
    into: A mapping that receives the finished layers, such as a `LayerStore`.
    mesh: Devices that share sequences and output rows, with the axes `data` and
      `model`; the codes equal those of one device, see `docs/guides/devices.md`.
    save_every: After how many layers `run_dir` gets the hidden states from which a
      killed run goes on; a kill costs that many layers at most. None saves after every
      layer if they take up to 1 GiB, and after up to eight layers if they take more.

  Returns:
    The same tree with `QuantizedLinear` leaves in place of target weights, for the same
    `model.apply`; of a `FlaxModel`, for `mxjax.apply`.

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
  return quantize_with_record(
    params,
    calib,
    method,
    contract=contract,
    chunk=chunk,
    run_dir=run_dir,
    resume=resume,
    store=store,
    on_progress=on_progress,
    stop=stop,
    check=check,
    probe=probe,
    into=into,
    mesh=mesh,
    save_every=save_every,
  ).params
