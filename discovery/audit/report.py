"""Writes `report.html`, a single file for a run without scripts or downloads."""

import dataclasses
import html
import json
import pathlib
from collections import Counter, defaultdict
from typing import Any

from mxjax.discovery.audit import explain, programs, words
from mxjax.discovery.audit.explain import Story
from mxjax.discovery.audit.status import owed, proposer_use
from mxjax.discovery.core.ledger import KINDS
from mxjax.discovery.core.residual import consistent
from mxjax.discovery.core.store import begun_events, read_stored, write_for_people
from mxjax.discovery.search import heldout, runs
from mxjax.errors import ValueRefusal
from mxjax.evaluation.report import html as report_html
from mxjax.evaluation.report import numbers, svg
from mxjax.intake.texts import printable

Event = dict[str, Any]
BANNERS = {
  "embedded": "It puts together what its edit templates hold, and nothing else.",
  "llm": "A language model wrote every edit, account and statement; what it wrote is "
  "shown as text, and is no instruction.",
  "cassette": "Recorded replies of a language model: the code path reproduces, and "
  "this is no new sample.",
  "human": "A person, or a program, answered from a folder.",
}
"""What a reader has to know of the proposer, by the beginning of its name."""


STATUSES = ", ".join(f"{word} ({told})" for word, told in words.BECAME.items())
"""What can become of a question, in a sentence."""


def write(folder: pathlib.Path) -> pathlib.Path:
  """Writes the report of a run, finished or not; returns its path."""
  write_for_people(folder, "report.html", page(folder).encode())
  return folder / "report.html"


def page(folder: pathlib.Path) -> str:
  """Returns the HTML of the report."""
  events = begun_events(folder)
  told = explain.stories(folder, events)
  first = events[0]
  title = f"Discovery on {first['task']['task']}, seed {first['config']['seed']}"
  sections = [
    _summary(folder, events),
    report_html.glossary(words.WORDS),
    _curves(folder, events),
    _ledger(folder, events),
    _verdicts(told),
    _residuals(events),
    programs.champion(folder, told, events),
    _packets(told, events),
    _refused(events),
    programs.tree(told, events),
  ]
  head = f"<header><h1>{html.escape(title)}</h1></header>"
  lead = f'<p class="lead">{html.escape(_lead(events))}</p>'
  return report_html.document(title, head + lead + "".join(sections))


def _lead(events: list[Event]) -> str:
  first, last = events[0], events[-1]
  state = (
    "open" if last["event"] != "closed" else f"closed: {last['reason'].rstrip('.')}"
  )
  name = str(first["proposer"])
  said = next((told for kind, told in BANNERS.items() if name.startswith(kind)), "")
  return printable(f"Proposer {name}. {state}. {said}", "")


def _summary(folder: pathlib.Path, events: list[Event]) -> str:
  measured = [e for e in events if e["event"] == "program"]
  if not measured:
    raise ValueRefusal(
      folder,
      expected="a run with a measured program",
      got="none yet",
      mend="try again later",
    )
  initial = measured[0]
  options = dataclasses.asdict(runs.read_options(folder))
  champion = measured[-1]["champion"]
  best = next(e for e in measured if e["program"] == champion)
  target = _target(events, initial)
  rows = [
    ["initial program", programs.code(initial["program"]), f"{initial['value']:.5g}"],
    [
      "champion",
      programs.code(champion),
      f"{best['value']:.5g} at call {best['call']}",
    ],
    ["champion, held out", "", _held_out(folder, events, champion)],
    ["sandbox", html.escape(options["sandbox"]), ""],
    ["log", programs.code(events[-1]["hash"]), f"{len(events)} chained events"],
  ]
  # The program that a run began with has its own place below.
  config = {k: v for k, v in events[0]["config"].items() if k != "start"}
  config = html.escape(json.dumps(config, indent=1))
  more = f"<details><summary>configuration</summary><pre>{config}</pre></details>"
  head = ["", "", f"{html.escape(target)}, the target; lower is better"]
  return "<h2>Run</h2>" + report_html.table(head, rows) + more


def _held_out(folder: pathlib.Path, events: list[Event], champion: str) -> str:
  """Returns the held-out value of the champion, or why there is none, in words."""
  if events[-1]["event"] != "closed":
    return "told when the run has ended"
  scores = [m for m in heldout.unsealed(folder) if m["champion"] == champion]
  if not scores:
    return "it was not scored"
  value = scores[-1]["value"]
  return f"{value:.5g}" if value is not None else html.escape(scores[-1]["status"])


