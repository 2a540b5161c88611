"""Quantized checkpoints: arrays written by Orbax, described by `mxjax.json`.

Orbax alone restores typed leaves as plain dicts. The manifest therefore lists every
node of the params tree with its type and static fields, and every array with its shape,
dtype and SHA-256, so a checkpoint restores to the same tree, bit for bit, without the
model that made it.
"""

import dataclasses
import functools
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mxjax.devices import mesh as meshes
from mxjax.devices import processes
from mxjax.layers.linear import map_rows
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.storage.atomic_io import (
  list_files,
  partial_folder,
  staged,
  sync_tree,
  write_json,
)
from mxjax.storage.checkpoint_arrays import load_arrays, save_arrays
from mxjax.storage.checkpoint_manifest import (
  ARRAYS,
  FORMAT_VERSION,
  MANIFEST,
  TOKENIZER,
  check_contract,
  check_files,
  manifest_digest,
  read_manifest,
)
from mxjax.storage.tree_io import (
  changed_arrays,
  describe_arrays,
  pack,
  unpack,
  walk,
)

__all__ = [
  "ARRAYS",
  "FORMAT_VERSION",
  "MANIFEST",
  "TOKENIZER",
  "check_saved",
  "read_manifest",
  "restore_checkpoint",
  "save_checkpoint",
]


def _check_rules(params: Mapping[str, Any], contract: Contract) -> None:
  wrong = [
    f"{path} has {node.rules}"
    for path, node in walk(params)
    if isinstance(node, QuantizedLinear) and node.rules != contract.rules
  ]
  if wrong:
    raise ValueError(
      f"save_checkpoint: expected linears under the contract's {contract.rules}, got "
      f"{len(wrong)} others: {'; '.join(wrong[:3])}; pass the contract they were "
      "quantized under."
    )


