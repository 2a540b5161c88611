"""A Hugging Face folder: tensors in shards, config, tokenizer, and what was done.

Everything is written beside the folder that was asked for, read back and compared with
memory, and only then takes its name.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from mxjax.models.config import ModelConfig
from mxjax.models.families.hf_config_write import check_reads_back, to_hf_config
from mxjax.models.loading import weights
from mxjax.storage.run_folder import check_output, write_durably

MANIFEST = "mxjax_export.json"
"""What was exported, from what, what was left out, and what that cost."""
VERSION = 1
SHARD_BYTES = 5 * 10**9
"""The largest shard, but for a single tensor that is larger."""
COMPANIONS = (
  "generation_config.json",
  "tokenizer.json",
  "tokenizer_config.json",
  "tokenizer.model",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
)
"""Files that are copied as they are, where they exist."""


@dataclasses.dataclass(frozen=True)
class Source:
  """A quantized model and where it comes from.

  Attributes:
    params: Its params.
    config: Its description.
    facts: JSON-ready provenance for the manifest: digest of the checkpoint, contract,
      program, calibration.
    record: JSON-ready: what was left out, and what was measured before writing.
  """

  params: Mapping[str, Any]
  config: ModelConfig
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  record: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Companions:
  """Folders that the files beside the weights come from.

  Attributes:
    tokenizer: Holds the tokenizer's files, or None.
    model: The folder of the float model, or None; its `config.json` is then the base
      of ours, and its files win over those of `tokenizer`.
  """

  tokenizer: pathlib.Path | None = None
  model: pathlib.Path | None = None


def hf_values(source: Source, companions: Companions) -> dict[str, Any]:
  """The `config.json` of an export, before a format adds to it.

  A head among the params wins over a tie: rotated models have one of their own.

  Raises:
    NotImplementedError: The config cannot describe the model.
  """
  tie = source.config.tie_embeddings and "lm_head" not in source.params
  config = dataclasses.replace(source.config, tie_embeddings=tie)
  # A packed embedding is written as bfloat16, which is exact.
  dtype = str(getattr(source.params["embed_tokens"]["weight"], "dtype", "bfloat16"))
  if companions.model is None or not (companions.model / "config.json").is_file():
    return {**to_hf_config(config), "torch_dtype": dtype}
  values = json.loads((companions.model / "config.json").read_text(encoding="utf-8"))
  values.pop("dtype", None)
  biases = {
    name: getattr(config, name)
    for name in ("attention_bias", "mlp_bias")
    if name in values or getattr(config, name)
  }
  values |= {"tie_word_embeddings": tie, "torch_dtype": dtype, **biases}
  check_reads_back(values, config)
  return values


@contextlib.contextmanager
def staged(out: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """A folder that takes the name `out` when the block ends without an error.

  Raises:
    FileExistsError: `out` has something in it.
  """
  final = check_output(out)
  final.parent.mkdir(parents=True, exist_ok=True)
  partial = final.with_name(f"{final.name}.partial-{secrets.token_hex(4)}")
  partial.mkdir()
  try:
    yield partial
    os.replace(partial, final)
  finally:
    # Gone already unless something failed.
    shutil.rmtree(partial, ignore_errors=True)


def write_tensors(
  folder: pathlib.Path,
  tensors: Mapping[str, jax.Array | np.ndarray],
  *,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes safetensors, with an index where there are several shards, and reads back.

  Args:
    folder: An existing folder.
    tensors: By name, any dtype that safetensors has.
    shard_bytes: The largest shard.

  Raises:
    OSError: The files do not read back as what was written.
  """
  from safetensors.flax import save

  shards = _shards(tensors, shard_bytes)
  places: dict[str, str] = {}
  for number, names in enumerate(shards, 1):
    name = weights.SINGLE_FILE
    if len(shards) > 1:
      name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    arrays = {key: jax.numpy.asarray(tensors[key]) for key in names}
    write_durably(folder / name, save(arrays, metadata={"format": "pt"}))
    places |= dict.fromkeys(names, name)
  if len(shards) > 1:
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_json(folder / weights.INDEX_FILE, index)
  _check_written(folder, tensors, places)


