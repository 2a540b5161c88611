"""The run folder: the finished part of a run, for resuming after a kill.

    journal.jsonl         every event with checksums of its files; also the lock
    prepared/             what a program's `prepare` produced, if anything
    layers/NAME           finished layers
    gradients/            gradients of the layers to come; computed anew on resuming
    tuning/STEP           what tuning has learned so far, if the program tunes
    streams/INDEX-NAME    hidden states entering the next layer

A layer's files reach the disk before its journal entry, and the entry is written before
the hidden states that were written before are removed. So the journal always names
exactly one complete state, that of the last hidden states; any other file in the folder
is a leftover, and layers after that state are done again by a resumed run.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mxjax.devices import processes
from mxjax.intake.reading import refusing
from mxjax.storage import atomic_io, run_events, tree_io
from mxjax.storage.run_events import Event
from mxjax.storage.run_journal import RunJournal


class Tuning(NamedTuple):
  """State of tuning after a step: arrays in the order of a pytree's leaves, losses."""

  arrays: dict[str, np.ndarray]
  losses: list[float]


class RunFolder(RunJournal):
  """Finished work on disk, written and read by its kind; see `RunJournal`."""

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
    with self.explaining():
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
      with refusing(self.path, "what its journal lists as prepared"):
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
    streams: Mapping[str, Sequence[jax.Array | np.ndarray]] | None,
    clock: Mapping[str, Any],
  ) -> None:
    """Writes a finished layer durably, with the inputs of the next one.

    `streams` are the hidden states `[sequences, T, d]` entering the next layer, in
    chunks by name, and empty after the last; with None a resumed run does this layer
    again. `clock` has seconds and peak bytes by stage so far.
    """
    if self._journal is None:
      return
    before, number = self.finished, len(run_events.written_layers(self.events)) + 1
    checksums: dict[str, str] = {}
    files: dict[str, str] = {}
    with self.explaining():
      for stream, chunks in (streams or {}).items():
        file = f"streams/{number}-{stream}.safetensors"
        arrays = {f"{part:06d}": chunk for part, chunk in enumerate(chunks)}
        checksums[file] = atomic_io.write_arrays(self.path / file, arrays)
      nodes = self._write_tree(f"layers/{name}", layer, files)
    self.journal(
      "layer",
      name=name,
      files=files,
      nodes=nodes,
      streams=None if streams is None else checksums,
      record=record,
      clock=dict(clock),
    )
    for file in before[-1]["streams"] if before and streams is not None else ():
      (self.path / file).unlink()

  def write_tuning(
    self,
    arrays: Mapping[str, jax.Array],
    losses: Sequence[float],
    seconds: float | None = None,
  ) -> None:
    """Writes the state of tuning durably, in place of that of the step before.

    `seconds` are those of the last step.
    """
    if self._journal is None:
      return
    before = self.event("tuned")
    file = f"tuning/{len(losses)}.safetensors"
    with self.explaining():
      digest = atomic_io.write_arrays(self.path / file, arrays)
    self.journal("tuned", files={file: digest}, loss=losses[-1], seconds=seconds)
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
