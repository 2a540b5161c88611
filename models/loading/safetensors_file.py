"""A memory-mapped reader of one safetensors file.

The format is a little-endian 8-byte header length, a JSON header, then raw tensors.
Reading it here keeps bfloat16 without torch, touches no page that is not asked for,
and lets a truncated download be told by its byte counts.
"""

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

DTYPES = {
  "BF16": np.dtype(jnp.bfloat16),
  "F16": np.dtype(np.float16),
  "F32": np.dtype(np.float32),
}
"""Stored dtypes that a float checkpoint may have."""


class SafetensorsFile:
  """The tensors of one file, read when asked.

  Attributes:
    path: The file.
    entries: For each tensor its `dtype`, `shape` and `data_offsets`, the latter in
      bytes from the end of the header.
  """

  path: pathlib.Path
  entries: dict[str, dict[str, Any]]

  def __init__(self, path: pathlib.Path) -> None:
    """Reads the header and checks that the file is as long as it says.

    Args:
      path: A `.safetensors` file.

    Raises:
      ValueError: The file is truncated, or it is no safetensors file.
    """
    self.path = path
    size = path.stat().st_size
    with path.open("rb") as file:
      header_size = int.from_bytes(file.read(8), "little")
      self._data_start = 8 + header_size
      _require_bytes(path, self._data_start, size)
      header = _parse_header(path, file.read(header_size))
    self.entries = {k: v for k, v in header.items() if k != "__metadata__"}
    ends = [entry["data_offsets"][1] for entry in self.entries.values()]
    _require_bytes(path, self._data_start + max(ends, default=0), size)

  def shape(self, name: str) -> tuple[int, ...]:
    """Returns the shape of a tensor."""
    return tuple(self.entries[name]["shape"])

  def read(self, name: str) -> np.ndarray:
    """Maps one tensor into memory.

    Args:
      name: A key of `entries`.

    Returns:
      A read-only view of the file in the stored dtype.

    Raises:
      ValueError: The dtype is not one of `DTYPES`, or the byte range disagrees with
        the shape.
    """
    entry = self.entries[name]
    if entry["dtype"] not in DTYPES:
      raise ValueError(
        f"{self.path}: expected {name} in {', '.join(DTYPES)}, got {entry['dtype']}; "
        "load the unquantized checkpoint."
      )
    dtype, shape = DTYPES[entry["dtype"]], self.shape(name)
    start, stop = entry["data_offsets"]
    if stop - start != dtype.itemsize * int(np.prod(shape)):
      raise ValueError(
        f"{self.path}: expected {name} {list(shape)} {entry['dtype']} to fill its "
        f"byte range, got {stop - start} bytes; download the file again."
      )
    offset = self._data_start + start
    return np.memmap(self.path, dtype, mode="r", offset=offset, shape=shape)


def _require_bytes(path: pathlib.Path, expected: int, size: int) -> None:
  """Raises if the file is shorter than its own header demands."""
  if size < expected:
    raise ValueError(
      f"{path}: expected {expected} bytes by its header, got {size}; the file is "
      "truncated or no safetensors file, download it again."
    )


def _parse_header(path: pathlib.Path, text: bytes) -> dict[str, Any]:
  """Decodes the JSON header."""
  try:
    return json.loads(text)
  except ValueError as error:
    raise ValueError(
      f"{path}: expected a JSON header of safetensors, got bytes that do not parse "
      f"({error}); download the file again."
    ) from error
