"""Reads and writes Hugging Face's `config.json` from one table of fields.

Unknown config fields raise, unless they are null, false or known not to affect logits.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mxjax.errors import NotImplementedRefusal, ValueRefusal
from mxjax.models.config import SIZES, ModelConfig, RopeScaling, size_fault

NAMES = {
  "vocab_size": "vocab_size",
  "hidden_size": "hidden_size",
  "intermediate_size": "intermediate_size",
  "num_layers": "num_hidden_layers",
  "num_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
  "head_dim": "head_dim",
  "norm_eps": "rms_norm_eps",
  "max_positions": "max_position_embeddings",
  "tie_embeddings": "tie_word_embeddings",
  "bos_id": "bos_token_id",
}
"""Config field names of the `ModelConfig` fields that are stored unchanged."""

ROPE_NAMES = {
  "factor": "factor",
  "low_freq_factor": "low_freq_factor",
  "high_freq_factor": "high_freq_factor",
  "original_max_position": "original_max_position_embeddings",
}
"""The same for `RopeScaling`."""

TRANSLATED = frozenset(
  """architectures model_type hidden_act rope_theta rope_scaling rope_parameters
  partial_rotary_factor eos_token_id layer_types quantization_config""".split()
)
"""Config fields of every family that are not read through `NAMES`."""

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
"""Fields of training, generation and bookkeeping, which do not affect logits."""


class Window(NamedTuple):
  """How a family's configs encode the sliding window of all layers, in tokens or None.

  `fields` names the config fields that are read and written.
  """

  fields: frozenset[str]
  read: Callable[[Mapping[str, Any]], int | None]
  write: Callable[[int | None], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """What distinguishes the models of one architecture.

  Attributes:
    name: `model_type` in the config, and `ModelConfig.family`.
    architecture: Its entry in `architectures`.
    defaults: Values that transformers assumes for absent fields, by field of
      `ModelConfig`. Without a default, `num_kv_heads` equals `num_heads`, and
      `head_dim` is the hidden size divided by `num_heads`.
    flags: Switches of the same name in `config.json` and `ModelConfig`, off if absent.
    fixed: Fields of `ModelConfig` that are constant for the family and absent from its
      configs.
    window: How a sliding window is encoded, by default not at all.
  """

  name: str
  architecture: str
  defaults: Mapping[str, Any]
  flags: tuple[str, ...] = ()
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  window: Window = Window(frozenset(), lambda _: None, lambda _: {})

  def read(self, values: Mapping[str, Any], *, dtype: str = "float32") -> ModelConfig:
    """Translates a parsed `config.json`; see `from_hf_config`."""
    _check_sizes(values)
    known = TRANSLATED | HARMLESS | self.window.fields | {*NAMES.values(), *self.flags}
    _refuse_unread(values, self.name, known)
    _check_features(values)
    window = self.window.read(values)
    _check_layer_types(values, window)
    heads = require(values, "num_attention_heads")
    share = require(values, "hidden_size") // heads
    defaults = {"num_kv_heads": heads, "head_dim": share, **self.defaults}
    if "num_key_value_heads" in values:
      # A null field means one key-value head per query head; the family's default
      # applies only if the field is absent.
      defaults["num_kv_heads"] = heads
    defaults |= {"tie_embeddings": False, "bos_id": None}
    fields = {
      field: get(values, name, defaults[field])
      if field in defaults
      else require(values, name)
      for field, name in NAMES.items()
    }
    theta, scaling = _read_rope(values)
    eos = get(values, "eos_token_id", ())
    return ModelConfig(
      family=self.name,
      **fields,
      **{flag: get(values, flag, False) for flag in self.flags},
      **self.fixed,
      rope_theta=theta,
      rope_scaling=scaling,
      sliding_window=window,
      eos_ids=(eos,) if isinstance(eos, int) else tuple(eos),
      dtype=dtype,
    )

  def write(self, config: ModelConfig) -> dict[str, Any]:
    """Returns a model's `config.json` values, as far as the family can express it."""
    eos: Any = list(config.eos_ids)
    values = {
      "architectures": [self.architecture],
      "model_type": self.name,
      **{name: getattr(config, field) for field, name in NAMES.items()},
      **{flag: getattr(config, flag) for flag in self.flags},
      "hidden_act": "silu",
      "rope_theta": config.rope_theta,
      "eos_token_id": eos if len(eos) > 1 else next(iter(eos), None),
    }
    if scaling := config.rope_scaling:
      stored = {name: getattr(scaling, field) for field, name in ROPE_NAMES.items()}
      values["rope_scaling"] = {"rope_type": "llama3", **stored}
    return values | self.window.write(config.sliding_window)


