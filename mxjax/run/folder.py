"""The run folder: the finished part of a run, from which a killed run goes on.

    state.json            what is finished, with the SHA-256 of each of its files
    lock                  empty; the process that writes holds it
    prepared/             what a program's `prepare` produced, if anything
    layers/NAME           finished layers
    streams/INDEX-NAME    hidden states entering the next layer
    tuning/STEP           what tuning has learned so far, if the program tunes
    gradients/            gradients of the layers to come; computed anew on resuming

`state.json` always describes one complete state. New files reach the disk first, under
names that the state does not have; then `state.json` is replaced in one rename; then
the files that it no longer needs are removed. A kill anywhere leaves one state whole,
and beside it only files that `_unexplained` knows. Any other file is evidence that the
state has been exchanged for an older one, and refused before finished work is lost.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Annotated, Any, BinaryIO, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from jax.sharding import Mesh

from mxjax.devices import processes
from mxjax.devices.placement import Placement
from mxjax.errors import (
  BlockingIORefusal,
  FileExistsRefusal,
  FileNotFoundRefusal,
  ValueRefusal,
)
from mxjax.intake.reading import TEXT_BYTES, refusing
from mxjax.storage import atomic_io, sealed, tree_io

STATE, LOCK = "state.json", "lock"
FOLDERS = ("gradients", "layers", "prepared", "streams", "tuning")
SCRATCH = "scratch-"
"""Begins the names of folders that only one process uses."""
VERSION = 1
"""Of the layout of a run folder; a run in a folder of another is not resumed."""

PACKAGES = ("mxjax", "jax", "jaxlib", "numpy", "scipy")
"""Compute a run's numbers; jaxlib takes its LAPACK from scipy."""
OPTIONS = (
  "jax_default_matmul_precision",
  "jax_default_prng_impl",
  "jax_disable_jit",
  "jax_disable_most_optimizations",
  "jax_enable_x64",
  "jax_exec_time_optimization_effort",
  "jax_optimization_level",
  "jax_random_seed_offset",
  "jax_threefry_partitionable",
)
"""Options of JAX that choose arithmetic, random numbers, or how XLA compiles."""
VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
"""Environment variables that do so, beside `XLA_FLAGS`."""
HARMLESS_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")
"""Begin the flags of XLA that change no program."""

_MEND = "put back an intact copy of the folder, or start again with another --out"
_PATTERN = rf"^({'|'.join(FOLDERS)})/[^/\\]+\.safetensors$"
_Name = Annotated[str, pydantic.StringConstraints(pattern=_PATTERN)]
_Files = dict[_Name, sealed.Entry]
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


class _Tuning(pydantic.BaseModel):
  files: _OneFile
  losses: list[float]
  seconds: list[float]


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
  digest: sealed.Digest
  identity: dict[str, Any]
  environment: dict[str, Any]
  prepared: _Prepared | None
  layers: list[_Layer]
  #: Hidden states that leave the last of the layers, none after the model's last.
  streams: _Files
  tuning: _Tuning | None
  resumes: list[_Resume]
  end: _End | None
  #: Files that may lie beside the state and that it does not need: what it replaced,
  #: and layers finished since its hidden states, which a resumed run does again.
  removable: list[_Name]


State = dict[str, Any]
"""What `state.json` says, in the structure of `_State`."""
_NOTHING: State = {
  "prepared": None,
  "layers": [],
  "streams": {},
  "tuning": None,
  "resumes": [],
  "end": None,
  "removable": [],
}
"""The state before `RunFolder.begin` writes the first one."""


class Tuning(NamedTuple):
  """State of tuning after a step: arrays in the order of a pytree's leaves, losses."""

  arrays: dict[str, np.ndarray]
  losses: list[float]


def read_state(path: str | os.PathLike[str]) -> State:
  """Reads the state of a run folder without its lock; other files are not looked at.

  Raises:
    FileNotFoundError: There is none.
    ValueError: It is damaged or of another version.
  """
  return sealed.read(
    pathlib.Path(path) / STATE,
    "the state of a run",
    _MEND,
    kind=_State,
    version=("version", VERSION),
    limit=TEXT_BYTES,
  )


