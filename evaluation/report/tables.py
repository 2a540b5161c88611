"""Tables of text cells, rendered as Markdown, CSV and HTML."""

import csv
import html
import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mxjax.evaluation.report.html import table


class Table(NamedTuple):
  """A table of text cells; an empty cell means that there is no result.

  `note` is the text below the table, or empty; blank lines divide its paragraphs.
  """

  title: str
  head: Sequence[str]
  rows: Sequence[Sequence[str]]
  note: str = ""

  def markdown(self) -> str:
    """Returns heading, table and note in Markdown."""
    note = f"\n\n{self.note}" if self.note else ""
    return f"## {self.title}\n\n{markdown_rows(self.head, self.rows)}{note}\n"

  def html(self) -> str:
    """Returns heading, table and note in HTML, everything escaped."""
    cells = [[html.escape(cell) for cell in row] for row in self.rows]
    paragraphs = html.escape(self.note).split("\n\n") if self.note else []
    note = "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)
    return f"<h2>{html.escape(self.title)}</h2>{table(self.head, cells)}{note}"


def markdown_rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns head and rows in Markdown, without a trailing line break.

  Whatever a cell says stays in it: bars are escaped, line breaks become spaces.
  """
  text = lambda cell: " ".join(cell.replace("|", "\\|").splitlines())
  lines = [map(text, head), ["---"] * len(head), *(map(text, row) for row in rows)]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown(tables: Iterable[Table]) -> str:
  """Returns the tables in Markdown, one below the other."""
  return "\n".join(each.markdown() for each in tables)


def comma_separated(tables: Iterable[Table]) -> str:
  """Returns the tables in one CSV; each row begins with the table's title."""
  text = io.StringIO()
  writer = csv.writer(text, lineterminator="\n")
  for title, head, rows, _ in tables:
    writer.writerow(["table", *head])
    writer.writerows([title, *row] for row in rows)
  return text.getvalue()
