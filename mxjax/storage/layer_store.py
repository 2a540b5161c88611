"""Quantized layers on disk while the rest of the model is made or measured."""

import pathlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class LayerStore(MutableMapping[str, Any]):
  """A mapping of params whose decoder layers lie in files, read when asked for.

  The pipeline writes each finished layer into it and keeps none; measuring reads them
  back one at a time, bit for bit. It is scratch space of one process, not a
  checkpoint: the types of the leaves are remembered here, not in the files.
  """

  def __init__(self, folder: pathlib.Path) -> None:
    """Uses an existing folder; what is outside the layers stays in memory.

    Args:
      folder: Where `layers_i.safetensors` go.
    """
    self._folder = folder
    self._structures: dict[str, Any] = {}
    self._resident: dict[str, Any] = {}

  def _file(self, name: str) -> pathlib.Path:
    return self._folder / f"{name}.safetensors"

  def __setitem__(self, name: str, value: Any) -> None:
    """Writes a layer, or keeps what is no layer."""
    if not name.startswith("layers_"):
      self._resident[name] = value
      return
    from safetensors.numpy import save_file

    leaves, structure = jax.tree.flatten(value)
    arrays = {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}
    save_file(arrays, self._file(name))
    self._structures[name] = structure

  def __getitem__(self, name: str) -> Any:
    """Reads a layer back, or returns what is in memory."""
    if name in self._resident:
      return self._resident[name]
    from safetensors.numpy import load_file

    structure = self._structures[name]
    arrays = load_file(self._file(name))
    leaves = [jnp.asarray(arrays[str(i)]) for i in range(structure.num_leaves)]
    return jax.tree.unflatten(structure, leaves)

  def __delitem__(self, name: str) -> None:
    """Removes a layer's file, or what is in memory."""
    if name in self._resident:
      del self._resident[name]
      return
    del self._structures[name]
    self._file(name).unlink()

  def __iter__(self) -> Iterator[str]:
    """What is in memory first, then the layers in the order they were written."""
    yield from self._resident
    yield from self._structures

  def __len__(self) -> int:
    """The number of keys."""
    return len(self._resident) + len(self._structures)