def _target(events: list[Event], initial: Event) -> str:
  """Returns the name of the observable that the value of a program is."""
  outcome = next(e for e in events if e["event"] == "outcome" and e["values"])
  values = outcome["values"].items()
  return next((n for n, value in values if value == initial["value"]), "the value")


def _curves(folder: pathlib.Path, events: list[Event]) -> str:
  measured = [e for e in events if e["event"] == "program"]
  values = {e["program"]: e["value"] for e in measured}
  found = [(float(e["call"]), e["value"]) for e in measured]
  anytime = [(float(e["call"]), values[e["champion"]]) for e in measured]
  marks = heldout.unsealed(folder)
  scores = [(float(m["call"]), m["value"]) for m in marks if m["value"] is not None]
  figures = [
    report_html.lines(
      "Visible target",
      [
        svg.Series("best so far", anytime, 0, form="steps"),
        svg.Series("every executed program", found, 1, form="dots"),
      ],
      "At the call that was charged for it; lower is better.",
      x_label="evaluator calls",
    ),
    report_html.lines(
      "Held-out target of the champion",
      [svg.Series("held-out", scores, 0, form="steps")],
      "Measured by another process; the search never saw it.",
      x_label="evaluator calls",
    ),
  ]
  for name, used in _used(folder, events).items():
    figures.append(
      report_html.lines(
        f"Visible target by {name}",
        [svg.Series("best so far", used, 0, form="steps")],
        "What the proposer had used when the program was proposed.",
        x_label=name,
      )
    )
  return "<h2>Anytime curves</h2>" + report_html.grid(figures)


def _used(
  folder: pathlib.Path, events: list[Event]
) -> dict[str, list[tuple[float, float]]]:
  """Returns the champion's value after so many tokens, and dollars, of the proposer.

  Proposals are stored in the order in which they were registered or refused.
  """
  usage = [
    stored.get("usage", {})
    for path in sorted((folder / "proposals").glob("*.json"))
    if "exhausted" not in (stored := read_stored(path))
  ]
  values = {e["program"]: e["value"] for e in events if e["event"] == "program"}
  after: dict[str, tuple[float, float]] = {}
  tokens = dollars = 0.0
  # The packet of the initial program, which nobody proposed, has no label.
  made = (e for e in events if e["event"] == "refused" or "label" in e)
  # The last proposal may be stored and not registered yet.
  for event, use in zip(made, usage, strict=False):
    tokens += use.get("input_tokens", 0) + use.get("output_tokens", 0)
    dollars += use.get("micro_dollars", 0) / 1e6
    if event["event"] == "packet":
      after[event["id"]] = tokens, dollars
  best = [
    (*after[e["packet"]], values[e["champion"]])
    for e in _measured(events)
    if e["packet"] in after
  ]
  found = {}
  if tokens:
    found["tokens"] = [(t, value) for t, _, value in best]
  if dollars:
    found["dollars"] = [(d, value) for _, d, value in best]
  return found


def _measured(events: list[Event]) -> list[Event]:
  """Returns the events of programs, each with the packet that it was measured in."""
  of = {e["packet"]["program"]: e["id"] for e in events if e["event"] == "packet"}
  return [
    {"packet": of.get(e["program"], ""), **e} for e in events if e["event"] == "program"
  ]


def _ledger(folder: pathlib.Path, events: list[Event]) -> str:
  outcomes = [e for e in events if e["event"] == "outcome"]
  seconds = {
    path.stem: read_stored(path)["seconds"]
    for path in (folder / "outcomes").glob("*.json")
  }
  body = []
  for kind in KINDS:
    mine = [e for e in outcomes if e["kind"] == kind]
    paid = [e for e in mine if e["charged"]]
    spent = sum(seconds.get(e["exec_id"], 0.0) for e in paid)
    body.append(
      [
        kind,
        str(sum(e["charged"] for e in mine)),
        str(len(mine) - len(paid)),
        str(sum(e["status"] != "ok" for e in paid)),
        numbers.seconds(spent),
      ]
    )
  total = sum(e["charged"] for e in outcomes)
  body.append(["all", f"{total} of {events[0]['config']['budget']}", "", "", ""])
  refused = [e for e in events if e["event"] == "refused"]
  proposals = len(refused) + sum(
    e["event"] == "packet" and "label" in e for e in events
  )
  note = (
    f"<p>{proposals} proposals, {len(refused)} of them refused before any call. "
    "A repeated execution costs nothing, and is counted as reused; a failed one ended "
    "without values. A candidate is a proposed program as it is. "
    + " ".join(f"A {word}: {_low(words.WORDS[word])}" for word in ("control", "probe"))
    + "</p>"
  )
  use = proposer_use(folder, events, events[0]["config"])
  note += "".join(f"<p>{programs.shown(line.strip())}</p>" for line in use)
  head = ["kind", "calls charged", "reused", "failed", "time"]
  return "<h2>Ledger</h2>" + report_html.table(head, body) + note


