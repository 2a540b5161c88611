"""What the families share in reading a Hugging Face `config.json`.

Every field is read, known to change nothing here, or refused by name: a config is
never half understood.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mxjax.models.config import ModelConfig, RopeScaling

READ = frozenset(
  """architectures model_type vocab_size hidden_size intermediate_size
  num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
  max_position_embeddings rms_norm_eps tie_word_embeddings rope_theta rope_scaling
  rope_parameters partial_rotary_factor bos_token_id eos_token_id layer_types
  quantization_config""".split()
)
"""Fields that `read` looks at for every family."""

HARMLESS = frozenset(
  """dtype torch_dtype transformers_version use_cache initializer_range pad_token_id
  attention_dropout hidden_dropout pretraining_tp name_or_path auto_map is_decoder
  is_encoder_decoder is_llama_config return_dict return_dict_in_generate output_scores
  output_attentions output_hidden_states torchscript use_bfloat16 id2label label2id
  problem_type tokenizer_class prefix task_specific_params finetuning_task
  chunk_size_feed_forward unsloth_fixed unsloth_version transformers.js_config
  max_length min_length do_sample temperature top_k top_p typical_p num_beams
  num_beam_groups num_return_sequences length_penalty repetition_penalty
  diversity_penalty encoder_no_repeat_ngram_size no_repeat_ngram_size early_stopping
  bad_words_ids forced_bos_token_id forced_eos_token_id begin_suppress_tokens
  suppress_tokens exponential_decay_length_penalty remove_invalid_values sep_token_id
  decoder_start_token_id""".split()
)
"""Fields of training, generation and bookkeeping: none enters the logits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
  """What transformers takes for a field that a family's config leaves out.

  Attributes:
    norm_eps: For `rms_norm_eps`.
    max_positions: For `max_position_embeddings`.
    num_kv_heads: For `num_key_value_heads`; None is as many as query heads.
    head_dim: For `head_dim`; None is `hidden_size / num_attention_heads`.
  """

  norm_eps: float
  max_positions: int
  num_kv_heads: int | None = None
  head_dim: int | None = None


def read(
  values: Mapping[str, Any],
  family: str,
  defaults: Defaults,
  *,
  also_read: frozenset[str] = frozenset(),
  dtype: str = "float32",
  **special: Any,
) -> ModelConfig:
  """Translates the fields that all families have.

  Args:
    values: The parsed `config.json`, as transformers 4 or 5 writes it.
    family: Name of the family.
    defaults: Of the family.
    also_read: Fields that the family's file has looked at itself.
    dtype: Compute dtype.
    **special: Fields of `ModelConfig` that make the family what it is.

  Returns:
    The model's description.

  Raises:
    NotImplementedError: A field that would change the result is not supported.
    ValueError: A required field is absent.
  """
  _refuse_unread(values, family, READ | HARMLESS | also_read)
  _check_features(values)
  _check_layer_types(values, special.get("sliding_window"))
  heads, width = require(values, "num_attention_heads"), require(values, "hidden_size")
  theta, scaling = _rope(values)
  return ModelConfig(
    family=family,
    vocab_size=require(values, "vocab_size"),
    hidden_size=width,
    intermediate_size=require(values, "intermediate_size"),
    num_layers=require(values, "num_hidden_layers"),
    num_heads=heads,
    num_kv_heads=_kv_heads(values, heads, defaults),
    head_dim=get(values, "head_dim", defaults.head_dim or width // heads),
    norm_eps=get(values, "rms_norm_eps", defaults.norm_eps),
    rope_theta=theta,
    rope_scaling=scaling,
    tie_embeddings=get(values, "tie_word_embeddings", False),
    max_positions=get(values, "max_position_embeddings", defaults.max_positions),
    bos_id=values.get("bos_token_id"),
    eos_ids=_token_ids(values.get("eos_token_id")),
    dtype=dtype,
    **special,
  )


def get(values: Mapping[str, Any], key: str, default: Any) -> Any:
  """Returns a field; null means the default, as it does in transformers."""
  value = values.get(key)
  return default if value is None else value


def require(values: Mapping[str, Any], key: str) -> Any:
  """Returns a field that has no default."""
  if values.get(key) is None:
    raise ValueError(
      f"config.json: expected a field {key}, got none; use the config of the model."
    )
  return values[key]


def _kv_heads(values: Mapping[str, Any], heads: int, defaults: Defaults) -> int:
  """Null is one key-value head a query head; absent is the family's default."""
  value = values.get("num_key_value_heads", defaults.num_kv_heads)
  return heads if value is None else value


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
  """Returns none, one or several ids as a tuple."""
  if value is None:
    return ()
  return (value,) if isinstance(value, int) else tuple(value)


def _refuse_unread(
  values: Mapping[str, Any], family: str, known: frozenset[str]
) -> None:
  """Refuses fields that nothing here reads; null and false switch nothing on."""
  unread = [
    name
    for name, value in values.items()
    if name not in known
    and not name.startswith("_")
    and value is not None
    and value is not False
  ]
  if unread:
    listed = ", ".join(f"{name}={values[name]!r}" for name in unread)
    raise NotImplementedError(
      f"config.json: expected only fields that the {family} family reads or that "
      f"change no logit, got {listed}; remove them if they change nothing, or choose "
      "another checkpoint."
    )


def refuse_mixed_layers(kinds: set[str]) -> None:
  """Refuses a model whose layers differ in what they attend to.

  Raises:
    NotImplementedError: Always; the message names the kinds.
  """
  raise NotImplementedError(
    "config.json: expected layer_types of one kind that fits sliding_window, got "
    f"{', '.join(sorted(map(str, kinds)))}; choose a checkpoint whose layers all "
    "attend alike."
  )


def _check_layer_types(values: Mapping[str, Any], window: int | None) -> None:
  """Refuses layer types that disagree with the window of all layers."""
  kinds = set(values.get("layer_types") or ())
  if kinds - {"full_attention" if window is None else "sliding_attention"}:
    refuse_mixed_layers(kinds)


def _check_features(values: Mapping[str, Any]) -> None:
  """Refuses what would change the result without being computed."""
  problems = {
    f"hidden_act {values.get('hidden_act')}": get(values, "hidden_act", "silu")
    != "silu",
    "already quantized weights": values.get("quantization_config"),
  }
  found = [name for name, is_present in problems.items() if is_present]
  if found:
    raise NotImplementedError(
      "config.json: expected silu and unquantized weights, got "
      f"{', '.join(found)}; choose another checkpoint."
    )


def _rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """Reads base and scaling; transformers 5 merged both into rope_parameters."""
  rope = get(values, "rope_parameters", None) or get(values, "rope_scaling", {})
  theta = float(get(rope, "rope_theta", get(values, "rope_theta", 10000.0)))
  kind = get(rope, "rope_type", get(rope, "type", "default"))
  partial = get(
    rope, "partial_rotary_factor", get(values, "partial_rotary_factor", 1.0)
  )
  if kind not in ("default", "llama3") or partial != 1.0:
    raise NotImplementedError(
      "config.json: expected rope type default or llama3 on all of the head, got type "
      f"{kind} on the fraction {partial}; choose another checkpoint."
    )
  if kind == "default":
    return theta, None
  scaling = RopeScaling(
    factor=float(require(rope, "factor")),
    low_freq_factor=float(require(rope, "low_freq_factor")),
    high_freq_factor=float(require(rope, "high_freq_factor")),
    original_max_position=require(rope, "original_max_position_embeddings"),
  )
  return theta, scaling
