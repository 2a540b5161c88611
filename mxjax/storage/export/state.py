"""The `safetensors` export: the complete state for readers without Orbax.

`model.safetensors` (or shards with an index) holds every array of the params by its
path, such as `layers_0/self_attn/q_proj/weight/weight/codes`; `mxjax_state.json` holds
the nodes' types and static fields, the model and the contract. No model is refused.
"""

import os
import pathlib
from typing import Any

from mxjax.errors import ValueRefusal
from mxjax.intake.reading import read_json, refusing
from mxjax.storage.export.folder import (
  NO_COMPANIONS,
  SHARD_BYTES,
  Companions,
  Source,
  check_folder,
  read_tensors,
  write_folder,
)
from mxjax.storage.tree_io import describe_arrays, pack, unpack

FORMAT = "mxjax-safetensors"
VERSION = 2
STATE = "mxjax_state.json"


def write_state(
  out: str | os.PathLike[str],
  source: Source,
  companions: Companions = NO_COMPANIONS,
  *,
  shard_bytes: int = SHARD_BYTES,
) -> pathlib.Path:
  """Writes the complete state of a quantized model; see `write_folder`.

  Raises:
    FileExistsError: The folder is not empty.
    TypeError: A checkpoint cannot hold the type of a leaf.
  """
  nodes, arrays = pack(source.params)
  state = {
    "format": FORMAT,
    "version": VERSION,
    "model_config": source.config.to_dict(),
    **source.facts,
    "nodes": nodes,
    "arrays": describe_arrays(arrays),
  }
  return write_folder(
    out,
    FORMAT,
    source,
    companions,
    arrays,
    json_files={STATE: state},
    details={"activations": "as in the checkpoint"},
    shard_bytes=shard_bytes,
  )


def read_state(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads params written by `write_state`, bit for bit and with their types.

  Also returns the content of `mxjax_state.json`: `model_config`, `contract`, `program`,
  `calibration` and more.

  Raises:
    FileNotFoundError: A file is absent.
    ValueError: Another version, or files that are missing or changed.
  """
  file = pathlib.Path(folder) / STATE
  mend = "point to a folder written by `mxjax export --format safetensors`"
  state = read_json(file, dict[str, Any], "the state of an export", mend=mend)
  if (kind := (state.get("format"), state.get("version"))) != (FORMAT, VERSION):
    raise ValueRefusal(
      file,
      expected=f"{FORMAT} of version {VERSION}",
      got=kind,
      mend="use the mxjax version that wrote it",
    )
  check_folder(pathlib.Path(folder), is_ours=True)
  arrays = read_tensors(pathlib.Path(folder))
  with refusing(file, "the state of an export", "copy the folder again"):
    return unpack(state["nodes"], arrays), state
