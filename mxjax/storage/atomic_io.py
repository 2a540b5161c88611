"""Files that are whole or absent after a crash, with checksums taken as they go out.

Everything goes to `NAME.partial`, is synced, and takes its name by a rename: a process
killed anywhere, or a full disk, leaves the old file or none, and a `.partial` that
nobody reads.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

PARTIAL = ".partial"
_DTYPES = {
  "bfloat16": "BF16",
  "bool": "BOOL",
  "float16": "F16",
  "float32": "F32",
  "float64": "F64",
  "int8": "I8",
  "int32": "I32",
  "int64": "I64",
  "uint8": "U8",
  "uint32": "U32",
}
"""The names that the safetensors format gives dtypes."""


def sync(path: str | os.PathLike[str]) -> None:
  """Flushes a file, or a folder's list of names, to disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def sync_tree(folder: pathlib.Path) -> None:
  """Flushes every file and folder below to disk, deepest first."""
  for root, _, names in os.walk(folder, topdown=False):
    for place in (*(os.path.join(root, name) for name in names), root):
      sync(place)


def file_sha256(file: pathlib.Path) -> str:
  """SHA-256 of a file's content, hex."""
  with open(file, "rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def write_parts(path: pathlib.Path, parts: Iterable[bytes | memoryview]) -> str:
  """Writes a file so that after a crash it is whole or absent.

  Args:
    path: Where; what was there is replaced at once.
    parts: Its content, one piece in memory at a time.

  Returns:
    SHA-256 of the content, hex.
  """
  partial = path.with_name(path.name + PARTIAL)
  digest = hashlib.sha256()
  with open(partial, "wb") as file:
    for part in parts:
      digest.update(part)
      file.write(part)
    file.flush()
    os.fsync(file.fileno())
  os.replace(partial, path)
  sync(path.parent)
  return digest.hexdigest()


def write_durably(path: pathlib.Path, data: bytes) -> str:
  """`write_parts` of one piece."""
  return write_parts(path, [data])


def write_arrays(path: pathlib.Path, arrays: Mapping[str, Any]) -> str:
  """Writes a safetensors file durably, one array on the host at a time.

  Args:
    path: Where.
    arrays: Arrays by name, of JAX or numpy.

  Returns:
    SHA-256 of the file, hex.

  Raises:
    TypeError: A dtype that the format does not name.
  """
  # Wide dtypes first: then every array starts at a multiple of its item size.
  names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
  header, offset = {}, 0
  for name in names:
    dtype = str(arrays[name].dtype)
    if dtype not in _DTYPES:
      raise TypeError(
        f"write_arrays: {name} of {path} is {dtype}, expected one of "
        f"{', '.join(_DTYPES)}; convert it first."
      )
    end = offset + arrays[name].size * arrays[name].dtype.itemsize
    header[name] = {
      "dtype": _DTYPES[dtype],
      "shape": list(arrays[name].shape),
      "data_offsets": [offset, end],
    }
    offset = end
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)

  def parts() -> Iterator[bytes | memoryview]:
    yield len(text).to_bytes(8, "little") + text
    for name in names:
      # As bytes: numpy's buffers do not know bfloat16.
      array = np.ascontiguousarray(arrays[name]).reshape(-1)
      yield array.view(np.uint8).data

  return write_parts(path, parts())


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads a safetensors file; check its SHA-256 first."""
  from safetensors.numpy import load_file

  return load_file(path)
