"""What mxjax raises where a user can mend something: four fields, one sentence.

`XRefusal` is also an `XError`, so `except ValueError` catches a `ValueRefusal`. Code
decides by the class and the fields of an error, never by the wording of its sentence.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Self

Place = str | os.PathLike[str]


class Refusal(Exception):
  """An error of four fields; its text is `PLACE: expected EXPECTED, got GOT; MEND.`.

  It can be pickled and copied. Raise the subclass of the built-in kind that fits.

  Attributes:
    place: What refuses or is refused: a function, a command, a file, a parameter.
    expected: What would have been accepted.
    got: What came instead.
    mend: What to do about it; empty where `expected` says that already.
  """

  def __init__(self, place: Place, expected: str, got: object, mend: str = "") -> None:
    """Takes the fields as phrases, without the words and marks between them."""
    self.place = os.fspath(place)
    self.expected = expected
    self.got = str(got)
    self.mend = mend
    # Pickles and copies are built from these. Not super().__init__, with which an
    # OSError would take the first two for its number and text.
    self.args = self.place, self.expected, self.got, self.mend

  @property
  def complaint(self) -> str:
    """The sentence without its place."""
    mend = f"; {self.mend}" if self.mend else ""
    return f"expected {self.expected}, got {self.got}{mend}."

  def __str__(self) -> str:
    return f"{self.place}: {self.complaint}"

  def at(self, place: Place) -> Self:
    """Returns the same error at another place."""
    return type(self)(place, *self.args[1:])

  def within(self, place: Place) -> Self:
    """Returns the same error with `place` before its own."""
    return self.at(f"{os.fspath(place)}: {self.place}")


class ValueRefusal(Refusal, ValueError):
  """A value or a combination of values is refused."""


class TypeRefusal(Refusal, TypeError):
  """An object of this type or dtype is refused."""


class NotImplementedRefusal(Refusal, NotImplementedError):
  """What is asked for is not supported."""


class FloatingPointRefusal(Refusal, FloatingPointError):
  """A computation left the finite numbers, or its result is of no use."""


class ImportRefusal(Refusal, ImportError):
  """An optional package is not installed."""


class OSRefusal(Refusal, OSError):
  """The operating system or a file refuses; `errno` is the system's number, if any."""

  def __init__(
    self,
    place: Place,
    expected: str,
    got: object,
    mend: str = "",
    errno: int | None = None,
  ) -> None:
    """Takes the number beside the fields."""
    super().__init__(place, expected, got, mend)
    self.errno = errno
    self.args = *self.args, errno


class FileNotFoundRefusal(OSRefusal, FileNotFoundError):
  """A file or folder is absent."""


class FileExistsRefusal(OSRefusal, FileExistsError):
  """A file or folder is there that must not be overwritten."""


class ConnectionRefusal(OSRefusal, ConnectionError):
  """A service cannot be reached."""


class BlockingIORefusal(OSRefusal, BlockingIOError):
  """Another process holds a file or folder."""


_REBUILT = (
  ArithmeticError,
  AssertionError,
  AttributeError,
  FloatingPointError,
  IndexError,
  NotImplementedError,
  OverflowError,
  RuntimeError,
  TypeError,
  ZeroDivisionError,
)
"""Built-in exceptions that a text alone rebuilds, if they were made of one."""


@contextlib.contextmanager
def within(place: Place) -> Iterator[None]:
  """Puts `place` before the place of what is refused in this block.

  Errors that are no `Refusal`, such as those of a user's own program, tell it, too. A
  built-in error of one text gets `place` before that text, raised from the first. Any
  ValueError becomes a plain one: constructors of subclasses, such as
  UnicodeDecodeError, take other arguments than a text. All other errors, such as a
  KeyError or those of JAX's tracing, stay as they are and carry `place` as a note,
  which a traceback shows.
  """
  try:
    yield
  except Refusal as error:
    raise error.within(place) from error
  except ValueError as error:
    raise ValueError(f"{os.fspath(place)}: {error}") from error
  except Exception as error:
    is_of_one_text = len(error.args) == 1 and isinstance(error.args[0], str)
    # By exact type: a subclass may take other arguments than a text.
    if type(error) in _REBUILT and is_of_one_text:
      raise type(error)(f"{os.fspath(place)}: {error}") from error
    error.add_note(f"This happened in {os.fspath(place)}.")
    raise
