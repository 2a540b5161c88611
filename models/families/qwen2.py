"""Qwen2 and Qwen2.5: Llama's layer with biases on q, k and v, and none on o.

The window of these configs is off unless `use_sliding_window` is set; then the layers
from `max_window_layers` on slide.
"""

from collections.abc import Mapping
from typing import Any

from mxjax.models.config import ModelConfig
from mxjax.models.families import hf_config

ARCHITECTURE = "Qwen2ForCausalLM"
DEFAULTS = hf_config.Defaults(norm_eps=1e-6, max_positions=32768, num_kv_heads=32)
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28
ALSO_READ = frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})


def from_hf_config(values: Mapping[str, Any], *, dtype: str = "float32") -> ModelConfig:
  """Translates a config of the Qwen2 architecture; see `hf_config.read`."""
  return hf_config.read(
    values,
    "qwen2",
    DEFAULTS,
    also_read=ALSO_READ,
    dtype=dtype,
    qkv_bias=True,
    sliding_window=window(values),
  )


def window(values: Mapping[str, Any]) -> int | None:
  """The window of all layers of a Qwen config, or None.

  Raises:
    NotImplementedError: Some layers slide and others do not.
  """
  if not values.get("use_sliding_window"):
    return None
  first = hf_config.get(values, "max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
  layers = range(hf_config.require(values, "num_hidden_layers"))
  kinds = values.get("layer_types") or [
    "sliding_attention" if index >= first else "full_attention" for index in layers
  ]
  if set(kinds) == {"full_attention"}:
    return None
  if set(kinds) != {"sliding_attention"}:
    hf_config.refuse_mixed_layers(set(kinds))
  return values.get("sliding_window", DEFAULT_WINDOW)
