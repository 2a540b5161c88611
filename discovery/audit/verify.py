"""Verifies a run: recomputes every hash and executes some conditions again."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from mxjax.discovery.core import identity
from mxjax.discovery.core import task as task_
from mxjax.discovery.core.candidate_source import admit, with_functions
from mxjax.discovery.core.store import (
  Store,
  begun_events,
  changed_for_people,
  read_stored,
)
from mxjax.discovery.core.task import Call
from mxjax.discovery.search import runs
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.search.frontier import TRANSFER


@dataclasses.dataclass(frozen=True)
class Verification:
  """Result of a verification.

  Attributes:
    events: Events whose hash chain holds.
    packets: Packets checked for their registered hash and for preceding their outcomes.
    programs: Sources checked against the identity in their name.
    ledger: Calls charged, summed over the events.
    executed: Conditions executed again.
    complaints: Failed checks, one sentence each.
  """

  events: int
  packets: int
  programs: int
  ledger: int
  executed: int
  complaints: tuple[str, ...]


def verify(
  folder: pathlib.Path,
  calls: int = 3,
  seed: int = 0,
  trusted: runs.Trusted | None = None,
) -> Verification:
  """Checks a run; executes `calls` conditions chosen by `seed` again, without charge.

  The folder is data: `trusted` says what of it may be executed, and where.

  Raises:
    ValueError: The hash chain of the log is broken, or the folder asks for more than
      that.
  """
  events = begun_events(folder)
  packets = {e["id"]: e for e in events if e["event"] == "packet"}
  outcomes = [e for e in events if e["event"] == "outcome"]
  options = runs.read_options(folder)
  (trusted or runs.Trusted()).check(options)
  task = task_.load(options.task)
  sources = sorted((folder / "programs").glob("*.py"))
  # What was registered: its hash, and that it precedes every outcome.
  complaints = [
    f"packet {key[:12]} does not have its registered hash"
    for key, event in packets.items()
    if identity.digest(event["packet"]) != key
  ]
  complaints += [
    f"event {event['n']} precedes its packet's registration"
    for event in outcomes
    if event["n"] <= packets[event["packet"]]["n"]
  ]
  # The programs, by the identities that name them, and what was paid for.
  broken = [path.stem for path in sources if not _is_program(path, task)]
  complaints += [f"{name}.py is not the program of that identity" for name in broken]
  named = {name for event in packets.values() for name in _programs(event)}
  absent = named - {path.stem for path in sources}
  complaints += [f"program {name[:12]} is not there" for name in sorted(absent)]
  complaints += _changed(folder, events, outcomes, options, task)
  charged, last = sum(e["charged"] for e in outcomes), events[-1]
  if last["event"] == "closed" and last["ledger"]["total"] != charged:
    complaints.append(f"the ledger says {last['ledger']['total']}, not {charged}")
  # Values on the transfer model are in no event.
  fine = [e for e in outcomes if e["status"] == "ok" and e["condition"] != TRANSFER]
  # A probe may execute hooks of a program that its packet does not name: those of an
  # intervention that a verdict forbade.
  fine = [e for e in fine if e["kind"] != "probe"]
  lost = absent | {*broken}
  fine = [e for e in fine if not lost & _programs(packets[e["packet"]])]
  again = identity.shuffled(fine, seed, "verify")[:calls]
  if again:
    complaints += _execute(folder, options, task, packets, again)
  return Verification(
    len(events), len(packets), len(sources), charged, len(again), tuple(complaints)
  )


PAID = ("outcomes", "proposals", "replies", "failures")
"""Folders of results that a run keeps with their digests."""


def _changed(
  folder: pathlib.Path,
  events: list[dict[str, Any]],
  outcomes: list[dict[str, Any]],
  options: runs.RunOptions,
  task: task_.Task,
) -> list[str]:
  """Returns what was changed in what a run paid for, its options, and its pages."""
  complaints = changed_for_people(folder)
  opened = {"config": options.search.to_dict(), "task": dict(task.spec)}
  for name, value in opened.items():
    # As the log has it, whose numbers and tuples went through JSON.
    if identity.digest(value) != identity.digest(events[0][name]):
      complaints.append(f"run.json has another {name} than the log began with")
  stored: dict[str, Any] = {}
  for path in (path for kind in PAID for path in (folder / kind).glob("*.json")):
    try:
      value = read_stored(path)
    except ValueError as error:
      complaints.append(str(error))
      continue
    if path.parent.name == "outcomes":
      stored[path.stem] = value
  for event in outcomes:
    known = stored.get(event["exec_id"])
    # Values on the transfer model are in no event.
    if known is not None and event["condition"] != TRANSFER:
      if dict(known["outcome"]["values"]) != event["values"]:
        complaints.append(
          f"the outcome {event['exec_id'][:12]} is not that of event {event['n']}"
        )
  return complaints


def _is_program(path: pathlib.Path, task: task_.Task) -> bool:
  try:
    return admit(path.read_text(), task.interface).id == path.stem
  except ValueError:
    return False


def _programs(event: Mapping[str, Any]) -> set[str]:
  """Returns the program of a packet and its parent, if it has one."""
  return {event["packet"]["program"], event["packet"]["parent"]} - {""}


def _controls(
  folder: pathlib.Path, task: task_.Task, program: str, name: str
) -> Iterator[str]:
  """Yields the sources of a program's controls of a name that are programs too."""
  for path in sorted((folder / "proposals").glob("*.json")):
    proposal = read_stored(path)
    for control in proposal.get("controls", ()):
      code = control["intervention"].get("code")
      if control["name"] == name and code is not None:
        if admit(proposal["source"], task.interface).id == program:
          yield with_functions(proposal["source"], code)


def _execute(
  folder: pathlib.Path,
  options: runs.RunOptions,
  task: task_.Task,
  packets: dict[str, Any],
  outcomes: list[dict[str, Any]],
) -> list[str]:
  """Executes recorded conditions again in a scratch store; returns the differences."""
  scratch = Store(folder.with_name(folder.name + ".verify"))
  executor = runs.make_executor(task, scratch, options.sandbox)
  evaluator = CachedEvaluator(task, executor, scratch)
  calls = []
  for event in outcomes:
    packet = packets[event["packet"]]["packet"]
    for program in filter(None, (packet["parent"], packet["program"])):
      # Preparing a program stores the artifacts that the call executes.
      evaluator.prepare((folder / "programs" / f"{program}.py").read_text())
    if event["kind"] == "control":
      for source in _controls(folder, task, packet["program"], event["condition"]):
        evaluator.prepare(source)
    conditions = {c["name"]: c for c in packet["conditions"]}
    calls.append(Call(**conditions[event["condition"]]["call"]))
  measured: dict[int, Mapping[str, float]] = {}
  try:
    executor.run(calls, lambda i, outcome, _: measured.update({i: outcome.values}))
  finally:
    executor.close()
    scratch.close()
  return [
    f"{event['condition']} of packet {event['packet'][:12]} measures otherwise: "
    f"{dict(measured[index])} for {event['values']}"
    for index, event in enumerate(outcomes)
    if dict(measured[index]) != event["values"]
  ]
