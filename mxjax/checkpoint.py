"""Quantized checkpoints: arrays by Orbax, and `mxjax.json`, which says what they are.

Orbax alone gives typed leaves back as plain dicts. The manifest therefore lists every
node of the params tree with its type and static fields, and every array with its
shape, dtype and SHA-256, so that a checkpoint restores to the same tree, bit for bit,
without the model that made it.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import input_maps, mxfp4, quantized_linear
from mxjax.contract import PAPER_CONTRACT, Contract
from mxjax.mlp_recovery import MlpRecovery
from mxjax.quantized_linear import QuantizedLinear
from mxjax.run_folder import check_output, write_durably
from mxjax.value_recovery import ValueRecovery

FORMAT_VERSION = 1
MANIFEST = "mxjax.json"
ARRAYS = "arrays"
TOKENIZER = "tokenizer"

_MAPS = tuple(
  value
  for value in vars(input_maps).values()
  if isinstance(value, type) and dataclasses.is_dataclass(value)
)
_TYPES: dict[str, type] = {
  cls.__name__: cls
  for cls in (
    QuantizedLinear,
    mxfp4.MXTensor,
    quantized_linear.Nearest,
    quantized_linear.OneCode,
    quantized_linear.Clipped,
    quantized_linear.Unrounded,
    ValueRecovery,
    MlpRecovery,
    *_MAPS,
  )
}
"""Every typed node a checkpoint may hold, by the name the manifest gives it."""

_KEYS = (
  "contract",
  "contract_hash",
  "model_config",
  "nodes",
  "arrays",
  "files",
  "digest",
)


def _nodes(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
  """Every non-mapping node of nested dicts, and every empty dict, by path."""
  if not isinstance(tree, Mapping) or (path and not tree):
    yield path, tree
    return
  for key, value in tree.items():
    if not isinstance(key, str) or not key or "/" in key:
      raise TypeError(
        f"save_checkpoint: keys of params must be names without a slash, got {key!r} "
        f"under {path or 'the root'}; rename it."
      )
    yield from _nodes(value, f"{path}/{key}" if path else key)


def _fields(cls: type) -> tuple[list[str], list[str]]:
  """Names of the array fields and of the static fields of a typed node."""
  fields = dataclasses.fields(cls)
  static = [field.name for field in fields if field.metadata.get("static")]
  return [field.name for field in fields if field.name not in static], static


def _describe(node: Any, path: str, arrays: dict[str, Any]) -> dict[str, Any]:
  """The manifest entry of a node; its arrays are added to `arrays` by path."""
  if node is None:
    return {"type": "none"}
  if isinstance(node, Mapping):  # `_nodes` stops only at empty ones.
    return {"type": "dict"}
  if isinstance(node, (jax.Array, np.ndarray)):
    array = jnp.asarray(node)
    if array.dtype != node.dtype:
      raise TypeError(
        f"save_checkpoint: {path} is {node.dtype}, which JAX holds only in 64-bit "
        f"mode; convert it to {array.dtype} first."
      )
    arrays[path] = array
    return {"type": "array"}
  name = type(node).__name__
  if _TYPES.get(name) is not type(node):
    raise TypeError(
      f"save_checkpoint: {path} is a {name}, expected an array or one of "
      f"{', '.join(sorted(_TYPES))}; convert it to one of these."
    )
  children, static = _fields(type(node))
  values = {field: getattr(node, field) for field in static}
  return {
    "type": name,
    "static": {
      key: dataclasses.asdict(value) if isinstance(value, mxfp4.Rules) else value
      for key, value in values.items()
    },
    "children": {
      field: _describe(getattr(node, field), f"{path}/{field}", arrays)
      for field in children
    },
  }


def _rebuild(entry: dict[str, Any], path: str, arrays: Mapping[str, Any]) -> Any:
  """The inverse of `_describe`."""
  kind = entry["type"]
  if kind == "none":
    return None
  if kind == "dict":
    return {}
  if kind == "array":
    return arrays[path]
  if kind not in _TYPES:
    raise ValueError(
      f"restore_checkpoint: {path} has the type {kind!r}, expected one of "
      f"{', '.join(sorted(_TYPES))}; use the mxjax version that wrote it."
    )
  static = dict(entry["static"])
  if "rules" in static:
    static["rules"] = mxfp4.Rules(**static["rules"])
  children = {
    field: _rebuild(child, f"{path}/{field}", arrays)
    for field, child in entry["children"].items()
  }
  return _TYPES[kind](**children, **static)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Slash-separated paths to nested dicts."""
  result: dict[str, Any] = {}
  for path, value in flat.items():
    *parents, name = path.split("/")
    level = result
    for parent in parents:
      level = level.setdefault(parent, {})
    level[name] = value
  return result


def _at(tree: Any, path: str) -> Any:
  for key in path.split("/"):
    tree = tree[key]
  return tree


