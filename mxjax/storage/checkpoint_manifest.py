"""The manifest `mxjax.json`: a checkpoint's content, contract and checksums."""

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from mxjax.numerics.contract import Contract
from mxjax.storage.atomic_io import damaged_files

FORMAT_VERSION = 1
MANIFEST = "mxjax.json"
ARRAYS = "arrays"
TOKENIZER = "tokenizer"

_KEYS = (
  "contract",
  "contract_hash",
  "model_config",
  "nodes",
  "arrays",
  "files",
  "digest",
)


def manifest_digest(manifest: Mapping[str, Any]) -> str:
  """Computes the SHA-256 of a manifest's canonical JSON without its own digest."""
  content = {key: value for key, value in manifest.items() if key != "digest"}
  text = json.dumps(content, sort_keys=True, separators=(",", ":"))
  return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads and checks `mxjax.json` of a checkpoint folder; reads no array.

  Returns:
    The manifest: `format_version`, `contract`, `contract_hash`, `model_config`,
    `calibration`, `program`, `extra`, `nodes`, `arrays`, `files`, `digest`.

  Raises:
    FileNotFoundError: There is no manifest.
    ValueError: It is damaged or of another format version.
  """
  file = pathlib.Path(path) / MANIFEST
  if not file.is_file():
    raise FileNotFoundError(
      f"read_manifest: expected {file}, got no such file; name a folder written by "
      "save_checkpoint."
    )
  damaged = f"read_manifest: expected the manifest of a checkpoint in {file}, got "
  mend = "; copy the checkpoint again, or quantize anew."
  try:
    manifest = json.loads(file.read_bytes())
  except ValueError as error:
    raise ValueError(f"{damaged}damaged JSON ({error}){mend}") from error
  if not isinstance(manifest, dict):
    raise ValueError(f"{damaged}a JSON {type(manifest).__name__}{mend}")
  version = manifest.get("format_version")
  if version != FORMAT_VERSION:
    raise ValueError(
      f"read_manifest: expected format version {FORMAT_VERSION} in {file}, got "
      f"{version!r}; use the mxjax version that wrote it."
    )
  if missing := [key for key in _KEYS if key not in manifest]:
    raise ValueError(f"{damaged}none of {', '.join(missing)}{mend}")
  if manifest_digest(manifest) != manifest["digest"]:
    raise ValueError(f"{damaged}content that does not match its digest{mend}")
  return manifest


def _by_dotted_name(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  result: dict[str, Any] = {}
  for key, value in values.items():
    if isinstance(value, Mapping):
      result |= _by_dotted_name(value, f"{prefix}{key}.")
    else:
      result[prefix + key] = value
  return result


def check_contract(
  place: pathlib.Path, manifest: Mapping[str, Any], contract: Contract
) -> None:
  """Rejects a checkpoint of another contract.

  Raises:
    ValueError: The contracts differ; the message lists every differing field.
  """
  if manifest["contract_hash"] == contract.hash:
    return
  ours = _by_dotted_name(json.loads(json.dumps(contract.to_dict())))
  theirs = _by_dotted_name(manifest["contract"])
  differing = [
    f"{key} is {theirs.get(key)!r}, expected {ours.get(key)!r}"
    for key in sorted(ours | theirs)
    if ours.get(key) != theirs.get(key)
  ]
  raise ValueError(
    f"restore_checkpoint: {place} was quantized under contract "
    f"{manifest['contract_hash']}, expected {contract.hash}: {'; '.join(differing)}; "
    "its results are not comparable, so pass its own contract to use it, "
    "contract=Contract.from_dict(read_manifest(path)['contract'])."
  )


def check_files(
  folder: pathlib.Path, entries: Mapping[str, Any], *, verify: bool
) -> None:
  """Checks that every file exists with its size and, with `verify`, its content.

  Raises:
    FileNotFoundError: There is no folder of arrays.
    ValueError: Files are damaged; the message lists all of them.
  """
  if not (folder / ARRAYS).is_dir():
    raise FileNotFoundError(
      f"restore_checkpoint: expected the arrays in {folder / ARRAYS}, got no such "
      "folder; copy the whole checkpoint, not mxjax.json alone."
    )
  if damage := damaged_files(folder, entries, verify=verify):
    raise ValueError(
      f"restore_checkpoint: expected in {folder} the {len(entries)} files that "
      f"{MANIFEST} lists, got damage: {'; '.join(damage)}; copy the checkpoint again, "
      "or quantize anew."
    )
