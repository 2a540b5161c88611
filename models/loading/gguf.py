"""Loader of GGUF files (llama.cpp's format) of the llama architecture."""

import contextlib
import contextvars
import functools
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from mxjax.errors import FileNotFoundRefusal, NotImplementedRefusal, ValueRefusal
from mxjax.intake.reading import refusing
from mxjax.models.config import ModelConfig
from mxjax.models.loading.lazy import LazyParams
from mxjax.models.loading.weights import refuse_pointer
from mxjax.models.parameters import Path, StoredTensor

if TYPE_CHECKING:
  from gguf import GGUFReader, ReaderTensor

ARCHITECTURES = ("llama",)
"""Supported values of `general.architecture`."""

READ = (
  *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
  *("attention.layer_norm_rms_epsilon", "block_count", "context_length"),
  *("embedding_length", "feed_forward_length", "rope.freq_base", "rope.scaling.type"),
)
"""Keys of the architecture that `read_config` reads, without its name."""

HARMLESS = (
  *("general.", "tokenizer.", "quantize.", "imatrix.", "GGUF."),
  *("llama.rope.scaling.original_context_length", "llama.rope.scaling.finetuned"),
)
"""Beginnings of keys that are known to leave logits unchanged.

They say where a file comes from, and how text becomes ids; the length before rotary
scaling matters only where there is scaling, which is refused.
"""

MODEL_TYPES = (None, "model")
"""Supported values of `general.type`; others are adapters and parts of models."""

LAYOUTS = ("Meta AI original pth",)
"""Values of `llama.tensor_data_layout` that mean the usual order of rows."""

MOST_VALUES = 4_000_000
"""Values in a file's metadata; 256,000 tokens and their merges take 2,000,000."""

GLOBAL_NAMES = {
  "token_embd": ("embed_tokens",),
  "output_norm": ("norm",),
  "output": ("lm_head",),
}
"""Tensors outside the layers, by their GGUF name without the last part."""

LAYER_NAMES = {
  "attn_norm": ("input_layernorm",),
  "attn_q": ("self_attn", "q_proj"),
  "attn_k": ("self_attn", "k_proj"),
  "attn_v": ("self_attn", "v_proj"),
  "attn_output": ("self_attn", "o_proj"),
  "ffn_norm": ("post_attention_layernorm",),
  "ffn_gate": ("mlp", "gate_proj"),
  "ffn_up": ("mlp", "up_proj"),
  "ffn_down": ("mlp", "down_proj"),
}
"""Tensors of a layer, by their name between `blk.i.` and the last part."""


def open_file(path: pathlib.Path, *, dtype: str = "float32") -> LazyParams:
  """Opens a GGUF file without decoding any tensor; `dtype` is the compute dtype.

  The params have Hugging Face's names and row order; each is decoded and rounded to
  bfloat16 when read.

  Raises:
    FileNotFoundError: The file is absent.
    NotImplementedError: The architecture or its rotary scaling is not supported.
    ValueError: The file is damaged, or tensors are missing, unexpected or mis-shaped.
  """
  reader = open_reader(path)
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  _check_ranges(reader, path)
  with refusing(path, "the metadata of a model converted by llama.cpp"):
    # What the library found well-formed can still have a value of another kind.
    config = read_config(reader, tensors, dtype=dtype)
    return LazyParams(dict(_stored_tensors(tensors, config)), config, str(path))


_HEADERS: contextvars.ContextVar[dict[pathlib.Path, "GGUFReader"] | None] = (
  contextvars.ContextVar("headers", default=None)
)
"""Readers by path while a `headers_kept` is open."""


@contextlib.contextmanager
def headers_kept() -> Iterator[None]:
  """Reads the header of each file once inside the block, and forgets it behind it.

  A vocabulary takes more than a second to read, and a command asks for the config, the
  weights and the tokenizer in turn. A file that changes meanwhile is not read again.
  """
  if _HEADERS.get() is not None:
    yield
    return
  token = _HEADERS.set({})
  try:
    yield
  finally:
    _HEADERS.reset(token)


def open_reader(path: pathlib.Path) -> "GGUFReader":
  """Memory-maps a GGUF file and reads its header; raises as `open_file` does."""
  kept = _HEADERS.get()
  if kept is None:
    return _read_header(path)
  if path not in kept:
    kept[path] = _read_header(path)
  return kept[path]