def listed_files(state: State) -> dict[str, dict[str, Any]]:
  """Returns size and SHA-256 of every file of a state, by relative path."""
  files = {LOCK: {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}}
  for part in (state["prepared"], *state["layers"], state["tuning"]):
    files |= part["files"] if part else {}
  return files | state["streams"]


def _unexplained(names: Iterable[str], state: State) -> list[str]:
  """Selects files beside a state that no kill of this run can have left.

  A killed process leaves partial files, gradients, what the state calls removable, and
  what it was writing for the next state: what was prepared, or a layer with the hidden
  states that leave it, or a step of tuning. More than that was finished once, by a
  state that is not here.
  """
  if "identity" not in state:
    return [name for name in names if not _is_scratch(name)]
  number = 1 + len(state["layers"])
  number += sum(name.startswith("layers/") for name in state["removable"])
  step = 1 + (len(state["tuning"]["losses"]) if state["tuning"] else 0)
  writing = ["layers/", f"streams/{number}-", f"tuning/{step}."]
  writing += [] if number > 1 or state["prepared"] else ["prepared/"]
  odd, new = [], []
  for name in names:
    if not re.match(_PATTERN, name):
      odd += [] if _is_scratch(name) else [name]
    elif not name.startswith("gradients/") and name not in state["removable"]:
      (new if name.startswith(tuple(writing)) else odd).append(name)
  kinds = [name.partition("/")[0] for name in new]
  is_one = {*kinds} <= {"layers", "streams"} or len({*kinds}) == 1
  return odd + ([] if is_one and kinds.count("layers") <= 1 else new)


def _is_scratch(name: str) -> bool:
  return name.startswith(SCRATCH) or atomic_io.PARTIAL in name


def environment(placement: Placement, model: Any) -> dict[str, Any]:
  """Returns what else than its inputs may change a run's bits, JSON-ready.

  That is versions, the flags of XLA and of JAX, the device, the machine, what computes
  attention, and the mesh.
  """
  text = os.environ.get("XLA_FLAGS", "")
  if text and not text.lstrip().startswith("-"):  # XLA then takes it for a file.
    file = pathlib.Path(text.strip())
    text = file.read_text() if file.is_file() else ""
  words = [word for word in shlex.split(text) if not word.startswith(HARMLESS_FLAGS)]
  device = jax.devices()[0]
  return {
    **{name: _version(name) for name in PACKAGES},
    # Of a flag that is repeated, XLA takes the last.
    "XLA_FLAGS": {name: value for name, _, value in (w.partition("=") for w in words)},
    **{name: os.environ.get(name) for name in VARIABLES},
    **{name: getattr(jax.config, name, None) for name in OPTIONS},
    "machine": platform.machine(),
    "platform": device.platform,
    "device": device.device_kind,
    "runtime": device.client.platform_version,
    "mesh": placement.describe(),
    "attention": getattr(model, "attention", None),
  }


def _version(package: str) -> str | None:
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:  # mxjax itself, in a bare checkout.
    return None


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
  """Returns their values and ours where they differ, by key."""
  return {
    key: [theirs.get(key), ours.get(key)]
    for key in {**theirs, **ours}
    if theirs.get(key) != ours.get(key)
  }


