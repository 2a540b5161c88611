"""`mxjax plan`: estimates the cost of quantizing a model from its config alone."""

import argparse
import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mxjax import methods
from mxjax.cli import options as shared

if TYPE_CHECKING:
  from mxjax.audit.plan import Plan
  from mxjax.evaluation.report.tables import Table

CONTEXT = 2048
"""Tokens of the sequence whose cache is shown."""


def add_parser(commands: Any) -> None:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "plan",
    help="what quantizing a model will take, from its config alone",
    description="Prints parameters, blocks, storage, memory, disk and passes on MODEL, "
    "of HiRes without --method; reads no weights. Memory is a rule of thumb for a "
    "process on CPU: Python, JAX and compiled programs, the model or the layer in "
    "work, hidden states, captured inputs, Hessians and a workspace, and an eighth on "
    "top. Evaluating the quantized model afterwards is not in it.",
  )
  shared.add(parser, "model", "--sequences", "--length", "--on-disk")
  shared.add(parser, "--dtype")
  help_text = "memory of one of several devices: data=4,model=2"
  shared.add(parser, "--mesh", help=help_text)
  parser.add_argument(
    "--method",
    metavar="NAMES",
    help="the bytes that each of these stores, by what takes them, and its time, in "
    "place of HiRes' storage; memory, disk and passes stay those of HiRes, but for "
    "what tuning learns of maps and codes: a comma list of all, paper, or "
    f"{shared.METHOD_HELP}",
  )
  shared.add(parser, "--json")
  parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
  """Prints the plan."""
  from mxjax import models
  from mxjax.audit import plan
  from mxjax.cli import inputs, output
  from mxjax.devices import mesh as meshes
  from mxjax.evaluation import estimates
  from mxjax.evaluation.subjects import stays_on_disk

  programs = [methods.get(name) for name in shared.method_names(options.method or "")]
  config = models.load_config(options.model, dtype=options.dtype)
  shared.fit_lengths(options, config.max_positions)
  axes = meshes.sizes(options.mesh) if options.mesh else {}
  plan_of = functools.partial(
    plan.plan,
    config,
    length=options.length,
    on_disk=stays_on_disk(config, options.on_disk),
    data=axes.get("data", 1),
    model=axes.get("model", 1),
  )
  planned = plan_of(sequences=shared.sequences(options))
  stored = {one.name: plan.stored(config, one) for one in programs}
  learned = {one.name: plan.learned_bytes(planned, one) for one in programs}
  if options.json:
    asked = {"stored": stored, "learned": learned} if stored else {}
    print(json.dumps(planned.to_dict() | asked))
    return
  rate = estimates.products_a_second(planned.dtype)
  is_short = options.sequences is None and not axes
  seconds = {}
  for name in stored or ("hires",):
    # As `quantize` reads it by default.
    is_one = is_short and not methods.get(name).reads_data
    read = plan_of(sequences=1) if is_one else planned
    seconds[name] = estimates.expected_seconds(read, [name], options.mesh, rate=rate)
  if stored:
    output.print_table(_stored_table(stored, seconds))
  else:
    for table in _storage_tables(planned, inputs.model_name(options)):
      output.print_table(table)
  output.print_table(_cache_table(planned))
  # Where methods are named, the table of what they store has the time of each.
  output.print_table(
    _work_table(planned, None if stored else seconds["hires"], learned)
  )


def _stored_table(
  stored: Mapping[str, Mapping[str, Any]], seconds: Mapping[str, float | None]
) -> "Table":
  """Builds a line a method: MiB by part, all of them, against bfloat16, and time."""
  from mxjax.evaluation.report import numbers
  from mxjax.evaluation.report.tables import Table

  parts = {
    "codes": ("codes", "scales"),
    "maps": ("maps",),
    "tables": ("tables",),
    "rest": ("recovery", "embedding", "head", "others"),
    "all": ("total",),
  }
  lines = [
    [
      name if found["form"] == "W4A4" else f"{name} [{found['form']}]",
      *(f"{sum(found[p] for p in of) / 2**20:.4g}" for of in parts.values()),
      f"{found['total'] / found['bf16']:.3f}",
      f"{found['bits_per_weight']:.2f}",
      numbers.about(taken) if (taken := seconds.get(name)) else "-",
    ]
    for name, found in stored.items()
  ]
  note = (
    "codes: with their scales; rest: embedding, head, norms, biases and recovery; "
    "bits: of a quantized weight, maps and tables included; build: about, on this "
    "machine, where a run has been timed"
  )
  heads = ("method", *parts, "of BF16", "bits", "build")
  return Table("stored MiB by method", heads, lines, note)


