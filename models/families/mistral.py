"""Mistral: Llama's layer with an explicit head width and a sliding window.

A query attends to itself and the `sliding_window - 1` tokens before it. Version 0.1
uses 4,096 tokens; from 0.2 on the field is null and the whole past is visible.
"""

from mxjax.models.families.hf_config import Family, Window

DEFAULT_WINDOW = 4096
"""Value that transformers assumes if the field is absent (not null)."""

FAMILY = Family(
  name="mistral",
  architecture="MistralForCausalLM",
  defaults={"norm_eps": 1e-6, "max_positions": 131072, "num_kv_heads": 8},
  window=Window(
    fields=frozenset({"sliding_window"}),
    read=lambda values: values.get("sliding_window", DEFAULT_WINDOW),
    write=lambda window: {"sliding_window": window},
  ),
)
