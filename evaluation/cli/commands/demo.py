"""`mxjax demo`: compares four methods on the embedded model and text."""

import argparse
import pathlib
from typing import Any

METHODS = ("rtn", "gptq", "brq", "hires")
SEQUENCES, LENGTH = 8, 512
"""Calibration and test windows."""
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
  return parser


def run(options: argparse.Namespace) -> None:
  """Compares methods, writes the report and a checkpoint, and generates text."""
  from mxjax import models
  from mxjax.evaluation import datasets, study
  from mxjax.evaluation.cli import console, outputs, progress, settings, speaking
  from mxjax.models.streaming import PrefixCache

  folder = outputs.fresh_folder(pathlib.Path(options.out))
  model, params = models.from_pretrained(None)
  tokenizer = models.load_tokenizer(None)
  load = lambda split: datasets.load_tokens(
    None, tokenizer, count=SEQUENCES, length=LENGTH, split=split
  )
  subject = study.Subject(model, params, {"unseen passages": load("test")})
  facts = {"made_by": settings.made_by(options)}
  with progress.progress("bars") as begin:
    rows, quantized = study.compare(
      subject, load("calibration"), METHODS, on_method=begin, facts=facts
    )
  folder.mkdir(parents=True, exist_ok=True)
  if quantized is not None:
    row = [row for row in rows if "error" not in row][-1]
    facts = {key: row["record"][key] for key in ("calibration", "program")}
    outputs.save_checkpoint(folder, quantized, model.config, tokenizer, **facts)
  outputs.finish(folder, rows, "mxjax demo: SmolLM2-135M")
  outputs.print_rows(rows, folder)
  if quantized is not None:
    cache = PrefixCache(model, quantized, 256)
    ids = tokenizer.encode(PROMPT)
    said = speaking.speak(cache, tokenizer, ids, max_new_tokens=24)["text"]
    console.say(f"{row['method']} says: {PROMPT + said!r}")
