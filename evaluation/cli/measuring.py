"""`mxjax evaluate` and `mxjax tables`: what a model can do, in numbers."""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from mxjax import models
from mxjax.audit import sizes
from mxjax.evaluation import results, study
from mxjax.evaluation import tables as table_forms
from mxjax.evaluation.cli import cli_inputs, console, devices
from mxjax.evaluation.tasks import seven_tasks
from mxjax.storage import atomic_io, checkpoint


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
  model, quantized, tokenizer, folder = cli_inputs.restore(options.checkpoint, mesh)
  tests = cli_inputs.test_windows(options, tokenizer)
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
  folder = atomic_io.check_output(options.out) if options.out else None
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
  model, params, tokenizer, _ = cli_inputs.restore(str(manifest))
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
    folder = atomic_io.create_output(options.out)
    written = table_forms.write(folder, built, found)
    print("\n".join(str(path) for path in written), file=sys.stderr)
  print(table_forms.markdown(built), end="")
