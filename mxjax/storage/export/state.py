"""All of our own state as safetensors and one JSON file, for readers without Orbax.

`model.safetensors` (or shards with an index) holds every array of the params by its
path, `layers_0/self_attn/q_proj/weight/weight/codes` and so on; `mxjax_state.json` says
which type each node is, its static fields, the model, and the contract. Nothing is
left out, so nothing is refused.
"""

import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

from mxjax.storage.export.folder import (
  SHARD_BYTES,
  Companions,
  Source,
  read_tensors,
  staged,
  write_companions,
  write_json,
  write_manifest,
  write_tensors,
)
from mxjax.storage.tree_io import array_sha256, describe, nested, rebuild, walk

FORMAT = "mxjax-safetensors"
VERSION = 1
STATE = "mxjax_state.json"


def write_state(
  out: str | os.PathLike[str],
  source: Source,
  companions: Companions | None = None,
  *,
  shard_bytes: int = SHARD_BYTES,
) -> pathlib.Path:
  """Writes everything a quantized model is.

  Args:
    out: A new folder.
    source: The model.
    companions: Where the tokenizer comes from.
    shard_bytes: The largest shard.

  Returns:
    The folder.

  Raises:
    FileExistsError: The folder has something in it.
    TypeError: A leaf of a type that no checkpoint holds.
  """
  arrays: dict[str, jax.Array] = {}
  described = {path: describe(n, path, arrays) for path, n in walk(source.params)}
  state = {
    "format": FORMAT,
    "version": VERSION,
    "model_config": source.config.to_dict(),
    **source.facts,
    "nodes": described,
    "arrays": {
      path: {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "sha256": array_sha256(array),
      }
      for path, array in arrays.items()
    },
  }
  with staged(out) as folder:
    write_tensors(folder, arrays, shard_bytes=shard_bytes)
    write_json(folder / STATE, state)
    write_companions(folder, source.config, companions or Companions())
    write_manifest(folder, FORMAT, source, {"activations": "as in the checkpoint"})
  return pathlib.Path(out)


def read_state(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads params back, bit for bit, with their types.

  Args:
    folder: Written by `write_state`.

  Returns:
    The params, and what `mxjax_state.json` says: `model_config`, `contract`,
    `program`, `calibration` and more.

  Raises:
    FileNotFoundError: A file is absent.
    ValueError: Another version, or arrays that are missing or changed.
  """
  file = pathlib.Path(folder) / STATE
  if not file.is_file():
    raise FileNotFoundError(
      f"{folder}: expected a file {STATE}, got none; point to a folder written by "
      "`mxjax export --format safetensors`."
    )
  state = json.loads(file.read_text(encoding="utf-8"))
  if (kind := (state.get("format"), state.get("version"))) != (FORMAT, VERSION):
    raise ValueError(
      f"{file}: expected {FORMAT} of version {VERSION}, got {kind}; use the mxjax "
      "version that wrote it."
    )
  arrays = read_tensors(pathlib.Path(folder))
  damaged = [
    path
    for path, entry in state["arrays"].items()
    if path not in arrays or array_sha256(np.asarray(arrays[path])) != entry["sha256"]
  ]
  if damaged:
    raise ValueError(
      f"{folder}: {len(damaged)} of {len(state['arrays'])} arrays are missing or do "
      f"not have the SHA-256 that {STATE} states: {', '.join(damaged[:5])}; copy the "
      "folder again."
    )
  tree = {path: rebuild(node, path, arrays) for path, node in state["nodes"].items()}
  return nested(tree), state
