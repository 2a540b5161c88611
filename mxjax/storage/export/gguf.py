"""A GGUF file of llama.cpp whose linears have the type MXFP4.

Its blocks are ours: one E8M0 byte, then 32 E2M1 codes, of which byte `j` holds those of
`j` (low half) and `j + 16`; so weights decode to the same values. What the file says of
tokenizer and settings is copied from a GGUF file of the float model. Inputs are not
rounded to MXFP4 by llama.cpp: a CPU rounds them to its own Q8_0.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mxjax.errors import OSRefusal, ValueRefusal
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models.loading import gguf as loading
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import Unrounded
from mxjax.storage.export import features, folder

if TYPE_CHECKING:
  from gguf import GGMLQuantizationType, GGUFReader

FORMAT = "gguf"
FILE = "model.gguf"
OWN_KEYS = ("general.file_type", "general.quantization_version", "GGUF.")
"""Keys that are of the file itself, and not copied."""
FILE_TYPE = 38
"""llama.cpp's number for files whose linears are mostly MXFP4."""


def check(params: Mapping[str, Any]) -> None:
  """Rejects a model that the format cannot hold; all features are named."""
  features.refuse(FORMAT, features.features_of(params))


def blocks(weight: mxfp4.MXTensor) -> np.ndarray:
  """Returns the bytes of llama.cpp's blocks, uint8 `[out, in / 32 * 17]`."""
  packed, scales = np.asarray(weight.codes), np.asarray(weight.scales)
  # Ours: the even column of a pair lies in the low half of a byte.
  codes = np.stack([packed & 15, packed >> 4], axis=-1)
  # `[rows, blocks, 2, 16]`: llama.cpp pairs code j of a block with code j + 16.
  halves = codes.reshape(*scales.shape, 2, mxfp4.BLOCK_SIZE // 2)
  bytes_ = halves[..., 0, :] | halves[..., 1, :] << 4
  made = np.concatenate([scales[..., None], bytes_], axis=-1)
  return made.reshape(scales.shape[0], -1)


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
  """Brings rows of q and k, `[heads * head_dim, ...]`, into llama.cpp's order.

  It undoes `mxjax.models.loading.gguf.unpermute`.
  """
  halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
  return halves.swapaxes(1, 2).reshape(rows.shape)


def to_tensors(
  source: folder.Source,
) -> Iterator[tuple[str, np.ndarray, "GGMLQuantizationType | None"]]:
  """Yields llama.cpp's name of each tensor, its array, and its type if that is raw."""
  from gguf import GGMLQuantizationType

  outside = {path[0]: name for name, path in loading.GLOBAL_NAMES.items()}
  inside = {path: name for name, path in loading.LAYER_NAMES.items()}
  heads = {"attn_q": source.config.num_heads, "attn_k": source.config.num_kv_heads}
  for path, node in features.nodes(source.params):
    if path[0] in outside:
      kind, name = "", f"{outside[path[0]]}.{path[-1]}"
    elif kind := inside.get(path[1:-1], ""):
      name = f"blk.{path[0].removeprefix('layers_')}.{kind}.{path[-1]}"
    else:
      raise ValueRefusal(
        "export",
        expected=f"tensors of llama.cpp's architecture {loading.ARCHITECTURES[0]}",
        got=".".join(path),
        mend="use --format dequant or transformers",
      )
    if isinstance(node, QuantizedLinear):
      mxfp4.check_legal(node.weight, f"export: {name}")
      array, kind_of = blocks(node.weight), GGMLQuantizationType.MXFP4
    elif node.ndim == 1 or str(node.dtype) != "bfloat16":
      # llama.cpp multiplies by norms and adds biases in float32 only.
      array, kind_of = np.asarray(node.astype("float32")), None
    else:
      array, kind_of = np.asarray(node).view(np.uint8), GGMLQuantizationType.BF16
    # Whole rows move, scales and codes together, so that a block stays what it is.
    if kind in heads:
      array = permute(array, heads[kind])
    yield name, np.ascontiguousarray(array), kind_of


def _check_base(base: "GGUFReader", file: pathlib.Path, source: folder.Source) -> None:
  """Rejects a GGUF file that is of another model."""
  tensors = {tensor.name: tensor for tensor in base.tensors}
  # Settings are copied from that file, so that it must be of the same shape.
  theirs = loading.read_config(base, tensors).to_dict()
  ours = source.config.to_dict()
  # How it computes, and which ids end a text, are not of the weights.
  free = ("dtype", "bos_id", "eos_ids")
  if other := [k for k in ours if k not in free and ours[k] != theirs.get(k)]:
    raise ValueRefusal(
      file,
      expected="a GGUF file of the float model that was quantized",
      got=f"another {', '.join(other)}",
      mend="name that file by --model",
    )


def _write(
  path: pathlib.Path, base: "GGUFReader", tensors: list[tuple[str, np.ndarray, Any]]
) -> None:
  """Writes the file, and reads its tensors back."""
  from gguf import GGUFReader, GGUFValueType, GGUFWriter

  writer = GGUFWriter(path, loading.ARCHITECTURES[0])
  for key, entry in base.fields.items():
    # The writer sets the architecture itself.
    if key == "general.architecture" or key.startswith(OWN_KEYS):
      continue
    # Of an array: its own type, and behind it that of its elements.
    kind, *inner = entry.types
    writer.add_key_value(
      key, entry.contents(), kind, sub_type=inner[-1] if inner else None
    )
  writer.add_key_value("general.file_type", FILE_TYPE, GGUFValueType.UINT32)
  for name, array, kind in tensors:
    writer.add_tensor(name, array, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  found = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
  for name, array, _ in tensors:
    if found[name].data.tobytes() != array.tobytes():
      raise OSRefusal(
        f"export: {path}",
        expected=f"{name} to read back as it was written",
        got="other values",
        mend="check the disk and export again",
      )


def write_gguf(
  out: str | os.PathLike[str],
  source: folder.Source,
  companions: folder.Companions = folder.NO_COMPANIONS,
  *,
  shard_bytes: int = folder.SHARD_BYTES,
) -> pathlib.Path:
  """Writes a folder with `model.gguf`, one file whatever its size.

  `companions.model` is a GGUF file of the float model, whose tokenizer and settings are
  copied.

  Raises:
    FileExistsError: The folder is not empty.
    NotImplementedError: llama.cpp's architecture cannot describe the model.
    ValueError: The format cannot hold features of the model; there is no GGUF file of
      the float model, or it is of another one.
  """
  del shard_bytes
  check(source.params)
  if companions.model is None or companions.model.suffix != ".gguf":
    raise ValueRefusal(
      "export",
      expected="--model with a GGUF file of the float model, whose tokenizer and "
      "settings are copied",
      got=companions.model or "none",
      mend="name one, or use --format dequant, which needs no such file",
    )
  base = loading.open_reader(companions.model)
  _check_base(base, companions.model, source)
  tensors = list(to_tensors(source))
  return folder.write_folder(
    out,
    FORMAT,
    source,
    folder.NO_COMPANIONS,
    {},
    json_files={},
    details={
      "activations": "not rounded to MXFP4: llama.cpp rounds them to its own Q8_0 on a "
      "CPU",
      "quantized_linears": sum(
        kind is not None and kind.name == "MXFP4" for _, _, kind in tensors
      ),
    },
    shard_bytes=folder.SHARD_BYTES,
    write=lambda place: _write(place / FILE, base, tensors),
  )


def runtime_params(params: Mapping[str, Any]) -> dict[str, Any]:
  """Returns params whose activations are not rounded, as those of no GGUF are."""

  def swap(node: Any) -> Any:
    if isinstance(node, QuantizedLinear):
      return dataclasses.replace(node, rounding=Unrounded())
    return node

  return jax.tree.map(
    swap, dict(params), is_leaf=lambda node: isinstance(node, QuantizedLinear)
  )