def _read_header(path: pathlib.Path) -> "GGUFReader":
  if not path.is_file():
    raise FileNotFoundRefusal(
      path,
      expected="a GGUF file",
      got="no file",
      mend="check the path",
    )
  refuse_pointer(path)
  with path.open("rb") as file:
    magic, version = file.read(4), int.from_bytes(file.read(4), "little")
  # A version below 2**16, read in the other order, has its value in the upper bytes.
  if magic == b"GGUF" and version and not version & 0xFFFF:
    raise NotImplementedRefusal(
      path,
      expected="a GGUF file in little-endian byte order",
      got="a big-endian one",
      mend="convert the model again, without --bigendian",
    )
  with refusing(path, "a complete GGUF file"):
    return _bounded_reader()(path)


def _check_ranges(reader: "GGUFReader", path: pathlib.Path) -> None:
  """Rejects tensors that share bytes."""
  end, before = 0, ""
  for tensor in sorted(reader.tensors, key=lambda one: int(one.data_offset)):
    if (start := int(tensor.data_offset)) < end:
      raise ValueRefusal(
        path,
        expected="tensors that do not overlap",
        got=f"{tensor.name} from byte {start}, where {before} ends at {end}",
        mend="download the file again",
      )
    end, before = start + int(tensor.n_bytes), tensor.name


@functools.cache
def _bounded_reader() -> type["GGUFReader"]:
  """Makes the library's reader stop where the file ends, and read from a plain array.

  By itself it reads nothing there, for as many times as a count says. A vocabulary is
  some hundred thousand values, and NumPy makes a slice of a `memmap` at several times
  the cost of one of the same bytes as a plain array.
  """
  from gguf import GGUFReader

  class Bounded(GGUFReader):
    reads = 0
    _mapped: np.ndarray

    @property
    def data(self) -> np.ndarray:
      """The mapped bytes of the file."""
      return self._mapped

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
      # The same mapped bytes, without the subclass.
      self._mapped = mapped.view(np.ndarray)

    def _get(
      self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any
    ) -> Any:
      # Counted, because a list claims its own length and is read value by value.
      self.reads += 1
      end = int(offset) + np.dtype(dtype).itemsize * int(count)
      if end > len(self.data) or self.reads > MOST_VALUES:
        raise ValueError(f"value {self.reads} would end at byte {end}")
      return super()._get(int(offset), dtype, count, *order, **named)

  return Bounded


def field(reader: "GGUFReader", key: str, default: Any = None) -> Any:
  """Returns a metadata value, or `default` if the file has no such key."""
  entry = reader.get_field(key)
  return default if entry is None else entry.contents()


