"""Keeps the finished part of a run in a folder, from which a killed run goes on.

    state.json            what is finished, with the SHA-256 of each of its files
    lock                  empty; the process that writes holds it
    learning/STEP         what `prepare` has learned so far, if it learns in steps
    prepared/             what `prepare` produced; names begin with its steps, if any
    layers/NAME           finished layers
    streams/INDEX-NAME    hidden states entering layer INDEX, if the run saves them
    tuning/STEP           what tuning has learned so far, if the program tunes
    gradients/            gradients of the layers to come; computed anew on resuming

`state.json` always describes one complete state. New files reach the disk first, under
names that the state does not have; then `state.json` is replaced in one rename; then
the files that it no longer needs are removed. A kill anywhere leaves one state whole,
and beside it only files that `_unexplained` knows. Any other file is evidence that the
state has been exchanged for an older one, and refused before finished work is lost.

After a kill a run goes on behind its last finished layer, or its last step. What enters
the next layer is computed anew: the finished layers are replayed, from the first or
from the last hidden states that were saved, see `replay_layer` in `recover.py`.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from jax.sharding import Mesh

from mxjax.devices import mesh as meshes
from mxjax.devices import processes
from mxjax.devices.environment import differing
from mxjax.errors import (
  BlockingIORefusal,
  FileExistsRefusal,
  FileNotFoundRefusal,
  ValueRefusal,
)
from mxjax.intake.reading import TEXT_BYTES, refusing
from mxjax.storage import atomic_io, digested_json, tree_io

STATE, LOCK = "state.json", "lock"
FOLDERS = ("gradients", "layers", "learning", "prepared", "streams", "tuning")
SCRATCH = "scratch-"
"""The names of folders that only one process uses begin with this."""
VERSION = 2
"""This is the version of a run folder's layout; no other one is resumed."""

_MEND = "put back an intact copy of the folder, or start again with another --out"
# A name has one folder and nothing that leads out of it: a state that someone else
# wrote could otherwise have a resume delete any file of this user.
_PATTERN = rf"^({'|'.join(FOLDERS)})/[^/\\]+\.safetensors$"
_Name = Annotated[str, pydantic.StringConstraints(pattern=_PATTERN)]
_Files = dict[_Name, digested_json.Entry]
_OneFile = Annotated[_Files, pydantic.Field(min_length=1, max_length=1)]


class _Prepared(pydantic.BaseModel):
  files: _Files
  nodes: dict[_Name, tree_io.Nodes]
  paths: list[str]
  record: Any


class _Clock(pydantic.BaseModel):
  seconds: dict[str, float]
  peak_bytes: dict[str, int]


class _Layer(pydantic.BaseModel):
  name: str
  files: _OneFile
  nodes: tree_io.Nodes
  record: dict[str, Any]
  clock: _Clock


class _Steps(pydantic.BaseModel):
  #: Of the last step; none once its result is written as `prepared`.
  files: _Files
  losses: list[float]
  seconds: list[float]
  #: That a step learns on; not in the folders of version 0.1.0.
  sequences: int = 1


class _Resume(pydantic.BaseModel):
  layer: int
  discarded: list[str]
  changed: dict[str, Any]


class _End(pydantic.BaseModel):
  sanity: dict[str, Any] | None
  seconds: dict[str, float]


class _State(pydantic.BaseModel):
  """The structure of `state.json`."""

  version: int
  digest: digested_json.Digest
  identity: dict[str, Any]
  environment: dict[str, Any]
  #: Not in the folders of version 0.1.0.
  learning: _Steps | None = None
  prepared: _Prepared | None
  layers: list[_Layer]
  #: Hidden states that leave one of the layers, the last ones that were saved.
  streams: _Files
  tuning: _Steps | None
  resumes: list[_Resume]
  end: _End | None
  #: Files that it replaced, which may still lie beside the state.
  removable: list[_Name]


