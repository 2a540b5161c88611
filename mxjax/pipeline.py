"""`quantize`: Algorithm 1, in its order, one decoder layer resident at a time.

For each layer the float model runs on the calibration stream and its linears' inputs
are captured; every target linear is shaped and realized from them; the finished layer
is journaled. Recovery fits then run on their own streams of hidden states: fit j is
measured on the model that has everything before it installed and nothing after, the
conditional order of Eq. conditional-stage, yet all of it needs one pass over layers.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import execution, mxfp4, precision, run_folder, sanity, streams
from mxjax.calibration import Calibration, CausalLanguageModel, Params
from mxjax.calibration_store import CalibrationStore
from mxjax.contract import PAPER_CONTRACT, Contract
from mxjax.float_stream import FloatStream, inputs_of
from mxjax.linear_inputs import LinearInputs
from mxjax.program import Program
from mxjax.records import QuantizationRecord, StageClock, linear_record

SANITY_TOKENS = 256


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


class Result(NamedTuple):
  """What `quantize_with_record` returns.

  Attributes:
    params: The same tree with `QuantizedLinear` leaves.
    record: What was measured on the way.
    reference: The float params that the program quantized: those given, unless it
      rewrote them.
  """

  params: MutableMapping[str, Any]
  record: QuantizationRecord
  reference: Params


def check_params(
  model: CausalLanguageModel, params: Params, contract: Contract
) -> None:
  """Checks every target weight before any work, collecting all complaints.

  Raises:
    ValueError: A width that is not a multiple of 32, or NaN or inf in a weight; the
      message names each layer, its shape and its counts.
  """
  complaints = []
  for index in range(model.num_layers):
    layer = params[model.layer_name(index)]
    for block, name in targets(model, contract):
      weight = layer[block][name]["weight"]
      path = f"{model.layer_name(index)}/{block}/{name}"
      if not isinstance(weight, (jax.Array, np.ndarray)):
        complaints.append(f"{path} is already quantized")
        continue
      if weight.shape[-1] % contract.block_size:
        complaints.append(f"{path} has input width {weight.shape[-1]}")
      if bad := int((~jnp.isfinite(jnp.asarray(weight))).sum()):
        complaints.append(f"{path} has {bad} NaN or inf of {weight.size} weights")
  if complaints:
    raise ValueError(
      f"quantize: every target needs a float weight, finite, with an input width that "
      f"is a multiple of {contract.block_size}; {'; '.join(complaints)}; mend the "
      "checkpoint or leave these projections out of Contract.targets."
    )


def targets(model: CausalLanguageModel, contract: Contract) -> list[tuple[str, str]]:
  """The target linears of a layer, in forward order."""
  return [path for path in model.projection_taps if path[1] in contract.targets]


def _shape_groups(
  model: CausalLanguageModel,
  layer: Params,
  program: Program,
  views: Mapping[str, LinearInputs],
  contract: Contract,
  path: str,
) -> None:
  """Runs `shape_group` for the linears on each tap, and keeps what it returns."""
  for tap, view in views.items():
    weights = {
      name: mxfp4.to_blocks(jnp.asarray(layer[block][name]["weight"], jnp.float32))
      for block, name in targets(model, contract)
      if model.projection_taps[block, name] == tap
    }
    try:
      view.group = program.shape_group(weights, view)
    except ValueError as error:
      raise ValueError(f"{path}/{tap}: {error}") from error


def _quantize_layer(
  model: CausalLanguageModel,
  layer: Params,
  program: Program,
  views: Mapping[str, LinearInputs],
  learned: Mapping[str, Any],
  contract: Contract,
  path: str,
  announce: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Quantizes the targets of one layer; returns its new params and records."""
  new = {block: dict(layer[block]) for block in layer}
  records: dict[str, Any] = {}
  _shape_groups(model, layer, program, views, contract, path)
  for block, name in targets(model, contract):
    announce(name)
    view = views[model.projection_taps[block, name]]
    inputs = view.sibling(name, learned.get(f"{path}/{block}/{name}"))
    weight = jnp.asarray(layer[block][name]["weight"])
    try:
      leaf = execution.finish(program.quantize_linear(weight, inputs))
    except ValueError as error:
      raise ValueError(f"{path}/{block}/{name}: {error}") from error
    records[f"{block}/{name}"] = linear_record(weight, leaf, inputs)
    new[block][name] = {**layer[block][name], "weight": leaf}
  return new, records


