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
      if not any(each <= parts for each in known):
        known[:] = [each for each in known if not parts <= each] + [parts]

  def of(self, observable: str) -> tuple[str, ...]:
    """Returns what has been seen to move an observable, in the interface's order."""
    parts = {part for each in self._sets.get(observable, ()) for part in each}
    names = dict.fromkeys((*self._interface.names, *self._interface.plan))
    return tuple(name for name in names if name in parts)

  def known(self) -> dict[str, tuple[str, ...]]:
    """Returns the scope of every observable that something has moved."""
    return {name: self.of(name) for name in sorted(self._sets)}
