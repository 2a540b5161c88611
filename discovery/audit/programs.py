"""The programs of a run in its report: how the champion came about, and the tree."""

import html
import pathlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mxjax.discovery.audit import explain
from mxjax.discovery.audit.explain import Made, Story
from mxjax.intake.texts import printable

MAX_DIFF_LINES = 60
"""Shown of each difference in the tree, which may hold thousands."""


def shown(text: str) -> str:
  """Returns text that a model may have written, safe within HTML."""
  return html.escape(printable(text, "\t"))


def code(identity: str) -> str:
  """Returns the beginning of an identity."""
  return f"<code>{shown(identity[:12])}</code>"


def _diff(text: str, most: int | None = None) -> str:
  lines = []
  every = text.split("\n")
  for line in every[:most]:
    tag = {"+": "ins", "-": "del"}.get(line[:1])
    lines.append(f"<{tag}>{shown(line)}</{tag}>" if tag else shown(line))
  if left := len(every) - len(lines):
    lines.append(f"({left} more lines; `mxjax discover explain` shows all)")
  return f"<pre>{chr(10).join(lines)}</pre>"


def _named(made: Made) -> str:
  return f"{code(made.program)} {shown(made.label)}: {made.value}"


def _folded(summary: str, content: str, *, is_open: bool = False) -> str:
  state = " open" if is_open else ""
  return f"<details{state}><summary>{summary}</summary>{content}</details>"


def _line(
  told: Sequence[Story], events: list[dict[str, Any]]
) -> list[tuple[Story, Made]]:
  champion = [e for e in events if e["event"] == "program"][-1]["champion"]
  return explain.lineage(told, champion)


def champion(
  folder: pathlib.Path, told: Sequence[Story], events: list[dict[str, Any]]
) -> str:
  """Returns the champion's difference from its parent, and each step that led there."""
  line, head = _line(told, events), "<h2>Champion</h2>"
  if len(line) < 2:
    return f"{head}<p>No program measured better than the initial one.</p>"
  first, last = line[0][1].program, line[-1][1].program
  whole = explain.difference(folder, first, last, ("initial", "champion"))
  steps = [_folded(_named(made), _step(story, made)) for story, made in line[1:-1]]
  story, best = line[-1]
  return "".join(
    [
      f"{head}<p>What the last of {len(line) - 1} steps changed of its parent, then "
      "the steps before it from the first on, and all of them together. A step is "
      "named by its program, what it was called, and its value.</p>",
      _folded(_named(best), _step(story, best), is_open=True),
      *steps,
      _folded("from the initial program to the champion", _diff(whole)),
      _folded(
        "the whole source of the champion",
        f"<pre>{chr(10).join(map(shown, explain.source(folder, last).split(chr(10))))}"
        "</pre>",
      ),
    ]
  )


def _step(story: Story, made: Made) -> str:
  """Returns what the packet of a program concluded, and how the program differs."""
  return f"<p>{shown(explain.verdict(story))}.</p>{_diff(made.diff)}"


def tree(told: Sequence[Story], events: list[dict[str, Any]]) -> str:
  """Returns the executed programs under their parents, the champion's line in bold."""
  line = {made.program for _, made in _line(told, events)}
  children: defaultdict[str, list[Made]] = defaultdict(list)
  for _, made in explain.first_made(told).values():
    children[made.parent].append(made)

  def branch(parent: str) -> str:
    items = []
    for made in children[parent]:
      name = _named(made)
      summary = f"<b>{name}</b>" if made.program in line else name
      fold = _folded(summary, _diff(made.diff, MAX_DIFF_LINES))
      items.append(f"<li>{fold}{branch(made.program)}</li>")
    return f"<ul>{''.join(items)}</ul>" if items else ""

  lead = (
    "<p>Every executed program under its parent, with the controls and probes that "
    "were kept as programs; the line of the champion in bold.</p>"
  )
  return f'<h2>Lineage</h2>{lead}<div class="tree">{branch("")}</div>'
