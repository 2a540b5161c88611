"""Console output: progress on stderr, sentences and tables on stdout."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich import progress
from rich import table as rich_table
from rich.console import Console

from mxjax.audit import plan
from mxjax.evaluation.report import numbers
from mxjax.evaluation.report.tables import Table

STDERR = Console(stderr=True)
STDOUT = Console()


def printable(text: str, kept: str = "\n\t") -> str:
  """Returns text with everything escaped that a terminal could act on.

  Names and notes come from models and files. `kept` are the control characters that
  stay.
  """
  shown = lambda c: c if c.isprintable() or c in kept else ascii(c)[1:-1]
  return "".join(map(shown, text))


def say(text: str) -> None:
  """Prints a sentence without markup, escaped by `printable`.

  No line is broken, or a long path could be neither copied nor read by a program.
  """
  STDOUT.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def print_table(table: Table) -> None:
  """Prints a table with its first column left-aligned and the others right-aligned."""
  printed = rich_table.Table(
    title=table.title, box=None, pad_edge=False, padding=(0, 2, 0, 0)
  )
  first, *others = table.head
  printed.add_column(first, overflow="fold", min_width=8)
  for head in others:
    # Numbers are never broken, so that of narrow terminals only names are.
    printed.add_column(head.replace(" ", "\n"), justify="right", no_wrap=True)
  for row in table.rows:
    printed.add_row(*row)
  STDOUT.print(printed)
  if table.note:
    say(table.note)


def bars(name: str, state: str, left: str) -> progress.Progress:
  """Returns a display of bars; the texts are templates of a task's fields."""
  return progress.Progress(
    progress.TextColumn(name),
    progress.BarColumn(bar_width=16),
    progress.TaskProgressColumn(),
    progress.TextColumn(state),
    progress.TimeElapsedColumn(),
    progress.TextColumn(left),
    console=STDERR,
  )


@contextlib.contextmanager
def task_bars() -> Iterator[Callable[[str, int, int], None]]:
  """Shows a bar per task with counts and elapsed time."""
  with bars("{task.description}", "{task.completed}/{task.total}", "") as shown:
    known: dict[str, progress.TaskID] = {}

    def update(name: str, done: int, total: int) -> None:
      if name not in known:
        known[name] = shown.add_task(name, total=total)
      shown.update(known[name], completed=done)

    yield update


def task_table(result: dict[str, Any]) -> Table:
  """Builds the table that `evaluate --tasks` prints."""
  rows = []
  for name, task in result["tasks"].items():
    count, seconds = str(task["items"]), f"{task['seconds']:.0f}"
    if "standard_error" in task:
      score = f"{100 * task['score']:.2f} %"
      error = f"{100 * task['standard_error']:.2f}"
      rows.append([name, score, error, f"{count} / {task['official_items']}", seconds])
    else:
      rows.append([name, f"{task['score']:.3f}", "", f"{count} windows", seconds])
  title = f"{result['method']} on {result['model']}"
  return Table(title, ("task", "score", "±", "of", "seconds"), rows)


def _perplexity_cell(result: dict[str, Any]) -> str:
  spread = f" ± {result['spread'] / 2:.2f}" if len(result["values"]) > 1 else ""
  return f"{result['mean']:.2f}{spread}"


