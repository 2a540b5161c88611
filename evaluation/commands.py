"""What each command does, one function a command."""

import argparse
import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mxjax import checkpoint, methods, models, mxfp4, run_folder, sizes
from mxjax.contract import Contract
from mxjax.evaluation import ablation, console, datasets, report, study
from mxjax.methods import ablations

ROWS = "rows"
DEMO_METHODS = ("rtn", "gptq", "brq", "hires")
DEMO_CALIBRATION = (8, 512)
DEMO_TEST = (8, 512)
DEMO_PROMPT = "The history of the steam engine begins"


def _calibration(
  options: argparse.Namespace, tokenizer: datasets.TextTokenizer
) -> np.ndarray:
  return datasets.load_tokens(
    options.calib,
    tokenizer,
    count=options.sequences,
    length=options.length,
    split="calibration",
    seed=options.seed,
  )


def _tests(
  options: argparse.Namespace, tokenizer: datasets.TextTokenizer
) -> dict[str, np.ndarray]:
  tokens = datasets.load_tokens(
    options.data,
    tokenizer,
    count=options.windows,
    length=options.window_length,
    split="test",
  )
  name = pathlib.Path(options.data).stem if options.data else "embedded test"
  return {name: tokens}


def _write_json(path: pathlib.Path, value: Any) -> None:
  run_folder.write_durably(path, json.dumps(value, indent=1).encode())


def _slim(row: Mapping[str, Any]) -> dict[str, Any]:
  """A row without the per-layer record, for printing."""
  return {key: value for key, value in row.items() if key != "record"}


def _save(
  folder: pathlib.Path,
  row: Mapping[str, Any],
  params: Mapping[str, Any],
  model: models.CausalLM,
  tokenizer: models.Tokenizer,
) -> None:
  with tempfile.TemporaryDirectory() as scratch:
    tokenizer.save(pathlib.Path(scratch))
    checkpoint.save_checkpoint(
      folder / "checkpoint",
      params,
      model.config,
      calibration=row["record"]["calibration"],
      program=row["record"]["program"],
      tokenizer_files=sorted(pathlib.Path(scratch).iterdir()),
    )


def _prepare(
  options: argparse.Namespace,
) -> tuple[models.CausalLM, models.Tokenizer, study.Subject, np.ndarray]:
  """Loads the model, the calibration tokens and the tests that options name."""
  model, params = models.from_pretrained(options.model)
  tokenizer = models.load_tokenizer(options.model)
  tokens = _calibration(options, tokenizer)
  subject = study.Subject(
    model,
    params,
    _tests(options, tokenizer),
    options.replicates,
    options.operator_error,
  )
  return model, tokenizer, subject, tokens


def quantize(options: argparse.Namespace) -> None:
  """`mxjax quantize`."""
  methods.get(options.method)
  folder = run_folder.check_output(options.out)
  model, tokenizer, subject, tokens = _prepare(options)
  with console.progress_bars() as begin:
    row, quantized = study.run_method(
      subject,
      tokens,
      options.method,
      run_dir=folder / "run",
      chunk=options.chunk,
      on_progress=begin(options.method),
    )
  row["float_perplexity"] = subject.float_perplexities()
  _save(folder, row, quantized, model, tokenizer)
  _finish(folder, [row], f"{options.method} on {options.model or 'SmolLM2-135M'}")
  _print(options, [row], folder)


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
  return folder if (folder / ROWS).is_dir() else run_folder.check_output(out)


def compare(options: argparse.Namespace) -> None:
  """`mxjax compare`."""
  names = _method_names(options.methods)
  rules = [mxfp4.Rules(scale_rule=rule) for rule in options.scale_rules.split(",")]
  contracts = {
    "" if rule == mxfp4.PAPER_RULES else f"[{rule.scale_rule}]": Contract(rules=rule)
    for rule in rules
  }
  folder = _resumable(options.out)
  _, _, subject, tokens = _prepare(options)
  with console.progress_bars() as begin:
    rows, _ = study.compare(
      subject, tokens, names, folder=folder, contracts=contracts, on_method=begin
    )
  folder.mkdir(parents=True, exist_ok=True)
  if not any("error" in row for row in rows):
    study.clear_store(folder)
  _finish(folder, rows, f"Comparison on {options.model or 'SmolLM2-135M'}")
  _print(options, rows, folder)


def ablate(options: argparse.Namespace) -> None:
  """`mxjax ablate`."""
  names = [name.strip() for name in options.study.split(",") if name.strip()]
  if names == ["all"]:
    names = list(ablations.STUDIES)
  for name in names:
    ablation.study_rows(name)
  seeds = [int(seed) for seed in options.seeds.split(",")]
  folder = pathlib.Path(options.out)
  if not any((folder / name).is_dir() for name in ablations.STUDIES):
    run_folder.check_output(folder)
  options.seed = seeds[0]
  _, tokenizer, subject, _ = _prepare(options)
  draws = {}
  for seed in seeds:
    options.seed = seed
    draws[seed] = _calibration(options, tokenizer)
  results, text = [], ""
  for name in names:
    with console.progress_bars() as begin:
      results.append(ablation.run(name, subject, draws, folder, on_row=begin))
    text += ablation.table(results[-1]) + "\n"
    run_folder.write_durably(folder / "tables.md", text.encode())
    _write_json(folder / "result.json", results)
  study.clear_store(folder)
  print(json.dumps(results) if options.json else text)


