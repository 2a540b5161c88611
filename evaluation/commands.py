"""What each command does, one function a command."""

import argparse
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mxjax import (
  checkpoint,
  methods,
  models,
  mxfp4,
  run_folder,
  sizes,
)
from mxjax import mesh as meshes
from mxjax import plan as plan_module
from mxjax.contract import Contract
from mxjax.evaluation import (
  ablation,
  console,
  datasets,
  devices,
  report,
  results,
  seven_tasks,
  study,
)
from mxjax.evaluation import tables as table_forms
from mxjax.methods import ablations

ROWS, CHECKPOINT = "rows", "checkpoint"
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
    sampling=options.sampling,
  )


def _tests(
  options: argparse.Namespace, tokenizer: datasets.TextTokenizer
) -> dict[str, np.ndarray]:
  tests: dict[str, np.ndarray] = {}
  for source in options.data.split(",") if options.data else [None]:
    name = pathlib.Path(source).stem if source else "embedded test"
    if name in tests:
      raise ValueError(
        f"test data: two sets are named {name}; rename one of the files."
      )
    tests[name] = datasets.load_tokens(
      source,
      tokenizer,
      count=options.windows,
      length=options.window_length,
      split="test",
    )
  return tests


def _write_json(path: pathlib.Path, value: Any) -> None:
  run_folder.write_durably(path, json.dumps(value, indent=1).encode())


def _slim(row: Mapping[str, Any]) -> dict[str, Any]:
  """A row without the per-layer record, for printing."""
  return {key: value for key, value in row.items() if key != "record"}


def save(
  folder: pathlib.Path,
  row: Mapping[str, Any],
  params: Mapping[str, Any],
  model: models.CausalLM,
  tokenizer: models.Tokenizer,
) -> None:
  """Writes the checkpoint of a run, with its tokenizer."""
  with tempfile.TemporaryDirectory() as scratch:
    tokenizer.save(pathlib.Path(scratch))
    checkpoint.save_checkpoint(
      folder / CHECKPOINT,
      params,
      model.config,
      calibration=row["record"]["calibration"],
      program=row["record"]["program"],
      tokenizer_files=sorted(pathlib.Path(scratch).iterdir()),
    )


def prepare(
  options: argparse.Namespace, mesh: Mesh | None = None
) -> tuple[models.CausalLM, models.Tokenizer, study.Subject, np.ndarray]:
  """Loads the model, the calibration tokens and the tests that options name.

  `mesh` is where the subject will be quantized and measured.
  """
  model, params = models.open_pretrained(options.model)
  if not _stays_on_disk(options, params):
    params = params.load()
  tokenizer = models.load_tokenizer(options.model)
  tokens = _calibration(options, tokenizer)
  subject = study.Subject(
    model,
    params,
    _tests(options, tokenizer),
    options.replicates,
    options.operator_error,
    options.agreement,
    mesh,
  )
  return model, tokenizer, subject, tokens


def _stays_on_disk(options: argparse.Namespace, params: models.LazyParams) -> bool:
  """Whether layers are read when needed: as told, or when the memory is short."""
  if options.on_disk is not None:
    return options.on_disk
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return plan_module.plan(params.config).bf16 > memory // 2


def plan(options: argparse.Namespace) -> None:
  """`mxjax plan`."""
  config = models.load_config(options.model)
  planned = plan_module.plan(
    config,
    sequences=options.sequences,
    length=options.length,
    chunk=options.chunk,
    **(meshes.sizes(options.mesh) if options.mesh else {}),
  )
  if options.json:
    print(json.dumps(planned.to_dict()))
    return
  for table in console.plan_tables(planned, options.model or "SmolLM2-135M"):
    console.STDOUT.print(table)


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
  is_ours = any((folder / name).is_dir() for name in (ROWS, study.STORE))
  return folder if is_ours else run_folder.check_output(out)


def compare(options: argparse.Namespace) -> None:
  """`mxjax compare`."""
  names = _method_names(options.methods)
  rules = [mxfp4.Rules(scale_rule=rule) for rule in options.scale_rules.split(",")]
  contracts = {
    "" if rule == mxfp4.PAPER_RULES else f"[{rule.scale_rule}]": Contract(rules=rule)
    for rule in rules
  }
  folder = _resumable(options.out)
  _, _, subject, tokens = prepare(options)
  with console.progress_bars() as begin:
    rows, _ = study.compare(
      subject, tokens, names, folder=folder, contracts=contracts, on_method=begin
    )
  folder.mkdir(parents=True, exist_ok=True)
  if not any("error" in row for row in rows):
    study.clear_store(folder)
  finish(folder, rows, f"Comparison on {options.model or 'SmolLM2-135M'}")
  print_rows(options, rows, folder)


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
  _, tokenizer, subject, _ = prepare(options)
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
  finish(folder, rows, "mxjax demo: SmolLM2-135M")
  console.STDOUT.print(console.comparison_table(rows))
  console.STDOUT.print(f"report: {folder / 'report.html'}")
  if quantized is not None:
    save(folder, rows[-1], quantized, model, tokenizer)
    text = _continue(model, quantized, tokenizer, DEMO_PROMPT, max_new_tokens=24)
    console.STDOUT.print(f"{rows[-1]['method']} says: {text!r}", markup=False)