def _sha256(array: Any) -> str:
  return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _digest(manifest: Mapping[str, Any]) -> str:
  """SHA-256 of the canonical JSON of a manifest without its own digest."""
  content = {key: value for key, value in manifest.items() if key != "digest"}
  text = json.dumps(content, sort_keys=True, separators=(",", ":"))
  return hashlib.sha256(text.encode()).hexdigest()


def _check_rules(params: Mapping[str, Any], contract: Contract) -> None:
  wrong = [
    f"{path} has {node.rules}"
    for path, node in _nodes(params)
    if isinstance(node, QuantizedLinear) and node.rules != contract.rules
  ]
  if wrong:
    raise ValueError(
      f"save_checkpoint: expected linears under the contract's {contract.rules}, got "
      f"{len(wrong)} others: {'; '.join(wrong[:3])}; pass the contract they were "
      "quantized under."
    )


def _sync(folder: pathlib.Path) -> None:
  """Flushes every file and folder below to disk, deepest first."""
  for root, _, names in os.walk(folder, topdown=False):
    for place in (*(os.path.join(root, name) for name in names), root):
      _sync_one(place)


def _sync_one(path: str | os.PathLike[str]) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _files(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Size and SHA-256 of every file of a checkpoint, by relative path."""
  return {
    file.relative_to(folder).as_posix(): {
      "bytes": file.stat().st_size,
      "sha256": _file_sha256(file),
    }
    for file in sorted(folder.rglob("*"))
    if file.is_file()
  }


def _file_sha256(file: pathlib.Path) -> str:
  with open(file, "rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(
  folder: pathlib.Path,
  manifest: dict[str, Any],
  arrays: Mapping[str, jax.Array],
  tokenizer_files: Sequence[str | os.PathLike[str]],
) -> None:
  """Writes a checkpoint into a fresh folder, the manifest last."""
  from orbax.checkpoint import v1 as ocp

  folder.mkdir()
  if tokenizer_files:
    (folder / TOKENIZER).mkdir()
  for source in tokenizer_files:
    shutil.copyfile(source, folder / TOKENIZER / pathlib.Path(source).name)
  ocp.save(str(folder.absolute() / ARRAYS), _nested(arrays))
  _sync(folder)
  manifest = {**manifest, "files": _files(folder)}
  # What the file will say, so that tuples hash as the lists they become.
  manifest = json.loads(json.dumps(manifest))
  manifest["digest"] = _digest(manifest)
  text = json.dumps(manifest, indent=1) + "\n"
  write_durably(folder / MANIFEST, text.encode())


def save_checkpoint(
  path: str | os.PathLike[str],
  params: Mapping[str, Any],
  model_config: Any,
  *,
  contract: Contract = PAPER_CONTRACT,
  calibration: Mapping[str, Any] | None = None,
  program: Mapping[str, Any] | None = None,
  tokenizer_files: Sequence[str | os.PathLike[str]] | None = None,
  extra: Mapping[str, Any] | None = None,
) -> pathlib.Path:
  """Writes quantized params and everything needed to read them back.

  The work happens in a folder beside `path` that takes its name only when every file
  is on disk, so a save that fails leaves nothing behind. One process must hold all of
  every array.

  Args:
    path: Output folder; must not exist, or be empty.
    params: Nested dict of arrays, `QuantizedLinear` and recovery leaves.
    model_config: JSON-ready dict, or an object whose `to_dict` gives one.
    contract: What the params were quantized under.
    calibration: Fingerprint and shape of the calibration tokens.
    program: `Program.describe()` of what made the params.
    tokenizer_files: Files copied to `tokenizer/`.
    extra: Anything else worth keeping, JSON-ready.

  Returns:
    The folder.

  Raises:
    FileExistsError: `path` has something in it.
    FileNotFoundError: A tokenizer file is absent.
    TypeError: A leaf or a value that a checkpoint cannot hold.
    ValueError: A leaf was quantized under other rules than the contract's.
  """
  to_dict = getattr(model_config, "to_dict", None)
  _check_rules(params, contract)
  arrays: dict[str, jax.Array] = {}
  nodes = {name: _describe(node, name, arrays) for name, node in _nodes(params)}
  manifest: dict[str, Any] = {
    "format_version": FORMAT_VERSION,
    "contract": contract.to_dict(),
    "contract_hash": contract.hash,
    "model_config": dict(to_dict() if to_dict else model_config),
    "calibration": calibration and dict(calibration),
    "program": program and dict(program),
    "extra": extra and dict(extra),
    "nodes": nodes,
    "arrays": {
      name: {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "sha256": _sha256(array),
      }
      for name, array in arrays.items()
    },
  }
  folder = check_output(path)
  folder.parent.mkdir(parents=True, exist_ok=True)
  partial = folder.with_name(f"{folder.name}.partial-{secrets.token_hex(4)}")
  try:
    _write(partial, manifest, arrays, tokenizer_files or ())
    os.replace(partial, folder)
  finally:
    # Gone already unless something failed.
    shutil.rmtree(partial, ignore_errors=True)
  _sync_one(folder.parent)
  return folder


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads and checks `mxjax.json`; no array is touched.

  Args:
    path: The checkpoint folder.

  Returns:
    The manifest: `format_version`, `contract`, `contract_hash`, `model_config`,
    `calibration`, `program`, `extra`, `nodes`, `arrays`, `files`, `digest`.

  Raises:
    FileNotFoundError: No manifest there.
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
  if _digest(manifest) != manifest["digest"]:
    raise ValueError(f"{damaged}content that does not match its digest{mend}")
  return manifest


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  result: dict[str, Any] = {}
  for key, value in values.items():
    if isinstance(value, Mapping):
      result |= _flat(value, f"{prefix}{key}.")
    else:
      result[prefix + key] = value
  return result


def _check_contract(
  place: pathlib.Path, manifest: Mapping[str, Any], contract: Contract
) -> None:
  if manifest["contract_hash"] == contract.hash:
    return
  ours = _flat(json.loads(json.dumps(contract.to_dict())))
  theirs = _flat(manifest["contract"])
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


def _check_files(
  folder: pathlib.Path, entries: Mapping[str, Any], *, verify: bool
) -> None:
  """Names every file that is absent, of another size or (verified) content."""
  if not (folder / ARRAYS).is_dir():
    raise FileNotFoundError(
      f"restore_checkpoint: expected the arrays in {folder / ARRAYS}, got no such "
      "folder; copy the whole checkpoint, not mxjax.json alone."
    )
  wrong = []
  for name, entry in entries.items():
    file = folder / name
    if not file.is_file():
      wrong.append(f"{name} is missing")
    elif (size := file.stat().st_size) != entry["bytes"]:
      wrong.append(f"{name} has {size} bytes, not {entry['bytes']}")
    elif verify and _file_sha256(file) != entry["sha256"]:
      wrong.append(f"{name} has another SHA-256")
  if wrong:
    raise ValueError(
      f"restore_checkpoint: expected in {folder} the {len(entries)} files that "
      f"{MANIFEST} lists, got damage: {'; '.join(wrong)}; copy the checkpoint again, "
      "or quantize anew."
    )


def _load_arrays(
  folder: pathlib.Path, entries: Mapping[str, Any], sharding: jax.sharding.Sharding
) -> dict[str, jax.Array]:
  """The arrays by path, placed by `sharding`."""
  from orbax.checkpoint import v1 as ocp

  abstract = {
    path: jax.ShapeDtypeStruct(
      tuple(entry["shape"]), jnp.dtype(entry["dtype"]), sharding=sharding
    )
    for path, entry in entries.items()
  }
  try:
    tree = ocp.load(str(folder.absolute() / ARRAYS), _nested(abstract))
  except (KeyError, OSError, TypeError, ValueError) as error:
    first = str(error).strip().splitlines()[:1]
    raise ValueError(
      f"restore_checkpoint: the arrays in {folder / ARRAYS} are not the "
      f"{len(entries)} that {MANIFEST} lists, or are damaged: {''.join(first)[:300]}; "
      "copy the checkpoint again, or quantize anew."
    ) from error
  return {path: _at(tree, path) for path in entries}


def _verify(
  folder: pathlib.Path, entries: Mapping[str, Any], arrays: Mapping[str, jax.Array]
) -> None:
  damaged = [
    path for path, entry in entries.items() if _sha256(arrays[path]) != entry["sha256"]
  ]
  if damaged:
    raise ValueError(
      f"restore_checkpoint: {len(damaged)} of {len(entries)} arrays in {folder} do "
      f"not have the SHA-256 that {MANIFEST} states: {', '.join(damaged)}; copy the "
      "checkpoint again, or quantize anew."
    )


def restore_checkpoint(
  path: str | os.PathLike[str],
  *,
  contract: Contract = PAPER_CONTRACT,
  verify: bool = True,
  sharding: jax.sharding.Sharding | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads params back, bit for bit, with their types.

  Args:
    path: A folder written by `save_checkpoint`.
    contract: What the caller works under; the checkpoint's must be the same.
    verify: Whether to check the SHA-256 of every file and every array; without it
      only the sizes of the files are checked.
    sharding: Where the arrays go; the first device when None.

  Returns:
    The params, and the model config as a JSON dict.

  Raises:
    FileNotFoundError: The manifest or the arrays are absent.
    ValueError: Another contract or format version, or damage; the message names it.
  """
  folder = pathlib.Path(path)
  manifest = read_manifest(folder)
  _check_contract(folder, manifest, contract)
  sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  entries = manifest["arrays"]
  _check_files(folder, manifest["files"], verify=verify)
  arrays = _load_arrays(folder, entries, sharding)
  if verify:
    _verify(folder, entries, arrays)
  params = _nested(
    {name: _rebuild(node, name, arrays) for name, node in manifest["nodes"].items()}
  )
  return params, manifest["model_config"]