def _write_files(
  folder: pathlib.Path,
  manifest: dict[str, Any],
  arrays: Mapping[str, jax.Array],
  tokenizer_files: Sequence[str | os.PathLike[str]],
) -> None:
  """Writes a checkpoint into an empty folder, the manifest last."""
  if tokenizer_files:
    (folder / TOKENIZER).mkdir()
  for source in tokenizer_files:
    shutil.copyfile(source, folder / TOKENIZER / pathlib.Path(source).name)
  save_arrays(folder, arrays)
  sync_tree(folder)
  manifest = {**manifest, "files": list_files(folder)}
  # Hash the values as read back from JSON, where tuples are lists.
  manifest = json.loads(json.dumps(manifest))
  manifest["digest"] = manifest_digest(manifest)
  write_json(folder / MANIFEST, manifest, indent=1)


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

  The files go to a folder beside `path` that is renamed once all of them are on disk,
  so a failed save leaves nothing behind. All processes must call this, each with all of
  every array; process 0 writes.

  Args:
    path: Output folder; must not exist, or be empty.
    params: Nested dict of arrays, `QuantizedLinear` and recovery leaves.
    model_config: JSON-ready dict, or an object whose `to_dict` gives one.
    contract: The contract that the params were quantized under.
    calibration: Fingerprint and shape of the calibration tokens.
    program: `Program.describe()` of the program that made the params.
    tokenizer_files: Files copied to `tokenizer/`.
    extra: Further JSON-ready values.

  Raises:
    FileExistsError: `path` is not empty.
    FileNotFoundError: A tokenizer file is absent.
    TypeError: A checkpoint cannot hold a leaf or a value.
    ValueError: A leaf was quantized under other rules than the contract's.
  """
  to_dict = getattr(model_config, "to_dict", None)
  _check_rules(params, contract)
  nodes, arrays = pack(params)
  token = processes.from_leader(secrets.randbits(31))
  if not processes.is_leader():
    save_arrays(partial_folder(path, token), arrays)
    return pathlib.Path(path)
  manifest: dict[str, Any] = {
    "format_version": FORMAT_VERSION,
    "contract": contract.to_dict(),
    "contract_hash": contract.hash,
    "model_config": dict(to_dict() if to_dict else model_config),
    "calibration": calibration and dict(calibration),
    "program": program and dict(program),
    "extra": extra and dict(extra),
    "nodes": nodes,
    "arrays": describe_arrays(arrays),
  }
  with staged(path, token) as folder:
    _write_files(folder, manifest, arrays, tokenizer_files or ())
  return pathlib.Path(path)


def check_saved(path: str | os.PathLike[str], params: Mapping[str, Any]) -> None:
  """Checks that a checkpoint is whole and holds exactly these params.

  Raises:
    ValueError: Files are damaged, or arrays or types differ; the message names them.
  """
  folder = pathlib.Path(path)
  manifest = read_manifest(folder)
  check_files(folder, manifest["files"], verify=True)
  nodes, arrays = pack(params)
  entries = manifest["arrays"]
  differing = sorted(arrays.keys() - entries.keys())
  differing += sorted(changed_arrays(entries, arrays))
  if nodes != manifest["nodes"]:
    differing.append("the types of nodes")
  if differing:
    raise ValueError(
      f"check_saved: {folder} is the checkpoint of another result, it differs in "
      f"{', '.join(differing[:5])}; move it away, or name another --out."
    )


@dataclasses.dataclass(frozen=True)
class _Placeholder:
  """A stand-in for an array that a manifest lists."""

  path: str
  shape: tuple[int, ...]
  dtype: str


def _shardings(
  manifest: Mapping[str, Any], mesh: Mesh
) -> dict[str, jax.sharding.Sharding]:
  """Computes each array's sharding by path, as `mesh.shard_rows` would put it."""
  placeholders = {
    path: _Placeholder(path, tuple(entry["shape"]), entry["dtype"])
    for path, entry in manifest["arrays"].items()
  }
  shardings: dict[str, jax.sharding.Sharding] = {}

  def place(spec: P, array: _Placeholder) -> None:
    shardings[array.path] = NamedSharding(mesh, spec)

  whole = functools.partial(place, P())
  by_row = functools.partial(place, P(meshes.MODEL))
  rows = lambda weight: map_rows(by_row, whole, weight)
  meshes.map_weights(unpack(manifest["nodes"], placeholders), mesh, rows, whole)
  return shardings


def _check_arrays(
  folder: pathlib.Path, entries: Mapping[str, Any], arrays: Mapping[str, jax.Array]
) -> None:
  # No process holds all of an array spread over processes; its files were checked.
  local = {path: e for path, e in entries.items() if arrays[path].is_fully_addressable}
  if damaged := changed_arrays(local, arrays):
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
  mesh: Mesh | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads params back, bit for bit, with their types.

  Args:
    path: A folder written by `save_checkpoint`.
    contract: The caller's contract, which must equal the checkpoint's.
    verify: Whether to check every file's and array's SHA-256, not only file sizes.
    sharding: Where all arrays go; the first device when None.
    mesh: Devices over whose `model` axis the weights are sharded by output rows, in
      place of `sharding`; it need not match the mesh of the save. Each process reads
      its part of the arrays, one array at a time.

  Returns:
    The params, and the model config as a JSON dict.

  Raises:
    FileNotFoundError: The manifest or the arrays are absent.
    ValueError: Another contract or format version, or damage; the message names it.
  """
  folder = pathlib.Path(path)
  manifest = read_manifest(folder)
  check_contract(folder, manifest, contract)
  entries, mesh = manifest["arrays"], meshes.normalize(mesh)
  if mesh is not None:
    shardings = _shardings(manifest, mesh)
  else:
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = dict.fromkeys(entries, sharding)
  check_files(folder, manifest["files"], verify=verify)
  arrays = load_arrays(folder, entries, shardings)
  if verify:
    _check_arrays(folder, entries, arrays)
  return unpack(manifest["nodes"], arrays), manifest["model_config"]
