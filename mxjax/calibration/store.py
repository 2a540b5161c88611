"""On-disk statistics shared by runs on one float model and one calibration set.

The store holds the hidden states entering every layer and the reductions of every
linear input, so a later run need not rerun the float layers. The key hashes the content
of params, config and tokens: one store can hold several models and calibration sets.
"""

import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration.calibration import Calibration, Params
from mxjax.storage.atomic_io import read_checked, write_checked
from mxjax.storage.tree_io import flatten

FORMAT = "checked"
"""Of the files; another one has another key, so that its files are never read."""


def params_digest(params: Params) -> str:
  """Computes the hex SHA-256 of a float model's arrays by path, one key at a time."""
  digest = hashlib.sha256()
  for name in sorted(params):
    for path, array in sorted(flatten(params[name]).items()):
      digest.update(f"{name}/{path} {array.dtype} {array.shape}".encode())
      digest.update(np.ascontiguousarray(array).tobytes())
  return digest.hexdigest()


def _write(path: pathlib.Path, array: Any) -> None:
  write_checked(path, {"array": array})


def _read(path: pathlib.Path) -> jax.Array:
  return jnp.asarray(read_checked(path)["array"])


class Reductions(dict[str, jax.Array]):
  """Reductions of one linear input by name; each is a file, written once."""

  def __init__(self, folder: pathlib.Path) -> None:
    super().__init__()
    self._folder = folder

  def __missing__(self, name: str) -> jax.Array:
    file = self._folder / f"{name}.safetensors"
    if not file.is_file():
      raise KeyError(name)
    array = _read(file)
    super().__setitem__(name, array)
    return array

  def __setitem__(self, name: str, array: jax.Array) -> None:
    super().__setitem__(name, array)
    _write(self._folder / f"{name}.safetensors", array)


class CalibrationStore:
  """Stored statistics of one float model and one calibration set."""

  def __init__(
    self,
    root: str | os.PathLike[str],
    params: Params,
    calib: Calibration,
  ) -> None:
    """Derives the folder from the content of params and tokens; writes nothing.

    `root` has one subfolder for each content key, which includes the model's config, if
    that has `to_dict`.
    """
    # Equal weights compute other states with another rotary base, epsilon or dtype.
    config = getattr(calib.model, "config", None)
    to_dict = getattr(config, "to_dict", dict)
    described = json.dumps(to_dict(), sort_keys=True)
    parts = [FORMAT, params_digest(params), calib.fingerprint, described]
    key = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    self.path = pathlib.Path(root) / key[:16]

  def _hidden(self, index: int) -> pathlib.Path:
    return self.path / f"hidden_{index}.safetensors"

  def has_hidden(self, index: int) -> bool:
    """Whether the hidden states entering a layer are stored."""
    return self._hidden(index).is_file()

  def hidden(self, index: int, chunk: int) -> list[jax.Array]:
    """Reads the hidden states entering a layer, in chunks `[chunk, T, d]`."""
    array = _read(self._hidden(index))
    return [array[first : first + chunk] for first in range(0, len(array), chunk)]

  def put_hidden(self, index: int, stream: list[jax.Array]) -> None:
    """Writes the hidden states entering a layer unless they are stored already."""
    if not self.has_hidden(index):
      _write(self._hidden(index), np.concatenate([np.asarray(part) for part in stream]))

  def reductions(self, index: int, tap: str) -> Reductions:
    """Returns the stored reductions of a linear input of layer `index`."""
    return Reductions(self.path / f"layer_{index}" / tap)
