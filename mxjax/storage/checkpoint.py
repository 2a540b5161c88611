"""Quantized checkpoints: arrays written by Orbax, described by `mxjax.json`.

Orbax alone restores typed leaves as plain dicts. The manifest lists every node of the
params tree with its type and static fields, and every array with its shape, dtype and
SHA-256, so a checkpoint restores bit for bit without the model that made it.
"""

import functools
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import pydantic
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mxjax.devices import mesh as meshes
from mxjax.devices import processes
from mxjax.errors import FileNotFoundRefusal, ValueRefusal
from mxjax.intake.reading import refusing
from mxjax.layers import inference_packing
from mxjax.layers.inference_packing import Products
from mxjax.layers.linear import map_rows
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.storage import atomic_io, digested_json, tree_io
from mxjax.storage.checkpoint_arrays import load_arrays, save_arrays

FORMAT_VERSION = 2
MANIFEST = "mxjax.json"
ARRAYS = "arrays"
TOKENIZER = "tokenizer"
CHECKPOINT = "checkpoint"
"""The checkpoint in the output folder of the command line."""
MEND = "copy the checkpoint again, or quantize anew"


class _Array(pydantic.BaseModel):
  shape: list[Annotated[int, pydantic.Field(ge=0, lt=2**40)]]
  dtype: str
  sha256: digested_json.Digest


class _Manifest(digested_json.DigestedFile):
  contract: dict[str, Any]
  contract_hash: str
  model_config_: dict[str, Any] = pydantic.Field(alias="model_config")
  nodes: tree_io.Nodes
  arrays: dict[str, _Array]


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
    raise FileNotFoundRefusal(
      "checkpoint",
      expected=f"{file}",
      got="no such file",
      mend="name a folder written by `mxjax quantize` or save_checkpoint",
    )
  version = "format_version", FORMAT_VERSION
  what = "the manifest of a checkpoint"
  return digested_json.read(file, what, MEND, kind=_Manifest, version=version)


def read_contract(path: str | os.PathLike[str]) -> Contract:
  """Reads the contract of a checkpoint folder; reads no array.

  Raises:
    FileNotFoundError: There is no manifest.
    ValueError: The manifest is damaged, or its contract is none that is known.
  """
  folder = pathlib.Path(path)
  values = read_manifest(folder)["contract"]
  with refusing(folder / MANIFEST, "the contract of a checkpoint", MEND):
    return Contract.from_dict(values)


