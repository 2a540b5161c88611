"""`mxjax demo`: compares four methods on the embedded model and text."""

import argparse
import pathlib
from typing import Any

METHODS = ("rtn", "gptq", "brq", "hires")
SETTINGS: dict[str, Any] = dict(
  **dict(model=None, calib=None, data=None, sampling=None, seed=0, on_disk=False),
  **dict(sequences=8, length=512, windows=8, window_length=512, replicates=1),
  **dict(operator_error=True, agreement=False, dtype=None),
)
"""What options of `compare` would say."""
PROMPT = "The history of the steam engine begins"


def add_parser(commands: Any) -> argparse.ArgumentParser:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "demo",
    help="the embedded model and text: RTN, GPTQ, Hadamard + GPTQ and HiRes",
    description="Compares four methods on the embedded SmolLM2-135M with embedded "
    "text, writes a report, and lets the HiRes model speak.",
  )
  parser.add_argument("--out", default="runs/demo", metavar="DIR", help="a new folder")
  parser.set_defaults(**SETTINGS)
  return parser


def run(options: argparse.Namespace) -> None:
  """Compares methods, writes the report and a checkpoint, and generates text."""
  from mxjax.evaluation.cli import console, inputs, outputs, progress, speaking
  from mxjax.evaluation.provenance import made_by
  from mxjax.evaluation.tables import comparing
  from mxjax.models.streaming import PrefixCache

  folder = outputs.fresh_folder(pathlib.Path(options.out))
  prepared = inputs.prepare(options, METHODS)
  facts = {"made_by": made_by(options.arguments)}
  with progress.progress("bars") as begin:
    rows, quantized = comparing.compare(
      prepared.subject, prepared.tokens, METHODS, on_method=begin, facts=facts
    )
  folder.mkdir(parents=True, exist_ok=True)
  if quantized is not None:
    row = [row for row in rows if "error" not in row][-1]
    facts = {key: row["record"][key] for key in ("calibration", "program")}
    config, tokenizer = prepared.subject.model.config, prepared.tokenizer
    outputs.save_checkpoint(folder, quantized, config, tokenizer, **facts)
  outputs.finish(folder, rows, "mxjax demo:", "SmolLM2-135M")
  outputs.print_rows(rows, folder)
  if quantized is not None:
    cache = PrefixCache(prepared.subject.model, quantized, 256)
    ids = prepared.tokenizer.encode(PROMPT)
    said = speaking.speak(cache, prepared.tokenizer, ids, max_new_tokens=24)["text"]
    console.say(f"{row['method']} says: {PROMPT + said!r}")
