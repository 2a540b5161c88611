"""Selects the controls to run: the cheapest subset that separates every pair.

Paper: Eq. control-compiler. The search over subsets is exact. A table maps each set of
separated pairs (a bit mask) to the best subset that reaches it.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

from mxjax.discovery.core import identity
from mxjax.discovery.core.residual import PRIMARY, Control, Explanation, disagree
from mxjax.errors import ValueRefusal

Policy = Literal["minimal", "random", "all", "none"]
MAX_EXPLANATIONS = 16
MAX_CONTROLS = 64
MAX_SETS = 1 << 16
"""Largest table; 64 controls that separate a pair each would fill one of 2**64."""


class IndistinguishableError(ValueError):
  """Raised when the allowed controls cannot separate the registered explanations."""


def _separated(explanations: Sequence[Explanation], condition: str) -> int:
  """Returns the bit mask of the pairs that predict differently under a condition."""
  return sum(
    1 << bit
    for bit, (a, b) in enumerate(itertools.combinations(explanations, 2))
    if disagree(a.predicts(condition), b.predicts(condition))
  )


def minimal(
  explanations: Sequence[Explanation], controls: Sequence[Control]
) -> tuple[Control, ...]:
  """Returns the exact minimum-cost subset of controls that separates all explanations.

  The controls are in name order; there are none if the primary run separates all pairs.
  Ties go to fewer controls, then to the lexicographically first names.

  Raises:
    IndistinguishableError: Even all controls together leave some pairs unseparated; the
      message names them.
    ValueError: More than 16 explanations or 64 controls, a repeated name, or more sets
      of separated pairs than the table holds.
  """
  _check_sizes(explanations, controls)
  # A bit for each pair of explanations; the constraint of the equation asks for all.
  everything = (1 << (len(explanations) * (len(explanations) - 1) // 2)) - 1
  start = _separated(explanations, PRIMARY)
  best: dict[int, tuple[int, int, tuple[str, ...]]] = {start: (0, 0, ())}
  # In the order of names, so that tuples of names compare as ties are to be broken.
  for control in sorted(controls, key=lambda c: c.name):
    gain = _separated(explanations, control.name)
    # A copy, because the loop adds to the table that it reads.
    for mask, (cost, count, names) in list(best.items()):
      reached = mask | gain
      offer = (cost + control.cost, count + 1, (*names, control.name))
      if reached != mask and offer < best.get(reached, (offer[0] + 1, 0, ())):
        best[reached] = offer
    if len(best) > MAX_SETS:
      raise ValueRefusal(
        "controls",
        expected=f"at most {MAX_SETS} sets of pairs that controls separate",
        got=f"more by {control.name}",
        mend="register fewer controls or explanations",
      )
  if everything not in best:
    raise IndistinguishableError(_complaint(explanations, controls, everything))
  names = best[everything][2]
  return _by_name(c for c in controls if c.name in names)


def _by_name(controls: Iterable[Control]) -> tuple[Control, ...]:
  return tuple(sorted(controls, key=lambda c: c.name))


def select(
  policy: Policy,
  explanations: Sequence[Explanation],
  controls: Sequence[Control],
  *address: object,
) -> tuple[Control, ...]:
  """Returns the controls that a policy runs, in name order.

  `random` draws legal controls at `address` (see `identity.draw`) up to the total cost
  of the minimal set, or as close below it as the draw allows; the packet records both
  costs. Every policy except `none` raises wherever `minimal` does: a proposal that no
  allowed control can resolve is revised before it is paid for.
  """
  if policy == "none":
    return ()
  smallest = minimal(explanations, controls)
  if policy == "minimal":
    return smallest
  if policy == "all":
    return _by_name(controls)
  allowance = sum(control.cost for control in smallest)
  drawn: list[Control] = []
  for control in identity.shuffled(controls, *address, "random-legal"):
    if control.cost <= allowance:
      drawn.append(control)
      allowance -= control.cost
  return _by_name(drawn)


def _check_sizes(
  explanations: Sequence[Explanation], controls: Sequence[Control]
) -> None:
  names = [c.name for c in controls]
  accounts = [e.name for e in explanations]
  if len(explanations) > MAX_EXPLANATIONS or len(controls) > MAX_CONTROLS:
    raise ValueRefusal(
      "controls",
      expected=f"at most {MAX_EXPLANATIONS} explanations and {MAX_CONTROLS} "
      "controls, which can be searched exactly",
      got=f"{len(explanations)} and {len(controls)}",
      mend="register fewer",
    )
  if len(set(names)) != len(names) or len(set(accounts)) != len(accounts):
    raise ValueRefusal(
      "controls",
      expected="distinct names",
      got=f"controls {names} and explanations {accounts}",
      mend="rename the repeated ones",
    )


def _complaint(
  explanations: Sequence[Explanation], controls: Sequence[Control], everything: int
) -> str:
  reached = _separated(explanations, PRIMARY)
  for control in controls:
    reached |= _separated(explanations, control.name)
  pairs = itertools.combinations(explanations, 2)
  left = [
    f"{a.name} / {b.name}"
    for bit, (a, b) in enumerate(pairs)
    if (everything & ~reached) >> bit & 1
  ]
  silent = [
    account.name
    for account in explanations
    if not any(account.predicts(control.name) for control in controls)
  ]
  told = f"; {', '.join(silent)} predicts nothing under any control" if silent else ""
  return (
    f"controls: nothing allowed separates {', '.join(left)}{told}. Register a control "
    "under which both predict one observable, and differently, or drop one of the two."
  )