State = dict[str, Any]
"""What `state.json` says, in the structure of `_State`."""
_NOTHING: State = {
  "learning": None,
  "prepared": None,
  "layers": [],
  "streams": {},
  "tuning": None,
  "resumes": [],
  "end": None,
  "removable": [],
}
"""The state before `RunFolder.begin` writes the first one."""


class Steps(NamedTuple):
  """What was learned up to a step: arrays in the order of a pytree's leaves, losses."""

  arrays: dict[str, np.ndarray]
  losses: list[float]


def read_state(path: str | os.PathLike[str]) -> State:
  """Reads the state of a run folder without its lock; other files are not looked at.

  Raises:
    FileNotFoundError: There is none.
    ValueError: It is damaged or of another version.
  """
  read = digested_json.read(
    pathlib.Path(path) / STATE,
    "the state of a run",
    _MEND,
    kind=_State,
    version=("version", VERSION),
    limit=TEXT_BYTES,
  )
  return {"learning": None, **read}


def listed_files(state: State) -> dict[str, dict[str, Any]]:
  """Returns size and SHA-256 of every file of a state, by relative path."""
  files = {LOCK: {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}}
  steps = state["learning"], state["tuning"]
  for part in (state["prepared"], *state["layers"], *steps):
    files |= part["files"] if part else {}
  return files | state["streams"]


def _unexplained(names: Iterable[str], state: State) -> list[str]:
  """Selects files beside a state that no kill of this run can have left.

  A killed process leaves partial files, gradients, what the state calls removable, and
  what it was writing for the next state: what was prepared, or a layer with the hidden
  states that leave it, or a step of learning or tuning. More than that was finished
  once, by a state that is not here.
  """
  if "identity" not in state:
    # A new run may still be computing its identity while it differentiates.
    harmless = lambda name: _is_scratch(name) or name.startswith("gradients/")
    return [name for name in names if not harmless(name)]
  # The layer in work is number `len(layers)` from 0, and the hidden states that are
  # written with it enter the next one.
  number = 1 + len(state["layers"])
  writing = ["layers/", f"streams/{number}-", _next_file(state, "tuning")]
  # `prepare` runs once, before the first layer.
  if number == 1 and not state["prepared"]:
    first = _prepared_name("", _steps_taken(state["learning"]))
    writing += [f"{first}params-", f"{first}learned."]
    writing += [_next_file(state, "learning")]
  odd, new = [], []
  for name in names:
    if not re.fullmatch(_PATTERN, name):
      odd += [] if _is_scratch(name) else [name]
    elif not name.startswith("gradients/") and name not in state["removable"]:
      (new if name.startswith(tuple(writing)) else odd).append(name)
  # A kill interrupts one write: of one layer with its hidden states, or of one other
  # kind.
  kinds = [name.partition("/")[0] for name in new]
  is_one = {*kinds} <= {"layers", "streams"} or len({*kinds}) == 1
  return odd + ([] if is_one and kinds.count("layers") <= 1 else new)


def _steps_taken(steps: Mapping[str, Any] | None) -> int:
  return len(steps["losses"]) if steps else 0


def _next_file(state: State, stage: Literal["learning", "tuning"]) -> str:
  """Returns the file of the next write of steps; its number counts the writes."""
  files = state[stage]["files"] if state[stage] else {}
  latest = max((int(pathlib.PurePath(name).stem) for name in files), default=0)
  return f"{stage}/{latest + 1}.safetensors"


def _prepared_name(name: str, steps: int) -> str:
  """Returns how a file of what was prepared begins: two runs differ in their steps."""
  return f"prepared/{steps}-{name}" if steps else f"prepared/{name}"


def _is_scratch(name: str) -> bool:
  return name.startswith(SCRATCH) or atomic_io.PARTIAL in name


