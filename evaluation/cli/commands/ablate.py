"""`mxjax ablate`: the paper's ablation studies of HiRes."""

import argparse
import json
import pathlib
from typing import Any

from mxjax.evaluation.cli import arguments

STUDIES = (
  *("stages", "components", "rules", "recovery", "encoding", "geometry", "readings"),
  *("next", "controls"),
)
"""Keys of `methods.hires.ablations.STUDIES`, which imports JAX; a test compares."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "ablate",
    help="the paper's ablation studies of HiRes, with paired intervals",
    description="Builds every row of a study on every calibration draw, and writes "
    "OUT/tables.md and OUT/result.json. Finished rows stay in OUT, so a killed run "
    "continues where it was.",
  )
  arguments.add(parser, "model")
  add = parser.add_argument
  add("--study", required=True, help=f"comma list of {', '.join(STUDIES)}, or all")
  add("--seeds", default="0,3,5", help="calibration draws")
  arguments.add(parser, "--out", help="a folder")
  arguments.add(parser, "--on-disk")
  arguments.add_run(parser)
  parser.set_defaults(replicates=3)
  return parser


def run(options: argparse.Namespace) -> None:
  """Runs the studies; prints and writes each table as its study finishes."""
  from mxjax.evaluation import ablation, ablation_table, study
  from mxjax.evaluation.cli import inputs, outputs, progress, settings
  from mxjax.storage import atomic_io

  studies = arguments.split(options.study)
  if studies == ["all"]:
    studies = list(STUDIES)
  for name in studies:
    arguments.check("study", name, STUDIES)
  seeds = [int(seed) for seed in options.seeds.split(",")]
  folder = pathlib.Path(options.out)
  outputs.check_resumable(folder, study.ROWS)
  options.seed = seeds[0]
  tokenizer, subject, _ = inputs.prepare(options)
  draws = {}
  for seed in seeds:
    options.seed = seed
    draws[seed] = inputs.calibration(options, tokenizer)
  results, text = [], ""
  facts = {"made_by": settings.made_by(options)}
  for name in studies:
    with progress.progress("bars") as begin:
      result = ablation.run(name, subject, draws, folder, on_row=begin, facts=facts)
      results.append(result)
    text += ablation_table.table(results[-1]).markdown() + "\n"
    atomic_io.write_durably(folder / "tables.md", text.encode())
    atomic_io.write_json(folder / "result.json", results, indent=1)
  study.clear_store(folder)
  print(json.dumps(results) if options.json else text)
