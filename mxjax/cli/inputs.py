"""What options name: devices, models, tokens; and what a command is about to do."""

import argparse
from collections.abc import Iterable

import numpy as np
from jax.sharding import Mesh

from mxjax import methods, models
from mxjax.audit import plan
from mxjax.cli import options as shared
from mxjax.cli import output
from mxjax.devices import mesh as meshes
from mxjax.devices import processes
from mxjax.errors import ValueRefusal
from mxjax.evaluation import datasets, estimates, subjects
from mxjax.evaluation.provenance import DEFAULT_MODEL
from mxjax.evaluation.report import numbers
from mxjax.evaluation.subjects import CalibrationSample, Evaluation, Prepared
from mxjax.intake import texts
from mxjax.models.loading import gguf


def mesh_of(options: argparse.Namespace) -> Mesh | None:
  """Joins the other processes, if any, and returns the mesh that the options name.

  Raises:
    ValueError: A process was named without `--distributed`, or a size does not fit.
  """
  joins = ("coordinator", "processes", "process")
  named = [f"--{name}" for name in joins if getattr(options, name, None) is not None]
  # First of all: joining must come before any other use of JAX.
  if options.distributed:
    processes.connect(options.coordinator, options.processes, options.process)
  elif named:
    raise ValueRefusal(
      "devices",
      expected=f"--distributed beside {', '.join(named)}",
      got="none",
      mend="add it, or leave these out",
    )
  if options.mesh is not None:
    return meshes.make(**meshes.sizes(options.mesh))
  return meshes.make() if options.distributed else None


def model_name(options: argparse.Namespace) -> str:
  """Returns MODEL as given, or the name of the embedded model."""
  return options.model or DEFAULT_MODEL


def sample(options: argparse.Namespace) -> CalibrationSample:
  """Returns the calibration sample that the options name."""
  return CalibrationSample(
    source=options.calib,
    sequences=shared.sequences(options),
    length=options.length,
    seed=options.seed,
    sampling=options.sampling,
  )


def evaluation(options: argparse.Namespace) -> Evaluation:
  """Returns the tests and measures that the options name."""
  return Evaluation(
    sources=tuple(texts.split(options.data or "")) or (None,),
    windows=options.windows,
    window_length=options.window_length,
    replicates=options.replicates,
    operator_error=options.operator_error,
    agreement=options.agreement,
  )


def check_data(options: argparse.Namespace) -> None:
  """Rejects data that is not there, before a model is looked at.

  Raises:
    FileNotFoundError: `--calib` or `--data` names neither a file nor hub data.
  """
  named = [(getattr(options, "calib", None), "calibration")]
  named += [(source, "test") for source in texts.split(options.data or "")]
  for source, split in named:
    datasets.check_source(source, datasets.place_of(source, split))


def test_windows(
  options: argparse.Namespace, source: str | None, tokenizer: models.Tokenizer
) -> np.ndarray:
  """Loads the test windows of one source, int32 `[windows, window_length]`."""
  return datasets.load_tokens(
    source,
    tokenizer,
    count=options.windows,
    length=options.window_length,
    split="test",
  )


def prepare(
  options: argparse.Namespace, names: Iterable[str] = (), mesh: Mesh | None = None
) -> Prepared:
  """Loads what a quantizing command needs, for `mesh`, as the options name it.

  First it says what the methods `names` are about to take.

  Raises:
    FileNotFoundError: The texts or the model are not there; texts are looked for first.
  """
  check_data(options)
  # One process speaks for all.
  tell = output.teller(options.log if processes.is_leader() else "none")
  tell(f"loading {model_name(options)}")
  output.stage(f"loading {model_name(options)}")
  with gguf.headers_kept():
    config = models.load_config(options.model, dtype=options.dtype)
    shared.fit_lengths(options, config.max_positions)
    on_disk = subjects.stays_on_disk(config, options.on_disk)
    for line in _announcement(options, config, names, on_disk=on_disk):
      tell(line)
    return subjects.prepare(
      options.model,
      sample(options),
      evaluation(options),
      dtype=options.dtype,
      on_disk=on_disk,
      mesh=mesh,
    )


def _announcement(
  options: argparse.Namespace,
  config: models.ModelConfig,
  names: Iterable[str],
  *,
  on_disk: bool,
) -> list[str]:
  """Returns sentences on settings, defaults included, and what they will take."""
  names = tuple(names)
  mesh = getattr(options, "mesh", None)
  axes = meshes.sizes(mesh) if mesh else {}
  planned = plan.plan(
    config,
    sequences=shared.sequences(options),
    length=options.length,
    on_disk=on_disk,
    data=axes.get("data", 1),
    model=axes.get("model", 1),
  )
  text = lambda data: data or "embedded text"
  memory = numbers.size(planned.peak)
  # Codes and maps that tuning learns take more than all the rest of a run.
  learned = [plan.learned_bytes(planned, methods.get(name)) for name in names]
  sizes = {
    of: max((one[of] for one in learned), default=0) for of in ("memory", "disk")
  }
  besides = (
    f", and {numbers.size(sizes['memory'])} more while tuning learns, which takes "
    f"{numbers.size(sizes['disk'])} of a run folder"
    if sizes["memory"]
    else ""
  )
  is_without_data = names and not any(methods.get(name).reads_data for name in names)
  lines = [
    f"method: {', '.join(names)}" if names else "",
    f"arithmetic: {config.dtype}",
    f"calibration: {shared.sequences(options)} x {options.length:,} tokens of "
    f"{text(options.calib)}, "
    f"seed {options.seed}",
    f"{', '.join(names)} stores nothing that depends on calibration; the report's "
    "errors of linears and the sanity gate read the first sequence"
    if is_without_data
    else "",
    f"test: {options.windows} x {options.window_length:,} tokens of "
    f"{text(options.data)}, {options.replicates} replicate(s)",
    f"expected memory: about {memory}, layers {'on disk' if on_disk else 'in memory'}"
    f"{besides}",
  ]
  tests = len(texts.split(options.data or "")) or 1
  tokens = tests * options.windows * options.window_length * options.replicates
  # RTN is built as well where the report shows it.
  beside = ("rtn",) if getattr(options, "baseline", False) else ()
  timed = dict.fromkeys((*names, *beside)) if names else ()
  compared = options.windows * options.window_length if options.agreement else 0
  seconds = None
  if timed:
    seconds = estimates.expected_seconds(
      planned, timed, mesh, tokens, compared_tokens=compared
    )
  if seconds:
    lines.append(f"expected time: about {numbers.about(seconds)}")
  return [line for line in lines if line]
