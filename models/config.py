"""The frozen configuration of a decoder model, and its JSON form."""

import dataclasses
from collections.abc import Mapping
from typing import Any

COMPUTE_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Llama-3 scaling of the rotary frequencies.

  Wavelengths above `original_max_position / low_freq_factor` tokens are stretched by
  `factor`, those below `original_max_position / high_freq_factor` are kept, and those
  in between are interpolated.
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
    heads, groups, window = self.num_heads, self.num_kv_heads, self.sliding_window
    norms = (None, "head", "projection")
    for is_wrong, expected in (
      (heads % groups, f"num_heads a multiple of num_kv_heads, got {heads}, {groups}"),
      (self.head_dim % 2, f"an even head_dim to rotate, got {self.head_dim}"),
      (self.qk_norm not in norms, f"qk_norm one of {norms}, got {self.qk_norm!r}"),
      (
        window is not None and window < 1,
        f"a positive sliding_window or None, got {window}",
      ),
      (
        self.dtype not in COMPUTE_DTYPES,
        f"dtype one of {', '.join(COMPUTE_DTYPES)}, got {self.dtype!r}",
      ),
    ):
      if is_wrong:
        raise ValueError(
          f"ModelConfig: expected {expected}; correct the model's config, or the dtype "
          "that you pass."
        )

  def to_dict(self) -> dict[str, Any]:
    """Returns the fields as JSON values."""
    return dataclasses.asdict(self) | {"eos_ids": list(self.eos_ids)}

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
    """Rebuilds a config from the output of `to_dict`, also after a JSON round trip.

    Raises:
      ValueError: Fields are missing, unknown or inconsistent.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    missing = {k for k, v in defaults.items() if v is dataclasses.MISSING} - {*values}
    unknown = {*values} - {*defaults}
    if missing or unknown:
      raise ValueError(
        f"ModelConfig.from_dict: missing fields {sorted(missing)}, unknown fields "
        f"{sorted(unknown)}; use a dict made by `ModelConfig.to_dict`."
      )
    scaling = values.get("rope_scaling")
    typed = {
      "rope_scaling": None if scaling is None else RopeScaling(**scaling),
      "eos_ids": tuple(values.get("eos_ids", ())),
    }
    return cls(**{**values, **typed})
