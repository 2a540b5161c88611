"""Decoder language models: configs, linen ports, loaders, tokenizers, generation."""

import pathlib
from typing import Any

from mxjax.models.config import ModelConfig, RopeScaling
from mxjax.models.generation import generate, generate_each
from mxjax.models.loading import gguf, hub, weights
from mxjax.models.loading.hub import default_dtype
from mxjax.models.loading.lazy import LazyParams
from mxjax.models.tokenizer import Tokenizer
from mxjax.models.transformer import PROJECTION_TAPS, CausalLM

__all__ = [
  "PROJECTION_TAPS",
  "CausalLM",
  "LazyParams",
  "ModelConfig",
  "RopeScaling",
  "Tokenizer",
  "default_dtype",
  "from_pretrained",
  "generate",
  "generate_each",
  "load_config",
  "load_tokenizer",
  "open_pretrained",
]


def from_pretrained(
  source: str | pathlib.Path | None = None, *, dtype: str | None = "float32"
) -> tuple[CausalLM, dict[str, Any]]:
  """Loads a model and all of its weights.

  Args:
    source: None for the embedded SmolLM2-135M-Instruct, a `.gguf` file, a folder saved
      by transformers, or a hub id.
    dtype: Compute dtype, "float32" or "bfloat16"; None takes `default_dtype(source)`,
      as every command does without --dtype. The params keep the dtype in which they
      are stored (bfloat16 for a GGUF file).

  Returns:
    A linen module and its params. `model.apply({"params": params}, tokens)` maps int32
    `[B, T]` to float32 logits `[B, T, V]`.

  Raises:
    FileNotFoundError: The model does not exist, or there is no network to fetch it.
    NotImplementedError: The architecture or one of its features is not supported.
    ValueError: Files are damaged or do not fit their config.
  """
  model, params = open_pretrained(source, dtype=dtype)
  return model, params.load()


def open_pretrained(
  source: str | pathlib.Path | None = None, *, dtype: str | None = "float32"
) -> tuple[CausalLM, LazyParams]:
  """Opens a model whose weights stay on disk until a layer is read.

  Quantization and evaluation accept such params like a dict and hold one layer at a
  time; `model.apply` does not. Arguments and errors are those of `from_pretrained`,
  except that NaN and inf are detected only when a layer is read.
  """
  dtype = dtype or default_dtype(source)
  path = hub.resolve(source)
  open_ = weights.open_folder if path.is_dir() else gguf.open_file
  params = open_(path, dtype=dtype)
  return CausalLM(params.config), params


def load_config(
  source: str | pathlib.Path | None = None, *, dtype: str | None = "float32"
) -> ModelConfig:
  """Reads the config of a model, without downloading its weights.

  Arguments and errors are as in `from_pretrained`; `source` may be a `config.json`.
  """
  dtype = dtype or default_dtype(source)
  path = hub.resolve(source, with_weights=False)
  if path.suffix == ".gguf":
    return gguf.open_file(path, dtype=dtype).config
  return weights.read_config(path, dtype=dtype)


def load_tokenizer(source: str | pathlib.Path | None = None) -> Tokenizer:
  """Loads the tokenizer of a model; `source` is as in `from_pretrained`.

  Raises:
    FileNotFoundError: The model does not exist, or it has no tokenizer.
    NotImplementedError: The GGUF file uses an unsupported pre-tokenizer, or the
      tokenizer is none that `tokenizers` can run.
  """
  path = hub.resolve(source, with_weights=False)
  return Tokenizer.from_folder(path) if path.is_dir() else Tokenizer.from_gguf(path)
