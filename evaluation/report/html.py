"""HTML fragments of a page; every string argument is escaped unless noted."""

import html
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mxjax.evaluation.report import svg

WIDE = 1086
"""Width in pixels of a chart as wide as the page."""
STYLE = pathlib.Path(__file__).with_name("report.css")


def document(title: str, body: str) -> str:
  """Returns a self-contained page of ready HTML that fetches nothing."""
  return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE.read_text(encoding="utf-8")}</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""


def legend(entries: Iterable[tuple[str, int]]) -> str:
  """Returns a legend of names and palette indices."""
  span = lambda name, color: f'<span class="c{color}">{html.escape(name)}</span>'
  spans = (span(name, color) for name, color in entries)
  return f'<div class="legend">{"".join(spans)}</div>'


def figure(
  title: str, chart: str, *, note: str = "", keys: str = "", kind: str = ""
) -> str:
  """Returns a titled chart with its legend and a note on how to read it."""
  head = f"<h4>{html.escape(title)}</h4>"
  if note:
    head += f"<figcaption>{html.escape(note)}</figcaption>"
  return f'<figure class="{kind}">{head}{keys}{chart}</figure>'


def lines(
  title: str,
  series: Sequence[svg.Series],
  note: str,
  *,
  wide: bool = False,
  **options: Any,
) -> str:
  """Draws lines over the layers, with a legend if several; empty without points."""
  if not any(each.points for each in series):
    return ""
  if wide:
    options |= {"width": WIDE}
  chart = svg.line_chart(series, label=title, **options)
  keys = legend((each.name, each.color) for each in series) if len(series) > 1 else ""
  return figure(title, chart, note=note, keys=keys, kind="wide" if wide else "")


def stacks(
  draw: Callable[..., str], title: str, bars: svg.Bars, note: str, **options: Any
) -> str:
  """Draws `svg.columns` or `svg.rows`, with a legend if needed; empty without bars."""
  if not bars:
    return ""
  parts = dict.fromkeys((part.name, part.color) for _, all_ in bars for part in all_)
  chart = draw(bars, label=title, **options)
  return figure(title, chart, note=note, keys=legend(parts) if len(parts) > 1 else "")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns a table of ready HTML cells; one that begins with `<td` is a whole cell."""
  cell = lambda text: text if text.startswith("<td") else f"<td>{text}</td>"
  lines = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
  heads = "".join(f"<th>{html.escape(name)}</th>" for name in head)
  return (
    f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>'
    f"<tbody>{lines}</tbody></table></div>"
  )


def section(title: str, lead: str, content: str) -> str:
  """Returns a subsection, or "" if `content` (ready HTML) is empty."""
  if not content:
    return ""
  head = f"<h3>{html.escape(title)}</h3>"
  return f'{head}<p class="lead">{html.escape(lead)}</p>{content}'


def grid(figures: Iterable[str], kind: str = "") -> str:
  """Arranges figures side by side, leaving out empty ones."""
  inside = "".join(figures)
  return f'<div class="grid {kind}">{inside}</div>' if inside else ""
