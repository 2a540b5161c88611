"""Content addresses: one canonical JSON form, one hash, one counter-based draw."""

import hashlib
import importlib.resources
import json
import math
from collections.abc import Iterator, Sequence
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

T = TypeVar("T")


def canonical(value: Any) -> str:
  """The one JSON text of a value: sorted keys, no spaces, no NaN or infinity.

  Raises:
    ValueError: A float that is not finite, which JSON cannot say.
    TypeError: Something that is not JSON.
  """
  return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
  """SHA-256 of the canonical form, hex; bytes are hashed as they are."""
  data = value if isinstance(value, bytes) else canonical(value).encode()
  return hashlib.sha256(data).hexdigest()


def draw(*address: Any) -> float:
  """A uniform number in [0, 1) that depends on its address alone.

  Streams of different roles never share numbers, and a resumed or reordered run draws
  the same ones: there is no generator whose state could drift.
  """
  return int(digest(list(address))[:13], 16) / 16**13


def pick(options: Sequence[T], *address: Any) -> T:
  """One of `options`, uniformly, by `draw`."""
  return options[int(draw(*address) * len(options))]


def shuffled(options: Sequence[T], *address: Any) -> list[T]:
  """`options` in an order drawn from the address."""
  keyed = sorted(enumerate(options), key=lambda item: draw(*address, item[0]))
  return [option for _, option in keyed]


def finite(value: float) -> bool:
  """Whether a measurement may be compared; booleans are not measurements."""
  is_number = isinstance(value, float | int) and not isinstance(value, bool)
  return is_number and math.isfinite(value)


def source_digest(*packages: str) -> str:
  """SHA-256 of all Python sources of packages, with their names; subfolders too.

  What was measured by one version of the library is never taken for another's.

  Raises:
    FileNotFoundError: A package without a source file, such as one of bytecode only.
  """
  return digest([[name, _sources(name)] for name in packages])


def _sources(package: str) -> list[tuple[str, str]]:
  """Path inside the package and digest of each source, by path."""
  files = sorted(_python_files(importlib.resources.files(package), ""))
  if not files:
    raise FileNotFoundError(
      f"identity: expected Python sources in {package}, found none; outcomes cannot be "
      "bound to a library version, so install mxjax from a wheel or a checkout."
    )
  return files


def _python_files(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
  for entry in folder.iterdir():
    if entry.is_dir():
      yield from _python_files(entry, f"{prefix}{entry.name}/")
    elif entry.name.endswith(".py"):
      yield f"{prefix}{entry.name}", digest(entry.read_bytes())
