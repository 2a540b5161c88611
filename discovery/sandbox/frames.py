"""Length-prefixed messages between the supervisor and its workers, without pickles.

This module imports only the standard library. `multiprocessing.connection` frames bytes
too, but waits for the rest of a message without a deadline. A worker that sends half a
message would stall the trusted side, which therefore reads through `Worker._read`.
"""

import struct
from collections.abc import Iterable
from typing import BinaryIO

# An empty part takes eight bytes, so a bound of the length alone allows very many.
MAX_PARTS = 4096
_LENGTH = struct.Struct("<Q")


def frame(data: bytes) -> bytes:
  """Returns a message: the length of the data, then the data."""
  return _LENGTH.pack(len(data)) + data


def length_of(head: bytes) -> int:
  """Returns the message length announced in its first `_LENGTH.size` bytes."""
  return _LENGTH.unpack(head)[0]


def read(file: BinaryIO) -> bytes:
  """Reads one message from a trusted sender; empty at the end of the file."""
  head = file.read(_LENGTH.size)
  return file.read(length_of(head)) if len(head) == _LENGTH.size else b""


def write(file: BinaryIO, parts: Iterable[bytes]) -> None:
  """Sends one message of several parts."""
  file.write(frame(pack(parts)))
  file.flush()


def pack(parts: Iterable[bytes]) -> bytes:
  """Packs several byte strings into one."""
  return b"".join(map(frame, parts))


def unpack(data: bytes) -> list[bytes]:
  """Inverts `pack`, for untrusted bytes.

  Raises:
    ValueError: The lengths do not add up, or there are too many parts.
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
