"""Content addresses: one canonical JSON form, one hash, one counter-based draw."""

import hashlib
import json
import math
from collections.abc import Sequence
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