def read_config(
  reader: "GGUFReader", tensors: dict[str, "ReaderTensor"], *, dtype: str = "float32"
) -> ModelConfig:
  """Reads the config from GGUF metadata; tied weights and biases from the tensors."""
  _check_supported(reader, tensors)

  def require(key: str, default: Any = None) -> Any:
    if (value := field(reader, key, default)) is None:
      raise ValueRefusal(
        "GGUF file",
        expected=f"the metadata key {key}",
        got="none",
        mend="use a file converted by llama.cpp",
      )
    if isinstance(value, list):
      raise NotImplementedRefusal(
        "GGUF file",
        expected=f"one {key} for all layers",
        got=f"{len(value)} values",
        mend="choose a model whose layers are alike",
      )
    return value

  heads = require("llama.attention.head_count")
  width = require("llama.embedding_length")
  epsilon = require("llama.attention.layer_norm_rms_epsilon")
  # GGUF lists the fastest axis first.
  vocabulary = int(tensors["token_embd.weight"].shape[1])

  def token(name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = field(reader, key)
    # The model cannot make an id beyond its embedding: the text would never end.
    if type(value) is int and value >= vocabulary:
      raise ValueRefusal(
        "GGUF file",
        expected=f"{key} below {vocabulary}, the size of the vocabulary",
        got=value,
        mend="correct the key, or convert the model again",
      )
    return value

  # Ends of a text, of a turn, and of a message.
  ends = [token(end) for end in ("eos", "eot", "eom")]
  config = ModelConfig(
    vocab_size=vocabulary,
    hidden_size=width,
    intermediate_size=require("llama.feed_forward_length"),
    num_layers=require("llama.block_count"),
    num_heads=heads,
    num_kv_heads=require("llama.attention.head_count_kv", heads),
    head_dim=field(reader, "llama.attention.key_length", width // heads),
    # The shortest decimal of a float32, so 1e-5 stays 1e-5.
    norm_eps=float(str(np.float32(epsilon))),
    rope_theta=float(field(reader, "llama.rope.freq_base", 10000.0)),
    tie_embeddings="output.weight" not in tensors,
    attention_bias="blk.0.attn_q.bias" in tensors,
    mlp_bias="blk.0.ffn_gate.bias" in tensors,
    max_positions=require("llama.context_length"),
    bos_id=token("bos"),
    eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
    dtype=dtype,
  )
  _refuse_unread(reader, config)
  return config


def _refuse_unread(reader: "GGUFReader", config: ModelConfig) -> None:
  """Rejects keys that are neither read nor known to leave logits unchanged.

  Some of these leave them unchanged at one value, that of the plain architecture.
  """
  plain = {
    # `read_config` counts the rows of the embedding; here both must agree.
    "llama.vocab_size": config.vocab_size,
    "llama.rope.dimension_count": config.head_dim,
    "llama.attention.value_length": config.head_dim,
    "llama.attention.causal": True,
    "llama.expert_count": 0,
    "llama.expert_used_count": 0,
    "llama.rope.scaling.factor": 1.0,
    "llama.rope.scaling.attn_factor": 1.0,
    "llama.rope.scale_linear": 1.0,
    "split.count": 1,
    "split.no": 0,
    "split.tensors.count": len(reader.tensors),
  }
  read = {f"llama.{name}" for name in READ}
  unread = []
  for key in reader.fields:
    if key in read or key.startswith(HARMLESS):
      continue
    value = field(reader, key)
    if key == "llama.tensor_data_layout" and value in LAYOUTS:
      continue
    if key not in plain or value != plain[key]:
      unread.append(f"{key}={str(value)[:40]}")
  if unread:
    raise NotImplementedRefusal(
      "GGUF file",
      expected="only metadata that is read or changes no logit",
      got=", ".join(unread),
      mend="load the Hugging Face folder of this model",
    )


def _check_supported(reader: "GGUFReader", tensors: dict[str, "ReaderTensor"]) -> None:
  architecture = field(reader, "general.architecture")
  if architecture not in ARCHITECTURES:
    raise NotImplementedRefusal(
      "GGUF file",
      expected=f"an architecture of {', '.join(ARCHITECTURES)}",
      got=architecture,
      mend="load the Hugging Face folder of this model, which more families have",
    )
  if (kind := field(reader, "general.type")) not in MODEL_TYPES:
    raise NotImplementedRefusal(
      "GGUF file",
      expected="a whole model",
      got=f"one of the type {kind}",
      mend="name the file of the model",
    )
  scaling = field(reader, "llama.rope.scaling.type", "none")
  if scaling != "none" or "rope_freqs.weight" in tensors:
    raise NotImplementedRefusal(
      "GGUF file",
      expected="no rotary scaling",
      got="rope_freqs.weight" if scaling == "none" else f"the type {scaling}",
      mend="load the Hugging Face folder of this model",
    )


def _stored_tensors(
  tensors: dict[str, "ReaderTensor"], config: ModelConfig
) -> Iterator[tuple[Path, StoredTensor]]:
  """Yields tensors by params path; unknown names are kept and rejected later."""
  heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
  for name, tensor in tensors.items():
    *scope, kind, last = name.split(".")
    path = (name,)
    if not scope and kind in GLOBAL_NAMES:
      path = (*GLOBAL_NAMES[kind], last)
    elif scope[:1] == ["blk"] and kind in LAYER_NAMES:
      path = (f"layers_{scope[1]}", *LAYER_NAMES[kind], last)
    # GGUF lists the fastest axis first.
    shape = tuple(int(size) for size in reversed(tensor.shape))
    # 0 where rows are not rotated and keep their order.
    read = functools.partial(_decode, tensor, shape, heads.get(kind, 0))
    yield path, StoredTensor(name, shape, read)


def _decode(
  tensor: "ReaderTensor", shape: tuple[int, ...], permuted_heads: int
) -> np.ndarray:
  """Dequantizes a tensor to bfloat16, in Hugging Face's row order."""
  from gguf.quants import dequantize

  # NaN and inf are found and counted when a layer is read.
  with np.errstate(all="ignore"):
    values = np.asarray(dequantize(tensor.data, tensor.tensor_type)).reshape(shape)
    if permuted_heads:
      values = unpermute(values, permuted_heads)
    return values.astype(np.float32).astype(jnp.bfloat16)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
  """Restores Hugging Face's order of the `[heads * head_dim, ...]` rows of q and k.

  llama.cpp rotates neighbouring coordinates (2i, 2i + 1) of a head, Hugging Face
  (i, i + head_dim/2); its converter interleaves the halves of each head to match.
  """
  paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
  return paired.swapaxes(1, 2).reshape(rows.shape)
