"""The command line: `mxjax quantize | evaluate | compare | generate | demo`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mxjax.evaluation import commands

Extend = Callable[[Any], None]
"""Adds commands to the parser; each sets `run`, a function of its options."""
MODEL_HELP = (
  "a Hugging Face folder, a .gguf file or a hub id; the embedded SmolLM2-135M when "
  "omitted"
)
DATA_HELP = (
  "a .npy of token ids [n, length] used exactly, a text file, a .jsonl with a text in "
  "each line, c4 or wikitext2 (from the hub); the embedded text when omitted"
)


def _add_data(parser: argparse.ArgumentParser, *, calibrates: bool) -> None:
  if calibrates:
    group = parser.add_argument_group("calibration")
    group.add_argument("--calib", metavar="DATA", help=DATA_HELP)
    group.add_argument("--sequences", type=int, default=128, metavar="N")
    group.add_argument("--length", type=int, default=2048, metavar="T")
    group.add_argument("--seed", type=int, default=0, metavar="S")
  group = parser.add_argument_group("evaluation")
  group.add_argument("--data", metavar="DATA", help=DATA_HELP)
  group.add_argument("--windows", type=int, default=8, metavar="N")
  group.add_argument("--window-length", type=int, default=2048, metavar="T")
  group.add_argument(
    "--replicates",
    type=int,
    default=1,
    metavar="R",
    help="runs with the embedding perturbed by 1e-6: strict-A4 perplexity of small "
    "models is noise at the 1 %% level, and this shows how much",
  )
  group.add_argument(
    "--operator-error",
    action="store_true",
    help="also measure every linear on the float model's inputs, which separates "
    "methods that perplexity cannot",
  )
  parser.add_argument("--json", action="store_true", help="print JSON for machines")


def build_parser(extend: Extend | None = None) -> argparse.ArgumentParser:
  """The parser of all commands; `extend` adds those of a higher floor."""
  parser = argparse.ArgumentParser(
    prog="mxjax",
    description="Strict MXFP4 W4A4 post-training quantization of decoder LLMs in JAX.",
    epilog="Example: mxjax quantize --sequences 8 --out runs/smollm2; "
    "mxjax generate runs/smollm2 --prompt 'The moon is'",
  )
  commands_ = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

  quantize = commands_.add_parser(
    "quantize",
    help="quantize a model; writes a checkpoint, a journal and report.html",
    description="Quantizes every decoder linear of MODEL and writes OUT/checkpoint "
    "(Orbax), OUT/run (journal and finished layers), OUT/result.json and "
    "OUT/report.html.",
  )
  quantize.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
  quantize.add_argument(
    "--method", default="hires", help="rtn, gptq, brq or hires (default: hires)"
  )
  quantize.add_argument("--out", required=True, metavar="DIR", help="a new folder")
  quantize.add_argument(
    "--chunk",
    type=int,
    default=1,
    help="sequences in a device call; bits do not change",
  )
  _add_data(quantize, calibrates=True)

  evaluate = commands_.add_parser(
    "evaluate",
    help="measure a checkpoint",
    description="Measures a folder written by `quantize`.",
  )
  evaluate.add_argument("checkpoint", metavar="DIR")
  evaluate.add_argument(
    "--model", metavar="MODEL", help="the float model, for --operator-error"
  )
  _add_data(evaluate, calibrates=False)

  compare = commands_.add_parser(
    "compare",
    help="run several methods on the same calibration tokens",
    description="Quantizes MODEL by each method and ends in one table and one report.",
  )
  compare.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
  compare.add_argument("--methods", default="rtn,gptq,brq,hires")
  compare.add_argument("--out", required=True, metavar="DIR", help="a new folder")
  _add_data(compare, calibrates=True)

  generate = commands_.add_parser("generate", help="continue a prompt")
  generate.add_argument("checkpoint", metavar="DIR")
  generate.add_argument("--prompt", required=True)
  generate.add_argument("--max-new-tokens", type=int, default=32)
  generate.add_argument("--temperature", type=float, default=0.0)
  generate.add_argument("--top-k", type=int)
  generate.add_argument("--top-p", type=float)
  generate.add_argument("--seed", type=int, default=0)
  generate.add_argument("--json", action="store_true")

  demo = commands_.add_parser(
    "demo",
    help="the embedded model and text: RTN, GPTQ, Hadamard + GPTQ and HiRes",
    description="Compares four methods on the embedded SmolLM2-135M with embedded "
    "text, writes a report, and lets the HiRes model speak.",
  )
  demo.add_argument("--out", default="runs/demo", metavar="DIR", help="a new folder")
  if extend:
    extend(commands_)
  return parser


def main(arguments: Sequence[str] | None = None, extend: Extend | None = None) -> int:
  """Runs a command; errors a user can mend become one line and exit code 2."""
  options = build_parser(extend).parse_args(arguments)
  try:
    run = getattr(options, "run", None) or getattr(commands, options.command)
    run(options)
  except (
    ValueError,
    TypeError,
    OSError,
    NotImplementedError,
    FloatingPointError,
  ) as error:
    print(f"mxjax {options.command}: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
