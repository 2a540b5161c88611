"""`mxjax demo`: compares RTN and HiRes on the embedded model and text."""

import argparse
import itertools
import pathlib
from typing import Any

from mxjax.evaluation.provenance import DEFAULT_MODEL

METHODS = ("rtn", "hires")


def add_parser(commands: Any) -> None:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "demo",
    help="the embedded model and text: RTN and HiRes, in a few minutes",
    description=f"Compares RTN and HiRes on the embedded {DEFAULT_MODEL} with embedded "
    "text, writes a report, and lets the HiRes model speak. So few tokens, 4 x 256 to "
    "calibrate on and as many to test on, show how it works and rank no methods.",
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
    sequences=4,
    length=256,
    data=None,
    windows=4,
    window_length=256,
    replicates=1,
    operator_error=True,
    agreement=False,
  )


def run(options: argparse.Namespace) -> None:
  """Compares methods, writes the report and a checkpoint, and generates text."""
  from mxjax.cli import inputs, output
  from mxjax.evaluation import builds
  from mxjax.evaluation.provenance import made_by
  from mxjax.evaluation.tables import comparing
  from mxjax.models import CausalLM
  from mxjax.storage import atomic_io

  # The folder, or the first free numbered variant of it.
  asked = pathlib.Path(options.out)
  numbered = (
    asked.with_name(f"{asked.name}-{number}") for number in itertools.count(2)
  )
  free = (place for place in itertools.chain([asked], numbered) if not place.exists())
  folder = atomic_io.check_output(next(free))
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
    # `quantized` are the params of the last method that did not fail.
    row = [row for row in rows if "error" not in row][-1]
    builds.save_checkpoint(
      folder,
      quantized,
      model.config,
      tokenizer,
      calibration=row["record"]["calibration"],
      program=row["record"]["program"],
    )
    # What the report and the last line show: how the float model and this one go on.
    row["sample"] = builds.sample(prepared.subject, tokenizer, quantized, 24)
  builds.finish(folder, rows, "mxjax demo:", DEFAULT_MODEL)
  output.print_rows(rows, folder)
  if quantized is not None and (sample := row["sample"]):
    output.say(f"{row['method']} says: {sample['prompt'] + sample['quantized']!r}")
