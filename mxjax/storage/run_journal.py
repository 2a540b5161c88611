"""Opening a run folder: locked, proved whole, repaired without loss, or refused."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, Self

from mxjax.storage import atomic_io, run_events
from mxjax.storage.journal import Journal, parse
from mxjax.storage.run_events import FOLDERS, Event

JOURNAL = "journal.jsonl"
VERSION = 2
"""Of the layout of a run folder; a run in a folder of another is not resumed."""


def read_events(folder: pathlib.Path) -> tuple[list[Event], int]:
  """Reads a run's journal without a lock; also returns bytes of an incomplete end.

  Raises:
    ValueError: A line is damaged, or is no event of a run.
  """
  file = folder / JOURNAL
  data = file.read_bytes()
  events, size, _ = parse(file, data)
  run_events.check(file, events)
  return events, len(data) - size


def _abbreviate(value: Any) -> str:
  text = json.dumps(value, sort_keys=True)
  return text if len(text) <= 200 else f"{text[:200]}..."


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
  """Returns their values and ours where they differ, by key of ours."""
  return {
    key: [theirs.get(key), value]
    for key, value in ours.items()
    if theirs.get(key) != value
  }


def _parts(key: str, had: Any, new: Any) -> list[tuple[str, list[Any]]]:
  """Returns what differs in a value, of two mappings by their keys."""
  if isinstance(had, Mapping) and isinstance(new, Mapping):
    return [
      (f"{key} {part}", [had.get(part), new.get(part)])
      for part in {**had, **new}
      if had.get(part) != new.get(part)
    ]
  return [(key, [had, new])]


class RunJournal:
  """The journal of a run and its folder; locked against other processes until `close`.

  Only one process of a job writes. In the others the folder is read-only: they see the
  state at the time of opening, and their writes do nothing.

  Attributes:
    path: The folder.
    events: The journal's events, oldest first.
    discarded: Unfinished files of a killed process that were removed on opening.
  """

  path: pathlib.Path
  events: list[Event]
  discarded: list[str]

  def __init__(
    self,
    path: str | os.PathLike[str],
    *,
    resume: bool = False,
    read_only: bool = False,
  ) -> None:
    """Creates the folder, or opens one and checks every file of its last state.

    With `resume`, an existing run is continued; otherwise the folder must not exist, or
    be empty. With `read_only`, another process writes: only the journal is checked, and
    nothing is locked.

    Raises:
      BlockingIOError: Another process uses the folder.
      FileExistsError: The folder is not empty and `resume` is off, or it is no run.
      FileNotFoundError: A read-only process finds no journal.
      OSError: The folder cannot be written.
      ValueError: Files are damaged, or the journal has lost lines; nothing is changed.
    """
    self.path, self.discarded = pathlib.Path(path), []
    self._journal: Journal | None = None
    file = self.path / JOURNAL
    if read_only:
      if not file.is_file():
        raise FileNotFoundError(
          f"run folder: expected {file}, which process 0 has made, got no such file; "
          "name an --out that all processes see."
        )
      self.events = read_events(self.path)[0]
      return
    if not resume or (self.path.is_dir() and not file.is_file()):
      # A run writes nothing before its journal.
      atomic_io.create_output(path)
    with self.explaining():
      self.path.mkdir(parents=True, exist_ok=True)
      self._journal = Journal(file)
      self.events = self._journal.events
      try:
        self._prove(resume=resume)
        self._repair()
      except BaseException:
        self.close()
        raise

  def explaining(self) -> contextlib.AbstractContextManager[None]:
    """Explains errors of a folder that cannot be written."""
    mend = "go on with --resume: what was finished is on disk"
    return atomic_io.explaining(self.path, "run folder", mend)

  def _unlisted(self) -> list[str]:
    listed = run_events.listed_files(self.events)
    names = atomic_io.file_names(self.path)
    return [name for name in names if name not in {JOURNAL, *listed}]

  def _prove(self, *, resume: bool) -> None:
    """Checks that the folder is the journal's last state, but for leftovers."""
    if not resume and self.events:
      raise FileExistsError(
        f"output: {self.path} has a run in it; go on with it by --resume, or name "
        "another --out."
      )
    run_events.check(self.path / JOURNAL, self.events)
    listed = run_events.listed_files(self.events)
    faults = atomic_io.damaged_files(self.path, listed)
    faults += [
      f"{name} is in no line of it, and no kill leaves it"
      for name in run_events.unexplained(self._unlisted(), self.events)
    ]
    if faults:
      raise ValueError(
        f"run folder: expected in {self.path} what {JOURNAL} lists, got damage: "
        f"{'; '.join(faults)}; nothing of it was used: put back an intact copy, or "
        "start again with another --out."
      )

  def _repair(self) -> None:
    """Removes what a killed process was writing."""
    assert self._journal
    for place in self.path.iterdir():
      if place.is_dir() and place.name not in FOLDERS:
        shutil.rmtree(place)
        self.discarded.append(f"{place.name}/")
    for name in self._unlisted():
      (self.path / name).unlink()
      self.discarded.append(name)
    if self._journal.torn_bytes:
      self.discarded.append(
        f"{JOURNAL}: {self._journal.torn_bytes} bytes of a last line"
      )
    self._journal.cut()
    for name in FOLDERS:
      (self.path / name).mkdir(exist_ok=True)
    for place in (self.path, self.path.absolute().parent):
      atomic_io.sync(place)

  def close(self) -> None:
    """Releases the lock."""
    if self._journal:
      self._journal.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *details: object) -> None:
    self.close()

  def event(self, name: str) -> Event | None:
    """Returns the last event of a name, or None."""
    return run_events.last(self.events, name)

  @property
  def finished(self) -> list[Event]:
    """The events of the layers that a resumed run keeps, in order."""
    return run_events.finished_layers(self.events)

  def begin(
    self, identity: Mapping[str, Any], environment: Mapping[str, Any]
  ) -> list[Event]:
    """Journals the start or the resumption of a run.

    `identity` determines the result; `environment`, versions and device, may perturb
    low bits. Both are JSON-ready. Returns one entry for every resume: the layer, the
    discarded files and the changes in the environment.

    Raises:
      ValueError: The run in the folder has another identity.
    """
    if self._journal is None:
      return []
    # After a JSON round trip tuples are lists, as in the journal.
    ours = json.loads(json.dumps({**identity, "version": VERSION}))
    started = self.event("start")
    if started is None:
      self.journal("start", environment=dict(environment), **ours)
      return []
    if wrong := _differing(ours, started):
      texts = [
        f"{name} {_abbreviate(had)}, not {_abbreviate(new)}"
        for key, pair in wrong.items()
        for name, (had, new) in _parts(key, *pair)
      ]
      raise ValueError(
        f"run folder: the run in {self.path} has {'; '.join(texts)}; resume with "
        "the model, data and options it was started with, or name another --out."
      )
    changed = _differing(environment, started["environment"])
    self.journal(
      "resume", layer=len(self.finished), discarded=self.discarded, changed=changed
    )
    return [
      {key: one[key] for key in ("layer", "discarded", "changed")}
      for one in self.events
      if one["event"] == "resume"
    ]

  def journal(self, event: str, **values: Any) -> None:
    """Appends one event and syncs it to disk."""
    if self._journal:
      with self.explaining():
        self._journal.append(event, **values)
