"""Explains a program, or a whole run, from its log, to somebody who was not there."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.discovery.core import candidate_source
from mxjax.discovery.core.residual import of_edit
from mxjax.discovery.core.store import begun_events
from mxjax.errors import ValueRefusal
from mxjax.intake.texts import printable

Event = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Story:
  """Everything that the log records about one packet.

  Attributes:
    packet: The registration event.
    outcomes: Its settled conditions, in order.
    skipped: Registered controls that were not needed after the primary run.
    diff: Unified diff from the parent's source.
    adopted: Programs of its controls and probes that were kept for doing better.
    demands: What became of the response that its verdict requires, in order.
    reduced: What it was to hold and did not, for want of calls.
  """

  packet: Event
  outcomes: tuple[Event, ...]
  skipped: tuple[str, ...]
  verdict: Event | None
  checks: tuple[Event, ...]
  program: Event | None
  diff: str
  adopted: tuple[str, ...] = ()
  demands: tuple[Event, ...] = ()
  reduced: Event | None = None


def source(folder: pathlib.Path, program: str) -> str:
  """Returns a program's source; empty for the parent of the initial program."""
  path = folder / "programs" / f"{program}.py"
  return path.read_text() if program and path.exists() else ""


def stories(folder: pathlib.Path, events: Sequence[Event]) -> list[Story]:
  """Returns the stories of all packets among the events of a run, in order."""
  packets = [e for e in events if e["event"] == "packet"]
  by_packet: dict[str, list[Event]] = {p["id"]: [] for p in packets}
  programs: dict[str, Event] = {}
  for event in events:
    if event["event"] != "packet" and event.get("packet") in by_packet:
      by_packet[event["packet"]].append(event)
    if event["event"] == "program":
      programs.setdefault(event["program"], event)
  return [_story(folder, p, by_packet[p["id"]], programs) for p in packets]


def _story(
  folder: pathlib.Path, packet: Event, events: Sequence[Event], programs: dict[str, Any]
) -> Story:
  first = lambda kind: next((e for e in events if e["event"] == kind), None)
  body = packet["packet"]
  # Controls are skipped before either of the later stages of a round.
  skipped = [name for e in events if e["event"] == "skipped" for name in e["controls"]]
  diff = candidate_source.diff(
    source(folder, body["parent"]),
    source(folder, body["program"]),
    (f"parent {body['parent'][:12]}", f"program {body['program'][:12]}"),
  )
  return Story(
    packet,
    tuple(e for e in events if e["event"] == "outcome"),
    tuple(skipped),
    first("verdict"),
    tuple(e for e in events if e["event"] == "check"),
    programs.get(body["program"]),
    diff,
    tuple(e["program"] for e in events if e["event"] == "program"),
    tuple(e for e in events if e["event"] == "demand"),
    first("reduced"),
  )


def lineage(told: Sequence[Story], champion: str) -> list[Story]:
  """Returns the packets from the initial program to `champion`, one per program.

  A program may be proposed again, even by its own descendant; only its first packet
  counts.
  """
  first: dict[str, Story] = {}
  for story in told:
    for program in (story.packet["packet"]["program"], *story.adopted):
      first.setdefault(program, story)
  chain = []
  while champion in first:
    chain.append(first[champion])
    champion = first[champion].packet["packet"]["parent"]
  return chain[::-1]


def find(folder: pathlib.Path, program: str) -> list[Story]:
  """Returns the packets of a program, named by a prefix of its identity.

  Raises:
    ValueError: The prefix names no program or several.
  """
  named = [
    s
    for s in stories(folder, begun_events(folder))
    if any(name.startswith(program) for name in _programs(s))
  ]
  names = {n for s in named for n in _programs(s) if n.startswith(program)}
  if len(names) != 1:
    raise ValueRefusal(
      "explain",
      expected=f"the first characters of one program of {folder}",
      got=f"{program!r}, with which {len(names)} begin",
      mend="take an identity from the report",
    )
  return named


def _programs(story: Story) -> tuple[str, ...]:
  """Returns the candidate of a packet, and what was kept of its other conditions."""
  return (story.packet["packet"]["program"], *story.adopted)


