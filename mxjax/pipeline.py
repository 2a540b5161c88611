"""`quantize`: Algorithm 1, in its order, one decoder layer resident at a time.

For each layer the float model runs on the calibration stream and its linears' inputs
are captured; every target linear is shaped and realized from them; the finished layer
is journaled. Recovery fits then run on their own streams of hidden states: fit j is
measured on the model that has everything before it installed and nothing after, the
conditional order of Eq. conditional-stage, yet all of it needs one pass over layers.
"""

import dataclasses
import os
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import execution, precision, run_folder, sanity, streams
from mxjax.calibration import Calibration, CausalLanguageModel, Params
from mxjax.contract import PAPER_CONTRACT, Contract
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
  """

  params: MutableMapping[str, Any]
  record: QuantizationRecord


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


def _inputs_by_tap(
  model: CausalLanguageModel, taps: list[dict[str, jax.Array]], contract: Contract
) -> dict[str, LinearInputs]:
  names = {model.projection_taps[path] for path in targets(model, contract)}
  return {
    name: LinearInputs([chunk[name] for chunk in taps], contract.rules)
    for name in names
  }


def _quantize_layer(
  model: CausalLanguageModel,
  layer: Params,
  program: Program,
  taps: list[dict[str, jax.Array]],
  contract: Contract,
  path: str,
  announce: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Quantizes the targets of one layer; returns its new params and records."""
  new = {block: dict(layer[block]) for block in layer}
  views = _inputs_by_tap(model, taps, contract)
  records: dict[str, Any] = {}
  for block, name in targets(model, contract):
    announce(name)
    inputs = views[model.projection_taps[block, name]].sibling()
    weight = jnp.asarray(layer[block][name]["weight"])
    try:
      leaf = execution.finish(program.quantize_linear(weight, inputs))
    except ValueError as error:
      raise ValueError(f"{path}/{block}/{name}: {error}") from error
    records[f"{block}/{name}"] = linear_record(weight, leaf, inputs)
    new[block][name] = {**layer[block][name], "weight": leaf}
  return new, records


def _check_finite(stream: streams.Stream, place: str) -> None:
  bad = sum(int((~jnp.isfinite(chunk)).sum()) for chunk in stream)
  if bad:
    total = sum(chunk.size for chunk in stream)
    raise FloatingPointError(
      f"quantize: {bad} of {total} hidden values leaving {place} are NaN or inf on the "
      "calibration tokens; the float model itself overflows there, so check its "
      "weights and its compute dtype."
    )


def quantize_with_record(
  params: Params,
  calib: Calibration,
  program: Program,
  *,
  contract: Contract = PAPER_CONTRACT,
  chunk: int = 1,
  run_dir: str | os.PathLike[str] | None = None,
  on_progress: OnProgress | None = None,
  check: bool = True,
  store: MutableMapping[str, Any] | None = None,
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
  params = program.prepare(params, calib)
  fits = program.recover
  blocked = tuple(sorted({model.projection_taps[p] for p in targets(model, contract)}))
  plain = tuple(sorted({name for fit in fits for name in fit.float_taps}))
  start = lambda: streams.start(model, params, calib.tokens, chunk)
  float_stream, fit_streams = start(), [start() for _ in fits]
  result: MutableMapping[str, Any] = {} if store is None else store
  result.update(streams.outer_params(params))
  steps = 2 + len(fits)

  for index in range(model.num_layers):
    name = model.layer_name(index)
    layer = params[name]

    def announce(stage: str, step: int, index: int = index) -> None:
      if on_progress:
        done = (index + step / steps) / model.num_layers
        on_progress(Progress(index, model.num_layers, stage, done))

    announce("calibration", 0)
    with clock.stage("calibration"):
      outputs = [
        execution.finish(streams.capture(model, layer, hidden, blocked, plain))
        for hidden in float_stream
      ]
      float_stream = [output for output, _ in outputs]
      taps = [kept for _, kept in outputs]
      del outputs
      _check_finite(float_stream, name)
    with clock.stage("quantization"), precision.float64_scope():
      quantized, linears = _quantize_layer(
        model, layer, program, taps, contract, name, lambda s: announce(s, 1)
      )
      jax.block_until_ready(quantized)
    layer_record: dict[str, Any] = {"name": name, "linears": linears, "recovery": {}}
    for position, fit in enumerate(fits):
      announce(f"{fit.name} recovery", 2 + position)
      with clock.stage(f"{fit.name} recovery"), precision.float64_scope():
        fit_streams[position], moments = streams.measure(
          model, fit, quantized, layer, fit_streams[position], taps
        )
        leaf, fit_record = fit.solve(moments)
        quantized = fit.install(quantized, leaf)
        layer_record["recovery"][fit.name] = fit_record
    result[name] = quantized
    record.layers.append(layer_record)
    if folder:
      with clock.stage("writing"):
        folder.write_layer(name, quantized, layer_record)
    # Before the next layer's inputs come: they are the largest thing in memory.
    del taps

  if check:
    with clock.stage("sanity gate"):
      probe = calib.tokens[:1, :SANITY_TOKENS]
      report = sanity.compare(model, params, result, probe)
    record = dataclasses.replace(record, sanity=dataclasses.asdict(report))
    report.check(program.name)
  if folder:
    folder.journal("finished", sanity=record.sanity, seconds=clock.seconds)
  return Result(result, record)


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
      finished layers and the journal go), `on_progress`, `check` (the sanity gate),
      `store` (a mapping that takes the finished layers, such as a `LayerStore`).

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
