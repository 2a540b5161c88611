"""Explains a program, or a whole run, from its log, to somebody who was not there."""

import ast
import dataclasses
import pathlib
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mxjax.discovery.audit import words
from mxjax.discovery.core import candidate_source
from mxjax.discovery.core.residual import of_edit
from mxjax.discovery.core.store import begun_events
from mxjax.errors import ValueRefusal
from mxjax.intake.texts import printable

Event = dict[str, Any]
LABEL = 70
"""Characters of the label of another packet, where it is only named."""
SETS = 3
"""Sets of parts that are listed of those whose change moved an observable."""


@dataclasses.dataclass(frozen=True)
class Made:
  """A program as a packet made it: its candidate, or a condition that was kept.

  Attributes:
    program: Its identity.
    parent: That of its parent, or nothing.
    event: What the log says of it when it had run; None if it was not measured.
    diff: Unified difference from the parent's source.
  """

  program: str
  parent: str
  event: Event | None
  label: str
  diff: str

  @property
  def value(self) -> str:
    """Its value in words."""
    return f"{self.event['value']:.6g}" if self.event else "not measured"


@dataclasses.dataclass(frozen=True)
class Story:
  """Everything that the log records about one packet.

  Attributes:
    packet: The registration event.
    outcomes: Its settled conditions, in order.
    skipped: Registered controls that were not needed after the primary run.
    program: The event of its candidate, if that was measured.
    diff: Unified diff from the parent's source to the candidate's.
    adopted: Its controls and probes that were kept as programs for doing better than
      the parent, by their identity.
    demands: What became of the response that its verdict requires, in order.
    reduced: What it was to hold and did not, for want of calls.
    labels: What packets and programs of the run are called, by the first twelve
      characters of their identity.
    tried: What had moved the observable of its question before it, in a sentence.
    shown: The adopted program that is asked about, or nothing: then the candidate is.
  """

  packet: Event
  outcomes: tuple[Event, ...]
  skipped: tuple[str, ...]
  verdict: Event | None
  checks: tuple[Event, ...]
  program: Event | None
  diff: str
  adopted: Mapping[str, Made] = dataclasses.field(default_factory=dict)
  demands: tuple[Event, ...] = ()
  reduced: Event | None = None
  labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
  tried: str = ""
  shown: str = ""

  @property
  def label(self) -> str:
    """What the edit is called."""
    return self.packet.get("label", "the initial program")

  @property
  def candidate(self) -> Made:
    """The program that was proposed."""
    body = self.packet["packet"]
    return Made(body["program"], body["parent"], self.program, self.label, self.diff)

  @property
  def made(self) -> tuple[Made, ...]:
    """Its programs in the order in which they were recorded, the candidate first."""
    return (self.candidate, *self.adopted.values())


def source(folder: pathlib.Path, program: str) -> str:
  """Returns a program's source; empty for the parent of the initial program."""
  path = folder / "programs" / f"{program}.py"
  return path.read_text() if program and path.exists() else ""


def difference(
  folder: pathlib.Path, before: str, after: str, names: tuple[str, str]
) -> str:
  """Returns the unified difference of two programs; `names` says what each one is.

  A control that was kept has its source from a syntax tree, without comments or the
  spacing of its parent. The parent is compared in that form too, and named so: what
  differs is then what the control changed.
  """
  old, new = source(folder, before), source(folder, after)
  heads = [
    f"{name} {program[:12]}"
    for name, program in zip(names, (before, after), strict=True)
  ]
  if old and _unparsed(new) == new != _unparsed(old) != old:
    old, heads[0] = _unparsed(old), f"{heads[0]}, without comments and spacing"
  return candidate_source.diff(old, new, (heads[0], heads[1]))


def _unparsed(text: str) -> str:
  """Returns a source as its syntax tree is written; what does not parse stays."""
  try:
    return ast.unparse(ast.parse(text)) + "\n"
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return text


