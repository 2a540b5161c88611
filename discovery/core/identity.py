"""Content addressing: canonical JSON, one hash, and counter-based random draws."""

import hashlib
import importlib.resources
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

from mxjax.errors import FileNotFoundRefusal

T = TypeVar("T")


def canonical(value: Any) -> str:
  """Returns the canonical JSON text of a value: sorted keys, no spaces, finite numbers.

  Raises:
    ValueError: A float is not finite.
    TypeError: A value cannot be represented in JSON.
  """
  return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
  """Returns the SHA-256 (hex) of the canonical form; bytes are hashed unchanged."""
  data = value if isinstance(value, bytes) else canonical(value).encode()
  return hashlib.sha256(data).hexdigest()


def draw(*address: Any) -> float:
  """Returns a uniform number in [0, 1) that depends only on its address.

  Draws at different addresses are independent streams. A resumed or reordered run draws
  the same numbers, because there is no generator state.
  """
  # Thirteen digits are 52 bits, which a float64 holds exactly; more could round to 1.
  return int(digest(list(address))[:13], 16) / 16**13


def pick(options: Sequence[T], *address: Any) -> T:
  """Returns one of `options`, chosen uniformly by `draw`."""
  return options[int(draw(*address) * len(options))]


def shuffled(options: Sequence[T], *address: Any) -> list[T]:
  """Returns `options` in an order drawn from the address."""
  # Drawn by its place, because an address is JSON and an option may be any object.
  keyed = sorted(enumerate(options), key=lambda item: draw(*address, item[0]))
  return [option for _, option in keyed]


def finite(value: float) -> bool:
  """Returns whether a value is a finite number; booleans do not count as numbers."""
  is_number = isinstance(value, float | int) and not isinstance(value, bool)
  # Written so that an integer too long for a float is none either.
  return is_number and abs(value) <= sys.float_info.max


def source_digest(*packages: str) -> str:
  """Returns the SHA-256 over the names and Python sources of packages, recursively.

  Binding measurements to this digest keeps results of different library versions apart.

  Raises:
    FileNotFoundError: A package has no source file, for example only bytecode.
  """
  return digest([[name, _sources(name)] for name in packages])


def _sources(package: str) -> list[tuple[str, str]]:
  """Returns the relative path and digest of each source file, sorted by path."""
  files = sorted(_python_files(importlib.resources.files(package), ""))
  if not files:
    raise FileNotFoundRefusal(
      package,
      expected="Python sources, by which outcomes are bound to a version of the "
      "library",
      got="none",
      mend="install mxjax from a wheel or a checkout",
    )
  return files


def _python_files(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
  for entry in folder.iterdir():
    if entry.is_dir():
      yield from _python_files(entry, f"{prefix}{entry.name}/")
    elif entry.name.endswith(".py"):
      yield f"{prefix}{entry.name}", digest(entry.read_bytes())
