"""`mxjax demo`: compares four methods on the embedded model and text."""

import argparse
import pathlib
from typing import Any

from mxjax.evaluation.provenance import DEFAULT_MODEL

METHODS = ("rtn", "gptq", "brq", "hires")
PROMPT = "The history of the steam engine begins"


def add_parser(commands: Any) -> None:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "demo",
    help="the embedded model and text: RTN, GPTQ, Hadamard + GPTQ and HiRes",
    description="Compares four methods on the embedded SmolLM2-135M with embedded "
    "text, writes a report, and lets the HiRes model speak.",
  )
  parser.add_argument("--out", default="runs/demo", metavar="DIR", help="a new folder")
  # What the options of `compare` would say.
  parser.set_defaults(
    run=run,
    model=None,
    dtype=None,
    on_disk=False,
    calib=None,
    sampling=None,
    seed=0,
    sequences=8,
    length=512,
    data=None,
    windows=8,
    window_length=512,
    replicates=1,
    operator_error=True,
    agreement=False,
  )


def run(options: argparse.Namespace) -> None:
  """Compares methods, writes the report and a checkpoint, and generates text."""
  from mxjax.cli import generate, inputs, output
  from mxjax.evaluation import builds
  from mxjax.evaluation.provenance import made_by
  from mxjax.evaluation.tables import comparing
  from mxjax.models import CausalLM
  from mxjax.models.streaming import PrefixCache

  folder = _fresh(pathlib.Path(options.out))
  prepared = inputs.prepare(options, METHODS)
  model, tokenizer = prepared.subject.model, prepared.tokenizer
  assert isinstance(model, CausalLM)
  facts = {"made_by": made_by(options.arguments)}
  with output.progress("bars") as begin:
    rows, quantized = comparing.compare(
      prepared.subject, prepared.tokens, METHODS, on_method=begin, facts=facts
    )
  folder.mkdir(parents=True, exist_ok=True)
  if quantized is not None:
    row = [row for row in rows if "error" not in row][-1]
    builds.save_checkpoint(
      folder,
      quantized,
      model.config,
      tokenizer,
      calibration=row["record"]["calibration"],
      program=row["record"]["program"],
    )
  builds.finish(folder, rows, "mxjax demo:", DEFAULT_MODEL)
  output.print_rows(rows, folder)
  if quantized is not None:
    cache = PrefixCache(model, quantized, 256)
    ids = tokenizer.encode(PROMPT)
    text = generate.speak(cache, tokenizer, ids, max_new_tokens=24)["text"]
    output.say(f"{row['method']} says: {PROMPT + text!r}")


def _fresh(path: pathlib.Path) -> pathlib.Path:
  """Returns the path, or the first free numbered variant of it."""
  candidate, number = path, 1
  while candidate.exists():
    number += 1
    candidate = path.with_name(f"{path.name}-{number}")
  return candidate
