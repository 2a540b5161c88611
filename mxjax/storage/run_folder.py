"""The run folder: the finished part of a run, for resuming after a kill.

    journal.jsonl         every event with checksums of its files; also the lock
    prepared/             what a program's `prepare` produced, if anything
    layers/NAME           finished layers
    gradients/            gradients of the layers to come; computed anew on resuming
    tuning/STEP           what tuning has learned so far, if the program tunes
    streams/INDEX-NAME    hidden states entering the next layer

A layer's files reach the disk before its journal entry, and the entry is written before
the previous layer's hidden states are removed. So the journal always names exactly one
complete state; any other file in the folder is a leftover.
"""

import contextlib
import errno
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mxjax.devices import processes
from mxjax.storage import atomic_io, tree_io
from mxjax.storage.journal import Journal, parse

JOURNAL = "journal.jsonl"
FOLDERS = ("gradients", "layers", "prepared", "streams", "tuning")
VERSION = 1
Event = dict[str, Any]


@contextlib.contextmanager
def _explain_full_disk(path: pathlib.Path) -> Iterator[None]:
  """Adds advice to the error raised when the disk is full."""
  try:
    yield
  except OSError as error:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
      raise
    raise OSError(
      f"run folder: {path} cannot take more ({error.strerror}); make room, then go on "
      "with --resume: what was finished is on disk."
    ) from error


def _abbreviate(value: Any) -> str:
  text = json.dumps(value, sort_keys=True)
  return text if len(text) <= 200 else f"{text[:200]}..."


class Tuning(NamedTuple):
  """State of tuning after a step: arrays in the order of a pytree's leaves, losses."""

  arrays: dict[str, np.ndarray]
  losses: list[float]


