"""What commands print: sentences and tables on stdout, progress on stderr."""

import contextlib
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich import progress as rich_progress
from rich import table as rich_table
from rich.console import Console

from mxjax.evaluation import provenance
from mxjax.evaluation.report import numbers, page
from mxjax.evaluation.report.tables import Table
from mxjax.intake import texts
from mxjax.run.progress import OnProgress, Progress
from mxjax.run.reporting import Clock, Heartbeat, lines, place

STDERR = Console(stderr=True)
WIDE = 200
"""Columns of a table in a file or a pipe, where no terminal's width limits it."""
# Whoever sets COLUMNS asks for that width, in a pipe, too.
_is_limited = sys.stdout.isatty() or "COLUMNS" in os.environ
STDOUT = Console(width=None if _is_limited else WIDE)
Begin = Callable[[str], OnProgress]
"""Starts the display of a method's progress."""
_heartbeats: list[Heartbeat] = []
"""That of the command that runs, if no terminal shows what it does."""
_is_line_open = False
"""Whether the last `piece` left the terminal's cursor within a line."""


def say(text: str) -> None:
  """Prints a sentence without markup, escaped by `texts.printable`.

  No line is broken, or a long path could be neither copied nor read by a program.
  """
  STDOUT.print(texts.printable(text), markup=False, highlight=False, soft_wrap=True)


def piece(text: str) -> None:
  """Prints text as it is made, with no line end behind it.

  What `teller` says meanwhile on the same terminal begins a line of its own.
  """
  global _is_line_open
  print(text, end="", flush=True)
  if text:
    # A heartbeat within a text would be taken for a part of it.
    for beating in _heartbeats:
      beating.spoke()
    _is_line_open = sys.stdout.isatty() and not text.endswith("\n")


def print_table(table: Table) -> None:
  """Prints a table with its first column left-aligned and the others right-aligned."""
  printed = rich_table.Table(
    title=table.title, box=None, pad_edge=False, padding=(0, 2, 0, 0)
  )
  first, *others = table.head
  # Long names are folded: nothing of them is cut off.
  printed.add_column(first, overflow="fold", min_width=8)
  for head in others:
    # Numbers are never broken, so that of narrow terminals only names are.
    printed.add_column(head.replace(" ", "\n"), justify="right", no_wrap=True)
  for row in table.rows:
    printed.add_row(*row)
  STDOUT.print(printed)
  if table.note:
    say(table.note)


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


def comparison_table(rows: Sequence[dict[str, Any]]) -> Table:
  """Builds the final table: BF16, RTN if a row has it beside it, and the rows.

  There is a column for each measure that was asked for. Short names and few digits
  leave room for three tests in 80 columns.
  """
  good = [row for row in rows if "error" not in row]
  shown_rows = page.shown(rows)
  cells = [_cells(row) for row in good]
  heads = [
    head
    for head in (cells[0] if cells else ())
    # A column that nobody asked for would be full of dashes.
    if any(each[head] is not None for each in cells)
  ]
  body = []
  if good:
    exact = {f"ppl {k}": f"{v:.2f}" for k, v in good[0]["float_perplexity"].items()}
    # By definition: the float model does not differ from itself.
    exact |= {"KL, nats": "0", "flips": "0", "bits a weight": "16"}
    exact["size, MiB"] = f"{good[0]['size']['bf16_total'] / 2**20:.4g}"
    body.append(["BF16", *(exact.get(head, "-") for head in heads)])
  for row in shown_rows:
    if "error" in row:
      body.append([row["method"], "failed", *[""] * (len(heads) - 1)])
    else:
      shown = _cells(row)
      body.append([row["method"], *(shown[head] or "-" for head in heads)])
  note = "; ".join(f"{row['method']}: {row['error']}" for row in rows if "error" in row)
  return Table(provenance.forms(shown_rows), ("method", *heads), body, note)


def _cells(row: Mapping[str, Any]) -> dict[str, str | None]:
  """Returns the cells of a method by the head of their column; None: not measured."""
  cells: dict[str, str | None] = {}
  for name, result in row["perplexity"].items():
    spread = f" ± {result['spread'] / 2:.2f}" if len(result["values"]) > 1 else ""
    cells[f"ppl {name}"] = f"{result['mean']:.2f}{spread}"
  error, compared = row["operator_error"], row.get("agreement")
  return {
    **cells,
    "operator error": None if error is None else f"{error:.4f}",
    "KL, nats": f"{compared['kl_mean']:.4f}" if compared else None,
    "flips": f"{compared['flips']:.2%}" if compared else None,
    "bits a weight": f"{row['size']['quantized_linears']['bits_per_weight']:.2f}",
    "size, MiB": f"{row['size']['total'] / 2**20:.4g}",
    "build, s": f"{row['seconds']:.0f}",
  }