def _told(differing: Mapping[str, Any]) -> tuple[str, str]:
  """Names every difference, theirs and ours, of two mappings those of their values."""
  theirs, ours = [], []
  for key, (had, new) in differing.items():
    parts = {key: [had, new]}
    if isinstance(had, Mapping) and isinstance(new, Mapping):
      parts = {f"{key} {part}": pair for part, pair in _differing(new, had).items()}
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
    self._unsaved: list[dict[str, Any]] = []
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
        self._texts = {key: sealed.canonical(one) for key, one in self._state.items()}
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
    except FileNotFoundError as error:
      raise ValueRefusal(
        f"run folder: {self.path}",
        expected=f"a file {LOCK}",
        got="none, so another process may be at work unseen",
        mend="if no process is, make an empty file of that name",
      ) from error
    try:
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
      del self._state["digest"]
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
    for place in sorted(self.path.iterdir()):
      if place.is_dir() and place.name not in FOLDERS:
        shutil.rmtree(place)
        self.discarded.append(f"{place.name}/")
    for name in self._unlisted():
      (self.path / name).unlink()
      self.discarded.append(name)
    self._state = self._state | {"removable": []}
    for name in FOLDERS:
      (self.path / name).mkdir(exist_ok=True)
    for place in (self.path, self.path.absolute().parent):
      atomic_io.sync(place)

  def close(self) -> None:
    """Releases the lock."""
    if self._lock:
      self._lock.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *details: object) -> None:
    self.close()

  def begin(
    self, identity: Mapping[str, Any], environment: Mapping[str, Any]
  ) -> list[dict[str, Any]]:
    """Writes the first state of a run, or that it is resumed.

    `identity` is what the result is made of; `environment` may change its bits. Both
    are JSON-ready, and a run keeps both, but for the mesh on a CPU: there the bits do
    not depend on it. Returns one entry for every resume: the number of finished layers
    (`layer`), the files `discarded`, and the mesh if it has `changed`.

    Raises:
      ValueError: The run in the folder has another identity or environment.
    """
    if self._lock is None:
      return []
    # Tuples become lists, as in the state.
    identity, environment = json.loads(json.dumps([identity, environment]))
    if "identity" not in self._state:
      self._save(version=VERSION, identity=identity, environment=environment)
      return []
    if wrong := _differing(identity, self._state["identity"]):
      theirs, ours = _told(wrong)
      raise ValueRefusal(
        f"run folder: {self.path}",
        expected=f"a run of {theirs}",
        got=f"one of {ours}",
        mend="resume with the model, data and options it was started with, or name "
        "another --out",
      )
    changed = _differing(environment, self._state["environment"])
    is_free = lambda key: key == "mesh" and environment.get("platform") == "cpu"
    if wrong := {key: changed[key] for key in changed if not is_free(key)}:
      theirs, ours = _told(wrong)
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

  def _save(self, removable: Iterable[str] = (), **changes: Any) -> None:
    """Replaces the state on disk, then here; on an error both stay what they were."""
    # As a reader finds them: tuples become lists, and keys become texts.
    changes = json.loads(json.dumps({**changes, "removable": [*removable]}))
    # Records of layers are long and steps of tuning many: keep the text of what stays.
    texts = {key: sealed.canonical(value) for key, value in changes.items()}
    texts = self._texts | texts
    assert "identity" in texts, "RunFolder.begin comes first"
    with self._explaining():
      sealed.write_texts(self.path / STATE, texts)
    self._texts, self._state = texts, self._state | changes

  def _remove(self, names: Iterable[str]) -> None:
    for name in names:
      (self.path / name).unlink()

  @property
  def finished(self) -> list[dict[str, Any]]:
    """The layers that a resumed run keeps, in order; each has `name` and `record`.

    A run goes on from the last hidden states that were written, and so does the layers
    after these again.
    """
    return self._state["layers"]

  @property
  def clock(self) -> dict[str, dict[str, Any]]:
    """`seconds` and `peak_bytes` by stage, of all that is not done again."""
    if not self.finished:
      return {"seconds": {}, "peak_bytes": {}}
    state, before = self._state, self.finished[-1]["clock"]
    seconds = before["seconds"]
    if state["end"]:
      seconds = state["end"]["seconds"]
    elif state["tuning"]:
      seconds = {**seconds, "tuning": sum(state["tuning"]["seconds"])}
    return {"seconds": dict(seconds), "peak_bytes": dict(before["peak_bytes"])}

  @property
  def ended(self) -> dict[str, Any] | None:
    """The `sanity` and `seconds` that `finish` got, or None."""
    return self._state["end"]

  def _write(self, file: str, arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Writes arrays durably; returns the file's entry by its name."""
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
    trees = {f"params-{key}": value for key, value in (params or {}).items()}
    if learned:
      trees["learned"] = tree_io.nested(learned)
    files, nodes = {}, {}
    for name, tree in trees.items():
      file = f"prepared/{name}.safetensors"
      nodes[file], arrays = tree_io.pack(tree)
      files |= self._write(file, arrays)
    self._save(
      prepared={
        "files": files,
        "nodes": nodes,
        "paths": sorted(learned),
        "record": record,
      }
    )

  def read_prepared(self) -> tuple[dict[str, Any] | None, dict[str, Any], Any] | None:
    """Reads the three arguments of `write_prepared`, or returns None."""
    prepared = self._state["prepared"]
    if prepared is None:
      return None
    trees = {
      pathlib.Path(file).stem: tree_io.read_tree(self.path / file, nodes)
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
    """Writes a finished layer durably, with the inputs of the next one.

    `streams` are the hidden states `[sequences, T, d]` entering the next layer, in
    chunks by name, and empty after the last; with None a resumed run does this layer
    again. `clock` has seconds and peak bytes by stage so far.
    """
    if self._lock is None:
      return
    number = len(self.finished) + len(self._unsaved) + 1
    entering = {}
    for stream, chunks in (streams or {}).items():
      arrays = {f"{part:06d}": chunk for part, chunk in enumerate(chunks)}
      entering |= self._write(f"streams/{number}-{stream}.safetensors", arrays)
    nodes, arrays = tree_io.pack(layer)
    files = self._write(f"layers/{name}.safetensors", arrays)
    made = {"name": name, "files": files, "nodes": nodes}
    unsaved = [*self._unsaved, made | {"record": dict(record), "clock": dict(clock)}]
    if streams is None:
      self._save(removable=[file for one in unsaved for file in one["files"]])
      self._unsaved = unsaved
      return
    old = self._state["streams"]
    self._save(old, layers=[*self.finished, *unsaved], streams=entering)
    self._unsaved = []
    self._remove(old)

  def read_layer(self, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the params of one of the `finished` layers, bit for bit."""
    (file,) = layer["files"]
    return tree_io.read_tree(self.path / file, layer["nodes"])

  def read_streams(
    self, chunk: int, place: Callable[[np.ndarray], jax.Array] = jnp.array
  ) -> dict[str, list[jax.Array]]:
    """Reads the hidden states entering the next layer, by stream, in chunks.

    `place` makes a device array of a chunk, with a buffer of its own, because stream
    buffers are donated and numpy's must not be.
    """
    streams = {}
    for file in self._state["streams"]:
      arrays = atomic_io.read_arrays(self.path / file)
      rows = np.concatenate([arrays[part] for part in sorted(arrays)])
      starts = range(0, len(rows), chunk)
      name = pathlib.Path(file).stem.partition("-")[2]
      streams[name] = [place(rows[first : first + chunk]) for first in starts]
    return streams

  def write_tuning(
    self, arrays: Mapping[str, jax.Array], losses: Sequence[float], seconds: float
  ) -> None:
    """Writes the state of tuning durably, in place of that of the step before.

    `losses` are those of all steps, `seconds` those of the last one.
    """
    if self._lock is None:
      return
    before = self._state["tuning"] or {"files": {}, "seconds": []}
    made = {
      "files": self._write(f"tuning/{len(losses)}.safetensors", arrays),
      "losses": [*losses],
      "seconds": [*before["seconds"], seconds],
    }
    self._save(before["files"], tuning=made)
    self._remove(before["files"])

  def read_tuning(self) -> Tuning | None:
    """Reads the state written by `write_tuning`, or returns None."""
    tuning = self._state["tuning"]
    if tuning is None:
      return None
    (file,) = tuning["files"]
    return Tuning(atomic_io.read_arrays(self.path / file), [*tuning["losses"]])

  def finish(
    self, sanity: Mapping[str, Any] | None, seconds: Mapping[str, float]
  ) -> None:
    """Writes that the run is finished: its sanity check, and seconds by stage."""
    if self._lock:
      self._save(end={"sanity": sanity, "seconds": seconds})


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
