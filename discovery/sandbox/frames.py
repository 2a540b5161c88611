"""Length-prefixed messages between the supervisor and its workers: bytes, no pickles.

Imports only the standard library. `multiprocessing.connection` frames bytes too, but
waits for the rest of a message without a deadline: a worker that sends half of one
would stall the trusted side, so that side reads by `Worker._read`.
"""

import struct
from collections.abc import Iterable
from typing import BinaryIO

MAX_PARTS = 4096
_LENGTH = struct.Struct("<Q")


def frame(data: bytes) -> bytes:
  """A message: its length, then its bytes."""
  return _LENGTH.pack(len(data)) + data


def length_of(head: bytes) -> int:
  """The length that the first `_LENGTH.size` bytes of a message announce."""
  return _LENGTH.unpack(head)[0]


def read(file: BinaryIO) -> bytes:
  """One message from a trusted sender; empty at the end of the file."""
  head = file.read(_LENGTH.size)
  return file.read(length_of(head)) if len(head) == _LENGTH.size else b""


def write(file: BinaryIO, parts: Iterable[bytes]) -> None:
  """Sends one message of several parts."""
  file.write(frame(pack(parts)))
  file.flush()


def pack(parts: Iterable[bytes]) -> bytes:
  """Several byte strings in one."""
  return b"".join(map(frame, parts))


def unpack(data: bytes) -> list[bytes]:
  """The inverse of `pack`, for bytes that nobody vouches for.

  Raises:
    ValueError: Lengths that do not add up, or too many parts.
  """
  parts, position = [], 0
  while position < len(data):
    start = position + _LENGTH.size
    if start > len(data) or len(parts) >= MAX_PARTS:
      raise ValueError("a message whose lengths do not add up")
    position = start + length_of(data[position:start])
    if position > len(data):
      raise ValueError("a message whose lengths do not add up")
    parts.append(data[start:position])
  return parts
