"""The frozen configuration of a decoder model, and its JSON form."""

import dataclasses
from collections.abc import Mapping
from typing import Any

COMPUTE_DTYPES = ("float32", "bfloat16")
"""Names accepted by `ModelConfig.dtype`."""

QK_NORMS = (None, "head", "projection")
"""Values of `ModelConfig.qk_norm`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Llama-3 scaling of the rotary frequencies.

  Attributes:
    factor: Divisor of the low frequencies.
    low_freq_factor: Wavelengths above `original_max_position / low_freq_factor` tokens
      are stretched by `factor`.
    high_freq_factor: Wavelengths below `original_max_position / high_freq_factor`
      tokens are kept; those in between are interpolated.
    original_max_position: Context length before scaling, in tokens.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Shape and arithmetic of a decoder model.

  Attributes:
    family: Model family, a key of `mxjax.models.families.FAMILIES`.
    vocab_size: Rows of the embedding.
    hidden_size: Width d of the residual stream.
    intermediate_size: Width of the gated MLP.
    num_layers: Decoder layers.
    num_heads: Query heads.
    num_kv_heads: Key-value heads; divides `num_heads`.
    head_dim: Width of a head, even.
    norm_eps: Added to the mean square in every RMSNorm.
    rope_theta: Base of the rotary frequencies.
    rope_scaling: Llama-3 scaling of the rotary frequencies, or None.
    tie_embeddings: Whether the output head is the embedding matrix.
    attention_bias: Whether the q, k, v and o projections have a bias.
    qkv_bias: Whether q, k and v have a bias but o has none (Qwen2).
    mlp_bias: Whether the gate, up and down projections have a bias.
    qk_norm: RMSNorm of queries and keys before rotation: over each `"head"` (Qwen3),
      over the whole `"projection"` (OLMo-2), or None.
    is_post_norm: Whether the outputs of attention and MLP are normalized (OLMo-2)
      instead of their inputs.
    sliding_window: Tokens that a query attends to in every layer, itself included
      (Mistral), or None for the whole past.
    max_positions: Longest supported sequence, in tokens.
    bos_id: Token that begins a text, or None.
    eos_ids: Tokens that end a text, possibly none.
    dtype: Name of the compute dtype; the params keep their own.
  """

  family: str = "llama"
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  norm_eps: float
  rope_theta: float
  rope_scaling: RopeScaling | None = None
  tie_embeddings: bool = False
  attention_bias: bool = False
  qkv_bias: bool = False
  mlp_bias: bool = False
  qk_norm: str | None = None
  is_post_norm: bool = False
  sliding_window: int | None = None
  max_positions: int
  bos_id: int | None = None
  eos_ids: tuple[int, ...] = ()
  dtype: str = "float32"

  def __post_init__(self) -> None:
    """Rejects inconsistent fields."""
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        "ModelConfig: num_heads must be a multiple of num_kv_heads, got "
        f"{self.num_heads=} and {self.num_kv_heads=}; correct the model's config."
      )
    if self.head_dim % 2:
      raise ValueError(
        f"ModelConfig: head_dim must be even for rotary embedding, got "
        f"{self.head_dim=}; correct the model's config."
      )
    if self.qk_norm not in QK_NORMS:
      raise ValueError(
        f"ModelConfig: qk_norm must be one of {QK_NORMS}, got {self.qk_norm!r}; "
        "correct the model's config."
      )
    if self.sliding_window is not None and self.sliding_window < 1:
      raise ValueError(
        "ModelConfig: sliding_window must be positive or None, got "
        f"{self.sliding_window}; correct the model's config."
      )
    if self.dtype not in COMPUTE_DTYPES:
      raise ValueError(
        f"ModelConfig: dtype must be one of {', '.join(COMPUTE_DTYPES)}, got "
        f"{self.dtype!r}; pass one of them as `dtype=`."
      )

  def to_dict(self) -> dict[str, Any]:
    """Returns the fields as JSON values."""
    values = dataclasses.asdict(self)
    values["eos_ids"] = list(self.eos_ids)
    return values

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
    """Rebuilds a config from the output of `to_dict`, also after a JSON round trip.

    Raises:
      ValueError: Fields are missing, unknown or inconsistent.
    """
    fields = dataclasses.fields(cls)
    required = {one.name for one in fields if one.default is dataclasses.MISSING}
    missing, unknown = (
      required - set(values),
      set(values) - {one.name for one in fields},
    )
    if missing or unknown:
      raise ValueError(
        f"ModelConfig.from_dict: missing fields {sorted(missing)}, unknown fields "
        f"{sorted(unknown)}; use a dict made by `ModelConfig.to_dict`."
      )
    scaling = values.get("rope_scaling")
    return cls(
      **{
        **values,
        "rope_scaling": None if scaling is None else RopeScaling(**scaling),
        "eos_ids": tuple(values.get("eos_ids", ())),
      }
    )
