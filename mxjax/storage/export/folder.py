"""Hugging Face folders: sharded tensors, config, tokenizer and export manifest.

Everything is written to a temporary folder, read back and compared with memory, and
only then renamed to the output folder.
"""

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.errors import OSRefusal, ValueRefusal
from mxjax.intake.reading import read_json, refusing
from mxjax.models.config import ModelConfig
from mxjax.models.families import check_reads_back, to_hf_config
from mxjax.models.loading import weights
from mxjax.storage import digested_json
from mxjax.storage.atomic_io import (
  damaged_files,
  file_names,
  list_files,
  staged,
  write_arrays,
  write_durably,
  write_json,
)
from mxjax.storage.export import card

MANIFEST = "mxjax_export.json"
"""Manifest of an export: its source, what was left out, and the cost of that."""
CARD = "README.md"
"""The model card."""
VERSION = 1
SHARD_BYTES = 5 * 10**9
"""Maximum shard size in bytes; a single larger tensor gets its own shard."""
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
"""Files that are copied unchanged if they exist."""


@dataclasses.dataclass(frozen=True)
class Source:
  """A quantized model and its provenance, JSON-ready for the manifest.

  `facts` are digest of the checkpoint, contract, program and calibration; `record` says
  what was left out, and what was measured before writing.
  """

  params: Mapping[str, Any]
  config: ModelConfig
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  record: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Companions:
  """Folders that provide the files beside the weights, or None.

  `tokenizer` holds the tokenizer's files. `model` is the folder of the float model: its
  `config.json` is the base of ours, and its files override those of `tokenizer`.
  """

  tokenizer: pathlib.Path | None = None
  model: pathlib.Path | None = None


NO_COMPANIONS = Companions()


def hf_values(source: Source, companions: Companions) -> dict[str, Any]:
  """Builds the `config.json` of an export, without a format's additions.

  A head among the params overrides a tie: rotated models have their own head.

  Raises:
    NotImplementedError: The config cannot describe the model.
  """
  tie = source.config.tie_embeddings and "lm_head" not in source.params
  config = dataclasses.replace(source.config, tie_embeddings=tie)
  # A packed embedding is written as bfloat16, which is exact.
  dtype = str(getattr(source.params["embed_tokens"]["weight"], "dtype", "bfloat16"))
  if companions.model is None or not (companions.model / "config.json").is_file():
    return {**to_hf_config(config), "torch_dtype": dtype}
  values = weights.read_hf_config(companions.model / "config.json")
  # The newer name of `torch_dtype`, which is set below: two names could contradict each
  # other.
  values.pop("dtype", None)
  # Flags that the float model's config has, and those that a folded recovery has turned
  # on.
  biases = {
    name: getattr(config, name)
    for name in ("attention_bias", "mlp_bias")
    if name in values or getattr(config, name)
  }
  values |= {"tie_word_embeddings": tie, "torch_dtype": dtype, **biases}
  check_reads_back(values, config)
  return values


def _write_tensors(
  folder: pathlib.Path,
  tensors: Mapping[str, jax.Array | np.ndarray],
  shard_bytes: int,
) -> None:
  """Writes safetensors, with an index for several shards, and reads them back."""
  shards = _shards(tensors, shard_bytes)
  places: dict[str, str] = {}
  for number, names in enumerate(shards, 1):
    name = weights.SINGLE_FILE
    if len(shards) > 1:
      name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    write_arrays(folder / name, {k: tensors[k] for k in names}, {"format": "pt"})
    places |= dict.fromkeys(names, name)
  if len(shards) > 1:
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_json(folder / weights.INDEX_FILE, index)
  # Read back by the library that others read it with, and compared with what is in
  # memory.
  files = {name: weights.open_tensors(folder / name) for name in set(places.values())}
  for key, name in places.items():
    read, expected = files[name].get_tensor(key), np.asarray(tensors[key])
    if read.dtype != expected.dtype or read.tobytes() != expected.tobytes():
      raise OSRefusal(
        f"export: {folder / name}",
        expected=f"{key} to read back as it was written",
        got="other values",
        mend="check the disk and export again",
      )


