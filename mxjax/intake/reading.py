"""The one way in for files that others wrote.

Sizes are bounded before anything is read, structure is checked by pydantic or by the
format's own library, and whatever goes wrong becomes a `Refusal` that names the file.
"""

import contextlib
import functools
import gzip
import os
import pathlib
from collections.abc import Iterator
from typing import Any, TypeVar

import pydantic

from mxjax.errors import (
  FileNotFoundRefusal,
  NotImplementedRefusal,
  OSRefusal,
  Refusal,
  ValueRefusal,
)

JSON_BYTES = 64 * 2**20
"""Largest JSON file that is read; tokenizers of 256,000 tokens take 35 MB."""
TEXT_BYTES = 2**30
"""Largest text, unpacked; a shard of C4 takes 0.8 GB."""
UNPACKED = 2**20, 200
"""What a gzip file may unpack to: so many bytes, and so many for each of its own."""
AGAIN = "download the file again, or copy it from where it is intact"

_KINDS = {
  FileNotFoundError: FileNotFoundRefusal,
  OSError: OSRefusal,
  NotImplementedError: NotImplementedRefusal,
}

T = TypeVar("T")


def _describe(error: BaseException) -> str:
  if isinstance(error, pydantic.ValidationError):
    found = error.errors(include_url=False, include_context=False)
    parts = (
      f"{'.'.join(map(str, one['loc']))} {one['msg']}, not {str(one['input'])[:40]!r}"
      for one in found[:3]
    )
    return "; ".join(parts).strip()
  first = (str(error).strip().splitlines() or [""])[0][:300]
  return f"{type(error).__name__}: {first}" if first else type(error).__name__


@contextlib.contextmanager
def refusing(
  path: str | os.PathLike[str], expected: str, mend: str = AGAIN
) -> Iterator[None]:
  """Makes a `Refusal` that names the file `path` of whatever reading it raises.

  A `Refusal` whose place names the file passes, and so does one of a file that cannot
  be opened; others get the file as their place. All other errors are described after
  `expected`, before `mend`.

  Raises:
    NotImplementedError: What the file asks for is not supported.
    OSError: The file cannot be opened.
    TypeError: It holds values of another type.
    ValueError: All else.
  """
  try:
    yield
  # Neither a request to stop nor a fault in our own models says anything of the file.
  except (KeyboardInterrupt, SystemExit, GeneratorExit, pydantic.PydanticUserError):
    raise
  except Refusal as error:
    if isinstance(error, OSError) or str(path) in error.place:
      raise
    raise error.at(path) from error
  # Libraries in Rust panic with what is no Exception.
  except BaseException as error:
    kinds = (new for old, new in _KINDS.items() if isinstance(error, old))
    is_file = os.path.isfile(path)
    size = f"{os.path.getsize(path)} bytes that do" if is_file else "what does"
    raise next(kinds, ValueRefusal)(
      path, expected, got=f"{size} not read ({_describe(error)})", mend=mend
    ) from error


def read_bytes(
  path: pathlib.Path, *, limit: int = JSON_BYTES, mend: str = AGAIN
) -> bytes:
  """Reads a regular file of at most `limit` bytes.

  Raises:
    FileNotFoundError: There is none.
    ValueError: It is larger.
  """
  if not path.is_file():
    raise FileNotFoundRefusal(
      path.parent, expected=f"a file {path.name}", got="none", mend=mend
    )
  if (size := path.stat().st_size) > limit:
    raise ValueRefusal(path, expected=f"at most {limit} bytes", got=size, mend=mend)
  return path.read_bytes()


@functools.cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
  return pydantic.TypeAdapter(kind)


def parse_json(data: bytes, kind: type[T]) -> T:
  """Parses JSON of a structure; call it where errors are refused with the file's name.

  `kind` is what pydantic takes, such as `dict[str, str]` or a model of its own. Depth
  and digits are limited by its parser.

  Raises:
    pydantic.ValidationError: It is no JSON, or has another structure.
  """
  return _adapter(kind).validate_json(data, strict=True)


def read_json(
  path: pathlib.Path,
  kind: type[T],
  expected: str,
  *,
  mend: str = AGAIN,
  limit: int = JSON_BYTES,
) -> T:
  """Reads a JSON file of the structure `kind`; see `parse_json` and `refusing`.

  Raises:
    FileNotFoundError: There is none.
    ValueError: It is too large, no JSON, or of another structure.
  """
  with refusing(path, expected, mend):
    return parse_json(read_bytes(path, limit=limit, mend=mend), kind)


def read_text(path: pathlib.Path) -> bytes:
  """Reads a text, unpacked if its name ends in `.gz`; not decoded.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: It is too large, or no whole gzip file.
  """
  if path.suffix != ".gz":
    return read_bytes(path, limit=TEXT_BYTES, mend="take a part of it")
  least, ratio = UNPACKED
  with refusing(path, "a whole gzip file"):
    # So a small file cannot unpack to a huge one.
    limit = min(TEXT_BYTES, least + ratio * path.stat().st_size)
    with gzip.open(path) as file:
      # One byte more tells a text of just the limit from a longer one, and no more is
      # unpacked.
      data = file.read(limit + 1)
    if len(data) > limit:
      raise ValueRefusal(
        path,
        expected=f"at most {limit} bytes when unpacked",
        got="more",
        mend="take a part of it, or unpack it first",
      )
    return data
