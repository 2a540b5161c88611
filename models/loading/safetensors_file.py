"""Reads one safetensors file, one tensor at a time."""

import json
import pathlib

import numpy as np


class SafetensorsFile:
  """The tensors of one file by name, including bfloat16, each read on demand."""

  path: pathlib.Path
  names: list[str]

  def __init__(self, path: pathlib.Path) -> None:
    """Opens a `.safetensors` file and checks its header; reads no tensor.

    Raises:
      FileNotFoundError: The file is absent.
      ValueError: The file is truncated or not in the safetensors format.
    """
    from safetensors import SafetensorError, safe_open

    self.path = path
    try:
      self._file = safe_open(path, framework="numpy")
    except SafetensorError as error:
      raise ValueError(_describe_damage(path, error)) from error
    self.names = list(self._file.keys())

  def shape(self, name: str) -> tuple[int, ...]:
    """Returns the shape of a tensor."""
    return tuple(self._file.get_slice(name).get_shape())

  def dtype(self, name: str) -> str:
    """Returns the dtype of a tensor in the format's notation, such as BF16."""
    return self._file.get_slice(name).get_dtype()

  def read(self, name: str) -> np.ndarray:
    """Copies one tensor into memory, in the stored dtype."""
    return self._file.get_tensor(name)


def _describe_damage(path: pathlib.Path, error: Exception) -> str:
  """Translates the library's error for someone who downloaded the file."""
  size = path.stat().st_size
  with path.open("rb") as file:
    expected = 8 + int.from_bytes(file.read(8), "little")
    if expected <= size:
      try:
        header = json.loads(file.read(expected - 8))
      except ValueError:
        return (
          f"{path}: expected a JSON header of safetensors, got bytes that do not parse "
          f"({error}); download the file again."
        )
      header.pop("__metadata__", None)
      expected += max(
        (entry["data_offsets"][1] for entry in header.values()), default=0
      )
  if expected > size:
    return (
      f"{path}: expected {expected} bytes by its header, got {size}; the file is "
      "truncated or no safetensors file, download it again."
    )
  return f"{path}: expected a safetensors file, got {error}; download the file again."
