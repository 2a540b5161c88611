"""Tables of refusals: one test holds those of one door, and tells all failures."""

from collections.abc import Callable, Iterable


def check(
  cases: Iterable[tuple[Callable[[], object], *tuple[str, ...]]],
  kind: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> None:
  """Fails unless every call is refused with its words.

  Args:
    cases: A call without arguments, and the words that its error must have: the name
      of what is wrong, or the value that came, not the sentence around them.
    kind: What the calls must raise.
  """
  __tracebackhide__ = True
  told = []
  for number, (call, *words) in enumerate(cases):
    place = f"case {number} {words}"
    try:
      got = call()
    except kind as error:
      missing = [word for word in words if word not in str(error)]
      if missing:
        told.append(f"{place}: {missing} not in {str(error)!r}")
    except Exception as error:
      told.append(f"{place}: {type(error).__name__}: {error}")
    else:
      told.append(f"{place}: accepted, with {got!r:.200}")
  assert not told, "\n".join(told)
