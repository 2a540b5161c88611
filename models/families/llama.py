"""Llama 2, 3, 3.1, 3.2 and models of the same architecture, such as SmolLM2.

Pre-norm, grouped queries, gated MLP. Special: the Llama-3 stretch of the rotary
frequencies, and optional biases on all attention or all MLP projections.
"""

from collections.abc import Mapping
from typing import Any

from mxjax.models.config import ModelConfig
from mxjax.models.families import hf_config

ARCHITECTURE = "LlamaForCausalLM"
DEFAULTS = hf_config.Defaults(norm_eps=1e-6, max_positions=2048)
ALSO_READ = frozenset({"attention_bias", "mlp_bias"})


def from_hf_config(values: Mapping[str, Any], *, dtype: str = "float32") -> ModelConfig:
  """Translates a config of the Llama architecture; see `hf_config.read`."""
  return hf_config.read(
    values,
    "llama",
    DEFAULTS,
    also_read=ALSO_READ,
    dtype=dtype,
    attention_bias=hf_config.get(values, "attention_bias", False),
    mlp_bias=hf_config.get(values, "mlp_bias", False),
  )
