"""OLMo-2: post-norm, and RMSNorm over the whole query and key projections.

The outputs of attention and MLP are normalized instead of their inputs, so
`input_layernorm` is absent and `post_feedforward_layernorm` is present. The q and k
norms span all heads at once, with one scale per coordinate. In bfloat16 the scale of a
norm is applied after rounding, as in the other families; transformers applies it
before.
"""

from mxjax.models.families.hf_config import Family

FAMILY = Family(
  name="olmo2",
  architecture="Olmo2ForCausalLM",
  defaults={"norm_eps": 1e-5, "max_positions": 2048},
  flags=("attention_bias",),
  fixed={"qk_norm": "projection", "is_post_norm": True},
)
