"""What a study reads off the log of one run."""

import hashlib
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.discovery.core.residual import PRIMARY
from mxjax.discovery.core.store import read_events
from mxjax.discovery.core.task import Task
from mxjax.discovery.core.verdict import OWED
from mxjax.discovery.search import checkers, heldout
from mxjax.discovery.search.compilation import holder_of
from mxjax.discovery.tasks.world import World

Event = Mapping[str, Any]


def summarize(folder: pathlib.Path, task: Task) -> dict[str, Any]:
  """The numbers of a closed run, JSON-ready.

  An *explicit* verdict excludes a registered explanation. It is *effective* when it
  demands a response and the next program on the same holder, about the same question,
  changes an executed output of the computation it declares. Both are read off the log
  in the same way for every arm, so an arm without probes can be compared.

  Returns:
    The ledger; `marks` as `[call, visible, held-out, call that found the champion]`;
    verdicts by name; `explicit` and `effective` counts; `followed`, the demands that
    had a successor; the champion; where the truth is known, how often a focal account
    was supported or excluded rightly; and the SHA-256 of the log.
  """
  events = read_events(folder)
  of = lambda name: [e for e in events if e["event"] == name]
  found = {e["program"]: e["call"] for e in reversed(of("program"))}
  hidden = {e["call"]: e["value"] for e in heldout.unsealed(folder)}
  followed, effective = _successors(events)
  marks = [
    [e["call"], e["value"], hidden.get(e["call"]), found[e["champion"]]]
    for e in of("mark")
  ]
  return {
    "proposer": events[0]["proposer"],
    "ledger": events[-1]["ledger"],
    "closed": events[-1]["reason"],
    "marks": marks,
    "champion": of("program")[-1]["champion"],
    "verdicts": dict(sorted(Counter(e["verdict"] for e in of("verdict")).items())),
    "explicit": sum(bool(e["excluded"]) for e in of("verdict")),
    "effective": effective,
    "followed": followed,
    "checked": len(of("check")),
    "implemented": sum(bool(e["implemented"]) for e in of("check")),
    "against_truth": _against_truth(events, task) if isinstance(task, World) else {},
    "log_sha256": hashlib.sha256((folder / "log.jsonl").read_bytes()).hexdigest(),
  }


def _successors(events: Sequence[Event]) -> tuple[int, int]:
  """How many explicit demands had a successor, and how many it implemented."""
  packets = {e["id"]: e for e in events if e["event"] == "packet"}
  primary = {
    e["packet"]: e
    for e in events
    if e["event"] == "outcome" and e["condition"] == PRIMARY
  }
  outputs: dict[str, Mapping[str, str]] = {}
  kept: dict[str, bool] = {}
  for event in events:
    if event["event"] == "program":
      kept.setdefault(event["program"], event["kept"])
  for identity, packet in packets.items():
    if identity in primary:
      outputs.setdefault(packet["packet"]["program"], primary[identity]["outputs"])
  followed = effective = 0
  for event in events:
    if event["event"] != "verdict" or not event["excluded"]:
      continue
    if event["response"] not in OWED:
      continue
    packet = packets[event["packet"]]["packet"]
    program, parent = packet["program"], packet["parent"]
    holder = holder_of(
      event["response"], program, parent, is_kept=kept.get(program, False)
    )
    after = (
      p
      for p in packets.values()
      if p["n"] > event["n"] and p["packet"]["parent"] == holder and p["id"] in primary
    )
    successor = next(after, None)
    if successor is not None:
      followed += 1
      effective += _answers(successor["packet"], packet, primary, outputs, successor)
  return followed, effective


def _answers(
  successor: Mapping[str, Any],
  packet: Mapping[str, Any],
  primary: Mapping[str, Event],
  outputs: Mapping[str, Mapping[str, str]],
  event: Event,
) -> bool:
  """Whether a successor is about the same question and changed what it declares."""
  asked, about = packet["residual"], successor["residual"]
  if about is None or about["observable"] != asked["observable"]:
    return False
  mine, before = primary[event["id"]]["outputs"], outputs.get(successor["parent"], {})
  names = checkers.output_names(successor["declared"], mine)
  return any(mine.get(name) != before.get(name) for name in names)


def _against_truth(events: Sequence[Event], task: World) -> dict[str, list[int]]:
  """`[right, wrong]` of focal accounts that were supported and that were excluded."""
  labels = {e["id"]: e for e in events if e["event"] == "packet"}
  counts = {"supported": [0, 0], "excluded": [0, 0]}
  for event in events:
    if event["event"] == "verdict":
      packet = labels[event["packet"]]
      is_true = task.focal_is_true(packet["label"])
      if event["verdict"] == "supported":
        counts["supported"][not is_true] += 1
      if packet["packet"]["explanations"][0]["name"] in event["excluded"]:
        counts["excluded"][is_true] += 1
  return counts
