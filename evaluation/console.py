"""What a person sees: progress on stderr, tables on stdout."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
  BarColumn,
  Progress,
  TextColumn,
  TimeElapsedColumn,
  TimeRemainingColumn,
)
from rich.table import Table

from mxjax import pipeline

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
