"""Verifying a run: every hash again, and some conditions executed again."""

import dataclasses
import pathlib
from typing import Any

from mxjax.discovery.core import identity
from mxjax.discovery.core import task as task_
from mxjax.discovery.core.candidate_source import admit
from mxjax.discovery.core.packet import Condition
from mxjax.discovery.core.store import Store, read_events
from mxjax.discovery.core.task import Call, Outcome
from mxjax.discovery.sandbox.laboratory import Laboratory
from mxjax.discovery.search import runs


@dataclasses.dataclass(frozen=True)
class Verification:
  """What was checked.

  Attributes:
    events: Events whose chain holds.
    packets: Packets whose hash is the registered one, before their first outcome.
    programs: Sources whose identity is their name.
    ledger: Calls charged, added up from the events.
    executed: Conditions executed again with the recorded outcome.
    complaints: What did not hold, one sentence each.
  """

  events: int
  packets: int
  programs: int
  ledger: int
  executed: int
  complaints: tuple[str, ...]


def verify(folder: pathlib.Path, calls: int = 3, seed: int = 0) -> Verification:
  """Checks a run.

  Args:
    folder: The run.
    calls: Conditions to execute again; they are not charged.
    seed: Which ones.

  Raises:
    ValueError: The log's hash chain is broken.
  """
  events = read_events(folder)
  complaints: list[str] = []
  packets = {e["id"]: e for e in events if e["event"] == "packet"}
  for key, event in packets.items():
    if identity.digest(event["packet"]) != key:
      complaints.append(f"packet {key[:12]} does not have its registered hash")
  outcomes = [e for e in events if e["event"] == "outcome"]
  for event in outcomes:
    if event["n"] <= packets[event["packet"]]["n"]:
      complaints.append(f"event {event['n']} precedes its packet's registration")
  options = runs.read_options(folder)
  task = task_.load(options.task)
  sources = sorted((folder / "programs").glob("*.py"))
  for path in sources:
    if admit(path.read_text(), task.interface).id != path.stem:
      complaints.append(f"{path.name} is not the program of that identity")
  charged = sum(e["charged"] for e in outcomes)
  closing = events[-1] if events[-1]["event"] == "closed" else None
  if closing and closing["ledger"]["total"] != charged:
    complaints.append(f"the ledger says {closing['ledger']['total']}, not {charged}")
  executed = _execute(folder, options, task, packets, outcomes, calls, seed, complaints)
  return Verification(
    len(events), len(packets), len(sources), charged, executed, tuple(complaints)
  )


def _execute(
  folder: pathlib.Path,
  options: runs.RunOptions,
  task: task_.Task,
  packets: dict[str, Any],
  outcomes: list[dict[str, Any]],
  calls: int,
  seed: int,
  complaints: list[str],
) -> int:
  """Runs some recorded conditions again in a scratch store."""
  if not calls:
    return 0
  scratch = Store(folder.with_name(folder.name + ".verify"))
  bench = runs.make_bench(task, scratch, options.sandbox)
  lab = Laboratory(task, bench, scratch)
  fine = [e for e in outcomes if e["status"] == "ok" and e["kind"] != "probe"]
  done = 0
  try:
    for event in identity.shuffled(fine, seed, "verify")[:calls]:
      body = packets[event["packet"]]["packet"]
      found = next(c for c in body["conditions"] if c["name"] == event["condition"])
      for program in filter(None, (body["parent"], body["program"])):
        lab.prepare((folder / "programs" / f"{program}.py").read_text())
      again = Condition(**{**found, "call": Call(**found["call"])})
      seen: list[Outcome] = []
      keep = lambda index, outcome, seconds, seen=seen: seen.append(outcome)
      bench.run([again.call], keep)
      if dict(seen[0].values) != event["values"]:
        complaints.append(
          f"{event['condition']} of packet {event['packet'][:12]} measures otherwise: "
          f"{dict(seen[0].values)} for {event['values']}"
        )
      done += 1
  finally:
    bench.close()
    scratch.close()
  return done
