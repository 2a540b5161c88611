"""What the options of a command name: models, tokens, tests and checkpoints."""

import argparse
import os
import pathlib
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mxjax import models
from mxjax.audit import plan as plan_module
from mxjax.evaluation import datasets, study
from mxjax.storage import checkpoint

CHECKPOINT = "checkpoint"
"""Where a run keeps its checkpoint, inside its folder."""


def calibration(
  options: argparse.Namespace, tokenizer: datasets.TextTokenizer
) -> np.ndarray:
  """Calibration tokens, int32 `[sequences, length]`."""
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
  """Test windows by name, int32 `[windows, window_length]` each.

  Raises:
    ValueError: Two sets have one name.
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


def prepare(
  options: argparse.Namespace, mesh: Mesh | None = None
) -> tuple[models.CausalLM, models.Tokenizer, study.Subject, np.ndarray]:
  """Loads the model, the calibration tokens and the tests that options name.

  `mesh` is where the subject will be quantized and measured.
  """
  model, params = models.open_pretrained(options.model)
  if not stays_on_disk(options, params.config):
    params = params.load()
  tokenizer = models.load_tokenizer(options.model)
  tokens = calibration(options, tokenizer)
  subject = study.Subject(
    model,
    params,
    test_windows(options, tokenizer),
    options.replicates,
    options.operator_error,
    options.agreement,
    mesh,
  )
  return model, tokenizer, subject, tokens


def stays_on_disk(options: argparse.Namespace, config: models.ModelConfig) -> bool:
  """Whether layers are read when needed: as told, or when the memory is short."""
  if options.on_disk is not None:
    return options.on_disk
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return plan_module.plan(config).bf16 > memory // 2


def restore(
  path: str, mesh: Mesh | None = None
) -> tuple[models.CausalLM, dict[str, Any], models.Tokenizer, pathlib.Path]:
  """Model, params and tokenizer of a folder written by `quantize`, and the folder."""
  folder = pathlib.Path(path)
  if (folder / CHECKPOINT).is_dir():
    folder = folder / CHECKPOINT
  params, config = checkpoint.restore_checkpoint(folder, mesh=mesh)
  model = models.CausalLM(models.ModelConfig.from_dict(config))
  return model, params, models.Tokenizer.from_folder(folder / "tokenizer"), folder