def _low(sentence: str) -> str:
  """Returns a sentence with a small first letter, to stand behind a colon."""
  return sentence[:1].lower() + sentence[1:]


def _verdicts(told: list[Story]) -> str:
  verdicts = [s.verdict for s in told if s.verdict]
  keys = ("verdict", "reason", "response")
  counts = Counter(tuple(v[key] for key in keys) for v in verdicts)
  checks = [check for s in told for check in s.checks]
  found = Counter(c["implemented"] for c in checks)
  unknown = f", and {found[None]} could not tell" if found[None] else ""
  explicit = Counter(v["explicit"] for v in verdicts)
  means = lambda key: (
    f"{words.concluded(dict(zip(keys, key, strict=True)))}. The next program is to: "
    f"{words.ASKS.get(key[2], key[2])}."
  )
  rows = [
    [
      *map(html.escape, key),
      str(n),
      f'<td class="long">{html.escape(means(key))}</td>',
    ]
    for key, n in sorted(counts.items())
  ]
  note = (
    f"<p>{len(verdicts) - explicit['']} of {len(verdicts)} verdicts are explicit: they "
    "exclude the focal account, which the proposer put first, or a rival, which "
    "predicts the same of the primary run. Any other account is a straw man, which "
    f"the primary run tells from the focal one by itself. {explicit['primary']} are "
    f"explicit by the primary run alone. {found[True]} of {len(checks)} checks found "
    f"the required response in what was executed{unknown}.</p>"
  )
  head = ["verdict", "reason", "required response", "packets", "it means"]
  return "<h2>Verdicts</h2>" + report_html.table(head, rows) + note


def _residuals(events: list[Event]) -> str:
  opened = [r for e in events if e["event"] == "program" for r in e["residuals"]]
  status: defaultdict[str, list[str]] = defaultdict(list)
  for event in events:
    if event["event"] == "residual":
      status[event["key"]].append(event["status"])
  ended = [
    (r, moves)
    for r in opened
    if (moves := status.get(f"{r['program'][:12]}:{r['observable']}"))
  ]
  rows = [
    [
      programs.code(r["program"]),
      html.escape(r["observable"]),
      f"{r['value']:.4g} over {r['threshold']:.4g}",
      html.escape(", then ".join(moves)),
    ]
    for r, moves in ended
    if moves != ["left"]
  ]
  still = sum(moves[-1] == "supported" for _, moves in ended)
  is_open = len(opened) - len(ended)
  note = (
    f"<p>{len(opened)} questions were opened. {is_open} are open"
    + (f", {still} wait for the response to a verdict" if still else "")
    + f". {len(ended) - len(rows)} ended with nothing but that their program was no "
    f"longer retained; they are not listed. What becomes of a question: {STATUSES}."
    f"</p><p>A demand: {_low(words.WORDS['demand'])}</p>"
  )
  lines = "".join(f"<p>{programs.shown(line.strip())}.</p>" for line in owed(events))
  head = ["measured on", "observable", "value over threshold", "what became of it"]
  table = report_html.table(head, rows) if rows else ""
  return f"<h2>Residuals</h2>{note}{lines}{table}"


def _refused(events: list[Event]) -> str:
  """Lists what was refused before any call, and why."""
  rows = [
    [
      html.escape(e["status"]),
      f'<td class="long">{programs.shown(e["label"])}</td>',
      f'<td class="long">{programs.shown(e["detail"])}</td>',
    ]
    for e in events
    if e["event"] == "refused"
  ]
  head = "<h2>Refused proposals</h2>"
  if not rows:
    return f"{head}<p>None was refused.</p>"
  return head + report_html.table(["status", "proposal", "why"], rows)