def _difference_texts(differences: Mapping[str, Any]) -> tuple[str, str]:
  """Names every difference, theirs and ours, of two mappings those of their values."""
  theirs, ours = [], []
  for key, (had, new) in differences.items():
    parts = {key: [had, new]}
    if isinstance(had, Mapping) and isinstance(new, Mapping):
      parts = {f"{key} {part}": pair for part, pair in differing(new, had).items()}
    for name, pair in parts.items():
      for values, value in zip((theirs, ours), pair, strict=True):
        text = json.dumps(value, sort_keys=True)
        values.append(f"{name} {text if len(text) <= 200 else f'{text[:200]}...'}")
  return ", ".join(theirs), ", ".join(ours)


class RunFolder:
  """Finished work on disk; locked against other processes until `close`.

  Only one process of a job writes. In the others the folder is read-only: they see the
  state at the time of opening, and their writes do nothing.

  Attributes:
    path: The folder.
    discarded: Unfinished files of a killed process that were removed on opening.
  """

  path: pathlib.Path
  discarded: list[str]

  def __init__(
    self,
    path: str | os.PathLike[str],
    *,
    resume: bool = False,
    read_only: bool = False,
  ) -> None:
    """Creates the folder, or opens one and checks every file of its state.

    With `resume`, an existing run is continued; otherwise the folder must not exist, or
    be empty. With `read_only`, another process writes: only the state is checked, and
    nothing is locked.

    Raises:
      BlockingIOError: Another process uses the folder.
      FileExistsError: The folder is not empty and `resume` is off, or it is no run.
      FileNotFoundError: A read-only process finds no run.
      OSError: The folder cannot be written.
      ValueError: Files are damaged, or the state has lost work; nothing is changed.
    """
    self.path, self.discarded = pathlib.Path(path), []
    self._lock: BinaryIO | None = None
    self._state: State = _NOTHING
    self._texts: dict[str, str] = {}
    self._start: Callable[[], Mapping[str, Any]] | None = None
    if read_only:
      if not (self.path / LOCK).is_file():
        raise FileNotFoundRefusal(
          f"run folder: {self.path}",
          expected=f"a file {LOCK}, which process 0 has made",
          got="none",
          mend="name an --out that all processes see",
        )
      if (self.path / STATE).is_file():
        self._state = read_state(self.path)
      return
    # A run writes nothing before its lock, and nothing but the lock before its state.
    is_run = any((self.path / name).is_file() for name in (LOCK, STATE))
    if not (resume and is_run):
      atomic_io.create_output(path)
    with self._explaining():
      self._lock = self._locked()
      try:
        self._prove(resume=resume)
        self._repair()
        self._texts = {
          key: digested_json.canonical(one) for key, one in self._state.items()
        }
      # Nobody gets this object, so nobody else could release its lock.
      except BaseException:
        self.close()
        raise

  def _explaining(self) -> contextlib.AbstractContextManager[None]:
    """Explains errors of a folder that cannot be written."""
    mend = "go on with --resume: what was finished is on disk"
    return atomic_io.explaining(self.path, "run folder", mend)

  def _locked(self) -> BinaryIO:
    """Opens the lock's file and takes the lock, which ends with this process."""
    try:
      # A new file beside a state would let a second process in.
      lock = open(self.path / LOCK, "r+b" if (self.path / STATE).is_file() else "ab")
    except IsADirectoryError as error:
      raise ValueRefusal(
        f"run folder: {self.path}",
        expected=f"a file {LOCK}",
        got="a folder of that name",
        mend="if no process is at work in the run, put an empty file in its place",
      ) from error
    except FileNotFoundError as error:
      raise ValueRefusal(
        f"run folder: {self.path}",
        expected=f"a file {LOCK}",
        got="none, so another process may be at work unseen",
        mend="if no process is, make an empty file of that name",
      ) from error
    try:
      # The kernel releases it when the process dies, however it dies: no stale lock is
      # left.
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      lock.close()
      raise BlockingIORefusal(
        f"run folder: {self.path}",
        expected="no process at work in it",
        got="another process",
        mend="wait until it has ended, or name another --out",
        errno=error.errno,
      ) from error
    return lock

  def _unlisted(self) -> list[str]:
    known = {STATE, *listed_files(self._state)}
    return [name for name in atomic_io.file_names(self.path) if name not in known]

  def _prove(self, *, resume: bool) -> None:
    """Checks that the folder is in the state that it says, but for leftovers."""
    if (self.path / STATE).is_file():
      if not resume:
        raise FileExistsRefusal(
          f"output: {self.path}",
          expected="an empty folder",
          got="one with a run in it",
          mend="go on with it by --resume, or name another --out",
        )
      self._state = read_state(self.path)
      # It is of the text that was read; every write computes its own.
      del self._state["digest"]
    # All faults are collected before the first is raised, and before anything is
    # deleted.
    faults = atomic_io.damaged_files(self.path, listed_files(self._state))
    faults += [
      f"{name} is not in it, and no kill leaves it"
      for name in _unexplained(self._unlisted(), self._state)
    ]
    if faults:
      raise ValueRefusal(
        f"run folder: {self.path}",
        expected=f"what {STATE} lists",
        got=f"damage, of which nothing was used: {', '.join(faults)}",
        mend=_MEND,
      )

  def _repair(self) -> None:
    """Removes what a killed process was writing."""
    # All that is in other folders is scratch: `_prove` has refused any other file.
    for entry in sorted(self.path.iterdir()):
      if entry.is_dir() and entry.name not in FOLDERS:
        shutil.rmtree(entry)
        self.discarded.append(f"{entry.name}/")
    for name in self._unlisted():
      (self.path / name).unlink()
      self.discarded.append(name)
    self._state = self._state | {"removable": []}
    for name in FOLDERS:
      (self.path / name).mkdir(exist_ok=True)
    # A new folder survives a loss of power only if the folder that names it is flushed.
    for folder in (self.path, self.path.absolute().parent):
      atomic_io.sync(folder)

  def close(self) -> None:
    """Releases the lock."""
    if self._lock:
      self._lock.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *details: object) -> None:
    self.close()

  def begin(
    self,
    identity: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    environment: Mapping[str, Any],
  ) -> list[dict[str, Any]]:
    """Writes the first state of a run, or that it is resumed.

    `identity` is what the result is made of; `environment` may change its bits. Both
    are JSON-ready, and a run keeps both, but for the mesh on a CPU: there the bits do
    not depend on it. An identity that is still being computed is a function that waits
    for it: a new run calls it when it writes its first state, which is then before the
    first file and not now. Returns one entry for every resume: the number of finished
    layers (`layer`), the files `discarded`, and the mesh if it has `changed`.

    Raises:
      ValueError: The run in the folder has another identity or environment.
    """
    # Of a process that only reads.
    if self._lock is None:
      return []
    # Tuples become lists, as in the state.
    environment = json.loads(json.dumps(environment))
    wait = identity if callable(identity) else lambda: identity
    if "identity" not in self._state:
      self._start = lambda: {"identity": wait(), "environment": environment}
      if not callable(identity):
        self._begin()
      return []
    # A run that resumes compares its weights before it does any work.
    own = json.loads(json.dumps(wait()))
    if wrong := differing(own, self._state["identity"]):
      theirs, ours = _difference_texts(wrong)
      raise ValueRefusal(
        f"run folder: {self.path}",
        expected=f"a run of {theirs}",
        got=f"one of {ours}",
        mend="resume with the model, data, options and code it was started with, or "
        "name another --out",
      )
    changed = differing(environment, self._state["environment"])
    is_free = lambda key: key == "mesh" and environment.get("platform") == "cpu"
    if wrong := {key: changed[key] for key in changed if not is_free(key)}:
      theirs, ours = _difference_texts(wrong)
      raise ValueRefusal(
        f"run folder: {self.path}",
        expected=f"to go on under {theirs}",
        got=f"{ours}, under which the layers to come could get other bits",
        mend="go back to what it was started under, or start again with another --out",
      )
    entry = {
      "layer": len(self.finished),
      "discarded": self.discarded,
      "changed": changed,
    }
    self._save(resumes=[*self._state["resumes"], entry])
    return self._state["resumes"]

  def _begin(self) -> None:
    """Writes the first state of a run whose identity was not known at `begin`."""
    # The first write waits here for the digest of the weights, if it is still computed.
    if self._start:
      self._save(version=VERSION, **self._start())
      self._start = None

  def _save(self, removable: Iterable[str] = (), **changes: Any) -> None:
    """Replaces the state on disk, then here; on an error both stay what they were."""
    # An interrupt may have come before the last state's files were removed.
    left = [name for name in self._state["removable"] if (self.path / name).exists()]
    # As a reader finds them: tuples become lists, and keys become texts.
    changes = json.loads(json.dumps({**changes, "removable": [*left, *removable]}))
    # Records of layers are long and steps of tuning many: keep the text of what stays.
    texts = {key: digested_json.canonical(value) for key, value in changes.items()}
    texts = self._texts | texts
    assert "identity" in texts, "RunFolder.begin comes first"
    with self._explaining():
      digested_json.write_texts(self.path / STATE, texts)
    self._texts, self._state = texts, self._state | changes

  def _remove(self) -> None:
    """Removes what the state calls removable."""
    for name in self._state["removable"]:
      (self.path / name).unlink()

  @property
  def finished(self) -> list[dict[str, Any]]:
    """The layers that a resumed run keeps, in order; each has `name` and `record`."""
    return self._state["layers"]

  @property
  def clock(self) -> dict[str, dict[str, Any]]:
    """`seconds` and `peak_bytes` by stage, of all that is not done again."""
    state = self._state
    if not self.finished:
      learned = state["learning"]
      seconds = {"preparation": sum(learned["seconds"])} if learned else {}
      return {"seconds": seconds, "peak_bytes": {}}
    before = self.finished[-1]["clock"]
    seconds = before["seconds"]
    if state["end"]:
      seconds = state["end"]["seconds"]
    elif state["tuning"]:
      seconds = {**seconds, "tuning": sum(state["tuning"]["seconds"])}
    return {"seconds": dict(seconds), "peak_bytes": dict(before["peak_bytes"])}

  @property
  def learned_sequences(self) -> int:
    """Sequences on which `prepare` has learned in all of its steps so far."""
    learning = self._state["learning"]
    return _steps_taken(learning) * learning["sequences"] if learning else 0

  @property
  def ended(self) -> dict[str, Any] | None:
    """The `sanity` and `seconds` that `finish` got, or None."""
    return self._state["end"]

  def _write(self, file: str, arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Writes arrays durably; returns the file's entry by its name."""
    # The host copies of an alias are freed with it, those of an array are not.
    arrays = {
      name: meshes.alias(array) if isinstance(array, jax.Array) else array
      for name, array in arrays.items()
    }
    with self._explaining():
      digest = atomic_io.write_arrays(self.path / file, arrays)
      size = (self.path / file).stat().st_size
    return {file: {"bytes": size, "sha256": digest}}

  def write_prepared(
    self, params: Mapping[str, Any] | None, learned: Mapping[str, Any], record: Any
  ) -> None:
    """Writes the result of `Program.prepare`.

    `params` is the rewritten float model, or None if unchanged; `learned` is keyed by
    slash-separated path; `record` is JSON-ready.
    """
    if self._lock is None:
      return
    self._begin()
    trees = {f"params-{key}": value for key, value in (params or {}).items()}
    if learned:
      trees["learned"] = tree_io.nested(learned)
    steps = self._state["learning"]
    taken, files, nodes = _steps_taken(steps), {}, {}
    for name, tree in trees.items():
      file = f"{_prepared_name(name, taken)}.safetensors"
      nodes[file], arrays = tree_io.pack(tree)
      files |= self._write(file, arrays)
    made = {"files": files, "nodes": nodes, "paths": sorted(learned), "record": record}
    if steps is None:
      self._save(prepared=made)
      return
    # Nothing reads the steps from here on, but how long they took is told.
    self._save(steps["files"], prepared=made, learning={**steps, "files": {}})
    self._remove()

  def read_prepared(self) -> tuple[dict[str, Any] | None, dict[str, Any], Any] | None:
    """Reads the three arguments of `write_prepared`, or returns None."""
    prepared = self._state["prepared"]
    if prepared is None:
      return None
    first = len(_prepared_name("", _steps_taken(self._state["learning"])))
    trees = {
      file[first:].removesuffix(".safetensors"): tree_io.read_tree(
        self.path / file, nodes
      )
      for file, nodes in prepared["nodes"].items()
    }
    tree, learned = trees.pop("learned", {}), {}
    with refusing(self.path / STATE, "what it lists as prepared", _MEND):
      learned = {path: tree_io.at(tree, path) for path in prepared["paths"]}
    params = {name.removeprefix("params-"): params for name, params in trees.items()}
    return params or None, learned, prepared["record"]

  def write_layer(
    self,
    name: str,
    layer: Any,
    record: Mapping[str, Any],
    *,
    streams: Mapping[str, Sequence[jax.Array | np.ndarray]] | None,
    clock: Mapping[str, Any],
  ) -> None:
    """Writes a finished layer durably, with the inputs of the next one if it has them.

    `streams` are the hidden states `[sequences, T, d]` entering the next layer, in
    chunks by name, in place of those of an earlier layer; these stay with None, and are
    removed with an empty mapping. `clock` has seconds and peak bytes by stage so far.
    """
    self.write_packed(name, tree_io.pack(layer), record, streams=streams, clock=clock)

  def write_packed(
    self,
    name: str,
    packed: tuple[tree_io.Description, dict[str, Any]],
    record: Mapping[str, Any],
    *,
    streams: Mapping[str, Sequence[jax.Array | np.ndarray]] | None,
    clock: Mapping[str, Any],
  ) -> None:
    """Does what `write_layer` does with the result of `tree_io.pack`.

    It computes nothing on a device, so that it may run in a thread.
    """
    if self._lock is None:
      return
    self._begin()
    number = len(self.finished) + 1
    entering = {}
    for stream, chunks in (streams or {}).items():
      # With leading zeros, so that sorted names are chunks in calibration order.
      arrays = {f"{part:06d}": chunk for part, chunk in enumerate(chunks)}
      entering |= self._write(f"streams/{number}-{stream}.safetensors", arrays)
    nodes, arrays = packed
    files = self._write(f"layers/{name}.safetensors", arrays)
    made = {"name": name, "files": files, "nodes": nodes}
    made |= {"record": dict(record), "clock": dict(clock)}
    layers = [*self.finished, made]
    if streams is None:
      self._save(layers=layers)
      return
    # Named as removable before they are removed: a kill between the two leaves files
    # that the state explains.
    old = self._state["streams"]
    self._save(old, layers=layers, streams=entering)
    self._remove()

  def read_layer(self, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the params of one of the `finished` layers, bit for bit."""
    (file,) = layer["files"]
    return tree_io.read_tree(self.path / file, layer["nodes"])

  @property
  def saved_index(self) -> int:
    """The layer that the saved hidden states enter; 0 if none are saved.

    Raises:
      ValueError: Their names do not say one layer up to the first unfinished one.
    """
    files = self._state["streams"]
    numbers = {pathlib.Path(file).stem.partition("-")[0] for file in files} or {"0"}
    number = numbers.pop()
    if numbers or not number.isdecimal() or int(number) > len(self.finished):
      raise ValueRefusal(
        self.path / STATE,
        expected=f"hidden states of one of {len(self.finished)} layers",
        got=", ".join(files),
        mend=_MEND,
      )
    return int(number)

  def read_streams(
    self, chunk: int, put: Callable[[np.ndarray], jax.Array] = jnp.array
  ) -> dict[str, list[jax.Array]]:
    """Reads the hidden states entering layer `saved_index`, by stream, in chunks.

    `put` makes a device array of a chunk, with a buffer of its own, because stream
    buffers are donated and numpy's must not be.
    """
    streams = {}
    for file in self._state["streams"]:
      arrays = atomic_io.read_arrays(self.path / file)
      # Cut anew, because a resumed run may have another chunk size: no bit depends on
      # it.
      rows = np.concatenate([arrays[part] for part in sorted(arrays)])
      starts = range(0, len(rows), chunk)
      name = pathlib.Path(file).stem.partition("-")[2]
      streams[name] = [put(rows[first : first + chunk]) for first in starts]
    return streams

  def write_step(
    self,
    stage: Literal["learning", "tuning"],
    arrays: Mapping[str, jax.Array],
    losses: Sequence[float],
    seconds: float,
    sequences: int = 1,
  ) -> None:
    """Writes what was learned durably, in place of what the step before wrote.

    `losses` are those of all steps, `seconds` those since the write before, and
    `sequences` those that a step learns on.
    """
    if self._lock is None:
      return
    self._begin()
    before = self._state[stage] or {"files": {}, "seconds": []}
    made = {
      "files": self._write(_next_file(self._state, stage), arrays),
      "losses": [*losses],
      "seconds": [*before["seconds"], seconds],
      "sequences": sequences,
    }
    # The new step is on the disk and in the state before the old one is removed.
    self._save(before["files"], **{stage: made})
    self._remove()

  def has_steps(self, stage: Literal["learning", "tuning"]) -> bool:
    """Tells whether `write_step` wrote one."""
    return self._state[stage] is not None

  def read_steps(self, stage: Literal["learning", "tuning"]) -> Steps | None:
    """Reads what `write_step` wrote last, or returns None."""
    steps = self._state[stage]
    if steps is None:
      return None
    with refusing(self.path / STATE, f"what it lists of {stage}", _MEND):
      (file,) = steps["files"]
    return Steps(atomic_io.read_arrays(self.path / file), [*steps["losses"]])

  def finish(
    self, sanity: Mapping[str, Any] | None, seconds: Mapping[str, float]
  ) -> None:
    """Writes that the run is finished: its sanity check, and seconds by stage."""
    if self._lock:
      self._begin()
      self._save(end={"sanity": sanity, "seconds": seconds})


class LayerWriter:
  """Writes the finished layers of a run folder, each behind the work on the next one.

  A thread copies a layer to the host, digests, writes and syncs it; one layer is under
  way at most. What goes wrong there is raised by the next call, and at the end of the
  `with` block. Without a folder nothing is written.
  """

  def __init__(self, folder: RunFolder | None) -> None:
    self._folder = folder
    # One thread, because each state of the folder follows from the one before it.
    self._pool = concurrent.futures.ThreadPoolExecutor(1, "mxjax-layer-writer")
    self._under_way: concurrent.futures.Future[None] | None = None

  def write(
    self,
    name: str,
    layer: Any,
    record: Mapping[str, Any],
    *,
    streams: Mapping[str, Sequence[jax.Array | np.ndarray]] | None,
    clock: Mapping[str, Any],
  ) -> None:
    """Begins to do what `RunFolder.write_layer` does, after the layer before it.

    The `streams` are on the host, because the next layer takes the device's buffers.
    """
    if self._folder is None:
      return
    self.wait()
    # Here and not in the thread: on a CPU one computation is under way at a time.
    packed = tree_io.pack(layer)
    self._under_way = self._pool.submit(
      self._folder.write_packed, name, packed, record, streams=streams, clock=clock
    )

  def wait(self) -> None:
    """Returns when what was given to `write` is on the disk; raises what went wrong."""
    under_way, self._under_way = self._under_way, None
    if under_way is not None:
      under_way.result()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: object, error: BaseException | None, *rest: object) -> None:
    try:
      self.wait()
    except Exception as other:
      if error is None:
        raise
      # What stopped the run counts, but a layer that is not on the disk is told, too.
      error.add_note(f"The layer before it could not be written: {other}")
    finally:
      self._pool.shutdown()


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
