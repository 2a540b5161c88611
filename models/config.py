"""The frozen configuration of a decoder model, and its JSON form."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from mxjax.errors import ValueRefusal

COMPUTE_DTYPES = ("float32", "bfloat16")
QK_NORMS = ("head", "projection")
SIZES = {
  "vocab_size": 2**24,
  "hidden_size": 2**20,
  "intermediate_size": 2**22,
  "num_layers": 2**12,
  "num_heads": 2**14,
  "num_kv_heads": 2**14,
  "head_dim": 2**14,
  "max_positions": 2**31 - 1,
  "sliding_window": 2**31 - 1,
}
"""Largest value of each size; a config beyond is damaged, and never computed with."""
_FLAGS = "tie_embeddings attention_bias qkv_bias mlp_bias is_post_norm".split()


def size_fault(name: str, value: Any) -> tuple[str, str] | None:
  """Says what is expected and what came if `value`, from a file, is no size at all."""
  # By exact type: to `isinstance`, true is an integer.
  if type(value) is int and 1 <= value <= SIZES[name]:
    return None
  return f"{name} an integer from 1 to {SIZES[name]}", str(value)[:40]


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
    # The first fault alone: later checks compute with what earlier ones accept.
    for expected, got in self._faults():
      raise ValueRefusal(
        "ModelConfig",
        expected=expected,
        got=got,
        mend="correct the model's config, or the dtype that you pass",
      )

  def _faults(self) -> Iterator[tuple[str, object]]:
    """Yields what is expected and what came, types first: values come from files."""
    for name in SIZES:
      value = getattr(self, name)
      if name != "sliding_window" or value is not None:
        if fault := size_fault(name, value):
          yield fault
    scaling = dataclasses.asdict(self.rope_scaling) if self.rope_scaling else {}
    for name in ("norm_eps", "rope_theta", *scaling):
      value = scaling[name] if name in scaling else getattr(self, name)
      if type(value) not in (int, float) or not 0 < value < math.inf:
        yield f"a positive {name}", repr(value)
    for name in _FLAGS:
      if type(value := getattr(self, name)) is not bool:
        yield f"{name} true or false", repr(value)
    for value in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
      if type(value) is not int or not 0 <= value < 2**31:
        yield "token ids for bos_id and eos_ids", repr(value)
    heads, groups, norms = self.num_heads, self.num_kv_heads, (None, *QK_NORMS)
    if heads % groups:
      yield "num_heads a multiple of num_kv_heads", f"{heads}, {groups}"
    if self.head_dim % 2:
      yield "an even head_dim to rotate", self.head_dim
    if self.qk_norm not in norms:
      yield f"qk_norm one of {norms}", repr(self.qk_norm)
    if self.dtype not in COMPUTE_DTYPES:
      yield f"dtype one of {', '.join(COMPUTE_DTYPES)}", repr(self.dtype)

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
    if wrong := [*(f"no {name}" for name in sorted(missing)), *sorted(unknown)]:
      raise ValueRefusal(
        "ModelConfig.from_dict",
        expected="the fields that `ModelConfig.to_dict` writes",
        got=", ".join(wrong),
        mend="use a dict that it made",
      )
    # JSON has dicts and lists; a hashable config has a dataclass and a tuple.
    scaling = values.get("rope_scaling")
    typed = {
      "rope_scaling": None if scaling is None else RopeScaling(**scaling),
      "eos_ids": tuple(values.get("eos_ids", ())),
    }
    return cls(**{**values, **typed})
