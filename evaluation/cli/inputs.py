"""Loads the models, tokens and checkpoints that command-line options name."""

import argparse
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from mxjax import models
from mxjax.audit import plan
from mxjax.evaluation import datasets, study
from mxjax.evaluation.cli import arguments
from mxjax.layers import inference_packing
from mxjax.storage import checkpoint

CHECKPOINT = "checkpoint"
"""Name of the subfolder with a run's checkpoint."""


class Inputs(NamedTuple):
  """Inputs of a quantizing command; `tokens` is int32 `[sequences, length]`."""

  model: models.CausalLM
  tokenizer: models.Tokenizer
  subject: study.Subject
  tokens: np.ndarray


def model_name(options: argparse.Namespace) -> str:
  """Returns MODEL as given, or the name of the embedded model."""
  return options.model or arguments.DEFAULT_MODEL


def calibration(
  options: argparse.Namespace, tokenizer: datasets.TextTokenizer
) -> np.ndarray:
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
  options: argparse.Namespace, tokenizer: datasets.TextTokenizer
) -> dict[str, np.ndarray]:
  """Loads the test windows by name, int32 `[windows, window_length]` each.

  Raises:
    ValueError: Two sets have the same name.
  """
  tests: dict[str, np.ndarray] = {}
  for source in options.data.split(",") if options.data else [None]:
    name = pathlib.Path(source).stem if source else "embedded test"
    if name in tests:
      raise ValueError(
        f"test data: two sets are named {name}; rename one of the files."
      )
    tests[name] = datasets.load_tokens(
      source,
      tokenizer,
      count=options.windows,
      length=options.window_length,
      split="test",
    )
  return tests


def test_subject(
  options: argparse.Namespace,
  model: models.CausalLM,
  params: Mapping[str, Any],
  tokenizer: models.Tokenizer,
  mesh: Mesh | None,
) -> study.Subject:
  """Combines a float model with the measurements that the options request."""
  return study.Subject(
    model,
    params,
    test_windows(options, tokenizer),
    options.replicates,
    options.operator_error,
    options.agreement,
    mesh,
  )


def prepare(options: argparse.Namespace, mesh: Mesh | None = None) -> Inputs:
  """Loads model, calibration tokens and tests for `mesh`, as the options name them."""
  model, params = models.open_pretrained(options.model)
  if not stays_on_disk(options, params.config):
    params = params.load()
  tokenizer = models.load_tokenizer(options.model)
  tokens = calibration(options, tokenizer)
  subject = test_subject(options, model, params, tokenizer, mesh)
  return Inputs(model, tokenizer, subject, tokens)


def stays_on_disk(options: argparse.Namespace, config: models.ModelConfig) -> bool:
  """Tells whether to read layers on demand: by option, or because memory is short."""
  if options.on_disk is not None:
    return options.on_disk
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return plan.plan(config).bf16 > memory // 2


def checkpoint_folder(path: str | pathlib.Path) -> pathlib.Path:
  """Returns the checkpoint in a folder written by `quantize`, or the folder itself."""
  folder = pathlib.Path(path)
  inside = folder / CHECKPOINT
  return inside if inside.is_dir() else folder


def restore(
  path: str | pathlib.Path,
  mesh: Mesh | None = None,
  storage: Mapping[str, Any] | None = None,
) -> tuple[models.CausalLM, dict[str, Any], models.Tokenizer, pathlib.Path]:
  """Loads what `quantize` wrote: model, params, tokenizer and checkpoint folder.

  `path` is the run's folder or the checkpoint in it, `mesh` where to place the params,
  and `storage` the arguments of `pack_for_inference` (none: nothing is packed).
  """
  folder = checkpoint_folder(path)
  params, config = checkpoint.restore_checkpoint(folder, mesh=mesh)
  if storage:
    params = inference_packing.pack_for_inference(params, **storage)
  model = models.CausalLM(models.ModelConfig.from_dict(config))
  tokenizer = models.Tokenizer.from_folder(folder / checkpoint.TOKENIZER)
  return model, params, tokenizer, folder
