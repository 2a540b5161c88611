"""Translation of a Hugging Face `config.json` of the Llama family."""

from collections.abc import Mapping
from typing import Any

from mxjax.models.config import ModelConfig, RopeScaling

ARCHITECTURES = ("LlamaForCausalLM",)
"""Values of `architectures` that this package runs."""


def from_hf_config(values: Mapping[str, Any], *, dtype: str = "float32") -> ModelConfig:
  """Translates a config as transformers 4 or 5 writes it.

  Args:
    values: The parsed `config.json`.
    dtype: Compute dtype.

  Returns:
    The model's description.

  Raises:
    NotImplementedError: The architecture, or a feature in the config that would
      change the result, is not supported.
    ValueError: A required field is absent.
  """
  _check_architecture(values)
  _check_features(values)
  heads, width = (
    _require(values, "num_attention_heads"),
    _require(values, "hidden_size"),
  )
  theta, scaling = _rope(values)
  return ModelConfig(
    vocab_size=_require(values, "vocab_size"),
    hidden_size=width,
    intermediate_size=_require(values, "intermediate_size"),
    num_layers=_require(values, "num_hidden_layers"),
    num_heads=heads,
    num_kv_heads=_get(values, "num_key_value_heads", heads),
    head_dim=_get(values, "head_dim", width // heads),
    norm_eps=_get(values, "rms_norm_eps", 1e-6),
    rope_theta=theta,
    rope_scaling=scaling,
    tie_embeddings=_get(values, "tie_word_embeddings", False),
    attention_bias=_get(values, "attention_bias", False),
    mlp_bias=_get(values, "mlp_bias", False),
    max_positions=_get(values, "max_position_embeddings", 2048),
    bos_id=values.get("bos_token_id"),
    eos_ids=_token_ids(values.get("eos_token_id")),
    dtype=dtype,
  )


def _get(values: Mapping[str, Any], key: str, default: Any) -> Any:
  """Returns a field; null means the default, as it does in transformers."""
  value = values.get(key)
  return default if value is None else value


def _require(values: Mapping[str, Any], key: str) -> Any:
  """Returns a field that has no default."""
  if values.get(key) is None:
    raise ValueError(
      f"config.json: expected a field {key}, got none; use the config of the model."
    )
  return values[key]


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
  """Returns none, one or several ids as a tuple."""
  if value is None:
    return ()
  return (value,) if isinstance(value, int) else tuple(value)


def _check_architecture(values: Mapping[str, Any]) -> None:
  """Refuses other model families by name."""
  names = values.get("architectures") or [values.get("model_type")]
  if not set(names) & {*ARCHITECTURES, "llama"}:
    raise NotImplementedError(
      f"config.json: expected an architecture of {', '.join(ARCHITECTURES)}, got "
      f"{', '.join(map(str, names))}; choose a model of a supported architecture."
    )


def _check_features(values: Mapping[str, Any]) -> None:
  """Refuses what would change the result without being computed."""
  slides = values.get("sliding_window") and values.get("use_sliding_window", True)
  kinds = set(values.get("layer_types") or ["full_attention"])
  problems = {
    "sliding-window attention": slides or kinds != {"full_attention"},
    f"hidden_act {values.get('hidden_act')}": _get(values, "hidden_act", "silu")
    != "silu",
    "already quantized weights": values.get("quantization_config"),
  }
  found = [name for name, is_present in problems.items() if is_present]
  if found:
    raise NotImplementedError(
      "config.json: expected full attention, silu and unquantized weights, got "
      f"{', '.join(found)}; choose another checkpoint."
    )


def _rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """Reads base and scaling; transformers 5 merged both into rope_parameters."""
  rope = _get(values, "rope_parameters", None) or _get(values, "rope_scaling", {})
  theta = float(_get(rope, "rope_theta", _get(values, "rope_theta", 10000.0)))
  kind = _get(rope, "rope_type", _get(rope, "type", "default"))
  partial = _get(
    rope, "partial_rotary_factor", _get(values, "partial_rotary_factor", 1.0)
  )
  if kind not in ("default", "llama3") or partial != 1.0:
    raise NotImplementedError(
      "config.json: expected rope type default or llama3 on all of the head, got type "
      f"{kind} on the fraction {partial}; choose another checkpoint."
    )
  if kind == "default":
    return theta, None
  scaling = RopeScaling(
    factor=float(_require(rope, "factor")),
    low_freq_factor=float(_require(rope, "low_freq_factor")),
    high_freq_factor=float(_require(rope, "high_freq_factor")),
    original_max_position=_require(rope, "original_max_position_embeddings"),
  )
  return theta, scaling
