"""The frozen description of a decoder model, and its JSON form."""

import dataclasses
from collections.abc import Mapping
from typing import Any

COMPUTE_DTYPES = ("float32", "bfloat16")
"""Names accepted by `ModelConfig.dtype`."""

QK_NORMS = (None, "head", "projection")
"""Values of `ModelConfig.qk_norm`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """The Llama-3 stretch of rotary frequencies.

  Attributes:
    factor: How much slower the low frequencies turn.
    low_freq_factor: Wavelengths above `original_max_position / low_freq_factor`
      tokens are stretched by `factor`.
    high_freq_factor: Wavelengths below `original_max_position / high_freq_factor`
      tokens are kept; those between the two are blended.
    original_max_position: Context length before the stretch, in tokens.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Everything that fixes the shape and the arithmetic of a decoder model.

  Attributes:
    family: Model family, a key of `mxjax.models.families.FAMILIES`.
    vocab_size: Rows of the embedding.
    hidden_size: Width d of the residual stream.
    intermediate_size: Width of the gated MLP.
    num_layers: Decoder layers.
    num_heads: Query heads.
    num_kv_heads: Key-value heads; divides `num_heads`.
    head_dim: Coordinates of a head, even.
    norm_eps: Added to the mean square in every RMS norm.
    rope_theta: Base of the rotary frequencies.
    rope_scaling: Llama-3 scaling of them, or None.
    tie_embeddings: Whether the head is the embedding matrix.
    attention_bias: Whether q, k, v and o projections have a bias.
    qkv_bias: Whether q, k and v have a bias and o has none (Qwen2).
    mlp_bias: Whether gate, up and down projections have a bias.
    qk_norm: RMS norm of queries and keys before rotation: over each `"head"`
      (Qwen3), over the whole `"projection"` (OLMo-2), or None.
    is_post_norm: Whether attention and MLP read the residual stream as it is and
      their outputs are normalized (OLMo-2), instead of their inputs.
    sliding_window: Tokens that a query sees, itself included, or None for all of the
      past (Mistral). Every layer has the same window.
    max_positions: Longest sequence the model was made for, in tokens.
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
    """Refuses combinations no layer could compute."""
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
    """Returns the fields as plain JSON values."""
    values = dataclasses.asdict(self)
    values["eos_ids"] = list(self.eos_ids)
    return values

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
    """Rebuilds an equal config from what `to_dict` returned, also through JSON.

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