def stories(folder: pathlib.Path, events: Sequence[Event]) -> list[Story]:
  """Returns the stories of all packets among the events of a run, in order."""
  packets = [e for e in events if e["event"] == "packet"]
  by_packet: dict[str, list[Event]] = {p["id"]: [] for p in packets}
  for event in _attributed(events):
    if event["event"] != "packet" and event.get("packet") in by_packet:
      by_packet[event["packet"]].append(event)
  labels: dict[str, str] = {}
  told = [_story(folder, p, by_packet[p["id"]], labels) for p in packets]
  labels |= {story.packet["id"][:12]: story.label for story in told}
  # A probe is named by a packet before its own, so its label is known only now.
  told = [dataclasses.replace(s, adopted=_adopted(folder, s)) for s in told]
  for made in (made for story in told for made in story.made):
    # What made a program first names it.
    labels.setdefault(made.program[:12], made.label)
  margins = next((e["margins"] for e in events if "margins" in e), {})
  tried = _tried(told, margins)
  return [dataclasses.replace(s, tried=tried.get(s.packet["id"], "")) for s in told]


def _attributed(events: Sequence[Event]) -> Iterator[Event]:
  """Yields events; those of candidates that ran get the packet that they ran in."""
  waiting: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
  where: dict[str, list[str]] = {}
  for event in events:
    body = event.get("packet")
    if event["event"] == "packet":
      # The event of a candidate that ran does not name its packet. Candidates are
      # recorded in the order of their packets, and what was unsafe never is.
      where[event["id"]] = waiting[body["program"], body["parent"]]
      where[event["id"]].append(event["id"])
    elif event["event"] == "rejected" and body in where:
      where[body].remove(body)
    elif event["event"] == "program" and body is None:
      ids = waiting[event["program"], event["parent"]]
      event = {**event, "packet": ids.pop(0) if ids else ""}
    yield event


def _story(
  folder: pathlib.Path,
  packet: Event,
  events: Sequence[Event],
  labels: Mapping[str, str],
) -> Story:
  first = lambda kind: next((e for e in events if e["event"] == kind), None)
  body = packet["packet"]
  # Controls are skipped before either of the later stages of a round.
  skipped = [name for e in events if e["event"] == "skipped" for name in e["controls"]]
  programs = [e for e in events if e["event"] == "program"]
  adopted = {
    e["program"]: Made(e["program"], e["parent"], e, "", "")
    for e in programs
    if "origin" in e
  }
  return Story(
    packet,
    tuple(e for e in events if e["event"] == "outcome"),
    tuple(skipped),
    first("verdict"),
    tuple(e for e in events if e["event"] == "check"),
    next((e for e in programs if "origin" not in e), None),
    difference(folder, body["parent"], body["program"], ("parent", "program")),
    adopted,
    tuple(e for e in events if e["event"] == "demand"),
    first("reduced"),
    labels,
  )


def _adopted(folder: pathlib.Path, story: Story) -> dict[str, Made]:
  """Returns what was kept of a packet, each with its own label and difference."""
  found = {}
  for made in story.adopted.values():
    assert made.event is not None
    label = f"{story.label}, as in {condition(story, made.event['origin'])}"
    diff = difference(folder, made.parent, made.program, ("parent", "program"))
    found[made.program] = dataclasses.replace(made, label=label, diff=diff)
  return found


def _tried(told: Sequence[Story], margins: Mapping[str, float]) -> dict[str, str]:
  """Returns for each packet with a question what had moved its observable before.

  Of all executed programs, candidates and controls, it compares each with its parent
  and the controls with the candidate too, as the search does to learn what moves an
  observable.
  """
  seen: list[tuple[tuple[str, ...], dict[str, float]]] = []
  ran: dict[str, tuple[Event, dict[str, float]]] = {}
  found = {}
  for story in told:
    body = story.packet["packet"]
    if residual := body["residual"]:
      name = residual["observable"]
      found[story.packet["id"]] = _said_of_tries(seen, name, margins.get(name))
    values = {o["condition"]: o["values"] for o in story.outcomes if o["values"]}
    calls = {
      c["name"]: c["call"]
      for c in body.get("conditions", ())
      if c["name"] in values and not c["call"]["intervention"]
    }
    own = [(call, values[name]) for name, call in calls.items()]
    # The primary run is the first of a packet's conditions.
    others = [ran[body["parent"]]] if body["parent"] in ran else []
    for index, (call, measured) in enumerate(own):
      for other, before in others + (own[:1] if index else []):
        parts = _parts(call, other)
        both = measured.keys() & before.keys()
        seen.append((parts, {n: abs(measured[n] - before[n]) for n in both}))
    if own:
      ran.setdefault(body["program"], own[0])
    for made in story.adopted.values():
      origin = made.event["origin"] if made.event else ""
      if origin in calls:
        ran.setdefault(made.program, (calls[origin], values[origin]))
  return found


