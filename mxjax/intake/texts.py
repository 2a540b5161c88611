"""Text that people or files wrote: lists of names, and what a terminal may show.

Nothing here imports an array library, so that the command line's help is instant.
"""

import csv
import difflib
from collections.abc import Iterable

from mxjax.errors import ValueRefusal


def split(text: str) -> list[str]:
  """Splits a comma-separated list of names and drops empty ones.

  A name that holds a comma itself stands in double quotes.
  """
  names = next(csv.reader([text], skipinitialspace=True), [])
  return [name.strip() for name in names if name.strip()]


def mend(name: str, known: Iterable[str]) -> str:
  """Returns what to write for a name that is close to a known one, otherwise ""."""
  known = list(known)
  # Whoever typed the beginning of a name meant it; similar spellings come second.
  longer = [candidate for candidate in known if candidate.startswith(name)]
  close = longer or difflib.get_close_matches(name, known, n=1)
  return f"write {close[0]} if that was meant" if close else ""


def check(what: str, name: str, known: Iterable[str]) -> None:
  """Rejects an unknown name.

  Raises:
    ValueError: The name is unknown; expects the known names, as `split` reads them, and
      a close one to write.
  """
  known = tuple(known)
  if name not in known:
    known = tuple(f'"{each}"' if "," in each else each for each in known)
    raise ValueRefusal(
      what,
      expected=f"one of {', '.join(known)}",
      got=repr(name),
      mend=mend(name, known),
    )


def printable(text: str, kept: str = "\n\t") -> str:
  """Returns text with everything escaped that a terminal could act on.

  Names and notes come from models and files. `kept` are the control characters that
  stay.
  """
  # An escape sequence in a name could otherwise move the cursor or rewrite what was
  # printed.
  return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)
