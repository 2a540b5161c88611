"""Qwen2 and Qwen2.5: Llama's layer with biases on q, k and v, and none on o.

The configs use a sliding window only if `use_sliding_window` is set, and then only in
the layers from `max_window_layers` on.
"""

from collections.abc import Mapping
from typing import Any

from mxjax.models.families.hf_config import (
  Family,
  Window,
  get,
  refuse_mixed_layers,
  require,
)

DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


def _read_window(values: Mapping[str, Any]) -> int | None:
  """Returns the window of all layers, or None; rejects models where only some slide."""
  if not values.get("use_sliding_window"):
    return None
  first = get(values, "max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
  layers = range(require(values, "num_hidden_layers"))
  kinds = values.get("layer_types") or [
    "sliding_attention" if index >= first else "full_attention" for index in layers
  ]
  if set(kinds) == {"full_attention"}:
    return None
  if set(kinds) != {"sliding_attention"}:
    refuse_mixed_layers(set(kinds))
  return values.get("sliding_window", DEFAULT_WINDOW)


def _write_window(window: int | None) -> dict[str, Any]:
  if not window:
    return {}
  return {
    "use_sliding_window": True,
    "sliding_window": window,
    "max_window_layers": 0,
  }


WINDOW = Window(
  frozenset({"sliding_window", "use_sliding_window", "max_window_layers"}),
  _read_window,
  _write_window,
)
FAMILY = Family(
  name="qwen2",
  architecture="Qwen2ForCausalLM",
  defaults={"norm_eps": 1e-6, "max_positions": 32768, "num_kv_heads": 32},
  fixed={"qkv_bias": True},
  window=WINDOW,
)