class RunFolder:
  """Finished work on disk; locked against other processes until `close`.

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
      ValueError: Files are damaged; the message names all.
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
      self.events = parse(file, file.read_bytes())[0]
      return
    if not resume or (self.path.is_dir() and not file.is_file()):
      # A run writes nothing before its journal.
      atomic_io.create_output(path)
    self.path.mkdir(parents=True, exist_ok=True)
    self._journal = Journal(file)
    self.events = self._journal.events
    try:
      self._restore_last_state(self._journal.torn_bytes, resume=resume)
    except BaseException:
      self.close()
      raise

  def _restore_last_state(self, torn_bytes: int, *, resume: bool) -> None:
    """Checks the files that the journal lists and removes all others."""
    if not resume and self.events:
      raise FileExistsError(
        f"output: {self.path} has a run in it; go on with it by --resume, or name "
        "another --out."
      )
    listed = self._listed_files()
    if damage := atomic_io.damaged_files(self.path, listed):
      raise ValueError(
        f"run folder: expected in {self.path} what {JOURNAL} lists, got damage: "
        f"{'; '.join(damage)}; nothing of it was used: put back an intact copy, or "
        "start again with another --out."
      )
    for place in self.path.iterdir():
      if place.is_dir() and place.name not in FOLDERS:
        shutil.rmtree(place)
        self.discarded.append(f"{place.name}/")
    for file in sorted(self.path.rglob("*")):
      name = file.relative_to(self.path).as_posix()
      if file.is_file() and name not in {JOURNAL, *listed}:
        file.unlink()
        self.discarded.append(name)
    if torn_bytes:
      self.discarded.append(f"{JOURNAL}: {torn_bytes} bytes of a last line")
    for name in FOLDERS:
      (self.path / name).mkdir(exist_ok=True)
    for place in (self.path, self.path.absolute().parent):
      atomic_io.sync(place)

  def close(self) -> None:
    """Releases the lock."""
    if self._journal:
      self._journal.close()

  def __enter__(self) -> "RunFolder":
    return self

  def __exit__(self, *details: object) -> None:
    self.close()

  def event(self, name: str) -> Event | None:
    """Returns the last event of a name, or None."""
    return next((one for one in reversed(self.events) if one["event"] == name), None)

  @property
  def finished(self) -> list[Event]:
    """The events of the finished layers, in order."""
    return [one for one in self.events if one["event"] == "layer"]

  def _listed_files(self) -> dict[str, dict[str, str]]:
    """Returns the SHA-256 of every file of the last state, by relative path."""
    finished, digests = self.finished, {}
    for one in (self.event("prepared"), *finished, self.event("tuned")):
      digests |= one["files"] if one else {}
    digests |= finished[-1]["streams"] if finished else {}
    return {name: {"sha256": digest} for name, digest in digests.items()}

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
    differing = [
      f"{key} {_abbreviate(started.get(key))}, not {_abbreviate(value)}"
      for key, value in ours.items()
      if started.get(key) != value
    ]
    if differing:
      raise ValueError(
        f"run folder: the run in {self.path} has {'; '.join(differing)}; resume with "
        "the model, data and options it was started with, or name another --out."
      )
    before = started["environment"]
    changed = {
      key: [before.get(key), value]
      for key, value in environment.items()
      if before.get(key) != value
    }
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
      with _explain_full_disk(self.path):
        self._journal.append(event, **values)

  def _write_tree(
    self, name: str, tree: Any, digests: dict[str, str]
  ) -> tree_io.Description:
    """Writes a typed tree; adds its file's SHA-256 to `digests`."""
    file = f"{name}.safetensors"
    digests[file], nodes = tree_io.write_tree(self.path / file, tree)
    return nodes

  def _read_tree(self, name: str, nodes: tree_io.Description) -> dict[str, Any]:
    return tree_io.read_tree(self.path / f"{name}.safetensors", nodes)

  def write_prepared(
    self, params: Mapping[str, Any] | None, learned: Mapping[str, Any], record: Any
  ) -> None:
    """Writes the result of `Program.prepare`.

    `params` is the rewritten float model, or None if unchanged; `learned` is keyed by
    slash-separated path; `record` is JSON-ready.
    """
    if self._journal is None:
      return
    files: dict[str, str] = {}
    nodes: dict[str, Any] = {"learned": None, "params": None}
    write = functools.partial(self._write_tree, digests=files)
    with _explain_full_disk(self.path):
      if learned:
        nodes["learned"] = write("prepared/learned", tree_io.nested(learned))
      if params is not None:
        nodes["params"] = {
          key: write(f"prepared/params-{key}", value) for key, value in params.items()
        }
    self.journal(
      "prepared", files=files, nodes=nodes, paths=sorted(learned), record=record
    )

  def read_prepared(self) -> tuple[dict[str, Any] | None, dict[str, Any], Any] | None:
    """Reads the three arguments of `write_prepared`, or returns None."""
    event = self.event("prepared")
    if event is None:
      return None
    nodes, learned, params = event["nodes"], {}, None
    if nodes["learned"]:
      tree = self._read_tree("prepared/learned", nodes["learned"])
      learned = {path: tree_io.at(tree, path) for path in event["paths"]}
    if nodes["params"] is not None:
      params = {
        key: self._read_tree(f"prepared/params-{key}", described)
        for key, described in nodes["params"].items()
      }
    return params, learned, event["record"]

  def write_layer(
    self,
    name: str,
    layer: Any,
    record: Mapping[str, Any],
    *,
    streams: Mapping[str, Sequence[jax.Array | np.ndarray]],
    clock: Mapping[str, Any],
  ) -> None:
    """Writes a finished layer durably, with the inputs of the next one.

    `streams` are the hidden states `[sequences, T, d]` entering the next layer, in
    chunks by name, and empty after the last; `clock` has seconds and peak bytes by
    stage so far.
    """
    if self._journal is None:
      return
    before = self.finished
    checksums: dict[str, str] = {}
    files: dict[str, str] = {}
    with _explain_full_disk(self.path):
      for stream, chunks in streams.items():
        file = f"streams/{len(before) + 1}-{stream}.safetensors"
        arrays = {f"{part:06d}": chunk for part, chunk in enumerate(chunks)}
        checksums[file] = atomic_io.write_arrays(self.path / file, arrays)
      nodes = self._write_tree(f"layers/{name}", layer, files)
    self.journal(
      "layer",
      name=name,
      files=files,
      nodes=nodes,
      streams=checksums,
      record=record,
      clock=dict(clock),
    )
    for file in before[-1]["streams"] if before else ():
      (self.path / file).unlink()

  def write_tuning(
    self, arrays: Mapping[str, jax.Array], losses: Sequence[float]
  ) -> None:
    """Writes the state of tuning durably, in place of that of the step before."""
    if self._journal is None:
      return
    before = self.event("tuned")
    file = f"tuning/{len(losses)}.safetensors"
    with _explain_full_disk(self.path):
      digest = atomic_io.write_arrays(self.path / file, arrays)
    self.journal("tuned", files={file: digest}, loss=losses[-1])
    for old in before["files"] if before else ():
      (self.path / old).unlink()

  def read_tuning(self) -> Tuning | None:
    """Reads the state written by `write_tuning`, or returns None."""
    event = self.event("tuned")
    if event is None:
      return None
    [file] = event["files"]
    losses = [one["loss"] for one in self.events if one["event"] == "tuned"]
    return Tuning(atomic_io.read_arrays(self.path / file), losses)

  def read_layer(self, event: Event) -> dict[str, Any]:
    """Reads the params of a finished layer, bit for bit."""
    return self._read_tree(f"layers/{event['name']}", event["nodes"])

  def read_streams(
    self, chunk: int, place: Callable[[np.ndarray], jax.Array] = jnp.array
  ) -> dict[str, list[jax.Array]]:
    """Reads the hidden states entering the next layer, by stream, in chunks.

    `place` makes a device array of a chunk, with a buffer of its own, because stream
    buffers are donated and numpy's must not be.
    """
    streams = {}
    for file in self.finished[-1]["streams"]:
      arrays = atomic_io.read_arrays(self.path / file)
      rows = np.concatenate([arrays[part] for part in sorted(arrays)])
      starts = range(0, len(rows), chunk)
      name = pathlib.Path(file).stem.partition("-")[2]
      streams[name] = [place(rows[first : first + chunk]) for first in starts]
    return streams


def open_run(
  path: str | os.PathLike[str], *, resume: bool, mesh: Mesh | None
) -> RunFolder:
  """Opens a run folder for writing in process 0, for reading in the others."""
  is_leader = processes.is_leader()
  if not is_leader:
    processes.wait_for_all(mesh)
  folder = RunFolder(path, resume=resume, read_only=not is_leader)
  if is_leader:
    processes.wait_for_all(mesh)
  return folder
