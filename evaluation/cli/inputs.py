"""Loads the devices, models, tokens and checkpoints that options name."""

import argparse
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mxjax import models
from mxjax.audit import plan
from mxjax.devices import mesh as meshes
from mxjax.devices import processes
from mxjax.evaluation import datasets, study
from mxjax.evaluation.cli import arguments, progress, settings
from mxjax.layers import inference_packing
from mxjax.storage import checkpoint

CHECKPOINT = checkpoint.CHECKPOINT
"""Name of the subfolder with a run's checkpoint."""


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


def calibration(options: argparse.Namespace, tokenizer: models.Tokenizer) -> np.ndarray:
  """Loads the calibration tokens, int32 `[sequences, length]`."""
  return datasets.load_tokens(
    options.calib,
    tokenizer,
    count=options.sequences,
    length=options.length,
    split="calibration",
    seed=options.seed,
    sampling=options.sampling,
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


def test_subject(
  options: argparse.Namespace,
  model: models.CausalLM,
  params: Mapping[str, Any],
  tokenizer: models.Tokenizer,
  mesh: Mesh | None,
) -> study.Subject:
  """Combines a float model with the tests and measures that the options request.

  Raises:
    ValueError: Two sets of test windows have the same name.
  """
  tests: dict[str, np.ndarray] = {}
  for source in arguments.split(options.data or "") or [None]:
    name = pathlib.Path(source).stem if source else "embedded test"
    if name in tests:
      raise ValueError(
        f"test data: two sets are named {name}; rename one of the files."
      )
    tests[name] = test_windows(options, source, tokenizer)
  measures = options.replicates, options.operator_error, options.agreement
  return study.Subject(model, params, tests, *measures, mesh)


def prepare(
  options: argparse.Namespace, names: Iterable[str] = (), mesh: Mesh | None = None
) -> tuple[models.Tokenizer, study.Subject, np.ndarray]:
  """Loads what a quantizing command needs, for `mesh`, as the options name it.

  First it says what the methods `names` are about to take. Returns the tokenizer, the
  model with its tests, and the calibration tokens.
  """
  tell = progress.teller(options.log if processes.is_leader() else "none")
  tell(f"loading {model_name(options)}")
  model, params = models.open_pretrained(options.model, dtype=options.dtype)
  on_disk = stays_on_disk(options, params.config)
  for line in settings.announcement(options, params.config, names, on_disk=on_disk):
    tell(line)
  if not on_disk:
    params = params.load()
  tokenizer = models.load_tokenizer(options.model)
  tokens = calibration(options, tokenizer)
  subject = test_subject(options, model, params, tokenizer, mesh)
  return tokenizer, subject, tokens


def stays_on_disk(options: argparse.Namespace, config: models.ModelConfig) -> bool:
  """Tells whether to read layers on demand: by option, or because memory is short."""
  if options.on_disk is not None:
    return options.on_disk
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return plan.plan(config).bf16 > memory // 2


def checkpoint_folder(path: str | pathlib.Path) -> pathlib.Path:
  """Returns the checkpoint in a folder written by `quantize`, or the folder itself."""
  inside = pathlib.Path(path) / CHECKPOINT
  return inside if inside.is_dir() else pathlib.Path(path)


def is_checkpoint(source: str | None) -> bool:
  """Tells whether `source` is a folder written by `quantize`, or its checkpoint."""
  return bool(source) and ((checkpoint_folder(source) / checkpoint.MANIFEST).is_file())


def restore(
  source: str | None,
  mesh: Mesh | None = None,
  storage: Mapping[str, Any] | None = None,
  dtype: str | None = None,
) -> tuple[models.CausalLM, dict[str, Any], models.Tokenizer]:
  """Loads the model, params and tokenizer that `quantize` wrote, or any float model.

  `source` is the run's folder, the checkpoint in it, or what `models.from_pretrained`
  takes; `mesh` is where to place a checkpoint's params, and `storage` the arguments of
  `pack_for_inference` (none: nothing is packed). `dtype` is the compute dtype of a
  float model; without it, `models.default_dtype` decides.

  Raises:
    ValueError: A checkpoint computes in another dtype.
  """
  if is_checkpoint(source):
    folder = checkpoint_folder(str(source))
    model, params = checkpoint.load(folder, mesh=mesh)
    if dtype not in (None, model.config.dtype):
      raise ValueError(
        f"{folder}: expected --dtype {model.config.dtype}, that of its build, got "
        f"{dtype}; leave the option out, or quantize again with --dtype {dtype}."
      )
    tokenizer = models.Tokenizer.from_folder(folder / checkpoint.TOKENIZER)
  else:
    model, params = models.from_pretrained(source, dtype=dtype)
    tokenizer = models.load_tokenizer(source)
  if storage:
    params = inference_packing.pack_for_inference(params, **storage)
  return model, params, tokenizer
