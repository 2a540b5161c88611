"""`mxjax import`: converts a compressed-tensors model to a checkpoint."""

import argparse
import dataclasses
import pathlib
from typing import Any

from mxjax.cli import options as shared


def add_parser(commands: Any) -> None:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "import",
    help="read a compressed-tensors MXFP4 model, to evaluate it here",
    description="Reads a compressed-tensors folder (mxfp4-pack-quantized) and writes "
    "OUT/checkpoint, which `mxjax evaluate` takes. Codes and scales stay as they are.",
  )
  parser.add_argument("folder", metavar="FOLDER", help="the compressed-tensors model")
  shared.add(parser, "--out", "--dtype")
  parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
  """Writes the checkpoint."""
  from mxjax import models
  from mxjax.cli import output
  from mxjax.evaluation import builds
  from mxjax.numerics.contract import PAPER_CONTRACT
  from mxjax.storage import atomic_io, export
  from mxjax.storage.export import compressed_tensors

  out = atomic_io.check_output(options.out)
  folder = pathlib.Path(options.folder)
  model = export.read_compressed_tensors(folder)
  activations = "mxfp4" if model.rounds_inputs else "float"
  dtype = options.dtype or models.default_dtype(str(folder))
  builds.save_checkpoint(
    out,
    model.params,
    dataclasses.replace(model.config, dtype=dtype),
    models.load_tokenizer(str(folder)),
    contract=dataclasses.replace(PAPER_CONTRACT, activations=activations),
    program={"name": f"imported from {compressed_tensors.METHOD}"},
    extra={"rounds_inputs": model.rounds_inputs},
  )
  rounds = "rounded by our rule" if model.rounds_inputs else "not rounded (W4A16)"
  output.say(f"activations: {rounds}; arithmetic: {dtype}")
  output.say(f"wrote checkpoint: {out}")
