"""Crash-safe writes of files and folders, and their checksums.

Everything is written under a partial name, synced, and then renamed. A killed process
or a full disk leaves the old file or none, and partial files that nobody reads.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mxjax.errors import (
  FileExistsRefusal,
  OSRefusal,
  Refusal,
  TypeRefusal,
  ValueRefusal,
)
from mxjax.intake.reading import refusing

PARTIAL = ".partial"
REMAKE = "delete it, then repeat the command, which computes it again"
_SIZES = {"float": (16, 32, 64), "int": (8, 16, 32, 64), "uint": (8, 16, 32, 64)}
_DTYPES = {"bfloat16": "BF16", "bool": "BOOL"} | {
  f"{kind}{bits}": f"{kind[0].upper()}{bits}"
  for kind, sizes in _SIZES.items()
  for bits in sizes
}
"""The names that the safetensors format gives dtypes."""


def check_output(path: str | os.PathLike[str]) -> pathlib.Path:
  """Checks that an output folder does not exist, or is empty; creates nothing.

  Raises:
    FileExistsError: The folder is not empty; its content is never overwritten.
    OSError: It would lie below a file.
  """
  folder = pathlib.Path(path)
  for parent in folder.absolute().parents:
    if os.path.exists(parent) and not parent.is_dir():
      raise OSRefusal(
        f"output: {folder}",
        expected="a folder below folders",
        got=f"{parent}, which is a file",
        mend="name another --out",
        errno=errno.ENOTDIR,
      )
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    # `run` is the folder of a build, which keeps its state while it goes on.
    has_build = (folder / "run" / "state.json").exists()
    raise FileExistsRefusal(
      f"output: {folder}",
      expected="a new folder or an empty one",
      got="one that is neither",
      mend=("add --resume to go on with the build in it, or " if has_build else "")
      + "name another --out or remove it yourself, because results are never "
      "overwritten",
    )
  return folder


def create_output(path: str | os.PathLike[str]) -> pathlib.Path:
  """Creates an output folder after `check_output`."""
  folder = check_output(path)
  with explaining(folder):
    folder.mkdir(parents=True, exist_ok=True)
  return folder


def partial_folder(out: str | os.PathLike[str], token: int) -> pathlib.Path:
  """Names the folder beside `out` in which its content is prepared."""
  folder = pathlib.Path(out)
  return folder.with_name(f"{folder.name}{PARTIAL}-{token:08x}")


_REFUSALS = {
  errno.ENOSPC: "make room",
  errno.EDQUOT: "make room",
  errno.EFBIG: "make room",
  errno.EROFS: "mount it for writing",
  errno.EACCES: "allow writing there",
  errno.EPERM: "allow writing there",
}
_BLOCK = 4096
"""Bytes that the smallest file takes on a disk."""


@contextlib.contextmanager
def explaining(
  path: str | os.PathLike[str],
  place: str = "output",
  mend: str = "repeat the command, with --resume if it has that",
) -> Iterator[None]:
  """Says that `path` cannot be written: full, read-only, forbidden.

  Libraries that write files report a full disk in long texts of their own.

  Raises:
    OSError: In place of theirs, with the number of the system.
  """
  try:
    yield
  except Refusal:
    raise
  except Exception as error:
    number = error.errno if isinstance(error, OSError) else None
    # Orbax and tensorstore report a full disk by the system's text, without its number.
    if number is None and os.strerror(errno.ENOSPC) in str(error):
      number = errno.ENOSPC
    if number not in _REFUSALS:
      raise
    raise OSRefusal(
      f"{place}: {path}",
      expected="a place to write to",
      got=f"one that cannot take more ({os.strerror(number)})",
      mend=f"{_REFUSALS[number]}, then {mend}",
      errno=number,
    ) from error


def check_room(folder: pathlib.Path, arrays: Iterable[Any], files: int) -> None:
  """Checks that a disk has room for arrays, in so many files each.

  Raises:
    OSError: There is too little.
  """
  # Small arrays take a whole block each, and a model has hundreds of them.
  need = sum(array.nbytes + files * _BLOCK for array in arrays)
  if (free := shutil.disk_usage(folder).free) < need:
    raise OSRefusal(
      f"output: {folder}",
      expected=f"{need} bytes free",
      got=free,
      mend="make room, then repeat the command, with --resume if it has that",
      errno=errno.ENOSPC,
    )


@contextlib.contextmanager
def staged(
  out: str | os.PathLike[str], token: int | None = None
) -> Iterator[pathlib.Path]:
  """Yields a new folder that is renamed to `out` when the block ends without an error.

  `token` names the `partial_folder` shared by several processes; random if None.
  """
  final = check_output(out)
  # 31 bits, because processes tell each other the token as an int32.
  partial = partial_folder(out, secrets.randbits(31) if token is None else token)
  with explaining(final):
    final.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    try:
      yield partial
      # This replaces an empty folder; one with anything in it is refused by the system.
      os.replace(partial, final)
    finally:
      # The rename has moved the folder away unless something failed.
      shutil.rmtree(partial, ignore_errors=True)
    sync(final.parent)


def sync(path: str | os.PathLike[str]) -> None:
  """Flushes a file, or a folder's list of names, to disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def sync_tree(folder: pathlib.Path) -> None:
  """Flushes every file and folder below to disk, deepest first."""
  # What a folder names is on the disk before the folder that names it.
  for place in (*sorted(folder.rglob("*"), reverse=True), folder):
    sync(place)


