"""Qwen3: Llama's layer with an RMSNorm on each query and key head.

The norm acts on the `head_dim` coordinates of a head before rotation, with one scale
shared by all heads. `num_heads * head_dim` need not equal the hidden size. Unlike
Qwen2, there are no biases.
"""

from mxjax.models.families import qwen2
from mxjax.models.families.hf_config import Family

FAMILY = Family(
  name="qwen3",
  architecture="Qwen3ForCausalLM",
  defaults={
    "norm_eps": 1e-6,
    "max_positions": 32768,
    "num_kv_heads": 32,
    "head_dim": 128,
  },
  flags=("attention_bias",),
  fixed={"qk_norm": "head"},
  window=qwen2.WINDOW,
)
