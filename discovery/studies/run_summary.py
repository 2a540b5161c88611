"""Summarizes one run from its log, for studies."""

import hashlib
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxjax.discovery.core.residual import PRIMARY
from mxjax.discovery.core.store import read_events
from mxjax.discovery.core.task import Call, Task
from mxjax.discovery.core.verdict import FORBIDDING
from mxjax.discovery.search import heldout
from mxjax.discovery.search.resolution import holders_of
from mxjax.discovery.tasks.world import World

Event = Mapping[str, Any]


def summarize(folder: pathlib.Path, task: Task) -> dict[str, Any]:
  """Computes the numbers of a closed run, JSON-ready.

  A verdict is *explicit* if it excludes a rival, see `Finding.explicit`. It is
  *effective* if it also demands a change and the next program on the same holder, about
  the same question, changes the residual's computation and an output of it. Both come
  from the log in the same way for every arm, so arms without probes are comparable.

  Returns:
    The ledger; `marks` as `[call, visible, held-out, call that found the champion]`;
    verdicts by name; `explicit` and `effective` counts; `explicit_primary`, those that
    the primary run made explicit without a control; `followed`, the demands that had a
    successor; `demands` by status; the champion; if the truth is known, how often a
    focal account was rightly supported or excluded; and the SHA-256 of the log.
  """
  events = read_events(folder)
  of = lambda name: [e for e in events if e["event"] == name]
  programs, verdicts, checks = of("program"), of("verdict"), of("check")
  # In reverse, so that the first time counts of a program that was recorded again.
  measured_at = {e["program"]: e["call"] for e in reversed(programs)}
  hidden = {e["call"]: e["value"] for e in heldout.unsealed(folder)}
  successors = _successors(events)
  return {
    "proposer": events[0]["proposer"],
    "ledger": events[-1]["ledger"],
    "closed": events[-1]["reason"],
    "marks": [
      [e["call"], e["value"], hidden.get(e["call"]), measured_at[e["champion"]]]
      for e in of("mark")
    ],
    "champion": programs[-1]["champion"],
    "verdicts": dict(sorted(Counter(e["verdict"] for e in verdicts).items())),
    "explicit": sum(bool(e["explicit"]) for e in verdicts),
    "explicit_primary": sum(e["explicit"] == "primary" for e in verdicts),
    "demands": dict(sorted(Counter(e["status"] for e in of("demand")).items())),
    "effective": sum(successors),
    "followed": len(successors),
    "checked": len(checks),
    "implemented": sum(bool(e["implemented"]) for e in checks),
    "against_truth": _against_truth(events, task.focal_is_true)
    if isinstance(task, World)
    else {},
    "log_sha256": hashlib.sha256((folder / "log.jsonl").read_bytes()).hexdigest(),
  }


def _successors(events: Sequence[Event]) -> list[bool]:
  """Tells for each explicit demand with a successor whether that one implemented it."""
  packets = {e["id"]: e for e in events if e["event"] == "packet"}
  outputs: dict[str, Mapping[str, str]] = {}
  first_outputs: dict[str, Mapping[str, str]] = {}
  is_retained: dict[str, bool] = {}
  calls = {p["packet"]["program"]: _call(p["packet"]) for p in packets.values()}
  for event in events:
    if event["event"] == "outcome" and event["condition"] == PRIMARY:
      program = packets[event["packet"]]["packet"]["program"]
      outputs[event["packet"]] = event["outputs"]
      first_outputs.setdefault(program, event["outputs"])
    if event["event"] == "program":
      is_retained.setdefault(event["program"], event["kept"])
  owed = {
    e["packet"]: e["program"]
    for e in events
    if e["event"] == "demand" and e["status"] == "owed"
  }
  answers = []
  for event in events:
    if event["event"] != "verdict" or not event["explicit"]:
      continue
    if event["response"] in FORBIDDING:
      continue
    asked = packets[event["packet"]]["packet"]
    (usual,) = holders_of(
      event["response"],
      asked["program"],
      asked["parent"],
      event["survivors"],
      is_retained=is_retained.get(asked["program"], False),
    )
    # An arm that compiles no verdict owes nothing, and has the usual program.
    holder = owed.get(event["packet"], usual)
    # The first packet after the verdict that revises the program which owes the
    # response.
    for successor in packets.values():
      later = successor["n"] > event["n"] and successor["id"] in outputs
      if later and successor["packet"]["parent"] == holder:
        before = first_outputs.get(holder, {})
        mine, held = outputs[successor["id"]], calls[holder]
        answers.append(_answers(successor["packet"], asked, held, mine, before))
        break
  return answers


def _call(packet: Mapping[str, Any]) -> Call:
  return Call(**packet["conditions"][0]["call"])


def _answers(
  successor: Mapping[str, Any],
  asked: Mapping[str, Any],
  held: Call,
  mine: Mapping[str, str],
  before: Mapping[str, str],
) -> bool:
  """Tells whether a successor addresses the question and changes its computation."""
  about, scope = successor["residual"], asked["residual"]["computation"]
  if about is None or about["observable"] != asked["residual"]["observable"]:
    return False
  is_changed = _call(successor).part(scope) != held.part(scope)
  return is_changed and any(mine.get(n) != before.get(n) for n in scope)


def _against_truth(
  events: Sequence[Event], is_true: Callable[[str], bool]
) -> dict[str, list[int]]:
  """Counts `[right, wrong]` among supported and among excluded focal accounts."""
  packets = {e["id"]: e for e in events if e["event"] == "packet"}
  counts = {"supported": [0, 0], "excluded": [0, 0]}
  for event in events:
    if event["event"] == "verdict":
      packet = packets[event["packet"]]
      right = is_true(packet["label"])
      if event["verdict"] == "supported":
        counts["supported"][not right] += 1
      if packet["packet"]["explanations"][0]["name"] in event["excluded"]:
        counts["excluded"][right] += 1
  return counts