def file_sha256(file: pathlib.Path) -> str:
  """Computes the SHA-256 of a file's content, hex."""
  with open(file, "rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def describe_file(file: pathlib.Path) -> dict[str, Any]:
  """Returns the size and SHA-256 of a file."""
  return {"bytes": file.stat().st_size, "sha256": file_sha256(file)}


def file_names(folder: pathlib.Path) -> list[str]:
  """Lists the relative paths of all that is no folder below a folder, sorted."""
  # A link to a folder is listed as itself, because nothing below it is.
  found = (one for one in folder.rglob("*") if one.is_symlink() or not one.is_dir())
  return sorted(one.relative_to(folder).as_posix() for one in found)


def list_files(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Lists size and SHA-256 of every file below a folder, by relative path."""
  return {name: describe_file(folder / name) for name in file_names(folder)}


def damaged_files(
  folder: pathlib.Path, entries: Mapping[str, Mapping[str, Any]], *, verify: bool = True
) -> list[str]:
  """Describes damaged files, one phrase each; without `verify` by sizes only.

  `entries` are those of `list_files`; `bytes` may be left out.
  """
  damage = []
  for name, entry in entries.items():
    file = folder / name
    if not file.is_file():
      damage.append(f"{name} is missing")
    # Sizes first: a cut file is told without reading it.
    elif (size := file.stat().st_size) != entry.get("bytes", size):
      damage.append(f"{name} has {size} bytes, not {entry['bytes']}")
    elif verify and file_sha256(file) != entry["sha256"]:
      damage.append(f"{name} has another SHA-256")
  return damage


def write_parts(path: pathlib.Path, parts: Iterable[bytes | memoryview]) -> str:
  """Writes or replaces a file atomically: after a crash it is whole or absent.

  Only one of the `parts` is in memory at a time. Processes that write one file at once
  do not meet before it is whole. Returns the content's SHA-256, hex.
  """
  partial = path.with_name(f"{path.name}{PARTIAL}-{secrets.token_hex(4)}")
  digest = hashlib.sha256()
  try:
    with open(partial, "wb") as file:
      for part in parts:
        digest.update(part)
        file.write(part)
      file.flush()
      # Before the rename, or a loss of power could leave the new name with old or no
      # content.
      os.fsync(file.fileno())
    os.replace(partial, path)
  except OSError:
    # A full disk needs the room.
    partial.unlink(missing_ok=True)
    raise
  # The rename itself is on the disk only after this.
  sync(path.parent)
  return digest.hexdigest()


def write_durably(path: pathlib.Path, data: bytes) -> str:
  """Writes one piece with `write_parts`."""
  return write_parts(path, [data])


def write_json(path: pathlib.Path, values: Any, *, indent: int = 2) -> None:
  """Writes human-readable JSON durably."""
  write_durably(path, (json.dumps(values, indent=indent) + "\n").encode())


def write_arrays(
  path: pathlib.Path,
  arrays: Mapping[str, Any],
  metadata: Mapping[str, str] | None = None,
) -> str:
  """Writes a safetensors file durably, one array on the host at a time.

  The safetensors library needs every array on the host at once, computes no checksum
  while writing, and reports a full disk without its error number. `metadata` goes into
  the header. Returns the SHA-256 of the file, hex.

  Raises:
    TypeError: The format has no name for a dtype.
  """
  # Wide dtypes first, so that every array starts at a multiple of its item size.
  names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
  header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
  offset = 0
  for name in names:
    dtype = str(arrays[name].dtype)
    if dtype not in _DTYPES:
      raise TypeRefusal(
        f"write_arrays: {path}",
        expected=f"arrays of {', '.join(_DTYPES)}",
        got=f"{name} of {dtype}",
        mend="convert it first",
      )
    end = offset + arrays[name].size * arrays[name].dtype.itemsize
    header[name] = {
      "dtype": _DTYPES[dtype],
      "shape": list(arrays[name].shape),
      "data_offsets": [offset, end],
    }
    offset = end
  text = json.dumps(header, separators=(",", ":")).encode()
  # So that the data begin at a multiple of 8, the widest item, behind the 8 bytes of
  # the length.
  text += b" " * (-len(text) % 8)

  def parts() -> Iterator[bytes | memoryview]:
    yield len(text).to_bytes(8, "little") + text
    for name in names:
      # View as bytes because numpy's buffers do not support bfloat16.
      array = np.ascontiguousarray(arrays[name]).reshape(-1)
      yield array.view(np.uint8).data

  return write_parts(path, parts())


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads a safetensors file; check its SHA-256 first."""
  from safetensors.numpy import load_file

  with refusing(path, "safetensors as written before"):
    return load_file(path)


def _checksum(arrays: Mapping[str, Any]) -> str:
  """Returns a CRC-32 of names, dtypes, shapes and bytes, hex."""
  value = 0
  for name in sorted(arrays):
    array = np.ascontiguousarray(arrays[name])
    # Names and shapes, too: a flipped bit in the header could give the same bytes to
    # another name or shape.
    value = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), value)
    value = zlib.crc32(array.reshape(-1).view(np.uint8).data, value)
  return f"{value:08x}"


def write_checked(path: pathlib.Path, arrays: Mapping[str, Any]) -> None:
  """Writes a safetensors file whose header holds a checksum of its arrays."""
  path.parent.mkdir(parents=True, exist_ok=True)
  write_arrays(path, arrays, {"crc32": _checksum(arrays)})


def read_checked(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads what `write_checked` wrote.

  Raises:
    ValueError: The file is damaged.
  """
  import safetensors

  with refusing(path, "arrays as written before", REMAKE):
    with safetensors.safe_open(path, framework="numpy") as file:
      # `safe_open` has `keys()` and cannot be iterated by itself.
      arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
      stated = (file.metadata() or {}).get("crc32")
    if (found := _checksum(arrays)) != stated:
      raise ValueRefusal(
        path, expected=f"the checksum {stated}", got=found, mend=REMAKE
      )
  return arrays
