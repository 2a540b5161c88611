"""Loader of Hugging Face folders: `config.json` and safetensors, single or sharded."""

import functools
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pydantic

from mxjax.errors import ValueRefusal
from mxjax.intake.reading import read_json, refusing
from mxjax.models import families
from mxjax.models.config import ModelConfig
from mxjax.models.loading.lazy import LazyParams
from mxjax.models.parameters import Path, StoredTensor, parameter_shapes

if TYPE_CHECKING:
  import safetensors

SINGLE_FILE = "model.safetensors"
"""Weights of an unsharded checkpoint."""
INDEX_FILE = "model.safetensors.index.json"
"""Maps every tensor of a sharded checkpoint to its shard."""
DTYPES = ("BF16", "F16", "F32")
"""Stored dtypes that a float checkpoint may have, as safetensors names them."""

CONFIG = "the config of a model"
SAVE = "point to a folder saved by transformers' save_pretrained"
Fields = dict[str, Any] | None


class HfConfig(pydantic.BaseModel, extra="allow"):
  """The nested fields of a `config.json`; all others are kept as they are."""

  architectures: list[str] | None = None
  model_type: str | None = None
  rope_scaling: Fields = None
  rope_parameters: Fields = None
  layer_types: list[str] | None = None
  eos_token_id: int | list[int] | None = None
  quantization_config: Fields = None


class Index(pydantic.BaseModel):
  """What an index file must have."""

  weight_map: dict[str, str]


def open_tensors(path: pathlib.Path) -> "safetensors.safe_open":
  """Opens a `.safetensors` file and checks its header; reads no tensor.

  Raises:
    FileNotFoundError: The file is absent.
    ValueError: The file is truncated or not in the safetensors format.
  """
  import safetensors

  with refusing(path, "safetensors, a JSON header and all its tensors"):
    size = path.stat().st_size
    with path.open("rb") as file:
      end = 8 + int.from_bytes(file.read(8), "little")
    if end > size:
      raise ValueRefusal(
        path,
        expected=f"{end} bytes by its header",
        got=size,
        mend="the file is truncated or no safetensors file, download it again",
      )
    return safetensors.safe_open(path, framework="numpy")


def read_config(folder: pathlib.Path, *, dtype: str = "float32") -> ModelConfig:
  """Reads `config.json`, given its path or folder; raises as `open_folder` does."""
  path = folder / "config.json" if folder.is_dir() else folder
  with refusing(path, CONFIG, SAVE):
    return families.from_hf_config(read_hf_config(path), dtype=dtype)


def read_hf_config(path: pathlib.Path) -> dict[str, Any]:
  """Reads a `config.json`; checks the structure of its nested fields only."""
  return read_json(path, HfConfig, CONFIG, mend=SAVE).model_dump(exclude_unset=True)


def open_folder(
  folder: pathlib.Path, *, dtype: str = "float32", config: ModelConfig | None = None
) -> LazyParams:
  """Opens a model saved by transformers without reading any tensor.

  The folder holds `config.json` and `model.safetensors`, or shards and their index.
  `dtype` is the compute dtype; the params keep the dtype of the file. A `config` stands
  in for the folder's.

  Raises:
    FileNotFoundError: A file is absent.
    NotImplementedError: The architecture or one of its features is not supported.
    ValueError: A file is truncated, or tensors are missing, unexpected or mis-shaped.
  """
  config = config or read_config(folder, dtype=dtype)
  stored = dict(_stored_tensors(folder))
  if config.tie_embeddings:
    _drop_tied_head(stored, folder)
  return LazyParams(stored, config, str(folder))


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
  """Lists the safetensors files of a folder, single or sharded.

  Raises:
    FileNotFoundError: A file is absent; all missing shards are named.
  """
  if (folder / SINGLE_FILE).is_file():
    return [folder / SINGLE_FILE]
  weight_map = read_index(folder)
  files = [folder / name for name in sorted(set(weight_map.values()))]
  missing = [path.name for path in files if not path.is_file()]
  if missing:
    raise FileNotFoundError(
      f"{folder}: expected the {len(files)} shards of {INDEX_FILE}, got all but "
      f"{', '.join(missing)}; download the missing files."
    )
  return files


