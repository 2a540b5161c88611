"""The state of a run from its folder alone, for a second terminal.

Only reads: it works while the run goes on, and after it was killed.
"""

import pathlib
import statistics
import time
from collections import Counter
from typing import Any

from mxjax.discovery.audit.explain import quoted
from mxjax.discovery.core.ledger import KINDS
from mxjax.discovery.core.store import read_events, read_stored
from mxjax.discovery.core.verdict import FORBIDDING
from mxjax.discovery.search import runs

LATEST = 5


def read(folder: pathlib.Path) -> tuple[str, bool]:
  """Returns what is to be told of a run, a line each, and whether it has ended.

  Raises:
    FileNotFoundError: The folder is not a run folder.
    ValueError: The log was changed after it was written.
  """
  config = runs.read_options(folder).search.to_dict()
  log = folder / "log.jsonl"
  events = read_events(folder) if log.exists() else []
  if not events:
    return f"{folder}: begun, no event yet", False
  first, last = events[0], events[-1]
  is_closed = last["event"] == "closed"
  age = time.time() - log.stat().st_mtime
  lines = [
    f"{folder}: "
    + (f"closed: {last['reason']}" if is_closed else "open")
    # A killed run stays open: only its silence tells.
    + ("" if is_closed else f", last event {age:.0f} s ago"),
    f"{first['task']['task']}, seed {config['seed']}, proposer {first['proposer']}",
    _calls(folder, events, config),
    *_programs(events),
    *_questions(events),
    *owed(events),
    *proposer_use(folder, events, config),
  ]
  return "\n".join(lines), is_closed


def _calls(
  folder: pathlib.Path, events: list[dict[str, Any]], config: dict[str, Any]
) -> str:
  charged: Counter[str] = Counter()
  for event in events:
    if event["event"] == "outcome":
      charged[event["kind"]] += event["charged"]
  kinds = ", ".join(f"{charged[kind]} {kind}" for kind in KINDS)
  stored = (folder / "outcomes").glob("*.json")
  seconds = [read_stored(path)["seconds"] for path in stored]
  took = f"; {statistics.median(seconds):.3g} s each" if seconds else ""
  return f"calls: {charged.total()} of {config['budget']}: {kinds}{took}"


def _programs(events: list[dict[str, Any]]) -> list[str]:
  measured = [e for e in events if e["event"] == "program"]
  refused = sum(e["event"] == "refused" for e in events)
  packets = sum(e["event"] == "packet" and "label" in e for e in events)
  lines = [
    f"proposals: {packets + refused}, {refused} refused before any call; "
    f"{len({e['program'] for e in measured})} programs measured"
  ]
  if measured:
    champion = measured[-1]["champion"]
    best = next(e for e in measured if e["program"] == champion)
    lines.append(
      f"best: {best['value']:.6g} by {champion[:12]} at call {best['call']}; the "
      f"initial program has {measured[0]['value']:.6g}"
    )
  return lines


def _questions(events: list[dict[str, Any]]) -> list[str]:
  status: dict[str, str] = {}
  for event in events:
    if event["event"] == "program":
      opened = event["residuals"]
      status |= {f"{r['program'][:12]}:{r['observable']}": "open" for r in opened}
    elif event["event"] == "residual":
      status[event["key"]] = event["status"]
  left = Counter(k.partition(":")[2] for k, state in status.items() if state == "open")
  named = ", ".join(f"{n} of {observable}" for observable, n in left.most_common())
  labels = {e["id"]: e.get("label", "") for e in events if e["event"] == "packet"}
  verdicts = [e for e in events if e["event"] == "verdict"][-LATEST:]
  return [
    f"open questions: {left.total()}" + (f": {named}" if named else ""),
    *(f"  {labels[e['packet']]}: {e['verdict']} ({e['reason']})" for e in verdicts),
  ]


STANDING = ("owed", "failed")
"""What the log says of a demand that stands afterwards."""


def owed(events: list[dict[str, Any]]) -> list[str]:
  """Returns what later programs still owe to verdicts, and what is forbidden to them.

  A demand outlives the question that it came from: the parts that an edit changed are
  to be answered for, whether or not the measured quantity is over its threshold.
  """
  standing: dict[tuple[str, str], dict[str, Any]] = {}
  for event in events:
    if event["event"] == "demand":
      key = event["program"], event["packet"]
      # The last event of a demand says how it stands; taken out, so that order is by
      # it.
      standing.pop(key, None)
      if event["status"] in STANDING:
        standing[key] = event
  kept = _retained(events)
  mine = [event for (holder, _), event in standing.items() if holder in kept]
  asking = [event for event in mine if event["response"] not in FORBIDDING]
  forbidden = {e["packet"] for e in mine if e["response"] in FORBIDDING}
  labels = {e["id"]: e.get("label", "") for e in events if e["event"] == "packet"}
  about = {e["packet"]: e for e in events if e["event"] == "verdict"}
  lines = [f"owed to verdicts: {len(asking)}"]
  if asking:
    lines[0] += ", whether or not their questions are still open"
  for event in asking:
    verdict, label = about[event["packet"]], quoted(labels[event["packet"]])
    observable = verdict["residual"].partition(":")[2]
    lines.append(
      f"  {event['response']} in {', '.join(event['computation'])}, by revisions of "
      f"{event['program'][:12]}: the verdict on {label} about {observable} was "
      f"{verdict['verdict']}"
    )
  if forbidden:
    lines.append(f"forbidden by verdicts: {len(forbidden)} changes")
  if left := len(standing) - len(mine):
    lines.append(f"owed by programs that are no longer retained: {left}")
  return lines


def _retained(events: list[dict[str, Any]]) -> set[str]:
  """Returns the programs that are retained, as the search ranks them."""
  known = {e["program"]: e for e in events if e["event"] == "program" and e["kept"]}
  ranked = sorted(known.values(), key=lambda e: (e["value"], e["call"]))
  return {e["program"] for e in ranked[: events[0]["config"]["frontier"]]}


def proposer_use(
  folder: pathlib.Path, events: list[dict[str, Any]], config: dict[str, Any]
) -> list[str]:
  """Returns tokens and money, which the stored proposals have, and who answered."""
  used: Counter[str] = Counter()
  for path in (folder / "proposals").glob("*.json"):
    used.update(read_stored(path).get("usage", {}))
  lines = []
  if "input_tokens" in used:
    of = lambda name: f" of {config[name]:,}" if name in config else ""
    lines.append(
      f"tokens: {used['input_tokens']:,} in and {used['output_tokens']:,} out"
      f"{of('max_tokens')}; dollars: {used['micro_dollars'] / 1e6:.4f}{of('max_cost')}"
    )
  asked = Counter(m for e in events if e["event"] == "replies" for m in e["models"])
  return lines + [f"  {n} replies of {name}" for name, n in asked.most_common()]
