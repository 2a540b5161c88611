"""OLMo-2: post-norm, and an RMS norm over the whole query and key projection.

Attention and MLP read the residual stream as it is; what they return is normalized
before it is added, so `input_layernorm` is absent and `post_feedforward_layernorm`
stands at the end. The q and k norms span all heads at once, with a scale for each
coordinate. In bfloat16 the scale of a norm is applied after rounding, as in the other
families; transformers applies it before.
"""

from collections.abc import Mapping
from typing import Any

from mxjax.models.config import ModelConfig
from mxjax.models.families import hf_config

ARCHITECTURE = "Olmo2ForCausalLM"
DEFAULTS = hf_config.Defaults(norm_eps=1e-5, max_positions=2048)
ALSO_READ = frozenset({"attention_bias"})


def from_hf_config(values: Mapping[str, Any], *, dtype: str = "float32") -> ModelConfig:
  """Translates a config of the OLMo-2 architecture; see `hf_config.read`."""
  return hf_config.read(
    values,
    "olmo2",
    DEFAULTS,
    also_read=ALSO_READ,
    dtype=dtype,
    attention_bias=hf_config.get(values, "attention_bias", False),
    qk_norm="projection",
    is_post_norm=True,
  )
