"""The free proxy of a task: what it says of a program before that costs a call."""

from collections.abc import Callable, Mapping

from mxjax.discovery.core.task import Outcome, Status
from mxjax.discovery.search.cached_evaluator import CachedEvaluator

EVERYTHING = ("", "all", "proxy")
"""Names by which a proposer asks about every part."""


class FreeProxy:
  """Measures programs by a task's stand-in; its workers start with the first question.

  It sees calibration data alone and its outcomes are stored with the run, so a resumed
  run is told the same. No decision of the search depends on it.
  """

  def __init__(
    self, make: Callable[[], tuple[CachedEvaluator, Callable[[], None]]]
  ) -> None:
    """Takes what builds the evaluator of the stand-in, and what ends its workers."""
    self._make = make
    self._made: tuple[CachedEvaluator, Callable[[], None]] | None = None

  def answer(self, source: str, parent: str, part: str) -> str:
    """Returns what the proxy says of a program and of its parent, in words."""
    if self._made is None:
      self._made = self._make()
    proxy, _ = self._made
    prepared = [proxy.prepare(text) for text in (source, parent)]
    for each in prepared:
      if each.call is None:
        return f"The proxy cannot run it: {each.status}: {each.detail.rstrip('.')}."
    mine, theirs = proxy.measure(*(each.full_call for each in prepared))
    if mine.status != Status.OK:
      return f"The proxy ended {mine.status}: {mine.detail.rstrip('.')}."
    parts = {*mine.parts.get(proxy.task.target, {})}
    if part not in EVERYTHING and not any(part in name for name in parts):
      return (
        f"The proxy has no part {part!r:.80}; ask about all, or one of "
        f"{', '.join(sorted(parts))}."
      )
    lines = _rows(mine, theirs, "" if part in EVERYTHING else part)
    head = "The free proxy, your program beside the parent (errors, lower is better):"
    meaning = proxy.task.observables.get(proxy.task.target)
    return "\n".join([head, *lines, *([f"It measures {meaning}."] if meaning else [])])

  def close(self) -> None:
    """Ends the workers, if they were started."""
    if self._made is not None:
      self._made[1]()


def _rows(mine: Outcome, theirs: Outcome, part: str) -> list[str]:
  lines = []
  for name, value in sorted(mine.values.items()):
    rows: Mapping[str, float] = mine.parts.get(name, {})
    before = theirs.parts.get(name, {})
    cells = [
      f"{path} {rows[path]:.4g} ({before.get(path, float('nan')):.4g})"
      for path in sorted(rows)
      if part in path
    ]
    # NaN where the parent, whose own run may have failed, has no value.
    total = f"{value:.4g} ({theirs.values.get(name, float('nan')):.4g})"
    lines.append(f"  {name} {total}: {', '.join(cells)}")
  return lines
