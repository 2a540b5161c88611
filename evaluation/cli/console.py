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
from mxjax.running import pipeline

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
  """Prints a sentence without markup, escaped by `printable`."""
  STDOUT.print(printable(text), markup=False, highlight=False)


def print_table(table: Table) -> None:
  """Prints a table with its first column left-aligned and the others right-aligned."""
  printed = rich_table.Table(title=table.title)
  for index, head in enumerate(table.head):
    printed.add_column(head, justify="right" if index else "left")
  for row in table.rows:
    printed.add_row(*row)
  STDOUT.print(printed)


def _bars(name: str, state: progress.ProgressColumn) -> progress.Progress:
  return progress.Progress(
    progress.TextColumn(name),
    progress.BarColumn(bar_width=24),
    state,
    progress.TimeElapsedColumn(),
    progress.TextColumn("left"),
    progress.TimeRemainingColumn(),
    console=STDERR,
  )


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[str], pipeline.OnProgress]]:
  """Shows a bar per method with layer, stage, elapsed and remaining time."""
  stage = progress.TextColumn("{task.description:<34}")
  with _bars("{task.fields[method]:<6}", stage) as bars:

    def begin(method: str) -> pipeline.OnProgress:
      task = bars.add_task("starting", total=1.0, method=method)

      def update(now: pipeline.Progress) -> None:
        text = f"layer {now.layer + 1}/{now.layers}: {now.stage}"
        bars.update(task, completed=now.fraction, description=text)

      return update

    yield begin


@contextlib.contextmanager
def task_bars() -> Iterator[Callable[[str, int, int], None]]:
  """Shows a bar per task with elapsed and remaining time."""
  with _bars("{task.description:<14}", progress.MofNCompleteColumn()) as bars:
    known: dict[str, progress.TaskID] = {}

    def update(name: str, done: int, total: int) -> None:
      if name not in known:
        known[name] = bars.add_task(name, total=total)
      bars.update(known[name], completed=done)

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
  """Builds the final table of `compare` and `demo`."""
  first = next((row for row in rows if "error" not in row), None)
  tests = list(first["perplexity"]) if first else []
  costs = ("operator error", "build s", "MB", "x smaller than BF16")
  body = []
  if first:
    values = [f"{first['float_perplexity'][name]:.2f}" for name in tests]
    megabytes = f"{first['size']['bf16_total'] / 1e6:.0f}"
    body.append(["BF16 weights", *values, "0", "-", megabytes, "1.00"])
  for row in rows:
    if "error" in row:
      body.append([row["method"], *["failed"] * len(tests), row["error"][:60]])
      continue
    error, size = row["operator_error"], row["size"]
    cells = [_perplexity_cell(row["perplexity"][name]) for name in tests]
    cells.append("-" if error is None else f"{error:.6f}")
    cells += [f"{row['seconds']:.0f}", f"{size['total'] / 1e6:.0f}"]
    body.append([row["method"], *cells, f"{size['ratio']:.2f}"])
  head = ("method", *(f"perplexity, {name}" for name in tests), *costs)
  return Table("strict MXFP4 W4A4", head, body)


def plan_tables(planned: plan.Plan, name: str) -> list[Table]:
  """Builds the tables of `mxjax plan`: storage, the loaded model, then the work."""
  sizes = {
    f"parameters, {planned.parameters / 1e9:.3f} G, in bfloat16": planned.bf16,
    f"auxiliary, {planned.blocks:,} input blocks": planned.auxiliary,
    "decoded layout (the paper's): bfloat16 + auxiliary": planned.decoded_total,
    "packed codes": planned.codes,
    "packed scales": planned.scales,
    "embedding, norms, head, biases": planned.rest,
    "packed layout (ours)": planned.packed_total,
  }
  memory = {f"peak memory, {at}": size for at, size in planned.memory.items()}
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
  ]
  storage = [*written(sizes), ["packed against bfloat16", ratio]]
  place = "on disk" if planned.on_disk else "in memory"
  return [
    Table(f"{name}: storage", ("what", "size"), storage),
    Table("loaded and packed, HiRes", ("storage", "memory", "to bfloat16"), loaded),
    Table(f"a run, layers {place}", ("what", "amount"), work),
  ]