def _shards(tensors: Mapping[str, Any], shard_bytes: int) -> list[list[str]]:
  """Splits names in order; starts a shard where the next tensor would not fit."""
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
  """Reads all tensors of a folder, single or sharded, in their stored dtypes."""
  tensors: dict[str, jax.Array] = {}
  for path in weights.weight_files(folder):
    file = weights.open_tensors(path)
    with refusing(path, "tensors of dtypes that JAX has"):
      tensors |= {name: jnp.asarray(file.get_tensor(name)) for name in file.keys()}
  if (folder / weights.SINGLE_FILE).is_file():
    return tensors
  # The files alone do not tell which tensors there should be; the index does.
  weight_map = weights.read_index(folder)
  if absent := sorted(weight_map.keys() - tensors.keys()):
    raise ValueRefusal(
      folder,
      expected=f"the {len(weight_map)} tensors of {weights.INDEX_FILE}",
      got=f"none of {', '.join(absent[:5])}",
      mend="download the shards again",
    )
  return tensors


def check_folder(folder: pathlib.Path, *, is_ours: bool) -> None:
  """Checks every file of an export against its manifest.

  Folders of other programs have none; `is_ours` says that this one must.

  Raises:
    FileNotFoundError: There is no manifest where there must be one.
    ValueError: Files are damaged, or there are further weights.
  """
  path = folder / MANIFEST
  if not is_ours and not path.exists():
    return
  mend = "copy the folder again"
  files = digested_json.read(path, "the manifest of an export", mend)["files"]
  damage = damaged_files(folder, files)
  damage += [
    f"{name} is not listed"
    for name in file_names(folder)
    # A loader may read weights that nothing lists; other files beside them do no harm.
    if ".safetensors" in name and name not in files
  ]
  if damage:
    raise ValueRefusal(
      folder,
      expected=f"the {len(files)} files that {MANIFEST} lists",
      got=f"damage: {'; '.join(damage)}",
      mend=mend,
    )


def write_folder(
  out: str | os.PathLike[str],
  form: str,
  source: Source,
  companions: Companions,
  tensors: Mapping[str, jax.Array | np.ndarray],
  *,
  json_files: Mapping[str, Any],
  details: Mapping[str, Any],
  shard_bytes: int,
  copies: Sequence[pathlib.Path] = (),
  write: Callable[[pathlib.Path], None] | None = None,
) -> pathlib.Path:
  """Writes a whole export; `out`, a new folder, appears only when it is complete.

  `form` names the format, `source` has the config of the export, `json_files` maps file
  names such as `config.json` to values, `details` go into `mxjax_export.json` and the
  model card, `copies` are files that are copied, and `write` writes the tensors of a
  format that has other files than safetensors and a tokenizer's.

  Raises:
    FileExistsError: The folder is not empty.
    OSError: The tensors read back differently.
  """
  with staged(out) as folder:
    if write:
      write(folder)
    else:
      _write_tensors(folder, tensors, shard_bytes)
      _write_companions(folder, source.config, companions)
    for name, values in json_files.items():
      write_json(folder / name, values)
    for file in copies:
      shutil.copyfile(file, folder / file.name)
    manifest = {
      "format": form,
      "version": VERSION,
      "source": dict(source.facts),
      **source.record,
      **details,
    }
    # Before the manifest, which has the digest of the card.
    write_durably(folder / CARD, card.model_card(form, manifest).encode())
    digested_json.write(folder / MANIFEST, {**manifest, "files": list_files(folder)})
  return pathlib.Path(out)


def _write_companions(
  folder: pathlib.Path, config: ModelConfig, companions: Companions
) -> None:
  """Copies tokenizer files, generation config and chat template."""
  for origin in filter(None, (companions.tokenizer, companions.model)):
    for name in COMPANIONS:
      if (origin / name).is_file():
        shutil.copyfile(origin / name, folder / name)
  file = folder / "tokenizer_config.json"
  if file.is_file():
    settings = read_json(file, dict[str, Any], "the settings of a tokenizer")
    if "tokenizer_class" not in settings:
      # AutoTokenizer would infer another from the model type.
      write_json(file, {"tokenizer_class": "PreTrainedTokenizerFast", **settings})
  if not (folder / "generation_config.json").is_file():
    tokens = {"bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids)}
    known = {name: ids for name, ids in tokens.items() if ids not in (None, [])}
    write_json(folder / "generation_config.json", known)
