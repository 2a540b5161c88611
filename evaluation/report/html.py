"""HTML fragments of a page; every string argument is escaped unless noted."""

import html
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mxjax.evaluation.report import svg

STYLE = pathlib.Path(__file__).with_name("report.css")
# Not behind a letter or a hyphen: `mr-gptq` is no option.
OPTION = re.compile(r"(?<![\w-])--?[A-Za-z]\S*")
"""An option with what adheres to it; a browser would break after any of its hyphens."""
# Before letters alone, so that a number such as 1,000 stays whole.
PART = re.compile(r"(?<=\w)([:=,+])(?=[^\W\d])")
"""What joins the parts of a method's name, such as `gptq:activations=float`."""


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


def words(text: str) -> str:
  """Returns a text as HTML that breaks at the edge of a phone where a person would.

  Options are kept whole, and a method's name breaks between its parts. What a reader
  copies from the page is the text alone.
  """
  # Escaped first: what is added then is markup.
  parts = PART.sub(r"\1<wbr>", html.escape(text))
  return OPTION.sub(r'<span class="option">\g<0></span>', parts)


def legend(entries: Iterable[tuple[str, int]]) -> str:
  """Returns a legend of names and palette indices."""
  span = lambda name, color: f'<span class="c{color}">{words(name)}</span>'
  spans = (span(name, color) for name, color in entries)
  return f'<div class="legend">{"".join(spans)}</div>'


def figure(title: str, chart: str, *, note: str = "", keys: str = "") -> str:
  """Returns a titled chart with its legend and a note on how to read it."""
  head = f"<h4>{html.escape(title)}</h4>"
  if note:
    head += f"<figcaption>{html.escape(note)}</figcaption>"
  return f"<figure>{head}{keys}{chart}</figure>"


def lines(
  title: str,
  series: Sequence[svg.Series],
  note: str,
  **options: Any,
) -> str:
  """Draws lines over the layers, with a legend if several; empty without points."""
  series = [each for each in series if each.points]
  if not series:
    return ""
  chart = svg.line_chart(series, label=title, **options)
  names = [(each.name, each.color) for each in svg.merged(series)]
  keys = legend(names) if len(series) > 1 else ""
  return figure(title, chart, note=note, keys=keys)


def stacks(title: str, bars: svg.Bars, note: str, **options: Any) -> str:
  """Draws stacked bars, with a legend if several parts; empty without bars."""
  if not bars:
    return ""
  parts = dict.fromkeys((part.name, part.color) for _, all_ in bars for part in all_)
  chart = svg.rows(bars, label=title, **options)
  return figure(title, chart, note=note, keys=legend(parts) if len(parts) > 1 else "")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns a table of ready HTML cells; one that begins with `<td` is a whole cell."""
  cell = lambda text: text if text.startswith("<td") else f"<td>{text}</td>"
  lines = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
  heads = "".join(f"<th>{html.escape(name)}</th>" for name in head)
  return (
    f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead>'
    f"<tbody>{lines}</tbody></table></div>"
  )


def grid(figures: Iterable[str]) -> str:
  """Arranges figures side by side, leaving out empty ones."""
  inside = "".join(figures)
  return f'<div class="grid">{inside}</div>' if inside else ""


def folded(title: str, content: str, *, is_open: bool = False) -> str:
  """Returns ready HTML under a line that opens and closes it."""
  state = " open" if is_open else ""
  return f"<details{state}><summary>{words(title)}</summary>{content}</details>"


def glossary(words: Mapping[str, str]) -> str:
  """Returns a folded list of words and their meaning."""
  entries = "".join(
    f"<dt>{html.escape(word)}</dt><dd>{html.escape(meaning)}</dd>"
    for word, meaning in words.items()
  )
  return folded("Words on this page", f"<dl>{entries}</dl>")
