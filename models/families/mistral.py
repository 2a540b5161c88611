"""Mistral: Llama's layer with a head width of its own and a sliding window.

A query sees itself and the `sliding_window - 1` tokens before it. Version 0.1 slides
over 4,096 tokens; from 0.2 on the field is null and all of the past is seen.
"""

from collections.abc import Mapping
from typing import Any

from mxjax.models.config import ModelConfig
from mxjax.models.families import hf_config

ARCHITECTURE = "MistralForCausalLM"
DEFAULTS = hf_config.Defaults(norm_eps=1e-6, max_positions=131072, num_kv_heads=8)
DEFAULT_WINDOW = 4096
"""What transformers takes where the field is absent, not null."""
ALSO_READ = frozenset({"sliding_window"})


def from_hf_config(values: Mapping[str, Any], *, dtype: str = "float32") -> ModelConfig:
  """Translates a config of the Mistral architecture; see `hf_config.read`."""
  return hf_config.read(
    values,
    "mistral",
    DEFAULTS,
    also_read=ALSO_READ,
    dtype=dtype,
    sliding_window=values.get("sliding_window", DEFAULT_WINDOW),
  )
