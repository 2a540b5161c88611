"""The run folder as the processes see it that do not write."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from mxjax.devices import processes
from mxjax.storage import journal
from mxjax.storage.run_folder import JOURNAL, RunFolder, Streams


class ReadOnlyRunFolder(RunFolder):
  """A run folder that process 0 writes: read when it is opened, never written.

  It shows the state that process 0 found when it began; the folder must be one that
  all processes see.
  """

  def __init__(self, path: str | os.PathLike[str]) -> None:
    """Reads and checks the journal; takes no lock."""
    self.path = pathlib.Path(path)
    self.discarded = []
    file = self.path / JOURNAL
    if not file.is_file():
      raise FileNotFoundError(
        f"run folder: expected {file}, which process 0 has made, got no such file; "
        "name an --out that all processes see."
      )
    self._events = journal.parse(file, file.read_bytes())[0]

  def close(self) -> None:
    """Nothing is held."""

  @property
  def events(self) -> list[dict[str, Any]]:
    """What the journal held when it was read."""
    return self._events

  def begin(
    self, identity: Mapping[str, Any], environment: Mapping[str, Any]
  ) -> list[dict[str, Any]]:
    """Process 0 has compared both; see `RunFolder.begin`."""
    del identity, environment
    return []

  def journal(self, event: str, **values: Any) -> None:
    """Process 0 writes it."""

  def write_prepared(
    self, params: Mapping[str, Any] | None, learned: Mapping[str, Any], record: Any
  ) -> None:
    """Process 0 writes it."""

  def write_layer(
    self,
    name: str,
    layer: Any,
    record: Mapping[str, Any],
    *,
    streams: Streams,
    clock: Mapping[str, Any],
  ) -> None:
    """Process 0 writes it."""


def open_run(
  path: str | os.PathLike[str], *, resume: bool, mesh: Mesh | None
) -> RunFolder:
  """Opens a run folder for writing in process 0, for reading in the others."""
  if processes.is_leader():
    folder = RunFolder(path, resume=resume)
    processes.wait_for_all(mesh)
    return folder
  processes.wait_for_all(mesh)
  return ReadOnlyRunFolder(path)
