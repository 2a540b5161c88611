"""The run folder: a deterministic event log, and paid results stored by content.

`log.jsonl` holds the decisions of the search, one hash-chained event per line, without
clock readings. Two runs of one configuration write the same bytes whatever the number
of workers, and so does a run that was killed and resumed. Results that cost something
(proposer replies, traces, outcomes) are written durably beside the log under their
identity as soon as they are known; a resumed run reads them instead of paying again.
"""

import fcntl
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from mxjax.discovery.core import identity
from mxjax.errors import BlockingIORefusal, ValueRefusal
from mxjax.intake import reading
from mxjax.storage import atomic_io

FORMAT = 2
"""Of the log; its first event says it. Logs of version 0.1 had none."""


class ReplayError(ValueRefusal):
  """Raised when a resumed run decides differently from its log."""


class Store:
  """A run folder. Events are in its log, not in memory, and one process writes it."""

  def __init__(self, path: str | os.PathLike[str]) -> None:
    """Opens a folder that is new or has a log to replay.

    Raises:
      BlockingIOError: Another process has its log open.
    """
    self.path = pathlib.Path(path)
    self.path.mkdir(parents=True, exist_ok=True)
    self._count, self._last = 0, ""
    self._file: TextIO | None = None
    self._left = self._read_log()
    self._next = next(self._left, None)

  @property
  def replaying(self) -> bool:
    """Whether events still come from the log."""
    return self._next is not None

  def _read_log(self) -> Iterator[str]:
    """Returns the complete lines of the log; cuts a torn last line off the file."""
    path = self.path / "log.jsonl"
    if not path.exists():
      return iter(())
    # Locked before it is read: a torn line may be one that another process is writing.
    file, data = self._opened(), path.read_bytes()
    if (whole := data.rfind(b"\n") + 1) < len(data):
      file.truncate(whole)
    return _lines(path)

  def _opened(self) -> TextIO:
    """Returns the log, locked: a second writer would break its chain."""
    if self._file is None:
      file = (self.path / "log.jsonl").open("a", encoding="utf-8")
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        file.close()
        raise BlockingIORefusal(
          self.path,
          expected="no other process at work in it",
          got="another process at work",
          mend="wait until it has ended, or end it",
          errno=error.errno,
        ) from error
      self._file = file
    return self._file

  def emit(self, event_name: str, /, **fields: Any) -> dict[str, Any]:
    """Appends an event durably, or checks it against the log while replaying.

    Raises:
      ReplayError: The log has a different event here.
    """
    number = self._count
    event = {"n": number, "event": event_name, **fields, "previous": self._last}
    if not number:
      event["format"] = FORMAT
    event["hash"] = identity.digest(event)
    line = identity.canonical(event)
    if self._next is not None:
      if self._next != line:
        raise ReplayError(
          self.path,
          expected=f"event {number} as it was, {self._next[:200]}",
          got=line[:200],
          mend="resume with the same version and configuration",
        )
      self._next = next(self._left, None)
    else:
      file = self._opened()
      # It was opened to append, so it begins at its end: 0 unless another process wrote
      # to it since this store looked for a log.
      if not number and file.tell():
        raise ReplayError(
          self.path,
          expected="no log before this process began one",
          got="that of another process",
          mend="resume again",
        )
      file.write(line + "\n")
      file.flush()
      # On the disk before the caller goes on, since an experiment is registered before
      # its first call.
      os.fsync(file.fileno())
    self._count, self._last = number + 1, event["hash"]
    # The JSON round trip makes a run and its replay hold identical values.
    return json.loads(line)

  def get(self, folder: str, key: str) -> Any | None:
    """Returns the JSON value stored under a key, or None.

    Raises:
      ValueError: It was changed after it was written.
    """
    path = self.path / folder / f"{key}.json"
    return read_stored(path) if path.exists() else None

  def put(self, folder: str, key: str, value: Any) -> None:
    """Stores a JSON value durably, replacing any previous value of the key."""
    entry = {"sha256": identity.digest(value), "value": value}
    self._write(folder, f"{key}.json", identity.canonical(entry).encode())

  def get_bytes(self, folder: str, key: str) -> bytes | None:
    """Returns the bytes stored under a key, or None."""
    path = self.path / folder / key
    return path.read_bytes() if path.exists() else None

  def put_bytes(self, folder: str, key: str, data: bytes) -> None:
    """Stores bytes durably; an existing key is left unchanged."""
    if not (self.path / folder / key).exists():
      self._write(folder, key, data)

  def _write(self, folder: str, name: str, data: bytes) -> None:
    (self.path / folder).mkdir(exist_ok=True)
    atomic_io.write_durably(self.path / folder / name, data)

  def close(self) -> None:
    """Closes the log, which another process may open then."""
    if self._file is not None:
      self._file.close()
      self._file = None


