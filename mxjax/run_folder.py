"""The run folder: finished layers, written durably, and a journal of the work."""

import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

JOURNAL = "journal.jsonl"


def flatten(tree: Any) -> dict[str, np.ndarray]:
  """Leaves of a pytree by slash-separated path, as host arrays."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
    for path, leaf in leaves
  }


def write_durably(path: pathlib.Path, data: bytes) -> None:
  """Writes a file so that after a crash it is whole or absent."""
  partial = path.with_name(path.name + ".partial")
  with open(partial, "wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  os.replace(partial, path)
  descriptor = os.open(path.parent, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def check_output(path: str | os.PathLike[str]) -> pathlib.Path:
  """Checks that an output folder does not exist, or is empty; makes nothing.

  Raises:
    FileExistsError: The folder has something in it, which is never overwritten.
  """
  folder = pathlib.Path(path)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise FileExistsError(
      f"output: {folder} exists and is not an empty folder; name another --out or "
      "remove it yourself, because results are never overwritten."
    )
  return folder


def create_output(path: str | os.PathLike[str]) -> pathlib.Path:
  """Makes an output folder that must not exist, or must be empty.

  Raises:
    FileExistsError: The folder has something in it.
  """
  folder = check_output(path)
  folder.mkdir(parents=True, exist_ok=True)
  return folder


class RunFolder:
  """Finished layers in `layers/` and one journal line for each event."""

  def __init__(self, path: str | os.PathLike[str]) -> None:
    """Creates the folder.

    Args:
      path: Where; must not exist or be empty.
    """
    self.path = create_output(path)
    (self.path / "layers").mkdir()

  def journal(self, event: str, **values: Any) -> None:
    """Appends one JSON line and syncs it to disk."""
    line = json.dumps({"event": event, **values}, sort_keys=True) + "\n"
    with open(self.path / JOURNAL, "a", encoding="utf-8") as file:
      file.write(line)
      file.flush()
      os.fsync(file.fileno())

  def write_layer(self, name: str, layer: Any, record: dict[str, Any]) -> None:
    """Writes a finished layer's arrays, then journals its checksum and record."""
    from safetensors.numpy import save

    data = save(flatten(layer))
    file = self.path / "layers" / f"{name}.safetensors"
    write_durably(file, data)
    digest = hashlib.sha256(data).hexdigest()
    self.journal("layer", name=name, sha256=digest, record=record)
