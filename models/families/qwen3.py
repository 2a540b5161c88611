"""Qwen3: Llama's layer with an RMS norm on each query and key head.

The norm acts on the `head_dim` coordinates of a head, before rotation, with one scale
for all heads. Heads have a width of their own: `num_heads * head_dim` need not be the
width of the model. The biases of Qwen2 are gone.
"""

from collections.abc import Mapping
from typing import Any

from mxjax.models.config import ModelConfig
from mxjax.models.families import hf_config, qwen2

ARCHITECTURE = "Qwen3ForCausalLM"
DEFAULTS = hf_config.Defaults(
  norm_eps=1e-6, max_positions=32768, num_kv_heads=32, head_dim=128
)
ALSO_READ = qwen2.ALSO_READ | {"attention_bias"}


def from_hf_config(values: Mapping[str, Any], *, dtype: str = "float32") -> ModelConfig:
  """Translates a config of the Qwen3 architecture; see `hf_config.read`."""
  return hf_config.read(
    values,
    "qwen3",
    DEFAULTS,
    also_read=ALSO_READ,
    dtype=dtype,
    attention_bias=hf_config.get(values, "attention_bias", False),
    qk_norm="head",
    sliding_window=qwen2.window(values),
  )