def _views(
  float_stream: FloatStream,
  model: CausalLanguageModel,
  layer: Params,
  contract: Contract,
) -> dict[str, LinearInputs]:
  """The inputs of a layer's targets by tap; linears on one tap share a view."""
  views: dict[str, LinearInputs] = {}
  for block, name in targets(model, contract):
    tap = model.projection_taps[block, name]
    if tap not in views:
      width = layer[block][name]["weight"].shape[-1]
      views[tap] = float_stream.inputs(tap, width, contract)
  return views


def _recover(
  model: CausalLanguageModel,
  program: Program,
  layers: tuple[Params, Params],
  fit_streams: list[streams.Stream],
  taps: list[dict[str, jax.Array]],
  stage: Callable[[str, int], AbstractContextManager[None]],
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Fits and installs a layer's recovery; advances every stream of the program."""
  float_layer, parent = layers
  current, records = dict(parent), {}
  by_layer = program.recovery_by == "layer"
  for position, fit in enumerate(program.recover):
    with stage(f"{fit.name} recovery", 2 + position), precision.float64_scope():
      place = 0 if by_layer else position
      entering = fit_streams[place]
      state = fit.state(current, parent)
      leaving, moments = streams.measure(
        model,
        fit,
        state,
        float_layer,
        streams.copy(entering) if by_layer else entering,
        taps,
      )
      if not by_layer:
        fit_streams[place] = leaving
      leaf, records[fit.name] = fit.solve(moments)
      current = fit.install(current, leaf)
  if by_layer and program.recover:
    fit_streams[0] = streams.advance(model, current, fit_streams[0])
  return current, records


def quantize_with_record(
  params: Params,
  calib: Calibration,
  program: Program,
  *,
  contract: Contract = PAPER_CONTRACT,
  chunk: int = 1,
  run_dir: str | os.PathLike[str] | None = None,
  store: str | os.PathLike[str] | None = None,
  on_progress: OnProgress | None = None,
  check: bool = True,
  into: MutableMapping[str, Any] | None = None,
) -> Result:
  """Like `mxjax.quantize`, with what was measured on the way; see there."""
  model = calib.model
  check_params(model, params, contract)
  folder = run_folder.RunFolder(run_dir) if run_dir is not None else None
  clock = StageClock()
  record = QuantizationRecord(
    program=dict(program.describe()),
    contract_hash=contract.hash,
    calibration={"fingerprint": calib.fingerprint, "shape": list(calib.tokens.shape)},
    layers=[],
    clock=clock,
  )
  if folder:
    folder.journal(
      "start",
      program=record.program,
      contract=record.contract_hash,
      calibration=record.calibration,
    )
  with clock.stage("preparation"):
    prepared = program.prepare(params, calib, contract)
    params, learned = prepared.params, prepared.learned
    record = dataclasses.replace(record, preparation=dict(prepared.record))
  fits = program.recover
  blocked = tuple(sorted({model.projection_taps[p] for p in targets(model, contract)}))
  float_stream = FloatStream(
    params,
    calib,
    chunk=chunk,
    blocked=blocked,
    plain=tuple(sorted({name for fit in fits for name in fit.float_taps})),
    store=CalibrationStore(store, params, calib) if store is not None else None,
  )
  start = lambda: streams.start(model, params, calib.tokens, chunk)
  fit_streams = [start() for _ in fits]
  upstream = start() if program.upstream == "quantized" else None
  result: MutableMapping[str, Any] = {} if into is None else into
  result.update(streams.outer_params(params))
  steps = 2 + len(fits)

  for index in range(model.num_layers):
    name = model.layer_name(index)
    layer = params[name]

    def announce(label: str, step: int = 1, index: int = index) -> None:
      if on_progress:
        done = (index + step / steps) / model.num_layers
        on_progress(Progress(index, model.num_layers, label, done))

    def stage(
      label: str, step: int, announce: Callable[[str, int], None] = announce
    ) -> AbstractContextManager[None]:
      announce(label, step)
      return clock.stage(label)

    with stage("calibration", 0):
      float_stream.enter(index)
      views: Mapping[str, LinearInputs] = _views(float_stream, model, layer, contract)
      if upstream is not None:
        # The float layer on what the quantized layers pass on.
        passed = streams.copy(upstream)
        capture = lambda part, layer=layer: streams.capture(
          model, layer, part, blocked, ()
        )
        seen = [execution.finish(capture(part))[1] for part in passed]
        views = inputs_of(seen, contract)
    with stage("quantization", 1), precision.float64_scope():
      quantized, linears = _quantize_layer(
        model, layer, program, views, learned, contract, name, announce
      )
      jax.block_until_ready(quantized)
    if upstream is not None:
      with stage("calibration", 0):
        upstream = streams.advance(model, quantized, upstream)
    recovery: dict[str, Any] = {}
    if fits:
      quantized, recovery = _recover(
        model, program, (layer, quantized), fit_streams, float_stream.taps, stage
      )
    if index + 1 < model.num_layers:
      float_stream.leave()
    layer_record = {"name": name, "linears": linears, "recovery": recovery}
    result[name] = quantized
    record.layers.append(layer_record)
    if folder:
      with clock.stage("writing"):
        folder.write_layer(name, quantized, layer_record)
    # Before the next layer's inputs come: they are the largest thing in memory.
    del views

  if check:
    with clock.stage("sanity gate"):
      probe = calib.tokens[:1, :SANITY_TOKENS]
      report = sanity.compare(model, params, result, probe)
    record = dataclasses.replace(record, sanity=dataclasses.asdict(report))
    report.check(program.name)
  if folder:
    folder.journal("finished", sanity=record.sanity, seconds=clock.seconds)
  return Result(result, record, params)


def quantize(
  params: Params,
  calib: Calibration,
  method: str | Program = "hires",
  **options: Any,
) -> MutableMapping[str, Any]:
  """Quantizes the decoder linears of a model to strict MXFP4 W4A4.

  It streams the calibration set layer by layer, so it is not itself a function to
  jit; everything it measures and solves is. The global x64 flag is left alone.

  Paper: Algorithm hiresmx for the default method.

  Args:
    params: The model's params, with float weights `[out, in]`.
    calib: The model, used only to measure, and int32 tokens `[sequences, length]`.
    method: A name in `mxjax.methods.METHODS` or a `Program`.
    **options: Keyword arguments of `quantize_with_record`: `contract`, `chunk`
      (sequences in a device call; the result does not depend on it), `run_dir` (where
      finished layers and the journal go), `store` (where what runs on the same model
      and tokens share is kept; the result does not depend on it), `on_progress`,
      `check` (the sanity gate), `into` (a mapping that takes the finished layers, such
      as a `LayerStore`).

  Returns:
    The same tree with `QuantizedLinear` leaves in place of target weights, for the
    same `model.apply`.

  Raises:
    ValueError: A width, a weight or a Hessian that cannot be quantized, by layer.
    FloatingPointError: Activations that are not finite, or a collapsed model.
    FileExistsError: `run_dir` is not empty.
  """
  from mxjax import methods

  return quantize_with_record(params, calib, methods.get(method), **options).params