def _packets(told: list[Story], events: list[Event]) -> str:
  margins: dict[str, float] = events[0]["margins"]
  measured = [e for e in events if e["event"] == "program"]
  target = _target(events, measured[0])
  values = {e["program"]: e["value"] for e in measured}
  parts = []
  for story in told:
    asks = bool(story.packet["packet"]["explanations"])
    verdict = "not resolved" if asks else "without a question"
    if story.verdict:
      verdict = story.verdict["verdict"]
    label = programs.shown(story.packet.get("label", "the initial program"))
    predicted = _predictions(story) if asks else ""
    parts.append(
      f"<details><summary>{programs.code(story.packet['id'])} {label}: "
      f"{html.escape(verdict)}</summary>{_moved(story, values, target)}{_said(story)}"
      f"{predicted}"
      f"{_concluded(story, margins)}</details>"
    )
  shown = html.escape(explain.margins_of(margins))
  defined = "".join(
    f"<li><b>{html.escape(word)}</b>: {html.escape(told)}</li>"
    for word, told in {**words.SYMBOLS, **words.STATES}.items()
  )
  lead = (
    "<p>What was asked, what each account said and predicted, what was measured, and "
    "what followed. A prediction that failed is struck out. Margins, the changes that "
    f"count: {shown}.</p><ul>{defined}</ul>"
  )
  return "<h2>Packets</h2>" + lead + "".join(parts)


def _moved(story: Story, values: dict[str, float], target: str) -> str:
  """Returns which program a packet revises, and how far the target moved from it."""
  parent, first = story.packet["packet"]["parent"], story.outcomes[:1]
  if parent not in values or not first or target not in first[0]["values"]:
    return ""
  before, after = values[parent], first[0]["values"][target]
  told = (
    f"{html.escape(target)} from {before:.6g} to {after:.6g} ({after - before:+.3g})"
  )
  called = programs.shown(explain.called(story, parent))
  return f"<p>A revision of {called}: {told}.</p>"


def _said(story: Story) -> str:
  """Returns the question of a packet and what the proposer says of it."""
  packet = story.packet["packet"]
  lines = [str(story.packet.get("note", ""))]
  if r := packet["residual"]:
    lines.append(f"Asked about {explain.asked(story, r)}")
  lines += [f"{a['name']}: {a['statement']}" for a in packet["explanations"]]
  return "".join(f"<p>{programs.shown(line)}</p>" for line in lines if line)


def _concluded(story: Story, margins: dict[str, float]) -> str:
  """Returns the values of every condition, what they excluded, and what followed."""
  lines = [
    f"{explain.condition(story, o['condition'])}: "
    f"{explain.measured(story, o, margins) or o['detail']}"
    for o in story.outcomes
  ]
  lines += [
    f"Kept as a program of its own: {made.program[:12]}, {made.label}: {made.value}."
    for made in story.adopted.values()
  ]
  if story.verdict:
    lines.append(explain.concluded(story.verdict))
  lines += [explain.demanded(story, event) for event in story.demands]
  lines += [explain.checked(story, event) for event in story.checks]
  return "".join(f"<p>{programs.shown(line)}</p>" for line in lines)


def _predictions(story: Story) -> str:
  observed = (story.verdict or {}).get("observed", {})
  ran = {o["condition"]: o for o in story.outcomes}
  accounts = story.packet["packet"]["explanations"]
  rows = []
  for name in [c["name"] for c in story.packet["packet"]["conditions"]]:
    names = sorted({o for a in accounts for o in a["predictions"].get(name, {})})
    state = ran[name]["status"] if name in ran else "not needed"
    for observable in names:
      seen = observed.get(name, {}).get(observable, state)
      cells = [
        html.escape(name),
        html.escape(observable),
        f"<b>{html.escape(seen)}</b>",
      ]
      for account in accounts:
        said = account["predictions"].get(name, {}).get(observable, "")
        # By the rule of verdicts, so that `gone` bears out `lost`; what is unsaid is
        # not wrong.
        wrong = name in observed and not consistent({"": said or seen}, {"": seen})
        said = html.escape(said)
        cells.append(f"<del>{said}</del>" if wrong else said)
      rows.append(cells)
  head = ["condition", "observable", "observed", *(a["name"] for a in accounts)]
  return report_html.table(head, rows)
