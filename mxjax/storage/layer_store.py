"""On-disk storage of quantized layers during quantization and evaluation."""

import pathlib
from collections.abc import Iterator, MutableMapping
from typing import Any

from mxjax.storage.tree_io import Description, read_tree, write_tree


class LayerStore(MutableMapping[str, Any]):
  """A mapping of params that keeps decoder layers in files and reads them on demand.

  The pipeline writes each finished layer into it and keeps none in memory; evaluation
  reads them back one at a time, bit for bit. It is scratch space of one process, not a
  checkpoint: the layers' descriptions are in memory only.
  """

  def __init__(self, folder: pathlib.Path) -> None:
    """Uses an existing folder for `layers_i.safetensors`; other keys stay in memory."""
    self._folder = folder
    self._descriptions: dict[str, Description] = {}
    self._resident: dict[str, Any] = {}

  def _file(self, name: str) -> pathlib.Path:
    return self._folder / f"{name}.safetensors"

  def __setitem__(self, name: str, value: Any) -> None:
    if name.startswith("layers_"):
      # Only the structure stays in memory; without this process the file cannot be
      # read.
      self._descriptions[name] = write_tree(self._file(name), value)[1]
    else:
      self._resident[name] = value

  def __getitem__(self, name: str) -> Any:
    if name in self._resident:
      return self._resident[name]
    return read_tree(self._file(name), self._descriptions[name])

  def __delitem__(self, name: str) -> None:
    if name in self._resident:
      del self._resident[name]
    else:
      del self._descriptions[name]
      self._file(name).unlink()

  def __iter__(self) -> Iterator[str]:
    yield from self._resident
    yield from self._descriptions

  def __len__(self) -> int:
    return len(self._resident) + len(self._descriptions)
