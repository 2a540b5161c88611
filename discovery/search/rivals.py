"""Accounts of our own beside a proposer's, so that a straw man supports nothing.

Each says that a gain of the target has another cause than the focal account names, and
has a control of its own. The focal account is held to the opposite, so a verdict
`supported` means that the claimed part of the edit carries the target's change.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.discovery.core.interventions import PROGRAM
from mxjax.discovery.core.proposal import Proposal
from mxjax.discovery.core.residual import PRIMARY, Control, Explanation, Rival
from mxjax.discovery.core.task import Call, Task
from mxjax.discovery.search import scopes

PREFIX = "rival: "
"""Begins the names of our controls, which no proposer may use."""
ANOTHER_PART = "another part of the edit"
WITHOUT_PART = PREFIX + ANOTHER_PART
"""The control of it: the candidate without the part that the focal account credits."""


def claimed(task: Task, proposal: Proposal, own: Call, parent: Call) -> tuple[str, ...]:
  """Returns the changed parts that the focal account credits.

  They are the ones that the proposal's controls take something from, or else all.
  """
  changed = scopes.changed(task.interface, own, parent)
  named: set[str] = set()
  for control in proposal.controls:
    for value in control.intervention.values():
      named |= {value} if isinstance(value, str) else set()
      named |= {*value} if isinstance(value, list) else set()
  hooks = [name for name in changed if name in named and name in task.interface.names]
  return scopes.with_keys(task.interface, hooks, changed) if hooks else changed


def of(
  task: Task, proposal: Proposal, own: Call, parent: Call
) -> tuple[tuple[Explanation, ...], tuple[Control, ...]]:
  """Returns all accounts, the proposer's first, and our controls.

  A rival whose intervention the proposal controls itself needs no second one.
  """
  accounts = proposal.explanations
  theirs = [_bare(control.intervention) for control in proposal.controls]
  found = [
    rival
    for rival in (
      *_another_part(task, proposal, own, parent),
      *task.rivals(own, parent),
    )
    if _bare(rival.intervention) not in theirs
    and not (
      # A task judges its own kinds alone; a program that changes nothing is found out
      # when it is built.
      rival.intervention["kind"] != PROGRAM
      and task.refuses(rival.intervention, own, parent)
    )
  ]
  controls = tuple(
    Control(
      PREFIX + rival.name,
      rival.intervention,
      task.price(rival.intervention),
      rival.statement,
    )
    for rival in found
  )
  return _with_rivals(accounts, found, task.target), controls


def _another_part(
  task: Task, proposal: Proposal, own: Call, parent: Call
) -> list[Rival]:
  parts = claimed(task, proposal, own, parent)
  rest = [
    name
    for name in scopes.changed(task.interface, own, parent)
    if name not in parts and name in task.interface.names
  ]
  if not rest:
    return []
  told = f"the gain comes from {', '.join(rest)} and not from {', '.join(parts)}"
  return [Rival(ANOTHER_PART, told, {"kind": PROGRAM, "without": [*parts]})]


def _with_rivals(
  accounts: Sequence[Explanation], found: Sequence[Rival], target: str
) -> tuple[Explanation, ...]:
  """Adds the rivals, and to the focal account the opposite of what they predict."""
  focal, *others = accounts
  against = dict(focal.predictions)
  rivals = []
  for rival in found:
    name = PREFIX + rival.name
    says, opposite = ("kept", "lost") if rival.keeps else ("lost", "kept")
    against[name] = {target: opposite}
    # It agrees about the primary run, so only its own control tells it from the focal
    # one.
    predictions = {PRIMARY: {target: "down"}, name: {target: says}}
    rivals.append(Explanation(rival.name, rival.statement, predictions, rival=True))
  return (dataclasses.replace(focal, predictions=against), *others, *rivals)


def _bare(intervention: Mapping[str, Any]) -> dict[str, Any]:
  return {k: v for k, v in intervention.items() if k != "parent"}
