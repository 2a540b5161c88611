"""`mxjax export`: writes a quantized model in the format of another program."""

import argparse
import json
import pathlib
from typing import Any

from mxjax.evaluation.cli import arguments

FORMATS = ("compressed-tensors", "dequant", "safetensors")
FEATURES = (
  *("maps", "refinement", "clipping", "value-recovery", "mlp-recovery", "gains"),
  *("rules", "recovery"),
)
"""`FEATURES` and `GROUPS` of `storage.export.features`, which imports JAX; a test
compares."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "export",
    help="write a quantized model for other programs",
    description="Writes a folder of `quantize` in another format. What the format "
    "cannot hold is refused by name; --drop leaves it out, and then the model is "
    "measured again before it is written, with the result in "
    "OUT/mxjax_export.json.",
  )
  arguments.add(parser, "checkpoint")
  add = parser.add_argument
  add(
    "--format",
    required=True,
    choices=FORMATS,
    help="compressed-tensors for vLLM and its like, where the activation rule is the "
    "runtime's; dequant, a plain folder of effective weights whose activations are not "
    "rounded; safetensors, all of our own state",
  )
  arguments.add(parser, "--out")
  add("--drop", metavar="NAMES", help=f"comma list of {', '.join(FEATURES)}")
  add(
    "--transforms",
    action="store_true",
    help="keep Hadamards without signs as transform_config; a runtime that ignores it "
    "computes nonsense",
  )
  add(
    "--model",
    metavar="FOLDER",
    help="the folder of the float model: its config.json, generation config and "
    "tokenizer files are taken",
  )
  add(
    "--dtype",
    default="bfloat16",
    choices=("bfloat16", "float32"),
    help="of the linears of dequant",
  )
  add("--shard-gb", type=float, default=5.0, metavar="GB", help="largest file")
  group = parser.add_argument_group("measuring")
  arguments.add(group, "--data", help="the embedded text when omitted")
  told = "0 measures nothing, where nothing is dropped; default: 8"
  arguments.add(group, "--windows", help=told)
  arguments.add(group, "--window-length")
  arguments.add(parser, "--json")
  return parser


def run(options: argparse.Namespace) -> None:
  """Checks, measures and writes the model, and prints what was written."""
  from mxjax import models
  from mxjax.evaluation import exporting
  from mxjax.evaluation.cli import console, inputs
  from mxjax.storage import atomic_io, checkpoint
  from mxjax.storage.export import features

  out = atomic_io.check_output(options.out)
  target = exporting.Target(
    format=options.format,
    dropped=features.parse(options.drop),
    transforms=options.transforms,
    dtype=options.dtype,
    shard_bytes=int(options.shard_gb * 1e9),
  )
  folder = inputs.checkpoint_folder(options.checkpoint)
  source = exporting.open_checkpoint(folder)
  # Features that the format cannot hold are rejected before anything is measured.
  changed = exporting.check(target, source)
  record: dict[str, Any] = {"dropped": list(target.dropped)}
  if options.windows:
    tokenizer = models.Tokenizer.from_folder(folder / checkpoint.TOKENIZER)
    tokens = inputs.test_windows(options, options.data, tokenizer)
    measured = exporting.measure(target, source, changed, tokens)
    record["evaluation"] = {"data": options.data or "embedded test", **measured}
  elif target.dropped:
    raise ValueError(
      "export: a model that lost something is measured before it is written, got "
      "--windows 0; give it windows to be measured on."
    )
  float_folder = pathlib.Path(options.model) if options.model else None
  manifest = exporting.write(out, target, source, changed, record, folder, float_folder)
  if options.json:
    print(json.dumps(manifest))
    return
  for name, value in record.get("evaluation", {}).get("perplexity", {}).items():
    console.say(f"perplexity, {name}: {value:.4f}")
  console.say(f"activations: {manifest['activations']}")
  console.say(f"wrote {options.format}: {out}")
