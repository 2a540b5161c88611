"""Decoder models: configs, linen ports, loaders, tokenizers and generation."""

import pathlib
from typing import Any

from mxjax.models import gguf, hub, weights
from mxjax.models.config import ModelConfig, RopeScaling
from mxjax.models.generation import generate
from mxjax.models.tokenizer import Tokenizer
from mxjax.models.transformer import PROJECTION_TAPS, CausalLM

__all__ = [
  "PROJECTION_TAPS",
  "CausalLM",
  "ModelConfig",
  "RopeScaling",
  "Tokenizer",
  "from_pretrained",
  "generate",
  "load_tokenizer",
]


def from_pretrained(
  source: str | pathlib.Path | None = None, *, dtype: str = "float32"
) -> tuple[CausalLM, dict[str, Any]]:
  """Loads a model and its weights.

  Args:
    source: None for the embedded SmolLM2-135M-Instruct, a `.gguf` file, a folder
      saved by transformers, or a hub id.
    dtype: Compute dtype, "float32" or "bfloat16"; the params keep the dtype they are
      stored in (bfloat16 after a GGUF file).

  Returns:
    A linen module and its params, so that `model.apply({"params": params}, tokens)`
    maps int32 `[B, T]` to float32 logits `[B, T, V]`.

  Raises:
    FileNotFoundError: There is no such model, or no network to fetch it.
    NotImplementedError: The architecture or a feature of it is not supported.
    ValueError: Files are damaged or do not fit their config.
  """
  path = hub.resolve(source)
  load = weights.load_folder if path.is_dir() else gguf.load_file
  config, params = load(path, dtype=dtype)
  return CausalLM(config), params


def load_tokenizer(source: str | pathlib.Path | None = None) -> Tokenizer:
  """Loads the tokenizer of a model.

  Args:
    source: The same as for `from_pretrained`.

  Returns:
    The tokenizer.

  Raises:
    FileNotFoundError: There is no such model, or it has no tokenizer.
    NotImplementedError: The GGUF file splits text in a way that is not supported.
  """
  path = hub.resolve(source)
  return Tokenizer.from_folder(path) if path.is_dir() else Tokenizer.from_gguf(path)
