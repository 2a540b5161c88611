"""Llama 2, 3, 3.1, 3.2 and models of the same architecture, such as SmolLM2.

Pre-norm, grouped-query attention, gated MLP; Llama-3 scaling of the rotary frequencies
and optional biases on all attention or all MLP projections.
"""

from mxjax.models.families.hf_config import Family

FAMILY = Family(
  name="llama",
  architecture="LlamaForCausalLM",
  defaults={"norm_eps": 1e-6, "max_positions": 2048},
  flags=("attention_bias", "mlp_bias"),
)
