"""A Hugging Face `config.json` from our description of a model.

The inverse of `families.from_hf_config`, and checked against it: a config that would
not read back as the same model is never written.
"""

import dataclasses
from typing import Any

from mxjax.models import families
from mxjax.models.config import ModelConfig

WITH_ATTENTION_BIAS = ("llama", "qwen3", "olmo2")
"""Families whose config can give q, k, v and o projections a bias."""
WITH_MLP_BIAS = ("llama",)
"""Families whose config can give the projections of the MLP a bias."""


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
  """Writes a config that transformers and `from_hf_config` read as this model.

  Args:
    config: The model's description.

  Returns:
    JSON values.

  Raises:
    NotImplementedError: The family's config cannot say what this model is.
  """
  if config.family not in families.FAMILIES:
    raise NotImplementedError(
      f"config.json: expected a family of {', '.join(families.FAMILIES)}, got "
      f"{config.family}; write its config by hand."
    )
  values: dict[str, Any] = {
    "architectures": [families.FAMILIES[config.family].ARCHITECTURE],
    "model_type": config.family,
    "vocab_size": config.vocab_size,
    "hidden_size": config.hidden_size,
    "intermediate_size": config.intermediate_size,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_theta,
    "max_position_embeddings": config.max_positions,
    "tie_word_embeddings": config.tie_embeddings,
    "bos_token_id": config.bos_id,
    "eos_token_id": _eos(config.eos_ids),
  }
  if scaling := config.rope_scaling:
    values["rope_scaling"] = {
      "rope_type": "llama3",
      "factor": scaling.factor,
      "low_freq_factor": scaling.low_freq_factor,
      "high_freq_factor": scaling.high_freq_factor,
      "original_max_position_embeddings": scaling.original_max_position,
    }
  if config.family in WITH_ATTENTION_BIAS:
    values["attention_bias"] = config.attention_bias
  if config.family in WITH_MLP_BIAS:
    values["mlp_bias"] = config.mlp_bias
  if config.family == "mistral":
    values["sliding_window"] = config.sliding_window
  if config.family in ("qwen2", "qwen3") and config.sliding_window:
    values |= {
      "use_sliding_window": True,
      "sliding_window": config.sliding_window,
      "max_window_layers": 0,
    }
  check_reads_back(values, config)
  return values


def _eos(ids: tuple[int, ...]) -> int | list[int] | None:
  return list(ids) if len(ids) > 1 else next(iter(ids), None)


def check_reads_back(values: dict[str, Any], config: ModelConfig) -> None:
  """Refuses a `config.json` that describes another model.

  Args:
    values: The JSON values.
    config: The model it should describe.

  Raises:
    NotImplementedError: It does not; every field that differs is named.
  """
  read = families.from_hf_config(values, dtype=config.dtype)
  differing = [
    f"{field.name} would read {getattr(read, field.name)!r}, not "
    f"{getattr(config, field.name)!r}"
    for field in dataclasses.fields(config)
    if getattr(read, field.name) != getattr(config, field.name)
  ]
  if differing:
    raise NotImplementedError(
      f"config.json: a {config.family} config cannot describe this model: "
      f"{'; '.join(differing)}; use --format safetensors, or the config.json of the "
      "model that was quantized."
    )