def comparison_table(rows: Sequence[dict[str, Any]]) -> Table:
  """Builds the final table of `compare` and `demo`, with a column a measure asked for.

  Its short names and few digits leave room for three tests in 80 columns.
  """
  good = [row for row in rows if "error" not in row]
  tests = list(good[0]["perplexity"]) if good else []
  bits = lambda row: row["size"]["quantized_linears"]["bits_per_weight"]
  # What each column shows, how, and what the float model has there.
  columns: dict[str, tuple[Callable[[Any], str | None], str]] = {
    **{
      f"ppl {name}": (
        lambda row, name=name: _perplexity_cell(row["perplexity"][name]),
        f"{good[0]['float_perplexity'][name]:.2f}",
      )
      for name in tests
    },
    "operator error": (
      lambda row: _written(row["operator_error"], "{:.4f}".format),
      "-",
    ),
    "KL": (lambda row: _agreement(row, "kl_mean", "{:.4f}".format), "0"),
    "flips": (lambda row: _agreement(row, "flips", "{:.2%}".format), "0"),
    "bits a weight": (lambda row: f"{bits(row):.2f}", "16"),
    "size, MiB": (
      lambda row: f"{row['size']['total'] / 2**20:.4g}",
      f"{good[0]['size']['bf16_total'] / 2**20:.4g}" if good else "",
    ),
    "build, s": (lambda row: f"{row['seconds']:.3g}", "-"),
  }
  shown = {
    head: (cell, exact)
    for head, (cell, exact) in columns.items()
    if any(cell(row) is not None for row in good)
  }
  body = [["BF16", *(exact for _, exact in shown.values())]] if good else []
  for row in rows:
    if "error" in row:
      empty = [""] * (len(shown) - 1)
      body.append([row["method"], "failed", *empty][: 1 + max(1, len(shown))])
    else:
      body.append([row["method"], *(cell(row) or "-" for cell, _ in shown.values())])
  note = "; ".join(f"{row['method']}: {row['error']}" for row in rows if "error" in row)
  return Table("strict MXFP4 W4A4", ("method", *shown), body, note)


def _written(value: float | None, form: Callable[[float], str]) -> str | None:
  return None if value is None else form(value)


def _agreement(
  row: dict[str, Any], key: str, form: Callable[[float], str]
) -> str | None:
  return form(row["agreement"][key]) if row.get("agreement") else None


def plan_tables(planned: plan.Plan, name: str, seconds: float | None) -> list[Table]:
  """Builds the tables of `mxjax plan`: storage, the loaded model, then the work.

  `seconds` are those of a HiRes run here, or None if nothing tells.
  """
  sizes = {
    f"parameters, {planned.parameters / 1e9:.3f} G, in bfloat16": planned.bf16,
    f"auxiliary, {planned.blocks:,} input blocks": planned.auxiliary,
    "decoded layout (the paper's): bfloat16 + auxiliary": planned.decoded_total,
    "packed codes": planned.codes,
    "packed scales": planned.scales,
    "embedding, norms, head, biases": planned.rest,
    "packed layout (ours)": planned.packed_total,
  }
  memory = {f"memory, {part}": size for part, size in planned.memory.items()}
  memory["peak memory, by a rule of thumb"] = planned.peak
  disk = {f"disk, {place}": size for place, size in planned.disk.items()}
  written = lambda sizes: [[what, numbers.size(size)] for what, size in sizes.items()]
  ratio = f"{planned.bf16 / planned.packed_total:.2f} x smaller"
  loaded = [
    [label, numbers.size(size), f"{size / planned.bf16:.3f}"]
    for label, size in planned.loaded.items()
  ]
  work = [
    *written(memory | disk),
    ["passes through the model", str(planned.model_passes)],
    ["passes over each linear's inputs", str(planned.reductions)],
    ["products of the model passes", f"{planned.forward_flops:.3g} FLOP"],
    ["products that hires-next adds", f"{planned.prediction_flops:.3g} FLOP"],
    *([["time on this machine, about", numbers.about(seconds)]] if seconds else []),
  ]
  bits = f"{planned.bits_per_weight:.3f}"
  storage = [
    *written(sizes),
    ["packed against bfloat16", ratio],
    ["bits a quantized weight, scales and auxiliary included", bits],
  ]
  place = "on disk" if planned.on_disk else "in memory"
  return [
    Table(f"{name}: storage", ("what", "size"), storage),
    Table("loaded and packed, HiRes", ("storage", "memory", "to bfloat16"), loaded),
    Table(f"a run in {planned.dtype}, layers {place}", ("what", "amount"), work),
  ]