def _parts(own: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the hooks and plan keys in which two calls differ."""
  names = dict.fromkeys(
    name for field in ("computation", "plan") for c in (own, other) for name in c[field]
  )
  differs = lambda name: any(
    own[field].get(name) != other[field].get(name) for field in ("computation", "plan")
  )
  return tuple(filter(differs, names))


def _said_of_tries(
  seen: Sequence[tuple[tuple[str, ...], Mapping[str, float]]],
  observable: str,
  margin: float | None,
) -> str:
  if margin is None:
    return "It has no margin, so nobody learns what moves it."
  compared = [(parts, by) for parts, by in seen if parts and observable in by]
  if not compared:
    return "No change of a program had been measured before this packet."
  moved = [" + ".join(parts) for parts, by in compared if by[observable] > margin]
  distinct = sorted({*moved}, key=lambda each: (each.count(" + "), each))
  told = f"Of {len(compared)} measured changes before this packet, "
  if not moved:
    return told + "none moved it by more than its margin."
  more = f" and {left} more sets" if (left := len(distinct) - SETS) > 0 else ""
  return (
    f"{told}{len(moved)} moved it; they changed {'; '.join(distinct[:SETS])}{more}."
  )


def first_made(told: Sequence[Story]) -> dict[str, tuple[Story, Made]]:
  """Returns where every measured program of a run was made first.

  A program may be proposed again, even by its own descendant; only the first time
  counts.
  """
  first: dict[str, tuple[Story, Made]] = {}
  for story in told:
    for made in story.made:
      if made.event is not None:
        first.setdefault(made.program, (story, made))
  return first


def lineage(told: Sequence[Story], champion: str) -> list[tuple[Story, Made]]:
  """Returns the programs from the initial one to `champion`, each with its packet."""
  first, chain = first_made(told), []
  while champion in first:
    chain.append(first[champion])
    champion = first[champion][1].parent
  return chain[::-1]


def find(folder: pathlib.Path, program: str) -> list[Story]:
  """Returns the packets of a program, named by a prefix of its identity.

  Raises:
    ValueError: The prefix names no program or several.
  """
  named = [
    (s, m.program)
    for s in stories(folder, begun_events(folder))
    for m in s.made
    if m.program.startswith(program)
  ]
  names = {name for _, name in named}
  if len(names) != 1:
    raise ValueRefusal(
      "explain",
      expected=f"the first characters of one program of {folder}",
      got=f"{program!r}, with which {len(names)} begin",
      mend="take an identity from the report",
    )
  return [
    dataclasses.replace(s, shown=name if name in s.adopted else "") for s, name in named
  ]


def quoted(label: str) -> str:
  """Returns a label, shortened, within a sentence."""
  return f'"{textwrap.shorten(label, LABEL, placeholder=" ...")}"'


def condition(story: Story, name: str) -> str:
  """Returns the name of a condition; of a probe, also what answer it takes back."""
  kind, _, packet = name.partition(" ")
  if kind != "probe" or packet not in story.labels:
    return name
  return f"{name} (for the verdict on {quoted(story.labels[packet])})"


def called(story: Story, identity: str) -> str:
  """Returns the beginning of a packet's or a program's identity, and its label."""
  begun = identity[:12]
  label = story.labels.get(begun)
  return f"{begun} ({quoted(label)})" if label else begun


def margins_of(margins: Mapping[str, float]) -> str:
  """Returns the margins in a line."""
  return ", ".join(f"{name} {margin:.3g}" for name, margin in margins.items())


def text(
  story: Story, margins: Mapping[str, float], *, tells_margins: bool = True
) -> str:
  """Renders a story for a terminal, with control characters escaped.

  A whole run tells the margins once, so its packets do not.
  """
  packet = story.packet["packet"]
  lines = _registered(story, packet)
  for outcome in story.outcomes:
    seen = measured(story, outcome, margins)
    lines.append(
      f"{outcome['kind']} {condition(story, outcome['condition'])}: "
      f"{outcome['status']}, charged {outcome['charged']}; {seen or outcome['detail']}"
    )
  if story.skipped:
    lines.append(f"not needed after the primary run: {', '.join(story.skipped)}")
  lines += [
    f"kept as a program of its own: {made.program[:12]}, {made.label}: {made.value}"
    for made in story.adopted.values()
  ]
  if story.verdict:
    lines.append(f"verdict: {concluded(story.verdict)}")
  lines += [demanded(story, event) for event in story.demands]
  lines += [checked(story, event) for event in story.checks]
  if story.reduced is not None:
    left = ", ".join(story.reduced["left_out"])
    lines.append(f"left out: {left}; {story.reduced.get('detail', 'too few calls')}")
  if packet["explanations"] and tells_margins:
    lines.append(f"margins: {margins_of(margins)}")
  shown = [story.adopted[story.shown]] if story.shown else story.made
  diffs = [printable(made.diff) for made in shown]
  # A line break within a name would begin a line that looks like ours.
  return "\n".join([*(printable(line, "") for line in lines), *diffs])


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


def demanded(story: Story, event: Event) -> str:
  """Returns what became of a response that a verdict requires, in a sentence."""
  where, program = ", ".join(event["computation"]), called(story, event["program"])
  became = words.OWING.get(event["status"], event["status"] + " by {}").format(program)
  told = f"response {event['response']} in {where}: {became}"
  return f"{told}; {event['detail']}" if "detail" in event else told


def concluded(verdict: Event) -> str:
  """Returns a verdict with its grounds and what it requires, in a sentence."""
  name, reason, response = (verdict[key] for key in ("verdict", "reason", "response"))
  gone = [f"{each} by {by}" for each, by in verdict["excluded"].items()]
  would = ", if so small a change told anything" if reason == "within_margin" else ""
  return (
    f"{name} ({reason}), which means: {words.concluded(verdict)}. Excluded{would}: "
    f"{'; '.join(gone) or 'none'}. Left: {'; '.join(verdict['survivors']) or 'none'}. "
    f"Explicit by {verdict['explicit'] or 'nothing'}. It requires the response "
    f"{response}: {words.ASKS.get(response, 'unknown')}."
  )


def checked(story: Story, event: Event) -> str:
  """Returns whether a response was found in what was executed, in a sentence."""
  return (
    f"answer {event['response']} to the verdict on packet "
    f"{called(story, event.get('response_to', ''))}, check by {event['checker']}: "
    f"{CHECKED[event['implemented']]}; {event['detail']}"
  )


def refused(event: Event) -> str:
  """Returns what was refused before any call, and why, in a sentence."""
  return f"refused ({event['status']}): {event['label']}; {event['detail']}"


def whole(folder: pathlib.Path) -> str:
  """Renders a run for a terminal: all that was asked, said, measured and concluded.

  The way to the champion opens it; the champion's source and its difference from the
  start close it.
  """
  events = begun_events(folder)
  first, end, margins = events[0], events[-1], events[0]["margins"]
  told = {story.packet["id"]: story for story in stories(folder, events)}
  programs = [e for e in events if e["event"] == "program"]
  opening = (
    f"The run: {first['task']['task']}, seed {first['config']['seed']}, proposer "
    f"{first['proposer']}; {first['target']} is minimized with "
    f"{first['config']['budget']} calls.",
    f"The run has ended: {end['reason'].rstrip('.')}."
    if end["event"] == "closed"
    else "The run is open.",
    f"margins: {margins_of(margins)}",
    "The words are explained at the end.",
  )
  parts = ["\n".join(printable(line, "") for line in opening)]
  best = programs[-1]["champion"] if programs else ""
  line = lineage([*told.values()], best)
  if line:
    parts.append("\n".join(printable(each, "") for each in _way(line)))
  for event in events:
    if event["event"] == "packet":
      parts.append(text(told[event["id"]], margins, tells_margins=False))
    elif event["event"] == "refused":
      parts.append(printable(refused(event), ""))
  if line:
    change = difference(folder, line[0][1].program, best, ("start", "champion"))
    parts += [
      printable(f"The champion, {best[:12]}:\n{source(folder, best)}"),
      printable(f"Its change from the start:\n{change}"),
    ]
  meant = (f"  {word}: {meaning}" for word, meaning in words.WORDS.items())
  return "\n\n".join([*parts, "\n".join(["What the words mean:", *meant])])


def _way(line: Sequence[tuple[Story, Made]]) -> list[str]:
  """Returns the steps to the champion: value, label and what the verdict says."""
  lines = [
    f"The way to the champion, {line[-1][1].program[:12]}. Each step revises the one "
    "before it, which need not have been the best by then:"
  ]
  for story, made in line:
    if not made.parent:
      lines.append(f"  {made.value} the start")
    elif made.event is not None and "origin" in made.event:
      # Its verdict is about the edit, which did worse.
      name = condition(story, made.event["origin"])
      kind = "" if name.startswith("probe ") else "control "
      lines += [
        f"  {made.value} {kind}{name}, kept as a program of its own",
        f"    of the edit {quoted(story.label)}, {verdict(story)}",
      ]
    else:
      lines += [f"  {made.value} {made.label}", f"    {verdict(story)}"]
  return lines


def verdict(story: Story) -> str:
  """Returns what the packet of a program concluded, in words."""
  if story.verdict is not None:
    return f"{story.verdict['verdict']}: {words.concluded(story.verdict)}"
  asks = bool(story.packet["packet"]["explanations"])
  return "not resolved yet" if asks else "without a question, so there is no verdict"


def _registered(story: Story, packet: Event) -> list[str]:
  made = story.adopted[story.shown] if story.shown else story.candidate
  lines = [
    f"program {made.program[:12]}, from {made.parent[:12] or 'nothing'}: {made.label}",
    f"packet {story.packet['id'][:12]}, registered at event {story.packet['n']}, "
    "before its first call",
  ]
  if made.event is not None:
    lines.insert(1, f"its value is {made.value}, at call {made.event['call']}")
  if story.shown and made.event is not None:
    lines.insert(
      2,
      f"it is {condition(story, made.event['origin'])} of the packet below, kept as a "
      f"program since it did better than {made.parent[:12]}; the packet proposed "
      f"{called(story, packet['program'])}",
    )
  if story.packet.get("note"):
    lines.append(f"  {story.packet['note']}")
  lines += [
    f"answers the verdict of packet {called(story, p)}" for p in packet["response_to"]
  ]
  if r := packet["residual"]:
    lines.append(f"residual: {asked(story, r)}")
  for account in packet["explanations"]:
    lines.append(f"  {account['name']}: {account['statement']}")
    for name, predicted in account["predictions"].items():
      said = ", ".join(f"{key} {symbol}" for key, symbol in predicted.items())
      lines.append(f"    under {condition(story, name)}: {said}")
  return lines


def asked(story: Story, residual: Event) -> str:
  """Returns the question of a packet: where it was measured, and what moves it."""
  told = (
    f"{residual['observable']} = {residual['value']:.4g}, over its threshold of "
    f"{residual['threshold']:.4g}, measured on {called(story, residual['program'])}. "
  )
  if parts := ", ".join(residual["computation"]):
    return f"{told}When it was opened, it had been moved alone by {parts}."
  told += "When it was opened, no part of a program had moved it alone."
  return f"{told} {story.tried}".strip()
