"""What a person sees: progress on stderr, tables on stdout."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  Progress,
  TaskID,
  TextColumn,
  TimeElapsedColumn,
  TimeRemainingColumn,
)
from rich.table import Table

from mxjax.audit import plan
from mxjax.running import pipeline

STDERR = Console(stderr=True)
STDOUT = Console()


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[str], pipeline.OnProgress]]:
  """Bars that say layer, stage, time spent and time left; one for each method."""
  columns = (
    TextColumn("{task.fields[method]:<6}"),
    BarColumn(bar_width=24),
    TextColumn("{task.description:<34}"),
    TimeElapsedColumn(),
    TextColumn("left"),
    TimeRemainingColumn(),
  )
  with Progress(*columns, console=STDERR) as bars:

    def begin(method: str) -> pipeline.OnProgress:
      task = bars.add_task("starting", total=1.0, method=method)

      def update(now: pipeline.Progress) -> None:
        text = f"layer {now.layer + 1}/{now.layers}: {now.stage}"
        bars.update(task, completed=now.fraction, description=text)

      return update

    yield begin


@contextlib.contextmanager
def task_bars() -> Iterator[Callable[[str, int, int], None]]:
  """A bar for each task, with time spent and left."""
  columns = (
    TextColumn("{task.description:<14}"),
    BarColumn(bar_width=24),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TextColumn("left"),
    TimeRemainingColumn(),
  )
  with Progress(*columns, console=STDERR) as bars:
    known: dict[str, TaskID] = {}

    def update(name: str, done: int, total: int) -> None:
      if name not in known:
        known[name] = bars.add_task(name, total=total)
      bars.update(known[name], completed=done)

    yield update


def task_table(result: dict[str, Any]) -> Table:
  """What `evaluate --tasks` prints."""
  table = Table(title=f"{result['method']} on {result['model']}")
  for heading in ("task", "score", "±", "of", "seconds"):
    table.add_column(heading, justify="left" if heading == "task" else "right")
  for name, found in result["tasks"].items():
    is_accuracy = "standard_error" in found
    score = f"{100 * found['score']:.2f} %" if is_accuracy else f"{found['score']:.3f}"
    error = f"{100 * found['standard_error']:.2f}" if is_accuracy else ""
    official = found.get("official_items")
    count = (
      f"{found['items']} / {official}" if official else f"{found['items']} windows"
    )
    table.add_row(name, score, error, count, f"{found['seconds']:.0f}")
  return table


def _perplexity_cell(result: dict[str, Any]) -> str:
  if len(result["values"]) == 1:
    return f"{result['mean']:.2f}"
  return f"{result['mean']:.2f} ± {result['spread'] / 2:.2f}"


def comparison_table(rows: Sequence[dict[str, Any]]) -> Table:
  """The table that ends `compare` and `demo`."""
  first = next((row for row in rows if "error" not in row), None)
  tests = list(first["perplexity"]) if first else []
  table = Table(title="strict MXFP4 W4A4")
  table.add_column("method")
  for name in tests:
    table.add_column(f"perplexity, {name}", justify="right")
  for heading in ("operator error", "build s", "MB", "x smaller than BF16"):
    table.add_column(heading, justify="right")
  if first:
    values = [f"{first['float_perplexity'][name]:.2f}" for name in tests]
    megabytes = f"{first['size']['bf16_total'] / 1e6:.0f}"
    table.add_row("BF16 weights", *values, "0", "-", megabytes, "1.00")
  for row in rows:
    if "error" in row:
      table.add_row(row["method"], *["failed"] * len(tests), row["error"][:60])
      continue
    error = row["operator_error"]
    table.add_row(
      row["method"],
      *(_perplexity_cell(row["perplexity"][name]) for name in tests),
      "-" if error is None else f"{error:.6f}",
      f"{row['seconds']:.0f}",
      f"{row['size']['total'] / 1e6:.0f}",
      f"{row['size']['ratio']:.2f}",
    )
  return table


def _size(count: float) -> str:
  """Bytes in the largest binary unit that keeps them above one."""
  for unit in ("B", "KiB", "MiB"):
    if abs(count) < 1024:
      return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
    count /= 1024
  return f"{count:.3f} GiB"


def plan_tables(planned: plan.Plan, name: str) -> list[Table]:
  """What `mxjax plan` prints: storage, the loaded model, then the work."""
  storage = Table(title=f"{name}: storage")
  storage.add_column("what")
  storage.add_column("size", justify="right")
  rows = {
    f"parameters, {planned.parameters / 1e9:.3f} G, in bfloat16": planned.bf16,
    f"auxiliary, {planned.blocks:,} input blocks": planned.auxiliary,
    "decoded layout (the paper's): bfloat16 + auxiliary": planned.decoded_total,
    "packed codes": planned.codes,
    "packed scales": planned.scales,
    "embedding, norms, head, biases": planned.rest,
    "packed layout (ours)": planned.packed_total,
  }
  for label, size in rows.items():
    storage.add_row(label, _size(size))
  storage.add_row(
    "packed against bfloat16", f"{planned.bf16 / planned.packed_total:.2f} x smaller"
  )
  loaded = Table(title="loaded and packed, HiRes")
  loaded.add_column("storage")
  loaded.add_column("memory", justify="right")
  loaded.add_column("to bfloat16", justify="right")
  for label, size in planned.loaded.items():
    loaded.add_row(label, _size(size), f"{size / planned.bf16:.3f}")
  place = "on disk" if planned.on_disk else "in memory"
  work = Table(title=f"a run, layers {place}")
  work.add_column("what")
  work.add_column("amount", justify="right")
  for stage, size in planned.memory.items():
    work.add_row(f"peak memory, {stage}", _size(size))
  for place, size in planned.disk.items():
    work.add_row(f"disk, {place}", _size(size))
  work.add_row("passes through the model", str(planned.model_passes))
  work.add_row("passes over each linear's inputs", str(planned.reductions))
  work.add_row("products of the model passes", f"{planned.forward_flops:.3g} FLOP")
  return [storage, loaded, work]
