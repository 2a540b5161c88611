"""`quantize`: Algorithm 1, in its order, one decoder layer resident at a time.

For each layer the float model runs on the calibration stream and its linears' inputs
are captured; every target linear is shaped and realized from them; the finished layer
is journaled. Recovery fits then run on their own streams of hidden states: fit j is
measured on the model that has everything before it installed and nothing after, the
conditional order of Eq. conditional-stage, yet all of it needs one pass over layers.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration, Params
from mxjax.calibration.float_stream import FloatStream, inputs_of
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.calibration.store import CalibrationStore
from mxjax.devices import execution, processes
from mxjax.devices import mesh as meshes
from mxjax.methods.program import Prepared, Program
from mxjax.numerics import precision
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.running import layer_quantization, run_identity, sanity
from mxjax.running.layer_quantization import check_params, targets
from mxjax.running.records import QuantizationRecord, StageClock
from mxjax.storage import run_folder

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


class Stopped(Exception):
  """A run that was asked to stop did, after a finished layer.

  Attributes:
    layer: How many layers are finished.
    layers: Layers in all.
  """

  layer: int
  layers: int

  def __init__(self, layer: int, layers: int) -> None:
    """Says where."""
    super().__init__(f"stopped after layer {layer} of {layers}")
    self.layer, self.layers = layer, layers


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


def _prepare(
  folder: run_folder.RunFolder | None,
  program: Program,
  params: Params,
  calib: Calibration,
  contract: Contract,
) -> Prepared:
  """Runs `Program.prepare`, or reads what it made before the run was killed."""
  if folder and (found := folder.read_prepared()):
    return Prepared(
      params if found.params is None else found.params, found.learned, found.record
    )
  made = program.prepare(params, calib, contract)
  rewritten = made.params is not params
  if folder and (rewritten or made.learned):
    folder.write_prepared(
      made.params if rewritten else None, made.learned, dict(made.record)
    )
  return made


class _Run:
  """A pass over the layers: its streams, and what has been finished."""

  def __init__(
    self,
    params: Params,
    calib: Calibration,
    program: Program,
    contract: Contract,
    chunk: int,
    folder: run_folder.RunFolder | None,
    store: str | os.PathLike[str] | None,
    mesh: Mesh | None,
    probe: bool,
  ) -> None:
    """Prepares; no layer runs yet."""
    self.probe = probe
    self.model, self.calib, self.program = calib.model, calib, program
    self.contract, self.folder, self.mesh = contract, folder, mesh
    self.chunk = meshes.check_sequences(mesh, len(calib.tokens), chunk)
    resumed = []
    if folder:
      identity = run_identity.identity(params, calib, program, contract)
      processes.check_same("model, data and options", identity, mesh)
      resumed = folder.begin(identity, run_identity.environment(mesh))
    self.clock = StageClock()
    with self.clock.stage("preparation"):
      prepared = _prepare(folder, program, params, calib, contract)
    self.params, self.learned = prepared.params, prepared.learned
    self.record = QuantizationRecord(
      program=dict(program.describe()),
      contract_hash=contract.hash,
      calibration={
        "fingerprint": calib.fingerprint,
        "shape": list(calib.tokens.shape),
      },
      layers=[],
      clock=self.clock,
      preparation=dict(prepared.record),
      resumed=resumed,
      mesh=meshes.describe(mesh),
    )
    taps = self.model.projection_taps
    self.blocked = tuple(sorted({taps[p] for p in targets(self.model, contract)}))
    self.float_stream = FloatStream(
      self.params,
      calib,
      chunk=self.chunk,
      blocked=self.blocked,
      plain=tuple(sorted({name for fit in program.recover for name in fit.float_taps})),
      store=CalibrationStore(store, self.params, calib) if store is not None else None,
      mesh=mesh,
    )
    self.results_on: Mesh | None = None
    self.fit_streams: list[streams.Stream] = []
    self.upstream: streams.Stream | None = None

  def restore(self, result: MutableMapping[str, Any]) -> None:
    """Puts the finished layers into `result`, and the streams where they stood."""
    outer = streams.outer_params(self.params)
    result.update(meshes.shard_rows(outer, self.results_on))
    done = self.folder.finished if self.folder else []
    count = len(done)
    for event in done:
      assert self.folder
      layer = self.folder.read_layer(event)
      result[event["name"]] = meshes.shard_rows(layer, self.results_on)
      self.record.layers.append(event["record"])
    if done:
      self.clock.resume_from(**done[-1]["clock"])
    if count == self.model.num_layers:
      return
    if self.folder and done:
      place = lambda part: streams.spread(part, self.mesh)
      held = self.folder.read_streams(self.chunk, place)
      self.float_stream.resume_from(count, held["float"])
      self.fit_streams = [held[name] for name in self._fit_names()]
      self.upstream = held.get("upstream")
      return
    start = lambda: streams.start(
      self.model, self.params, self.calib.tokens, self.chunk, self.mesh
    )
    self.fit_streams = [start() for _ in self.program.recover]
    self.upstream = start() if self.program.upstream == "quantized" else None

  def _fit_names(self) -> list[str]:
    fits = enumerate(self.program.recover)
    return [f"recovery{position}-{fit.name}" for position, fit in fits]

  def _streams(self) -> run_folder.Streams:
    """Everything that enters the next layer, by the name it has on disk."""
    held = {"float": self.float_stream.leaving}
    held |= dict(zip(self._fit_names(), self.fit_streams, strict=True))
    if self.upstream is not None:
      held["upstream"] = self.upstream
    if self.mesh is None:
      return held
    # Between processes nobody has all of a stream: every process fetches it.
    fetch = lambda part: np.asarray(meshes.to_primary_device(part, self.mesh))
    return {name: [fetch(part) for part in stream] for name, stream in held.items()}

  def layer(
    self,
    index: int,
    result: MutableMapping[str, Any],
    on_progress: OnProgress | None,
  ) -> None:
    """Quantizes one layer, fits its recovery, advances every stream."""
    model, program = self.model, self.program
    name = model.layer_name(index)
    float_layer = self.params[name]
    largest = 4 * max(leaf.size for leaf in jax.tree.leaves(float_layer))
    steps = 2 + len(program.recover)

    def announce(label: str, step: int = 1) -> None:
      if on_progress:
        done = (index + step / steps) / model.num_layers
        on_progress(Progress(index, model.num_layers, label, done))

    @contextlib.contextmanager
    def stage(label: str, step: int) -> Iterator[None]:
      announce(label, step)
      execution.trim_malloc(largest)
      with self.clock.stage(label):
        yield

    with stage("calibration", 0):
      views = self._views(index, float_layer)
    with stage("quantization", 1), precision.float64_scope():
      quantized, linears = layer_quantization.quantize_layer(
        *(model, float_layer, program, views, self.learned, self.contract, name),
        announce,
        probe=self.probe,
      )
      jax.block_until_ready(quantized)
      processes.check_same(f"the codes of {name}", quantized, self.mesh)
    # Inputs and Hessians of this layer are the largest arrays: recovery needs neither.
    del views
    self.float_stream.release_inputs()
    if self.upstream is not None:
      with stage("calibration", 1):
        self.upstream = streams.advance(model, quantized, self.upstream, self.mesh)
    recovery: dict[str, Any] = {}
    if program.recover:
      quantized, recovery = layer_quantization.recover(
        model,
        program,
        (float_layer, quantized),
        self.fit_streams,
        self.float_stream.taps,
        stage,
        self.mesh,
      )
    is_last = index + 1 == model.num_layers
    if not is_last:
      self.float_stream.leave()
    layer_record = {"name": name, "linears": linears, "recovery": recovery}
    if self.folder:
      with self.clock.stage("writing"):
        self.folder.write_layer(
          name,
          quantized,
          layer_record,
          streams={} if is_last else self._streams(),
          clock=dataclasses.asdict(self.clock),
        )
    result[name] = meshes.shard_rows(quantized, self.results_on)
    self.record.layers.append(layer_record)

  def _views(self, index: int, layer: Params) -> Mapping[str, LinearInputs]:
    """The inputs that the hooks see, by tap."""
    self.float_stream.enter(index)
    if self.upstream is None:
      return layer_quantization.views(
        self.float_stream, self.model, layer, self.contract
      )
    # The float layer on what the quantized layers pass on.
    layer = meshes.shard_rows(layer, self.mesh)
    capture = lambda part: streams.capture(
      self.model, layer, part, self.blocked, (), self.mesh
    )
    seen = [
      execution.block_on_cpu(capture(part))[1] for part in streams.copy(self.upstream)
    ]
    return inputs_of(seen, self.contract, self.mesh)

  def finish(self, result: MutableMapping[str, Any], *, check: bool) -> Result:
    """The sanity gate, and the end of the journal."""
    record, folder = self.record, self.folder
    ended = folder.event("finished") if folder else None
    if ended and ended["sanity"]:
      record = dataclasses.replace(record, sanity=ended["sanity"])
    elif check:
      with self.clock.stage("sanity gate"):
        probe = self.calib.tokens[:1, :SANITY_TOKENS]
        quantized = meshes.on_primary_device(result, self.mesh)
        report = sanity.compare(self.model, self.params, quantized, probe)
      record = dataclasses.replace(record, sanity=dataclasses.asdict(report))
      report.check(self.program.name)
    if folder and not ended:
      folder.journal("finished", sanity=record.sanity, seconds=self.clock.seconds)
    return Result(result, record, self.params)


def quantize_with_record(
  params: Params,
  calib: Calibration,
  program: Program,
  *,
  contract: Contract = PAPER_CONTRACT,
  chunk: int = 1,
  run_dir: str | os.PathLike[str] | run_folder.RunFolder | None = None,
  resume: bool = False,
  store: str | os.PathLike[str] | None = None,
  on_progress: OnProgress | None = None,
  stop: Callable[[], bool] | None = None,
  check: bool = True,
  probe: bool = True,
  into: MutableMapping[str, Any] | None = None,
  mesh: Mesh | None = None,
) -> Result:
  """Like `mxjax.quantize`, with what was measured on the way; see there."""
  mesh = meshes.normalize(mesh)
  if mesh is not None and store is not None:
    raise ValueError(
      "quantize: expected a store or a mesh, got both; what a store holds was computed "
      "by one device, so leave one of them out."
    )
  params = meshes.on_primary_device(params, mesh)
  check_params(calib.model, params, contract)
  with contextlib.ExitStack() as stack:
    if run_dir is None or isinstance(run_dir, run_folder.RunFolder):
      folder = run_dir
    else:
      folder = stack.enter_context(run_folder.RunFolder(run_dir, resume=resume))
    run = _Run(params, calib, program, contract, chunk, folder, store, mesh, probe)
    # A mapping of the caller's takes layers as they are; else they go on the mesh.
    run.results_on = mesh if into is None else None
    result: MutableMapping[str, Any] = {} if into is None else into
    run.restore(result)
    count = calib.model.num_layers
    for index in range(len(run.record.layers), count):
      run.layer(index, result, on_progress)
      if stop and processes.any_of(stop(), mesh):
        raise Stopped(index + 1, count)
    return run.finish(result, check=check)


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
      finished layers and the journal go), `resume` (go on with the run that is there,
      to the same bits; what is unfinished is done again), `store` (where what runs on
      the same model and tokens share is kept; the result does not depend on it),
      `on_progress`, `stop` (asked after every layer; where it says yes, `Stopped` is
      raised), `check` (the sanity gate), `probe` (measures each linear on a few tokens
      for the record), `into` (a mapping that takes the finished layers, such as a
      `LayerStore`), `mesh` (a `jax.sharding.Mesh` with the axes
      `data` and `model`, whose devices share sequences and output rows; the codes are
      those of one device, see `docs/guides/devices.md`).

  Returns:
    The same tree with `QuantizedLinear` leaves in place of target weights, for the
    same `model.apply`.

  Raises:
    ValueError: A width, a weight or a Hessian that cannot be quantized, by layer.
    FloatingPointError: Activations that are not finite, or a collapsed model.
    FileExistsError: `run_dir` is not empty.
    BlockingIOError: Another process is at work in `run_dir`.
    Stopped: `stop` said so.
  """
  from mxjax import methods

  return quantize_with_record(params, calib, methods.get(method), **options).params