def _fresh_folder(path: pathlib.Path) -> pathlib.Path:
  """The path, or the first free numbered one beside it."""
  candidate, number = path, 1
  while candidate.exists():
    number += 1
    candidate = path.with_name(f"{path.name}-{number}")
  return candidate


def finish(folder: pathlib.Path, rows: Sequence[dict[str, Any]], title: str) -> None:
  """Writes result.json and report.html."""
  _write_json(folder / "result.json", rows)
  report.write_report(
    folder / "report.html", list(rows), title=title, subtitle="strict MXFP4 W4A4"
  )


def print_rows(
  options: argparse.Namespace, rows: Sequence[dict[str, Any]], folder: pathlib.Path
) -> None:
  """Prints rows as a table, or as JSON where asked for."""
  if options.json:
    print(json.dumps([_slim(row) for row in rows]))
    return
  console.STDOUT.print(console.comparison_table(rows))
  console.STDOUT.print(f"report: {folder / 'report.html'}")


def restore(
  path: str, mesh: Mesh | None = None
) -> tuple[models.CausalLM, dict[str, Any], models.Tokenizer, pathlib.Path]:
  """Model, params and tokenizer of a folder written by `quantize`, and the folder."""
  folder = pathlib.Path(path)
  if (folder / "checkpoint").is_dir():
    folder = folder / "checkpoint"
  params, config = checkpoint.restore_checkpoint(folder, mesh=mesh)
  model = models.CausalLM(models.ModelConfig.from_dict(config))
  return model, params, models.Tokenizer.from_folder(folder / "tokenizer"), folder


def evaluate(options: argparse.Namespace) -> None:
  """`mxjax evaluate`."""
  if options.tasks and options.mesh:
    raise ValueError(
      "evaluate: expected --mesh without --tasks, got both; tasks run on one device, "
      "so leave --mesh out."
    )
  if options.tasks:
    _evaluate_tasks(options)
    return
  if options.checkpoint is None:
    raise ValueError(
      "evaluate: expected the folder of a quantized model, got none; name one, or pass "
      "--tasks to evaluate a float model."
    )
  mesh = devices.mesh_of(options)
  model, quantized, tokenizer, folder = restore(options.checkpoint, mesh)
  tests = _tests(options, tokenizer)
  params: Mapping[str, Any] = {}
  if options.operator_error or options.agreement:
    _, params = models.from_pretrained(options.model)
  subject = study.Subject(
    model,
    params,
    tests,
    options.replicates,
    options.operator_error,
    options.agreement,
    mesh,
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
  if row["agreement"] is not None:
    console.STDOUT.print(
      f"against the float model: KL {row['agreement']['kl_mean']:.4f} nats a token, "
      f"{row['agreement']['flips']:.2%} of predictions flipped"
    )
  console.STDOUT.print(f"size: {row['size']['total'] / 1e6:.1f} MB")


def _evaluate_tasks(options: argparse.Namespace) -> None:
  """The tasks of a quantized or float model, with a result file."""
  names = seven_tasks.parse_names(options.tasks)
  folder = run_folder.check_output(options.out) if options.out else None
  subject = _task_subject(options)
  with console.task_bars() as progress:
    result, items = seven_tasks.run(
      subject,
      names,
      item_limit=options.items,
      item_source=options.task_source,
      texts={"wikitext2": options.wikitext2, "c4": options.c4},
      windows=options.task_windows,
      window_length=options.window_length,
      on_progress=progress,
    )
  if folder:
    results.write(folder, result, items)
  if options.json:
    print(json.dumps(result))
    return
  console.STDOUT.print(console.task_table(result))
  if folder:
    console.STDOUT.print(f"results: {folder / 'evaluation.json'}")


def _task_subject(options: argparse.Namespace) -> seven_tasks.Subject:
  """A folder of `quantize`, or else any float model."""
  source = options.checkpoint
  folder = pathlib.Path(source) if source else None
  manifest = next(
    (
      place
      for place in ((folder / "checkpoint", folder) if folder else ())
      if (place / checkpoint.MANIFEST).is_file()
    ),
    None,
  )
  if manifest is None:
    model, params = models.open_pretrained(source)
    return seven_tasks.Subject(
      model=model,
      params=params.load(),
      tokenizer=models.load_tokenizer(source),
      name=options.name or (folder.name if folder else "SmolLM2-135M"),
      method=results.FLOAT,
      seed=None,
      details={},
    )
  model, params, tokenizer, _ = restore(str(manifest))
  facts = checkpoint.read_manifest(manifest)
  calibration = facts["calibration"] or {}
  return seven_tasks.Subject(
    model=model,
    params=params,
    tokenizer=tokenizer,
    name=options.name or calibration.get("model") or manifest.parent.name,
    method=(facts["program"] or {}).get("name", "quantized"),
    seed=calibration.get("seed"),
    details={"calibration": calibration, "program": facts["program"]},
  )


def tables(options: argparse.Namespace) -> None:
  """`mxjax tables`."""
  found = results.read(options.results)
  built = table_forms.build(found)
  if options.out:
    folder = run_folder.create_output(options.out)
    written = table_forms.write(folder, built, found)
    print("\n".join(str(path) for path in written), file=sys.stderr)
  print(table_forms.markdown(built), end="")


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
  model, params, tokenizer, _ = restore(options.checkpoint)
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
