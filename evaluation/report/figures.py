"""Charts as titled figures; a figure without data is an empty string."""

from collections.abc import Callable, Sequence
from typing import Any

from mxjax.evaluation.report import svg
from mxjax.evaluation.report.html import WIDE, figure, legend
from mxjax.evaluation.report.svg import Part, Series

Stacks = Sequence[tuple[str, Sequence[Part]]]
"""Named bars, each with the parts it is stacked from."""


def lines(
  title: str, series: Sequence[Series], note: str, *, wide: bool = False, **options: Any
) -> str:
  """Draws lines over the layers, with a legend if several; see `svg.line_chart`."""
  if not any(each.points for each in series):
    return ""
  if wide:
    options |= {"width": WIDE}
  chart = svg.line_chart(series, label=title, **options)
  keys = legend((each.name, each.color) for each in series) if len(series) > 1 else ""
  return figure(title, chart, note=note, keys=keys, kind="wide" if wide else "")


def stacks(
  draw: Callable[..., str], title: str, bars: Stacks, note: str, **options: Any
) -> str:
  """Draws stacked bars by `svg.columns` or `svg.rows`, with a legend if needed."""
  if not bars:
    return ""
  parts = dict.fromkeys((part.name, part.color) for _, all_ in bars for part in all_)
  chart = draw(bars, label=title, **options)
  return figure(title, chart, note=note, keys=legend(parts) if len(parts) > 1 else "")