def read_stored(path: pathlib.Path) -> Any:
  """Returns the value of a file that `Store.put` wrote.

  Raises:
    ValueError: It was changed after it was written, so that a run that goes on with it
      would be another one.
  """
  expected = "a result as it was paid for, with its digest"
  mend = "put back an intact copy, or remove the file and pay for the result again"
  with reading.refusing(path, expected, mend):
    data = reading.read_bytes(path, mend=mend)
    entry = reading.parse_json(data, dict[str, Any])
    if (
      entry.keys() != {"sha256", "value"}
      or identity.digest(entry["value"]) != entry["sha256"]
      # Another last digit of a number may read as the same number.
      or identity.canonical(entry).encode() != data
    ):
      raise ValueRefusal(
        path, expected=expected, got="one that was changed since", mend=mend
      )
  return entry["value"]


FOR_PEOPLE = ("config.toml", "report.html")
"""Files beside the log that nothing reads but people, who may act on them."""
DIGESTS = "digests.json"


def write_for_people(folder: pathlib.Path, name: str, data: bytes) -> None:
  """Writes one of `FOR_PEOPLE` durably, and its digest, by which `verify` knows it."""
  told = {**_digests(folder), name: identity.digest(data)}
  atomic_io.write_durably(folder / name, data)
  atomic_io.write_durably(folder / DIGESTS, identity.canonical(told).encode())


def changed_for_people(folder: pathlib.Path) -> list[str]:
  """Returns what is wrong with the files for people of a run, a sentence each."""
  try:
    told = _digests(folder)
  except ValueError as error:
    return [str(error)]
  found = {name: folder / name for name in FOR_PEOPLE if (folder / name).exists()}
  complaints = [f"{name} is not there any more" for name in sorted({*told} - {*found})]
  for name, path in found.items():
    if name not in told:
      complaints.append(f"{name} has no digest in {DIGESTS}")
    elif identity.digest(path.read_bytes()) != told[name]:
      complaints.append(f"{name} was changed after it was written")
  return complaints


def _digests(folder: pathlib.Path) -> dict[str, str]:
  path = folder / DIGESTS
  if not path.exists():
    return {}
  mend = (
    "write the report again by `mxjax discover report`, after an intact copy is back"
  )
  with reading.refusing(path, "digests by the names of files", mend):
    return reading.parse_json(reading.read_bytes(path), dict[str, str])


def _lines(path: pathlib.Path) -> Iterator[str]:
  # What is no UTF-8 breaks the hash chain, which names the event.
  with path.open(encoding="utf-8", errors="backslashreplace") as file:
    for line in file:
      if line.endswith("\n"):
        yield line.removesuffix("\n")


def _with_shared_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Returns a dict whose keys are one string in all events, for half of the memory."""
  return {sys.intern(key): value for key, value in pairs}


def begun_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Returns all events of a run that has begun; see `read_events`.

  Raises:
    ValueError: There is no event yet, or no log.
  """
  has_log = (pathlib.Path(path) / "log.jsonl").exists()
  if not (events := read_events(path) if has_log else []):
    raise ValueRefusal(
      path,
      expected="the log of a run",
      got="no event",
      mend="name the folder of a run, or try again once it has begun",
    )
  return events


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Returns all events of a log after checking its hash chain.

  A last line without its end is left out: it is being written, or was when the run was
  killed.

  Raises:
    ValueError: The chain is broken, or the log has another format.
  """
  events: list[dict[str, Any]] = []
  for line in _lines(pathlib.Path(path) / "log.jsonl"):
    previous = events[-1]["hash"] if events else ""
    try:
      event = json.loads(line, object_pairs_hook=_with_shared_keys)
      body = {key: value for key, value in event.items() if key != "hash"}
      is_whole = event["hash"] == identity.digest(body)
      is_whole = is_whole and event["previous"] == previous
    # Of a forged line: no JSON, nested too deeply, no object, NaN or no UTF-8.
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
      event, is_whole = {}, False
    if not is_whole:
      raise ValueRefusal(
        f"{path}/log.jsonl",
        expected="a whole hash chain",
        got=f"one that breaks at event {len(events)}",
        mend="the log was changed after it was written, so restore it from a copy",
      )
    events.append(event)
    if (format_ := events[0].get("format")) != FORMAT:
      raise ValueRefusal(
        f"{path}/log.jsonl",
        expected=f"a log of format {FORMAT}",
        got=format_,
        mend="read it with the version of mxjax that ran it, or run it again",
      )
  return events
