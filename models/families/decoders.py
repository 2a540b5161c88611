"""The supported families, one object each; to add one, add an object and its entry."""

from mxjax.models.families.hf_config import Family, Window

# Llama 2, 3, 3.1, 3.2 and models of the same architecture, such as SmolLM2: pre-norm,
# grouped-query attention, gated MLP, Llama-3 scaling of the rotary frequencies, and
# optional biases on all attention or all MLP projections.
LLAMA = Family(
  name="llama",
  architecture="LlamaForCausalLM",
  flags=("attention_bias", "mlp_bias"),
)

# Llama's layer with an explicit head width and a sliding window: a query attends to
# itself and the `sliding_window - 1` tokens before it. Version 0.1 uses 4,096 tokens;
# from 0.2 on the field is null and the whole past is visible.
MISTRAL = Family(
  name="mistral",
  architecture="MistralForCausalLM",
  window=Window(
    frozenset({"sliding_window"}), lambda window: {"sliding_window": window}
  ),
)


# It slides only if `use_sliding_window` is set, from layer `max_window_layers` on.
_QWEN_WINDOW = Window(
  frozenset({"sliding_window", "use_sliding_window", "max_window_layers"}),
  lambda window: (
    {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    if window
    else {}
  ),
)

# Qwen2 and Qwen2.5: Llama's layer with biases on q, k and v, and none on o.
QWEN2 = Family(
  name="qwen2",
  architecture="Qwen2ForCausalLM",
  fixed={"qkv_bias": True},
  window=_QWEN_WINDOW,
)

# Llama's layer with an RMSNorm on the `head_dim` coordinates of each query and key head
# before rotation, with one scale shared by all heads. `num_heads * head_dim` need not
# equal the hidden size. Unlike in Qwen2, there are no biases.
QWEN3 = Family(
  name="qwen3",
  architecture="Qwen3ForCausalLM",
  flags=("attention_bias",),
  fixed={"qk_norm": "head"},
  window=_QWEN_WINDOW,
)

# Post-norm, and an RMSNorm over the whole query and key projections: the outputs of
# attention and MLP are normalized instead of their inputs, so `input_layernorm` is
# absent and `post_feedforward_layernorm` is present. In bfloat16 the scale of a norm is
# applied after rounding, as in the other families; transformers applies it before.
OLMO2 = Family(
  name="olmo2",
  architecture="Olmo2ForCausalLM",
  flags=("attention_bias",),
  fixed={"qk_norm": "projection", "is_post_norm": True},
)

FAMILIES = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2)}
"""The families by `model_type`."""
