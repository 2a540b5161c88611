"""A journal of JSON lines, each chained to the ones before by a checksum.

A line begins with `chain`, the SHA-256 of the previous chain and the rest of the line.
A line without its newline was left by a killed process and is dropped; any other
mismatch is damage, after which no line can be trusted. The file also locks its folder;
the kernel releases the lock when its process dies.
"""

import fcntl
import hashlib
import json
import os
import pathlib
from typing import Any

from mxjax.intake.reading import parse_json, refusing
from mxjax.storage.atomic_io import sync

_BEFORE, _AFTER = b'{"chain": "', b'", '
_HEAD = len(_BEFORE) + 64 + len(_AFTER)


def _chain(before: str, rest: bytes) -> str:
  return hashlib.sha256(before.encode() + rest).hexdigest()


def parse(path: pathlib.Path, data: bytes) -> tuple[list[dict[str, Any]], int, str]:
  """Checks a journal's content; returns events, their bytes, and the last's chain.

  An incomplete line may follow the events. `path` is for messages.

  Raises:
    ValueError: A complete line does not continue the chain; the message has its number.
  """
  events, chain, size = [], "", 0
  for number, line in enumerate(data.split(b"\n")[:-1], 1):
    head, rest = line[:_HEAD], line[_HEAD:]
    chain = _chain(chain, rest)
    if head != _BEFORE + chain.encode() + _AFTER:
      raise ValueError(
        f"journal: line {number} of {path} does not have the checksum that it "
        "states, so what it and later lines say cannot be used; put back an intact "
        "copy of the folder, or start again with another --out."
      )
    with refusing(path, f"a JSON object in line {number}"):
      events.append(parse_json(b"{" + rest, dict[str, Any]))
    size += len(line) + 1
  return events, size, chain


class Journal:
  """A journal open for appending, and locked.

  Attributes:
    events: All its events, oldest first.
    torn_bytes: Length of an incomplete last line, which `cut` removes.
  """

  def __init__(self, path: pathlib.Path) -> None:
    """Opens or creates the file, takes the lock, checks every line.

    Raises:
      BlockingIOError: Another process holds the lock.
      ValueError: A line is damaged.
    """
    self._path = path
    self._file = open(path, "a+b", buffering=0)
    try:
      try:
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise BlockingIOError(
          f"journal: another process is at work in {path.parent}; wait until it has "
          "ended, or name another --out."
        ) from error
      self._file.seek(0)
      data = self._file.read()
      self.events, self._size, self._chain = parse(path, data)
      self.torn_bytes = len(data) - self._size
    except BaseException:
      self._file.close()
      raise

  def cut(self) -> None:
    """Removes the incomplete last line; once the folder is known to be whole."""
    if self.torn_bytes:
      self._file.truncate(self._size)
    sync(self._path.parent)

  def append(self, event: str, **values: Any) -> None:
    """Appends one event and syncs it to disk.

    Raises:
      OSError: The disk is full or failing; the journal is left as it was.
    """
    rest = json.dumps({"event": event, **values}, sort_keys=True)[1:].encode()
    chain = _chain(self._chain, rest)
    line = _BEFORE + chain.encode() + _AFTER + rest + b"\n"
    try:
      self._file.truncate(self._size)
      if (written := self._file.write(line)) != len(line):
        # A nearly full disk takes a part; writing the rest raises the error.
        self._file.write(line[written:])
      os.fsync(self._file.fileno())
    except OSError:
      self._file.truncate(self._size)
      raise
    self._chain, self._size = chain, self._size + len(line)
    # Store the event as a reader of the file would see it.
    self.events.append(json.loads(b"{" + rest))

  def close(self) -> None:
    """Releases the lock."""
    self._file.close()