def _by_dotted_name(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  result: dict[str, Any] = {}
  for key, value in values.items():
    if isinstance(value, Mapping):
      result |= _by_dotted_name(value, f"{prefix}{key}.")
    else:
      result[prefix + key] = value
  return result


def _check_contract(
  place: pathlib.Path, manifest: Mapping[str, Any], contract: Contract
) -> None:
  if manifest["contract_hash"] == contract.hash:
    return
  # `Contract.to_dict` leaves it out where inputs are rounded.
  usual = {"activations": PAPER_CONTRACT.activations}
  ours = usual | _by_dotted_name(json.loads(json.dumps(contract.to_dict())))
  theirs = usual | _by_dotted_name(manifest["contract"])
  differing = [
    f"{key} is {theirs.get(key)!r}, expected {ours.get(key)!r}"
    for key in sorted(ours | theirs)
    if ours.get(key) != theirs.get(key)
  ]
  raise ValueRefusal(
    f"restore_checkpoint: {place}",
    expected=f"a model quantized under contract {contract.hash}",
    got=f"one under {manifest['contract_hash']}: {'; '.join(differing)}",
    mend="its results are not comparable, so pass its own contract to use it, "
    "contract=mxjax.storage.checkpoint.read_contract(path)",
  )


def _check_files(
  folder: pathlib.Path, entries: Mapping[str, Any], *, verify: bool
) -> None:
  if not (folder / ARRAYS).is_dir():
    raise FileNotFoundRefusal(
      "restore_checkpoint",
      expected=f"the arrays in {folder / ARRAYS}",
      got="no such folder",
      mend="copy the whole checkpoint, not mxjax.json alone",
    )
  if damage := atomic_io.damaged_files(folder, entries, verify=verify):
    raise ValueRefusal(
      f"restore_checkpoint: {folder}",
      expected=f"the {len(entries)} files that {MANIFEST} lists",
      got=f"damage: {'; '.join(damage)}",
      mend=MEND,
    )


def _check_rules(place: str, params: Mapping[str, Any], contract: Contract) -> None:
  # In the words of `Contract.activations`.
  form = {True: "mxfp4", False: "float"}
  wrong = [
    f"{path} has {node.rules} and activations={form[node.rounding.is_legal]}"
    for path, node in tree_io.walk(params)
    if isinstance(node, QuantizedLinear)
    and (node.rules, form[node.rounding.is_legal])
    != (contract.rules, contract.activations)
  ]
  if wrong:
    raise ValueRefusal(
      place,
      expected=f"linears under the contract's {contract.rules} and "
      f"activations={contract.activations}",
      got=f"{len(wrong)} others: {'; '.join(wrong[:3])}",
      mend="pass the contract they were quantized under, contract=mxjax.Contract(...)",
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
  save_arrays(folder / ARRAYS, arrays)
  atomic_io.sync_tree(folder)
  # Last, because it has the digest of every other file.
  manifest = {**manifest, "files": atomic_io.list_files(folder)}
  digested_json.write(folder / MANIFEST, manifest)


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
    ValueError: A leaf was quantized under other rules than the contract's, or rounds
      inputs where the contract does not, or the reverse.
  """
  to_dict = getattr(model_config, "to_dict", None)
  _check_rules("save_checkpoint", params, contract)
  nodes, arrays = tree_io.pack(params)
  # All processes must name the same partial folder.
  token = processes.from_leader(secrets.randbits(31))
  # Orbax meets all processes in this call, though process 0 alone writes.
  if not processes.is_leader():
    save_arrays(atomic_io.partial_folder(path, token) / ARRAYS, arrays)
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
    "arrays": tree_io.describe_arrays(arrays),
  }
  with atomic_io.staged(path, token) as folder:
    # Orbax reports a full disk at length, and goes on writing for a while.
    atomic_io.check_room(folder.parent, arrays.values(), files=2)
    _write_files(folder, manifest, arrays, tokenizer_files or ())
  return pathlib.Path(path)


def check_saved(path: str | os.PathLike[str], params: Mapping[str, Any]) -> None:
  """Checks that a checkpoint is whole and holds exactly these params.

  Raises:
    ValueError: Files are damaged, or arrays or types differ; the message names them.
  """
  folder = pathlib.Path(path)
  manifest = read_manifest(folder)
  _check_files(folder, manifest["files"], verify=True)
  nodes, arrays = tree_io.pack(params)
  entries = manifest["arrays"]
  differing = sorted(arrays.keys() - entries.keys())
  differing += sorted(tree_io.changed_arrays(entries, arrays))
  if nodes != manifest["nodes"]:
    differing.append("the types of nodes")
  if differing:
    raise ValueRefusal(
      f"check_saved: {folder}",
      expected="the checkpoint of this result",
      got=f"another, which differs in {', '.join(differing[:5])}",
      mend="move it away, or name another --out",
    )


def _abstract_arrays(
  manifest: Mapping[str, Any],
  sharding: jax.sharding.Sharding | None,
  mesh: Mesh | None,
) -> dict[str, jax.ShapeDtypeStruct]:
  """Describes arrays by path, on a mesh placed as `Placement.shard_rows` would."""
  arrays = {
    path: jax.ShapeDtypeStruct(
      tuple(entry["shape"]), jnp.dtype(entry["dtype"]), sharding=sharding
    )
    for path, entry in manifest["arrays"].items()
  }
  if mesh is None:
    return arrays
  place = lambda spec: lambda one: one.update(sharding=NamedSharding(mesh, spec))
  whole = place(P())
  # The rules of `Placement.shard_rows`, applied to descriptions: so no process reads
  # rows that it will not hold.
  rows = functools.partial(map_rows, place(P(meshes.MODEL)), whole)
  tree = tree_io.unpack(manifest["nodes"], arrays)
  return tree_io.leaves_by_path(meshes.map_weights(tree, mesh, rows, whole))


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
    sharding: Where all arrays go; if None, to the first device, uncommitted: a jitted
      function may place them beside its other arguments.
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
  # Before any array is read or hashed, which takes long.
  _check_contract(folder, manifest, contract)
  _check_files(folder, manifest["files"], verify=verify)
  with refusing(folder / MANIFEST, "nodes and arrays of a checkpoint", MEND):
    abstract = _abstract_arrays(manifest, sharding, meshes.normalize(mesh))
  arrays = load_arrays(folder / ARRAYS, abstract)
  if verify:
    # No process holds all of an array spread over processes; its files were checked.
    entries = {
      path: entry
      for path, entry in manifest["arrays"].items()
      if arrays[path].is_fully_addressable
    }
    if damaged := tree_io.changed_arrays(entries, arrays):
      raise ValueRefusal(
        f"restore_checkpoint: {folder}",
        expected=f"arrays with the shape and SHA-256 that {MANIFEST} states",
        got=f"others in {len(damaged)} of {len(arrays)}: {', '.join(damaged)}",
        mend=MEND,
      )
  with refusing(folder / MANIFEST, "nodes and arrays of a checkpoint", MEND):
    params = tree_io.unpack(manifest["nodes"], arrays)
  _check_rules("restore_checkpoint", params, contract)
  return params, manifest["model_config"]


def load(
  path: str | os.PathLike[str],
  *,
  contract: Contract = PAPER_CONTRACT,
  verify: bool = True,
  sharding: jax.sharding.Sharding | None = None,
  mesh: Mesh | None = None,
  products: Products | None = "fastest",
) -> tuple[Any, dict[str, Any]]:
  """Loads a quantized model, ready for `model.apply({"params": params}, tokens)`.

  `path` is a folder written by `save_checkpoint`, or the output folder of the command
  `mxjax quantize`. `products` is the dtype in which a GPU multiplies many rows, see
  `inference_packing.with_products`: by default the fastest, but as stored on a mesh or
  with a sharding. The other arguments and errors are those of `restore_checkpoint`.

  Raises:
    ValueError: The config is not that of a model of `mxjax.models` either.
  """
  from mxjax.models import CausalLM, ModelConfig

  # The command writes the checkpoint beside its run and its report.
  inside = pathlib.Path(path) / CHECKPOINT
  folder = inside if inside.is_dir() else pathlib.Path(path)
  params, config = restore_checkpoint(
    folder, contract=contract, verify=verify, sharding=sharding, mesh=mesh
  )
  if products != "fastest" or (mesh is None and sharding is None):
    params = dict(inference_packing.with_products(params, products))
  try:
    return CausalLM(ModelConfig.from_dict(config)), params
  except (TypeError, ValueError) as error:
    raise ValueRefusal(
      f"load: {folder}",
      expected="the config of a model of mxjax.models",
      got=f"another ({error})",
      mend="restore_checkpoint(path) returns the params for a model of your own",
    ) from error
