"""The source of a program that is not of this library, as a part of its identity.

Name, class and options of a program do not tell that its code was edited between a kill
and a resume; the digest of the code does.
"""

import hashlib
import inspect
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any


def source_digests(program: Any) -> dict[str, str]:
  """Returns the SHA-256 of the source of each class from outside, by its name.

  These are the classes of a program, of its recovery fits, of its tuning, and of the
  programs that it chooses from, each with those it inherits from; classes of mxjax and
  of Python itself are left out. What such code calls in other modules is not seen.
  """
  found = {}
  for part in _parts(program):
    for cls in type(part).__mro__:
      if cls.__module__.partition(".")[0] != "mxjax" and not _is_pythons(cls):
        name = f"{cls.__module__}.{cls.__qualname__}"
        found[name] = hashlib.sha256(_text(cls).encode()).hexdigest()
  return dict(sorted(found.items()))


def _parts(program: Any) -> Iterator[Any]:
  yield program
  yield from program.recover
  if program.tune is not None:
    yield program.tune
  for other in getattr(program, "programs", ()):
    yield from _parts(other)


def _is_pythons(cls: type) -> bool:
  # A class that `exec` made without a module's name says that it is of `builtins`.
  module = sys.modules.get(cls.__module__)
  is_there = getattr(module, cls.__name__, None) is cls
  return is_there and cls.__module__.partition(".")[0] in sys.stdlib_module_names


def _text(cls: type) -> str:
  """Returns the source of a class, or what its code objects do where none is."""
  try:
    return inspect.getsource(cls)
  except (OSError, TypeError):  # Of a prompt, or made by `exec`.
    pass
  texts = []
  for name, value in sorted(vars(cls).items()):
    function = getattr(value, "fget", getattr(value, "__func__", value))
    code = getattr(function, "__code__", None)
    if code is not None:
      texts.append(f"{name}: {_description(code)}")
    elif isinstance(value, bool | int | float | str) and not name.startswith("__"):
      texts.append(f"{name} = {value!r}")
  return "\n".join(texts)


def _description(code: CodeType) -> str:
  """Describes a code object by what it does, without the lines it came from."""
  # Sets are sorted, because the order of their texts differs between processes.
  constants = [
    _description(one)
    if isinstance(one, CodeType)
    else repr(sorted(map(repr, one)) if isinstance(one, frozenset) else one)
    for one in code.co_consts
  ]
  return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"
