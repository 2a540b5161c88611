"""`mxjax export`: writes a quantized model in the format of another program."""

import argparse
import pathlib
from typing import Any

from mxjax import methods
from mxjax.evaluation.cli import arguments

FORMATS = ("compressed-tensors", "dequant", "safetensors", "transformers")
FEATURES = (
  *("maps", "refinement", "clipping", "value-recovery", "mlp-recovery", "recovery"),
)
"""`FEATURES` and `GROUPS` of `storage.export.features`, which imports JAX; a test
compares."""


COMPRESSED = ("rtn", "gptq", "spinquant", "focus")
"""Methods whose models compressed-tensors holds as they are."""
TRANSFORMED = ("mr-gptq", "brq")
"""Methods whose models it holds with --transforms."""


def formats(method: str) -> tuple[str, ...]:
  """Returns the formats that can hold a model of a method, given with its options."""
  name, tuned = methods.base_name(method), "+tune" in method
  # Both add to a linear what compressed-tensors has no place for.
  is_recovered = method.startswith(f"{name}+r") or "recover=" in method
  is_plain = name in (*COMPRESSED, *TRANSFORMED) and not (tuned or is_recovered)
  return FORMATS if is_plain else FORMATS[1:]


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
    f"runtime's, for {', '.join(COMPRESSED)}, and {' and '.join(TRANSFORMED)} with "
    "--transforms; dequant, a plain folder of effective weights whose activations are "
    "not rounded; safetensors, all of our own state; transformers, everything, and "
    "torch code that runs the strict model, slowly",
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
  told = "0 measures nothing, where nothing is dropped"
  arguments.add(group, "--windows", type=arguments.whole(0), help=told)
  arguments.add(group, "--window-length")
  arguments.add(parser, "--json")
  parser.set_defaults(unset={"dtype": parser.get_default("dtype")})
  return parser


def run(options: argparse.Namespace) -> None:
  """Writes the model in the format, after measuring what it lost.

  Raises:
    FileNotFoundError: The float model's folder does not exist.
    ValueError: The largest file has no size, or options would be ignored.
  """
  if options.model is not None and not pathlib.Path(options.model).is_dir():
    raise FileNotFoundError(
      f"export: expected --model with the folder of the float model, got "
      f"{options.model}, which is none; correct the path."
    )
  if not 0 < options.shard_gb < float("inf"):
    raise ValueError(
      f"export: expected --shard-gb above 0, got {options.shard_gb}; correct it."
    )
  if options.format != "dequant" and arguments.given(options, "dtype"):
    raise ValueError(
      f"export: expected --dtype beside --format dequant, got {options.format}, which "
      "writes what the checkpoint has; leave it out."
    )
  from mxjax.evaluation.cli import exporting

  exporting.run(options)