def get(values: Mapping[str, Any], key: str, default: Any) -> Any:
  """Returns a field, or the default if it is absent or null, as transformers does."""
  value = values.get(key)
  return default if value is None else value


def require(values: Mapping[str, Any], key: str) -> Any:
  """Returns a field that has no default."""
  if values.get(key) is None:
    raise ValueRefusal(
      "config.json",
      expected=f"a field {key}",
      got="none",
      mend="use the config of the model",
    )
  return values[key]


def _check_sizes(values: Mapping[str, Any]) -> None:
  """Rejects sizes that are none, before anything is computed with them."""
  for field, name in NAMES.items():
    if field in SIZES and values.get(name) is not None:
      if fault := size_fault(field, values[name]):
        raise ValueRefusal(
          "config.json",
          expected=f"{fault[0]} as {name}",
          got=fault[1],
          mend="use the config of the model",
        )


def _refuse_unread(
  values: Mapping[str, Any], family: str, known: frozenset[str]
) -> None:
  """Rejects fields that are not read, unless they are null or false."""
  unread = [
    f"{name}={value!r}"
    for name, value in values.items()
    if not (name in known or name.startswith("_") or value is None or value is False)
  ]
  if unread:
    raise NotImplementedRefusal(
      "config.json",
      expected=f"only fields that the {family} family reads or that change no logit",
      got=", ".join(unread),
      mend="remove them if they change nothing, or choose another checkpoint",
    )


def refuse_mixed_layers(kinds: set[str]) -> None:
  """Raises NotImplementedError for layers that differ in their attention type."""
  raise NotImplementedRefusal(
    "config.json",
    expected="layer_types of one kind that fits sliding_window",
    got=", ".join(sorted(map(str, kinds))),
    mend="choose a checkpoint whose layers all attend alike",
  )


def _check_layer_types(values: Mapping[str, Any], window: int | None) -> None:
  kinds = set(values.get("layer_types") or ())
  if kinds - {"full_attention" if window is None else "sliding_attention"}:
    refuse_mixed_layers(kinds)


def _check_features(values: Mapping[str, Any]) -> None:
  activation = get(values, "hidden_act", "silu")
  unsupported = {
    f"hidden_act {activation}": activation != "silu",
    "already quantized weights": values.get("quantization_config"),
  }
  if found := [text for text, is_present in unsupported.items() if is_present]:
    raise NotImplementedRefusal(
      "config.json",
      expected="silu and unquantized weights",
      got=", ".join(found),
      mend="choose another checkpoint",
    )


def _read_rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """Reads the base and scaling; transformers 5 merged both into rope_parameters."""
  rope = get(values, "rope_parameters", None) or get(values, "rope_scaling", {})
  theta = float(get(rope, "rope_theta", get(values, "rope_theta", 10000.0)))
  kind = get(rope, "rope_type", get(rope, "type", "default"))
  partial = get(
    rope, "partial_rotary_factor", get(values, "partial_rotary_factor", 1.0)
  )
  if kind not in ("default", "llama3") or partial != 1.0:
    raise NotImplementedRefusal(
      "config.json",
      expected="rope type default or llama3 on all of the head",
      got=f"type {kind} on the fraction {partial}",
      mend="choose another checkpoint",
    )
  if kind == "default":
    return theta, None
  fields = {field: require(rope, name) for field, name in ROPE_NAMES.items()}
  position = fields.pop("original_max_position")
  factors = {field: float(value) for field, value in fields.items()}
  return theta, RopeScaling(**factors, original_max_position=position)
