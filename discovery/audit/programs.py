"""The programs of a run in its report: how the champion came about, and the tree."""

import html
import pathlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mxjax.discovery.audit import explain
from mxjax.discovery.audit.explain import Story
from mxjax.discovery.core import candidate_source
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


def _named(story: Story) -> str:
  program = story.program
  value = f"{program['value']:.5g}" if program else "not measured"
  label = shown(story.packet.get("label", "the initial program"))
  return f"{code(story.packet['packet']['program'])} {label}: {value}"


def _folded(summary: str, content: str, *, is_open: bool = False) -> str:
  state = " open" if is_open else ""
  return f"<details{state}><summary>{summary}</summary>{content}</details>"


def _line(told: Sequence[Story], events: list[dict[str, Any]]) -> list[Story]:
  champion = [e for e in events if e["event"] == "program"][-1]["champion"]
  return explain.lineage(told, champion)


def champion(
  folder: pathlib.Path, told: Sequence[Story], events: list[dict[str, Any]]
) -> str:
  """Returns the champion's difference from its parent, and each step that led there."""
  line, head = _line(told, events), "<h2>Champion</h2>"
  if len(line) < 2:
    return f"{head}<p>No program measured better than the initial one.</p>"
  first, last = (story.packet["packet"]["program"] for story in (line[0], line[-1]))
  whole = candidate_source.diff(
    explain.source(folder, first),
    explain.source(folder, last),
    (f"initial {first[:12]}", f"champion {last[:12]}"),
  )
  steps = [_folded(_named(story), _diff(story.diff)) for story in line[1:-1]]
  return "".join(
    [
      f"{head}<p>What the last of {len(line) - 1} steps changed of its parent, then "
      "the steps before it and all of them together.</p>",
      _folded(_named(line[-1]), _diff(line[-1].diff), is_open=True),
      *steps,
      _folded("from the initial program to the champion", _diff(whole)),
      _folded(
        "the whole source of the champion",
        f"<pre>{chr(10).join(map(shown, explain.source(folder, last).split(chr(10))))}"
        "</pre>",
      ),
    ]
  )


def tree(told: Sequence[Story], events: list[dict[str, Any]]) -> str:
  """Returns the executed programs under their parents, the champion's line in bold."""
  line = {story.packet["id"] for story in _line(told, events)}
  children: defaultdict[str, list[Story]] = defaultdict(list)
  seen: set[str] = set()
  for story in told:
    body = story.packet["packet"]
    # A program may be proposed again; as in `explain.lineage`, its first packet counts.
    if story.program is not None and body["program"] not in seen:
      seen.add(body["program"])
      children[body["parent"]].append(story)

  def branch(parent: str) -> str:
    items = []
    for story in children[parent]:
      program, name = story.packet["packet"]["program"], _named(story)
      summary = f"<b>{name}</b>" if story.packet["id"] in line else name
      fold = _folded(summary, _diff(story.diff, MAX_DIFF_LINES))
      items.append(f"<li>{fold}{branch(program)}</li>")
    return f"<ul>{''.join(items)}</ul>" if items else ""

  lead = (
    "<p>Every executed program under its parent; the line of the champion in bold.</p>"
  )
  return f'<h2>Lineage</h2>{lead}<div class="tree">{branch("")}</div>'