def demo(options: argparse.Namespace) -> None:
  """`mxjax demo`."""
  folder = _fresh_folder(pathlib.Path(options.out))
  model, params = models.from_pretrained(None)
  tokenizer = models.load_tokenizer(None)
  load = lambda split, shape: datasets.load_tokens(
    None, tokenizer, count=shape[0], length=shape[1], split=split
  )
  tests = {"unseen passages": load("test", DEMO_TEST)}
  subject = study.Subject(model, params, tests)
  tokens = load("calibration", DEMO_CALIBRATION)
  with console.progress_bars() as begin:
    rows, quantized = study.compare(subject, tokens, DEMO_METHODS, on_method=begin)
  folder.mkdir(parents=True, exist_ok=True)
  _finish(folder, rows, "mxjax demo: SmolLM2-135M")
  console.STDOUT.print(console.comparison_table(rows))
  console.STDOUT.print(f"report: {folder / 'report.html'}")
  if quantized is not None:
    _save(folder, rows[-1], quantized, model, tokenizer)
    text = _continue(model, quantized, tokenizer, DEMO_PROMPT, max_new_tokens=24)
    console.STDOUT.print(f"{rows[-1]['method']} says: {text!r}", markup=False)


def _fresh_folder(path: pathlib.Path) -> pathlib.Path:
  """The path, or the first free numbered one beside it."""
  candidate, number = path, 1
  while candidate.exists():
    number += 1
    candidate = path.with_name(f"{path.name}-{number}")
  return candidate


def _finish(folder: pathlib.Path, rows: Sequence[dict[str, Any]], title: str) -> None:
  _write_json(folder / "result.json", rows)
  report.write_report(
    folder / "report.html", list(rows), title=title, subtitle="strict MXFP4 W4A4"
  )


def _print(
  options: argparse.Namespace, rows: Sequence[dict[str, Any]], folder: pathlib.Path
) -> None:
  if options.json:
    print(json.dumps([_slim(row) for row in rows]))
    return
  console.STDOUT.print(console.comparison_table(rows))
  console.STDOUT.print(f"report: {folder / 'report.html'}")


def _restore(
  path: str,
) -> tuple[models.CausalLM, dict[str, Any], models.Tokenizer, pathlib.Path]:
  folder = pathlib.Path(path)
  if (folder / "checkpoint").is_dir():
    folder = folder / "checkpoint"
  params, config = checkpoint.restore_checkpoint(folder)
  model = models.CausalLM(models.ModelConfig.from_dict(config))
  return model, params, models.Tokenizer.from_folder(folder / "tokenizer"), folder


def evaluate(options: argparse.Namespace) -> None:
  """`mxjax evaluate`."""
  model, quantized, tokenizer, folder = _restore(options.checkpoint)
  tests = _tests(options, tokenizer)
  params: Mapping[str, Any] = {}
  if options.operator_error:
    _, params = models.from_pretrained(options.model)
  subject = study.Subject(
    model, params, tests, options.replicates, options.operator_error
  )
  row = {
    "checkpoint": str(folder),
    **subject.measure(quantized),
    "size": sizes.size_report(quantized),
  }
  if options.json:
    print(json.dumps(row))
    return
  for name, result in row["perplexity"].items():
    values = ", ".join(f"{value:.3f}" for value in result["values"])
    console.STDOUT.print(f"perplexity, {name}: {result['mean']:.3f} ({values})")
  if row["operator_error"] is not None:
    console.STDOUT.print(f"operator error: {row['operator_error']:.6f}")
  console.STDOUT.print(f"size: {row['size']['total'] / 1e6:.1f} MB")


def _continue(
  model: models.CausalLM,
  params: Mapping[str, Any],
  tokenizer: models.Tokenizer,
  prompt: str,
  **options: Any,
) -> str:
  ids = tokenizer.encode(prompt)
  if not len(ids):
    raise ValueError("generate: the prompt is empty; give at least one word.")
  output = models.generate(model, params, ids[None], eos_id=tokenizer.eos_id, **options)
  return tokenizer.decode(np.asarray(output[0]))


def generate(options: argparse.Namespace) -> None:
  """`mxjax generate`."""
  model, params, tokenizer, _ = _restore(options.checkpoint)
  text = _continue(
    model,
    params,
    tokenizer,
    options.prompt,
    max_new_tokens=options.max_new_tokens,
    temperature=options.temperature,
    top_k=options.top_k,
    top_p=options.top_p,
    key=jax.random.key(options.seed),
  )
  print(json.dumps({"text": text}) if options.json else text)
