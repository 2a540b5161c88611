"""`mxjax compare` and `mxjax ablate`: many methods on the same tokens."""

import argparse
import json
import pathlib

from mxjax import methods
from mxjax.evaluation import ablation, study
from mxjax.evaluation.cli import cli_inputs, console, outputs
from mxjax.methods.hires import ablations
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import Contract
from mxjax.storage import atomic_io


def compare(options: argparse.Namespace) -> None:
  """`mxjax compare`."""
  names = _method_names(options.methods)
  rules = [mxfp4.Rules(scale_rule=rule) for rule in options.scale_rules.split(",")]
  contracts = {
    "" if rule == mxfp4.PAPER_RULES else f"[{rule.scale_rule}]": Contract(rules=rule)
    for rule in rules
  }
  folder = _resumable(options.out)
  _, _, subject, tokens = cli_inputs.prepare(options)
  with console.progress_bars() as begin:
    rows, _ = study.compare(
      subject, tokens, names, folder=folder, contracts=contracts, on_method=begin
    )
  folder.mkdir(parents=True, exist_ok=True)
  if not any("error" in row for row in rows):
    study.clear_store(folder)
  outputs.finish(folder, rows, f"Comparison on {options.model or 'SmolLM2-135M'}")
  outputs.print_rows(options, rows, folder)


def _method_names(text: str) -> list[str]:
  """The methods of a comma list; `all` and `paper` stand for several."""
  groups = {"all": tuple(methods.METHODS), "paper": methods.PAPER_METHODS}
  names = [name.strip() for name in text.split(",") if name.strip()]
  chosen = [one for name in names for one in groups.get(name, (name,))]
  for name in chosen:
    methods.get(name)
  return list(dict.fromkeys(chosen))


def _resumable(out: str) -> pathlib.Path:
  """A folder of earlier rows to go on with, or one that is free."""
  folder = pathlib.Path(out)
  is_ours = any((folder / name).is_dir() for name in (study.ROWS, study.STORE))
  return folder if is_ours else atomic_io.check_output(out)


def ablate(options: argparse.Namespace) -> None:
  """`mxjax ablate`."""
  names = [name.strip() for name in options.study.split(",") if name.strip()]
  if names == ["all"]:
    names = list(ablations.STUDIES)
  for name in names:
    ablation.study_rows(name)
  seeds = [int(seed) for seed in options.seeds.split(",")]
  folder = pathlib.Path(options.out)
  if not (folder / study.ROWS).is_dir():
    atomic_io.check_output(folder)
  options.seed = seeds[0]
  _, tokenizer, subject, _ = cli_inputs.prepare(options)
  draws = {}
  for seed in seeds:
    options.seed = seed
    draws[seed] = cli_inputs.calibration(options, tokenizer)
  results, text = [], ""
  for name in names:
    with console.progress_bars() as begin:
      results.append(ablation.run(name, subject, draws, folder, on_row=begin))
    text += ablation.table(results[-1]) + "\n"
    atomic_io.write_durably(folder / "tables.md", text.encode())
    outputs.write_json(folder / "result.json", results)
  study.clear_store(folder)
  print(json.dumps(results) if options.json else text)
