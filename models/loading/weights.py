"""Loader of Hugging Face folders: `config.json` and safetensors, single or sharded."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pydantic

from mxjax.errors import FileNotFoundRefusal, NotImplementedRefusal, ValueRefusal
from mxjax.intake.reading import read_json, refusing
from mxjax.models import families
from mxjax.models.config import ModelConfig
from mxjax.models.families import hf_config
from mxjax.models.loading.lazy import LazyParams
from mxjax.models.parameters import Path, StoredTensor, parameter_shapes

if TYPE_CHECKING:
  import safetensors

SINGLE_FILE = "model.safetensors"
"""Weights of an unsharded checkpoint."""
INDEX_FILE = "model.safetensors.index.json"
"""Maps every tensor of a sharded checkpoint to its shard."""
LFS_POINTER = b"version https://git-lfs"
"""How a file begins that Git LFS has not fetched."""
DTYPES = ("BF16", "F16", "F32")
"""Stored dtypes that a float checkpoint may have, as safetensors names them."""

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
ADAPTER_FILE = "adapter_config.json"
ADAPTER = (
  "an adapter (LoRA) without its model",
  "merge it with PEFT's merge_and_unload and save the result",
)
"""What a folder of PEFT has, and what to do about it."""
_QUANTIZED_HERE = (
  "a model that mxjax quantized",
  "name the float model; `mxjax evaluate`, `generate`, `chat` and `export` take this "
  "folder, and so does `mxjax.load`",
)
OWN_FILES = {
  "checkpoint/mxjax.json": _QUANTIZED_HERE,
  "mxjax.json": _QUANTIZED_HERE,
  "mxjax_state.json": (
    "an export of the format safetensors",
    "read it by `mxjax.storage.export.read_state`, or name the float model",
  ),
}
"""What mxjax writes that is no float model, and what to do about it."""
CONFIG = "the config of a model"
SAVE = "point to a folder saved by transformers' save_pretrained"
Fields = dict[str, Any] | None

# Parts of the names of tensors that no float model has, and what they are a sign of.
QUANTIZED_TENSORS = {
  "weight_scale_inv": "fp8 with block scales",
  "weight_packed": "compressed-tensors",
  "weight_scale": "fp8 or int8 with scales",
  "input_scale": "fp8 or int8 with scales",
  "qweight": "GPTQ or AWQ",
  "qzeros": "GPTQ or AWQ",
  "g_idx": "GPTQ",
  "SCB": "bitsandbytes int8",
  "absmax": "bitsandbytes 4-bit",
  "quant_map": "bitsandbytes 4-bit",
  "weight_format": "bitsandbytes int8",
  "codebooks": "AQLM",
  "W_q": "HQQ",
  "scales": "MLX",
}
NARROW_DTYPES = {"F8_E4M3": "fp8", "F8_E5M2": "fp8", "F4": "fp4", "U8": "packed codes"}
NARROW_DTYPES |= {"I8": "int8 codes", "U32": "packed codes", "I32": "packed codes"}

# Prefixes that wrappers leave on names, and how to be rid of them.
WRAPPERS = {
  "_orig_mod.": "it was saved from torch.compile: save the model inside it",
  "module.": "it was saved from DataParallel or DeepSpeed: save the model inside it",
  "base_model.model.": "it was saved from PEFT: merge with merge_and_unload and save",
}


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


def refuse_pointer(path: pathlib.Path) -> None:
  """Raises a ValueError where a file is the pointer that Git LFS has in its place."""
  with path.open("rb") as file:
    # Only the beginning: the file may have gigabytes.
    is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
  if is_pointer:
    raise ValueRefusal(
      path,
      expected="weights",
      got=f"a Git LFS pointer of {path.stat().st_size} bytes",
      mend="run `git lfs pull` in its repository",
    )


def open_tensors(path: pathlib.Path) -> "safetensors.safe_open":
  """Opens a `.safetensors` file and checks its header; reads no tensor.

  Raises:
    FileNotFoundError: The file is absent.
    ValueError: The file is truncated or not in the safetensors format.
  """
  import safetensors

  with refusing(path, "safetensors, a JSON header and all its tensors"):
    refuse_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
      # The format begins with the length of its header, in 8 bytes.
      start = file.read(8)
    if (end := 8 + int.from_bytes(start, "little")) > size:
      raise ValueRefusal(
        path,
        expected=f"{end} bytes by its header",
        got=size,
        mend="the file is truncated or no safetensors file, download it again",
      )
    return safetensors.safe_open(path, framework="numpy")


def read_config(source: pathlib.Path, *, dtype: str = "float32") -> ModelConfig:
  """Reads `config.json`, given its path or folder; raises as `open_folder` does.

  The stop ids are those of the config and of `generation_config.json` beside it.
  """
  path = source / CONFIG_FILE if source.is_dir() else source
  if not path.is_file() and source.is_dir():
    _refuse_gguf_inside(source)
    for name, (got, mend) in {**OWN_FILES, ADAPTER_FILE: ADAPTER}.items():
      if (source / name).is_file():
        raise FileNotFoundRefusal(source, expected="a float model", got=got, mend=mend)
  with refusing(path, CONFIG, SAVE):
    config = families.from_hf_config(read_hf_config(path), dtype=dtype)
  generation = path.parent / GENERATION_FILE
  if path.name != CONFIG_FILE or not generation.is_file():
    return config
  with refusing(generation, "the generation config of a model", "save it again"):
    values = read_json(generation, dict[str, Any], "the generation config of a model")
    known = hf_config.quiet_transformers().GenerationConfig.from_dict(values)
    ids = hf_config.token_ids(known.eos_token_id, "eos_token_id", config.vocab_size)
  # Each file may name ids that the other lacks.
  union = tuple(dict.fromkeys((*config.eos_ids, *ids)))
  return dataclasses.replace(config, eos_ids=union)


def read_hf_config(path: pathlib.Path) -> dict[str, Any]:
  """Reads a `config.json`; checks the structure of its nested fields only."""
  return read_json(path, HfConfig, CONFIG, mend=SAVE).model_dump(exclude_unset=True)


def open_folder(folder: pathlib.Path, *, dtype: str = "float32") -> LazyParams:
  """Opens a model saved by transformers without reading any tensor.

  The folder holds `config.json` and `model.safetensors`, or shards and their index.
  `dtype` is the compute dtype; the params keep the dtype of the file.

  Raises:
    FileNotFoundError: A file is absent.
    NotImplementedError: The architecture or one of its features is not supported, or
      the weights are quantized.
    ValueError: A file is truncated, or tensors are missing, unexpected or mis-shaped.
  """
  config = read_config(folder, dtype=dtype)
  stored = _stored_tensors(folder)
  _refuse_prefix(stored, folder)
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
  if not (folder / INDEX_FILE).is_file():
    _refuse_gguf_inside(folder)
    got, mend = other_weights([path.name for path in folder.iterdir()])
    raise FileNotFoundRefusal(
      folder,
      expected=f"{SINGLE_FILE}, or shards and their index {INDEX_FILE}",
      got=got,
      mend=mend,
    )
  weight_map = read_index(folder)
  files = [folder / name for name in sorted(set(weight_map.values()))]
  missing = [path.name for path in files if not path.is_file()]
  if missing:
    raise FileNotFoundRefusal(
      folder,
      expected=f"the {_shards(len(files))} of {INDEX_FILE}",
      got=f"all but {', '.join(missing)}",
      mend="download the missing files",
    )
  return files


def _shards(count: int) -> str:
  return f"{count} shard" + "s" * (count != 1)


def _refuse_gguf_inside(folder: pathlib.Path) -> None:
  """Raises FileNotFoundError where a folder has a GGUF file to be named itself."""
  if folder.is_dir() and (files := sorted(path.name for path in folder.glob("*.gguf"))):
    raise FileNotFoundRefusal(
      folder,
      expected="a folder saved by transformers",
      got=f"one with the GGUF file {', '.join(files)}",
      mend=f"name the file, {folder / files[0]}",
    )


def other_weights(names: list[str]) -> tuple[str, str]:
  """Says what weights a folder has instead of ours, and what to do about it."""
  ending = lambda *ends: [name for name in sorted(names) if name.endswith(ends)]
  convert = (
    "load it with transformers and call save_pretrained, which writes safetensors"
  )
  if shards := [n for n in ending(".safetensors") if n.startswith("model-")]:
    return f"{_shards(len(shards))} without the index", f"download {INDEX_FILE}, too"
  if ADAPTER_FILE in names:
    return ADAPTER
  if files := ending(".safetensors"):
    return f"safetensors of other names ({', '.join(files[:3])})", SAVE
  if files := ending(".bin", ".pt", ".pth", ".ckpt"):
    return f"only pickled weights ({', '.join(files[:3])}), which can run code", convert
  if files := ending(".bin.index.json"):
    return f"only the index of pickled weights ({files[0]})", convert
  if files := ending(".gguf"):
    return f"the GGUF file {', '.join(files)}", "download one and name that file"
  if files := ending(".h5", ".msgpack", ".onnx"):
    return f"weights of another library ({', '.join(files[:3])})", convert
  return "no weights", SAVE


def read_index(folder: pathlib.Path) -> dict[str, str]:
  """Reads the shard of every tensor; shards are files of the folder itself."""
  path = folder / INDEX_FILE
  weight_map = read_json(path, Index, "an index of safetensors", mend=SAVE).weight_map
  is_file = lambda name: name.endswith(".safetensors") and "/" not in name
  outside = [name for name in weight_map.values() if not is_file(name)]
  if outside:
    raise ValueRefusal(
      path,
      expected="names of files in its own folder",
      got=repr(outside[0]),
      mend=SAVE,
    )
  return weight_map


def _stored_tensors(folder: pathlib.Path) -> dict[Path, StoredTensor]:
  """Returns the tensors of a folder by their path in the params, none of them read."""
  stored: dict[Path, StoredTensor] = {}
  places: dict[str, pathlib.Path] = {}
  dtypes: dict[str, str] = {}
  for path in weight_files(folder):
    file = open_tensors(path)
    for name in file.keys():
      if (first := places.setdefault(name, path)) != path:
        raise ValueRefusal(
          path,
          expected="tensors that no other shard has",
          got=f"{name}, which {first.name} has too",
          mend=SAVE,
        )
      # Old checkpoints store this buffer, which the config determines.
      if name.endswith("rotary_emb.inv_freq"):
        continue
      view = file.get_slice(name)
      dtypes[name] = view.get_dtype()
      read = functools.partial(file.get_tensor, name)
      tensor = StoredTensor(name, tuple(view.get_shape()), read)
      if (twin := stored.setdefault(params_path(name), tensor)) is not tensor:
        raise ValueRefusal(
          path,
          expected="every tensor once",
          got=f"{twin.name} and {name}, which are two names of one",
          mend=SAVE,
        )
  _refuse_quantized(folder, dtypes)
  return stored


def _refuse_quantized(folder: pathlib.Path, dtypes: Mapping[str, str]) -> None:
  """Rejects weights that are no floats, by the names and dtypes of all tensors."""
  for part, kind in QUANTIZED_TENSORS.items():
    # The last two parts: bitsandbytes puts its own behind `weight`, as in
    # `weight.absmax`.
    if found := next((name for name in dtypes if part in name.split(".")[-2:]), None):
      raise NotImplementedRefusal(
        folder,
        expected="unquantized weights",
        got=f"{found}, as {kind} has",
        mend="load the checkpoint that was quantized",
      )
  for name, dtype in dtypes.items():
    if dtype not in DTYPES:
      kind = f" ({NARROW_DTYPES[dtype]})" if dtype in NARROW_DTYPES else ""
      raise ValueRefusal(
        folder,
        expected=f"{name} in {', '.join(DTYPES)}",
        got=f"{dtype}{kind}",
        mend="load the unquantized checkpoint",
      )


def _refuse_prefix(stored: Mapping[Path, StoredTensor], folder: pathlib.Path) -> None:
  """Names what stands before the names of all tensors, if that is why none fits."""
  anchor = "embed_tokens.weight"
  names = [tensor.name for tensor in stored.values()]
  prefixes = {name.removesuffix(anchor) for name in names if name.endswith(anchor)}
  # These two are translated; see `params_path`.
  if prefixes & {"", "model."}:
    return
  for prefix in sorted(prefixes):
    if any(name.startswith(f"{prefix}layers.") for name in names):
      wrappers = [text for start, text in WRAPPERS.items() if prefix.startswith(start)]
      part = "it is a part of a larger model: save its language model alone"
      raise ValueRefusal(
        folder,
        expected=f"tensors named model.{anchor} and so on",
        got=f"the prefix {prefix} before their names, as in {prefix}{anchor}",
        mend=f"{wrappers[0] if wrappers else part}",
      )


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
  # A copy is harmless; another head would be ignored in silence.
  if not np.array_equal(head.read(), embedding.read()):
    raise ValueRefusal(
      folder,
      expected="lm_head.weight to equal the embedding because tie_word_embeddings is "
      "true",
      got="other values",
      mend="set it to false in config.json or remove the tensor",
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

  # Checked before anything is written.
  expected = parameter_shapes(families.from_hf_config(hf_config))
  leaves = jax.tree_util.tree_leaves_with_path(params)
  tensors = {tuple(str(key.key) for key in path): leaf for path, leaf in leaves}
  if {path: leaf.shape for path, leaf in tensors.items()} != expected:
    raise ValueRefusal(
      folder,
      expected=f"params of the {len(expected)} shapes that the config implies",
      got=f"{len(tensors)} leaves of other names or shapes",
      mend="pass the config that the params were made with",
    )
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
  named = {tensor_name(path): leaf for path, leaf in tensors.items()}
  save_file(named, folder / SINGLE_FILE, metadata={"format": "pt"})