def _shards(tensors: Mapping[str, Any], shard_bytes: int) -> list[list[str]]:
  """Names in order, cut where the next would make a shard too large."""
  shards: list[list[str]] = [[]]
  filled = 0
  for name, tensor in tensors.items():
    if shards[-1] and filled + tensor.nbytes > shard_bytes:
      shards.append([])
      filled = 0
    shards[-1].append(name)
    filled += tensor.nbytes
  return shards


def read_tensors(folder: pathlib.Path) -> dict[str, jax.Array]:
  """Reads all tensors of a folder, single or sharded, in their stored dtypes.

  Raises:
    FileNotFoundError: A file is absent.
    ValueError: A shard is no safetensors file, or does not hold what the index says.
  """
  from safetensors import SafetensorError, safe_open

  single = folder / weights.SINGLE_FILE
  index_file = folder / weights.INDEX_FILE
  index: dict[str, str] = {}
  if not single.is_file():
    if not index_file.is_file():
      raise FileNotFoundError(
        f"{folder}: expected {weights.SINGLE_FILE} or {weights.INDEX_FILE}, got "
        "neither; point to a folder with safetensors."
      )
    index = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
  tensors: dict[str, jax.Array] = {}
  for name in sorted(set(index.values())) or [single.name]:
    if not (folder / name).is_file():
      raise FileNotFoundError(
        f"{folder}: expected the shard {name}, got none; download it."
      )
    try:
      with safe_open(folder / name, framework="flax") as file:
        tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
      raise ValueError(
        f"{folder / name}: expected a safetensors file, got {error}; download it again."
      ) from error
  if index and (absent := sorted(set(index) - set(tensors))):
    raise ValueError(
      f"{folder}: expected the {len(index)} tensors of {weights.INDEX_FILE}, got none "
      f"of {', '.join(absent[:5])}; download the shards again."
    )
  return tensors


def _check_written(
  folder: pathlib.Path, tensors: Mapping[str, Any], places: Mapping[str, str]
) -> None:
  from safetensors import safe_open

  for name in sorted(set(places.values())):
    with safe_open(folder / name, framework="flax") as file:
      for key in (key for key, place in places.items() if place == name):
        read, meant = np.asarray(file.get_tensor(key)), np.asarray(tensors[key])
        if read.dtype != meant.dtype or read.tobytes() != meant.tobytes():
          raise OSError(
            f"export: {key} in {folder / name} does not read back as it was written; "
            "check the disk and export again."
          )


def write_json(path: pathlib.Path, values: Any) -> None:
  """Writes JSON durably."""
  write_durably(path, (json.dumps(values, indent=2) + "\n").encode())


def write_companions(
  folder: pathlib.Path, config: ModelConfig, companions: Companions
) -> list[str]:
  """Copies tokenizer files, generation config and chat template.

  Returns:
    The names that are there now.
  """
  for origin in filter(None, (companions.tokenizer, companions.model)):
    for name in COMPANIONS:
      if (origin / name).is_file():
        shutil.copyfile(origin / name, folder / name)
  _name_tokenizer_class(folder / "tokenizer_config.json")
  if not (folder / "generation_config.json").is_file():
    tokens = {"bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids)}
    known = {name: ids for name, ids in tokens.items() if ids not in (None, [])}
    write_json(folder / "generation_config.json", known)
  return sorted(name for name in COMPANIONS if (folder / name).is_file())


def _name_tokenizer_class(path: pathlib.Path) -> None:
  """AutoTokenizer wants a class where the model type implies another."""
  if not path.is_file():
    return
  settings = json.loads(path.read_text(encoding="utf-8"))
  if "tokenizer_class" not in settings:
    write_json(path, {"tokenizer_class": "PreTrainedTokenizerFast", **settings})


def write_manifest(
  folder: pathlib.Path, form: str, source: Source, details: Mapping[str, Any]
) -> None:
  """Writes `mxjax_export.json`, last: with size and SHA-256 of every other file."""
  files = {
    file.relative_to(folder).as_posix(): {
      "bytes": file.stat().st_size,
      "sha256": _sha256(file),
    }
    for file in sorted(folder.rglob("*"))
    if file.is_file()
  }
  write_json(
    folder / MANIFEST,
    {
      "format": form,
      "version": VERSION,
      "source": dict(source.facts),
      **source.record,
      **details,
      "files": files,
    },
  )


def _sha256(path: pathlib.Path) -> str:
  with open(path, "rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()
