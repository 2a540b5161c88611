"""JSON files that hold their own digest, and the files that they list."""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import pydantic

from mxjax.errors import ValueRefusal
from mxjax.intake.reading import JSON_BYTES, read_json, refusing
from mxjax.storage import atomic_io

OUTPUTS = "mxjax_files.json"
"""Lists what a finished command wrote beside and above its checkpoint and its run."""
LISTED = (
  *("result.json", "result.csv", "report.html"),
  *("checkpoint/mxjax.json", "run/state.json"),
)
"""The files of an output folder that nothing else in it has a digest of."""


def _inside(name: str) -> str:
  parts = name.split("/")
  # 255 bytes are the longest name of a file on the usual systems: a longer one would
  # raise where it is looked for.
  is_odd = {"", ".", ".."} & {*parts} or max(map(len, name.encode().split(b"/"))) > 255
  if is_odd or "\\" in name or "\0" in name:
    raise ValueError("Name should be of a file inside the folder")
  return name


FileName = Annotated[str, pydantic.AfterValidator(_inside)]
Digest = Annotated[str, pydantic.StringConstraints(pattern="^[0-9a-f]{64}$")]


class Entry(pydantic.BaseModel):
  """Size and SHA-256 of a file."""

  bytes: Annotated[int, pydantic.Field(ge=0)]
  sha256: Digest


Files = dict[FileName, Entry]


class DigestedFile(pydantic.BaseModel):
  """What every file with its own digest has."""

  digest: Digest
  files: Files


T = TypeVar("T", bound=pydantic.BaseModel)


def canonical(values: Any) -> str:
  """Returns the one JSON text of values that digests are of."""
  return json.dumps(values, sort_keys=True, separators=(",", ":"))


def digest(values: Mapping[str, Any]) -> str:
  """Computes the SHA-256 of values' canonical JSON without their own digest."""
  content = {key: value for key, value in values.items() if key != "digest"}
  return hashlib.sha256(canonical(content).encode()).hexdigest()


def write(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Writes JSON with its digest, durably."""
  # Digest the values as read back from JSON, where tuples are lists.
  read = json.loads(json.dumps(values))
  atomic_io.write_json(path, {**read, "digest": digest(read)}, indent=1)


def write_texts(path: pathlib.Path, texts: Mapping[str, str]) -> None:
  """Writes what `write` does, of values whose `canonical` texts are at hand."""
  # Put together as `canonical` would write it: sorted keys and no spaces. So a reader
  # finds the same digest.
  content = ",".join(f"{canonical(key)}:{texts[key]}" for key in sorted(texts))
  own = hashlib.sha256(f"{{{content}}}".encode()).hexdigest()
  atomic_io.write_durably(path, f'{{"digest":"{own}",{content}}}\n'.encode())


def read(
  path: pathlib.Path,
  expected: str,
  mend: str,
  *,
  kind: type[T] = DigestedFile,
  version: tuple[str, int] | None = None,
  limit: int = JSON_BYTES,
) -> dict[str, Any]:
  """Reads a JSON file of the structure `kind`, and compares its digest.

  `version` is a field and the value that it must have. The file has at most
  `limit` bytes.

  Raises:
    FileNotFoundError: There is none.
    ValueError: It is damaged or of another version.
  """
  values = read_json(path, dict[str, Any], expected, mend=mend, limit=limit)
  # Before the structure, which another version has otherwise: the message should name
  # the version.
  if version and values.get(version[0]) != version[1]:
    raise ValueRefusal(
      path,
      expected=f"format version {version[1]}",
      got=repr(values.get(version[0])),
      mend="use the mxjax version that wrote it",
    )
  with refusing(path, expected, mend):
    kind.model_validate(values, strict=True)
  if digest(values) != values["digest"]:
    raise ValueRefusal(
      path, expected=expected, got="content that does not match its digest", mend=mend
    )
  return values


def write_outputs(folder: pathlib.Path) -> None:
  """Lists the files of a finished output folder, in `OUTPUTS`."""
  files = {
    name: entry
    for name in LISTED
    if (folder / name).is_file()
    for entry in [atomic_io.describe_file(folder / name)]
  }
  write(folder / OUTPUTS, {"version": 1, "files": files})


def output_faults(folder: pathlib.Path, others: Iterable[str]) -> list[str]:
  """Compares an output folder with its list and the names that `others` vouch for.

  Returns a phrase for each file that is missing, changed, or that nothing lists.
  """
  mend = "if its run was cut short, go on with --resume"
  try:
    values = read(folder / OUTPUTS, "the list of a finished output folder", mend)
  except (OSError, ValueError) as error:
    return [str(error).rstrip(".")]
  # What nothing lists is a fault, too: a result could have been put beside the others.
  known = {OUTPUTS, *values["files"], *others}
  faults = atomic_io.damaged_files(folder, values["files"])
  found = atomic_io.file_names(folder)
  return faults + [
    f"{name} is in no list of {folder}" for name in found if name not in known
  ]