def text(story: Story, margins: Mapping[str, float]) -> str:
  """Renders a story for a terminal, with control characters escaped."""
  packet = story.packet["packet"]
  lines = _registered(story, packet)
  for outcome in story.outcomes:
    seen = measured(story, outcome, margins)
    lines.append(
      f"{outcome['kind']} {outcome['condition']}: {outcome['status']}, charged "
      f"{outcome['charged']}; {seen or outcome['detail']}"
    )
  if story.skipped:
    lines.append(f"not needed after the primary run: {', '.join(story.skipped)}")
  lines += [f"kept as a program of its own: {name[:12]}" for name in story.adopted]
  if v := story.verdict:
    lines.append(
      f"verdict: {v['verdict']} ({v['reason']}); left {v['survivors']}; excluded "
      f"{v['excluded']}, explicit by {v['explicit'] or 'nothing'}; response: "
      f"{v['response']}"
    )
  lines += [demanded(event) for event in story.demands]
  for c in story.checks:
    lines.append(
      f"{c['response']}, check by {c['checker']}: {CHECKED[c['implemented']]}; "
      f"{c['detail']}"
    )
  if story.reduced is not None:
    left = ", ".join(story.reduced["left_out"])
    lines.append(f"left out: {left}; {story.reduced.get('detail', 'too few calls')}")
  shown = ", ".join(f"{name} {margin:.3g}" for name, margin in margins.items())
  lines.append(f"margins: {shown}" if packet["explanations"] else "")
  # A line break within a name would begin a line that looks like ours.
  return "\n".join([*(printable(line, "") for line in lines), printable(story.diff)])


CHECKED = {True: "implemented", False: "not implemented", None: "could not be told"}


def measured(story: Story, outcome: Event, margins: Mapping[str, float]) -> str:
  """Returns what a condition measured of all that has a margin, and how it moved."""
  values = outcome.get("values", {})
  observed = (story.verdict or {}).get("observed", {}).get(outcome["condition"], {})
  cells = []
  for name in margins:
    if name in values:
      moved = [observed[key] for key in (name, of_edit(name)) if key in observed]
      said = f" ({', '.join(moved)})" if moved else ""
      cells.append(f"{name} {values[name]:.6g}{said}")
  return ", ".join(cells)


def demanded(event: Event) -> str:
  """Returns what became of a response that a verdict requires, in a sentence."""
  where, program = ", ".join(event["computation"]), event["program"][:12]
  told = f"response {event['response']} in {where}: {event['status']} by {program}"
  return f"{told}; {event['detail']}" if "detail" in event else told


def refused(event: Event) -> str:
  """Returns what was refused before any call, and why, in a sentence."""
  return f"refused ({event['status']}): {event['label']}; {event['detail']}"


def whole(folder: pathlib.Path) -> str:
  """Renders a run for a terminal: all that was asked, said, measured and concluded.

  The champion's source and its difference from the start close it.
  """
  events = begun_events(folder)
  first, margins = events[0], events[0]["margins"]
  told = {story.packet["id"]: story for story in stories(folder, events)}
  programs = [e for e in events if e["event"] == "program"]
  parts = [
    f"The run: {first['task']['task']}, seed {first['config']['seed']}, proposer "
    f"{first['proposer']}; {first['target']} is minimized with "
    f"{first['config']['budget']} calls."
  ]
  for event in events:
    if event["event"] == "packet":
      parts.append(text(told[event["id"]], margins))
    elif event["event"] == "refused":
      parts.append(printable(refused(event), ""))
  if programs:
    best = programs[-1]["champion"]
    start = programs[0]["program"]
    line = lineage([*told.values()], best)
    way = [
      f"  {s.program['value']:.6g} {s.packet.get('label', 'the start')}"
      for s in line
      if s.program is not None
    ]
    change = candidate_source.diff(
      source(folder, start), source(folder, best), ("start", "champion")
    )
    parts += [
      printable("\n".join(["The way to the champion:", *way])),
      printable(f"The champion, {best[:12]}:\n{source(folder, best)}"),
      printable(f"Its change from the start:\n{change}"),
    ]
  end = events[-1]
  parts.append(
    printable(f"The run has ended: {end['reason']}.", "")
    if end["event"] == "closed"
    else "The run is open."
  )
  return "\n\n".join(parts)


def _registered(story: Story, packet: Event) -> list[str]:
  lines = [
    f"program {packet['program'][:12]}, from {packet['parent'][:12] or 'nothing'}: "
    f"{story.packet.get('label', 'the initial program')}",
    f"packet {story.packet['id'][:12]}, registered at event {story.packet['n']}, "
    "before its first call",
  ]
  if story.packet.get("note"):
    lines.append(f"  {story.packet['note']}")
  lines += [f"answers the verdict of packet {p[:12]}" for p in packet["response_to"]]
  if r := packet["residual"]:
    lines.append(
      f"residual: {r['observable']} = {r['value']:.4g} over {r['threshold']:.4g}, "
      f"moved by {', '.join(r['computation']) or 'nothing alone yet'}"
    )
  for account in packet["explanations"]:
    lines.append(f"  {account['name']}: {account['statement']}")
    for name, predicted in account["predictions"].items():
      lines.append(f"    under {name}: {predicted}")
  return lines
