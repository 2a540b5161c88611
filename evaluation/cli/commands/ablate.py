"""`mxjax ablate`: the paper's ablation studies of HiRes."""

import argparse
import json
import pathlib
from typing import Any

from mxjax.evaluation.cli import arguments, names


def add_parser(commands: Any) -> argparse.ArgumentParser:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "ablate",
    help="the paper's ablation studies of HiRes, with paired intervals",
    description="Builds every row of a study on every calibration draw, and writes "
    "OUT/tables.md and OUT/result.json. Finished rows stay in OUT, so a killed run "
    "continues where it was.",
  )
  arguments.add_model(parser)
  add = parser.add_argument
  add(
    "--study", required=True, help=f"comma list of {', '.join(names.STUDIES)}, or all"
  )
  add("--seeds", default="0,3,5", help="calibration draws; default: 0,3,5")
  add("--out", required=True, metavar="DIR", help="a folder")
  arguments.add_on_disk(parser)
  arguments.add_calibration(parser)
  arguments.add_evaluation(parser)
  arguments.add_compiled(parser)
  parser.set_defaults(replicates=3)
  return parser


def run(options: argparse.Namespace) -> None:
  """Runs the studies; prints and writes each table as its study finishes."""
  from mxjax.evaluation import ablation, ablation_table, study
  from mxjax.evaluation.cli import console, inputs, outputs
  from mxjax.methods.hires import ablations
  from mxjax.storage import atomic_io

  studies = names.split(options.study)
  if studies == ["all"]:
    studies = list(ablations.STUDIES)
  for name in studies:
    names.check("study", name, ablations.STUDIES)
  seeds = [int(seed) for seed in options.seeds.split(",")]
  folder = pathlib.Path(options.out)
  outputs.check_resumable(folder, study.ROWS)
  options.seed = seeds[0]
  _, tokenizer, subject, _ = inputs.prepare(options)
  draws = {}
  for seed in seeds:
    options.seed = seed
    draws[seed] = inputs.calibration(options, tokenizer)
  results, text = [], ""
  for name in studies:
    with console.progress_bars() as begin:
      results.append(ablation.run(name, subject, draws, folder, on_row=begin))
    text += ablation_table.table(results[-1]).markdown() + "\n"
    atomic_io.write_durably(folder / "tables.md", text.encode())
    outputs.write_json(folder / "result.json", results)
  study.clear_store(folder)
  print(json.dumps(results) if options.json else text)