def read_index(folder: pathlib.Path) -> dict[str, str]:
  """Reads the shard of every tensor; shards are files of the folder itself."""
  path = folder / INDEX_FILE
  weight_map = read_json(path, Index, "an index of safetensors", mend=SAVE).weight_map
  is_file = lambda name: name.endswith(".safetensors") and "/" not in name
  outside = [name for name in weight_map.values() if not is_file(name)]
  if outside:
    raise ValueError(
      f"{path}: expected names of files in its own folder, got {outside[0]!r}; {SAVE}."
    )
  return weight_map


def _stored_tensors(folder: pathlib.Path) -> Iterator[tuple[Path, StoredTensor]]:
  places: dict[str, pathlib.Path] = {}
  for path in weight_files(folder):
    file = open_tensors(path)
    for name in file.keys():
      if (first := places.setdefault(name, path)) != path:
        raise ValueError(
          f"{path}: expected tensors that no other shard has, got {name}, which "
          f"{first.name} has too; {SAVE}."
        )
      # Old checkpoints store this buffer, which the config determines.
      if name.endswith("rotary_emb.inv_freq"):
        continue
      shape = tuple(file.get_slice(name).get_shape())
      read = functools.partial(_read_float, path, file, name)
      yield params_path(name), StoredTensor(name, shape, read)


def _read_float(
  path: pathlib.Path, file: "safetensors.safe_open", name: str
) -> np.ndarray:
  if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
    raise ValueError(
      f"{path}: expected {name} in {', '.join(DTYPES)}, got {dtype}; load the "
      "unquantized checkpoint."
    )
  return file.get_tensor(name)


def params_path(name: str) -> Path:
  """Translates a Hugging Face tensor name to a path in the params.

  `model.layers.0.mlp.up_proj.bias` becomes `("layers_0", "mlp", "up_proj", "bias")`.
  """
  keys = name.split(".")
  if keys[0] == "model":
    keys = keys[1:]
  if keys[0] == "layers" and len(keys) > 1:
    keys = [f"layers_{keys[1]}", *keys[2:]]
  return tuple(keys)


def _drop_tied_head(stored: dict[Path, StoredTensor], folder: pathlib.Path) -> None:
  head = stored.pop(("lm_head", "weight"), None)
  embedding = stored.get(("embed_tokens", "weight"))
  if head is None or embedding is None:
    return
  if not np.array_equal(head.read(), embedding.read()):
    raise ValueError(
      f"{folder}: expected lm_head.weight to equal the embedding because "
      "tie_word_embeddings is true, got other values; set it to false in config.json "
      "or remove the tensor."
    )


def tensor_name(path: Path) -> str:
  """Translates a path in the params to a Hugging Face name; inverts `params_path`."""
  first, *rest = path
  if first == "lm_head":
    return ".".join(path)
  return ".".join(["model", first.replace("layers_", "layers."), *rest])


def save_folder(
  folder: pathlib.Path, hf_config: Mapping[str, Any], params: Mapping[str, Any]
) -> None:
  """Writes a float model that `open_folder` and transformers can read.

  `hf_config` has the JSON values of a supported family, `params` the matching float
  params in the dtypes to store. Existing files are replaced.

  Raises:
    NotImplementedError: The config is not of a supported family.
    ValueError: The params do not match the config.
  """
  from safetensors.flax import save_file

  expected = parameter_shapes(families.from_hf_config(hf_config))
  leaves = jax.tree_util.tree_leaves_with_path(params)
  tensors = {tuple(str(key.key) for key in path): leaf for path, leaf in leaves}
  if {path: leaf.shape for path, leaf in tensors.items()} != expected:
    raise ValueError(
      f"{folder}: expected params of the {len(expected)} shapes that the config "
      f"implies, got {len(tensors)} leaves of other names or shapes; pass the config "
      "that the params were made with."
    )
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
  named = {tensor_name(path): leaf for path, leaf in tensors.items()}
  save_file(named, folder / SINGLE_FILE, metadata={"format": "pt"})