def _storage_tables(planned: "Plan", name: str) -> "list[Table]":
  """Builds the tables of what a HiRes model stores, and takes when it is loaded."""
  from mxjax.evaluation.report import numbers
  from mxjax.evaluation.report.tables import Table

  sizes = {
    f"parameters, {planned.parameters / 1e9:.3f} G, in bfloat16": planned.bf16,
    f"auxiliary, {planned.blocks:,} input blocks": planned.auxiliary,
    "decoded layout (the paper's): bfloat16 + auxiliary": planned.decoded_total,
    "packed codes": planned.codes,
    "packed scales": planned.scales,
    "embedding, norms, head, biases": planned.rest,
    "packed layout (ours)": planned.packed_total,
  }
  written = lambda sizes: [[what, numbers.size(size)] for what, size in sizes.items()]
  ratio, word = planned.bf16 / planned.packed_total, "smaller"
  if ratio < 1:
    ratio, word = 1 / ratio, "larger"
  loaded = [
    [label, numbers.size(size), f"{size / planned.bf16:.3f}"]
    for label, size in planned.loaded.items()
  ]
  bits = f"{planned.bits_per_weight:.3f}"
  storage = [
    *written(sizes),
    ["packed against bfloat16", f"{ratio:.2f} x {word}"],
    ["bits a quantized weight, scales and auxiliary included", bits],
  ]
  return [
    Table(f"{name}: storage of HiRes", ("what", "size"), storage),
    Table("loaded and packed, HiRes", ("storage", "memory", "to bfloat16"), loaded),
  ]


def _cache_table(planned: "Plan") -> "Table":
  """Builds a line a format of the cache: bytes of a token, and of a long sequence."""
  from mxjax.evaluation.report import numbers
  from mxjax.evaluation.report.tables import Table

  cache = [
    [
      planned.dtype if how == "compute" else how,
      *(numbers.size(tokens * size) for tokens in (1, CONTEXT)),
      f"{size / planned.cache['compute']:.3f}",
    ]
    for how, size in planned.cache.items()
  ]
  heads = "cache", "a token", f"{CONTEXT:,} tokens", f"to {planned.dtype}"
  return Table("keys and values of a sequence", heads, cache)


def _work_table(
  planned: "Plan", seconds: float | None, learned: Mapping[str, Mapping[str, int]]
) -> "Table":
  """Builds the table of what a HiRes run needs; `seconds` are None if nothing tells.

  `learned` are bytes of `memory` and of `disk` that methods learn besides, by name.
  """
  from mxjax.evaluation.report import numbers
  from mxjax.evaluation.report.tables import Table

  needed = {f"memory, {part}": size for part, size in planned.memory.items()}
  needed["peak memory, by a rule of thumb"] = planned.peak
  for name, sizes in learned.items():
    if sizes["memory"]:
      needed |= {f"{of} besides, what {name} learns": sizes[of] for of in sizes}
  needed |= {f"disk, {place}": size for place, size in planned.disk.items()}
  work = [
    *([what, numbers.size(size)] for what, size in needed.items()),
    ["passes through the model", str(planned.model_passes)],
    ["passes over each linear's inputs", str(planned.reductions)],
    ["products of the model passes", f"{planned.forward_flops:.3g} FLOP"],
    ["products that hires-next adds", f"{planned.prediction_flops:.3g} FLOP"],
    *([["time on this machine, about", numbers.about(seconds)]] if seconds else []),
  ]
  place = "on disk" if planned.on_disk else "in memory"
  title = f"a run in {planned.dtype}, layers {place}, by HiRes"
  return Table(title, ("what", "amount"), work)
