"""Loads the devices, models, tokens and checkpoints that options name."""

import argparse
from collections.abc import Iterable

import numpy as np
from jax.sharding import Mesh

from mxjax import models
from mxjax.devices import mesh as meshes
from mxjax.devices import processes
from mxjax.evaluation import datasets, subjects
from mxjax.evaluation.cli import arguments, progress, settings
from mxjax.evaluation.subjects import CalibrationSample, Evaluation, Prepared
from mxjax.evaluation.subjects import checkpoint_folder as checkpoint_folder
from mxjax.evaluation.subjects import restore as restore


def mesh_of(options: argparse.Namespace) -> Mesh | None:
  """Joins the other processes, if any, and returns the mesh that the options name.

  Raises:
    ValueError: A process was named without `--distributed`, or a size does not fit.
  """
  joins = ("coordinator", "processes", "process")
  named = [f"--{name}" for name in joins if getattr(options, name, None) is not None]
  if options.distributed:
    processes.connect(options.coordinator, options.processes, options.process)
  elif named:
    raise ValueError(
      f"devices: expected --distributed beside {', '.join(named)}, got none; add it, "
      "or leave these out."
    )
  if options.mesh is not None:
    return meshes.make(**meshes.sizes(options.mesh))
  return meshes.make() if options.distributed else None


def model_name(options: argparse.Namespace) -> str:
  """Returns MODEL as given, or the name of the embedded model."""
  return options.model or arguments.DEFAULT_MODEL


def sample(options: argparse.Namespace) -> CalibrationSample:
  """Returns the calibration sample that the options name."""
  return CalibrationSample(
    source=options.calib,
    sequences=options.sequences,
    length=options.length,
    seed=options.seed,
    sampling=options.sampling,
  )


def evaluation(options: argparse.Namespace) -> Evaluation:
  """Returns the tests and measures that the options name."""
  return Evaluation(
    sources=tuple(arguments.split(options.data or "")) or (None,),
    windows=options.windows,
    window_length=options.window_length,
    replicates=options.replicates,
    operator_error=options.operator_error,
    agreement=options.agreement,
  )


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
  """
  tell = progress.teller(options.log if processes.is_leader() else "none")
  tell(f"loading {model_name(options)}")
  config = models.load_config(options.model, dtype=options.dtype)
  on_disk = subjects.stays_on_disk(config, options.on_disk)
  for line in settings.announcement(options, config, names, on_disk=on_disk):
    tell(line)
  return subjects.prepare(
    options.model,
    sample(options),
    evaluation(options),
    dtype=options.dtype,
    on_disk=on_disk,
    mesh=mesh,
  )
