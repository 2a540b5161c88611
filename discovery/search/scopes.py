"""Which hooks and plan keys an edit changes, and which of them move what observable.

Nothing here is a list that somebody wrote: what moves an observable beyond its margin
is learned from pairs of programs that were executed anyway.
"""

from collections.abc import Iterable, Mapping

from mxjax.discovery.core.interface import Interface
from mxjax.discovery.core.task import Call

Values = Mapping[str, float]


def changed(interface: Interface, own: Call, before: Call) -> tuple[str, ...]:
  """Returns the hooks and plan keys in which two programs execute differently.

  A hook that only one of them calls counts as changed.
  """
  mine, theirs = own.active(interface), before.active(interface)
  names = dict.fromkeys((*interface.names, *interface.plan))
  return tuple(name for name in names if mine.part([name]) != theirs.part([name]))


def moved(
  margins: Mapping[str, float], values: Values, before: Values
) -> tuple[str, ...]:
  """Returns the observables that differ by more than their margins."""
  return tuple(
    name
    for name, margin in margins.items()
    if name in values and name in before and abs(values[name] - before[name]) > margin
  )


def with_keys(
  interface: Interface, hooks: Iterable[str], among: Iterable[str]
) -> tuple[str, ...]:
  """Returns hooks with the plan keys among `among` that switch them on."""
  mine = {*hooks}
  keys = {
    hook.active_when[0]
    for hook in interface.hooks
    if hook.name in mine and hook.active_when is not None
  }
  return tuple(name for name in among if name in mine or name in keys)


class Scopes:
  """The smallest sets of parts whose change has moved each observable."""

  def __init__(self, interface: Interface, margins: Mapping[str, float]) -> None:
    """Starts with nothing known."""
    self._interface, self._margins = interface, margins
    self._sets: dict[str, list[frozenset[str]]] = {}

  def learn(self, own: Call, values: Values, before: Call, others: Values) -> None:
    """Learns from two executed programs, neither of them under an intervention."""
    parts = frozenset(changed(self._interface, own, before))
    if not parts:
      return
    for name in moved(self._margins, values, others):
      known = self._sets.setdefault(name, [])
      # Only the smallest sets are kept: one that contains another tells nothing more.
      if not any(each <= parts for each in known):
        known[:] = [each for each in known if not parts <= each] + [parts]

  def of(self, observable: str) -> tuple[str, ...]:
    """Returns what alone has moved an observable, in the interface's order.

    A hook and the plan key that switches it on are one. Of an edit of several parts
    nobody knows which of them it was, so it credits none.
    """
    alone = filter(self._is_alone, self._sets.get(observable, ()))
    return self._ordered(part for each in alone for part in each)

  def known(self) -> dict[str, tuple[str, ...]]:
    """Returns the scope of every observable that something has moved alone."""
    return {name: parts for name in sorted(self._sets) if (parts := self.of(name))}

  def joint(self) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Returns the sets that moved an observable which nothing has moved alone."""
    return {
      name: tuple(sorted(map(self._ordered, self._sets[name])))
      for name in sorted(self._sets)
      if not self.of(name)
    }

  def _is_alone(self, parts: frozenset[str]) -> bool:
    hooks = [name for name in self._interface.names if name in parts]
    return len(hooks) <= 1 and (
      len(parts) == 1 or {*with_keys(self._interface, hooks, parts)} == parts
    )

  def _ordered(self, parts: Iterable[str]) -> tuple[str, ...]:
    given = {*parts}
    names = dict.fromkeys((*self._interface.names, *self._interface.plan))
    return tuple(name for name in names if name in given)