def print_rows(
  rows: Sequence[dict[str, Any]], folder: pathlib.Path, *, as_json: bool = False
) -> None:
  """Prints rows as a table, or as JSON without the per-layer record."""
  if as_json:
    print(json.dumps([{k: v for k, v in row.items() if k != "record"} for row in rows]))
    return
  print_table(comparison_table(rows))
  if good := [row for row in rows if "error" not in row]:
    say(page.verdict(good))
  say(f"report: {folder / 'report.html'}")


def emit(event: str, **values: Any) -> None:
  """Prints one event as a JSON line on stderr."""
  for beating in _heartbeats:
    beating.spoke()
  # Flushed line by line, because whoever reads events waits for each.
  line = {"event": event, "time": round(time.time(), 3), **values}
  print(json.dumps(line), file=sys.stderr, flush=True)


def teller(form: str) -> Callable[[str], None]:
  """Returns a function that prints sentences on stderr, as events for form `json`.

  For form `none` it prints nothing.
  """
  if form == "none":
    return lambda text: None
  if form == "json":
    return lambda text: emit("message", text=text)

  def tell(text: str) -> None:
    global _is_line_open
    for beating in _heartbeats:
      beating.spoke()
    if _is_line_open:
      STDERR.print()
      _is_line_open = False
    STDERR.print(texts.printable(text), markup=False, highlight=False, soft_wrap=True)

  return tell


@contextlib.contextmanager
def heartbeat(command: str, form: str) -> Iterator[None]:
  """Says after every 30 s of silence what the command does, except on a terminal.

  There bars show it. With form `json` it is the event `alive`.
  """
  if STDERR.is_terminal and form != "json":
    yield
    return
  tell = teller(form) if form != "json" else lambda text: emit("alive", text=text)
  with Heartbeat(tell, command) as beating:
    _heartbeats.append(beating)
    try:
      yield
    finally:
      _heartbeats.remove(beating)


def stage(text: str, left: float | None = None) -> None:
  """Notes what begins, for a heartbeat to name if it takes long, and seconds left."""
  for beating in _heartbeats:
    beating.at(text, left)


@contextlib.contextmanager
def progress(form: str) -> Iterator[Begin]:
  """Yields a function that starts a display: `bars`, events (`json`) or `none`.

  Where stderr is no terminal, lines take the place of bars.
  """
  if form == "bars" and not STDERR.is_terminal:
    tell = teller(form)
    yield lambda method: lines(method, tell, next(iter(_heartbeats), None))
  elif form == "bars":
    left = "{task.fields[left]}"
    with _bars("{task.fields[method]}", "{task.description}", left) as shown:
      yield functools.partial(_begin_bar, shown)
  else:
    yield _begin_events if form == "json" else lambda method: lambda now: None


@contextlib.contextmanager
def task_bars() -> Iterator[Callable[[str, int, int], None]]:
  """Shows a bar per task with counts and elapsed time; a line where is no terminal."""
  if not STDERR.is_terminal:
    yield _task_lines()
    return
  with _bars("{task.description}", "{task.completed}/{task.total}", "") as shown:
    known: dict[str, rich_progress.TaskID] = {}

    def update(name: str, done: int, total: int) -> None:
      if name not in known:
        known[name] = shown.add_task(name, total=total)
      shown.update(known[name], completed=done)

    yield update


def _task_lines() -> Callable[[str, int, int], None]:
  tell, shown = teller("bars"), set()

  def update(name: str, done: int, total: int) -> None:
    stage(f"{name}, {done}/{total}")
    if name not in shown or done == total:
      shown.add(name)
      tell(f"{name}: {done}/{total}")

  return update


def _bars(name: str, state: str, left: str) -> rich_progress.Progress:
  """Returns a display of bars; the texts are templates of a task's fields."""
  return rich_progress.Progress(
    rich_progress.TextColumn(name),
    rich_progress.BarColumn(bar_width=16),
    rich_progress.TaskProgressColumn(),
    rich_progress.TextColumn(state),
    rich_progress.TimeElapsedColumn(),
    rich_progress.TextColumn(left),
    console=STDERR,
  )


def _begin_bar(shown: rich_progress.Progress, method: str) -> OnProgress:
  task = shown.add_task("starting", total=1.0, method=method, left="")
  clock = Clock()
  first: int | None = None

  def update(now: Progress) -> None:
    nonlocal first
    first = now.layer if first is None else first
    text = place(now)
    # Later layers have the shapes of the first, whose programs are compiled.
    if text != now.stage and now.layer == first:
      text += ", compiling"
    _, left = clock.follow(now)
    about = f"{numbers.about(left)} left" if left else ""
    shown.update(task, completed=now.fraction, description=text, left=about)

  return update


def _begin_events(method: str) -> OnProgress:
  clock = Clock()

  def update(now: Progress) -> None:
    spent, left = clock.follow(now)
    stage(f"{method}, {place(now)}", left)
    emit(
      "progress",
      method=method,
      layer=now.layer,
      layers=now.layers,
      stage=now.stage,
      fraction=round(now.fraction, 6),
      seconds=round(spent, 3),
      seconds_left=None if left is None else round(left, 3),
    )

  return update
