"""Reads and writes Hugging Face's `config.json` from one table of fields.

What a config means is decided by the config class of `transformers`: defaults, the two
spellings of rotary scaling, which of two fields wins. This module translates the result
to a `ModelConfig`, and refuses by name what the port does not compute.
"""

import copy
import dataclasses
import functools
import os
import reprlib
import sys
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

REQUIRED = "vocab_size hidden_size intermediate_size num_layers num_heads".split()
"""Fields that a config must have: another model's default would fit no weights."""

ROPE_NAMES = {
  "factor": "factor",
  "low_freq_factor": "low_freq_factor",
  "high_freq_factor": "high_freq_factor",
  "original_max_position": "original_max_position_embeddings",
}
"""The same for `RopeScaling`."""

ROPE_READ = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
"""Fields of every kind of rotary scaling."""

TRANSLATED = frozenset(
  """architectures model_type hidden_act rope_theta rope_scaling rope_parameters
  partial_rotary_factor original_max_position_embeddings eos_token_id
  layer_types""".split()
)
"""Config fields of every family that are not read through `NAMES`."""

HARMLESS = frozenset(
  """torch_dtype use_cache initializer_range pretraining_tp name_or_path auto_map
  is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder
  is_llama_config torchscript use_bfloat16 tf_legacy_loss tokenizer_class prefix
  task_specific_params finetuning_task num_labels gradient_checkpointing
  attn_implementation experts_implementation use_flash_attn use_flash_attention
  use_flash_attention_2 use_sdpa model_max_length transformers.js_config
  keys_to_ignore_at_inference license language tags""".split()
)
"""Fields of training, software and bookkeeping, which do not affect logits.

Those that every config of `transformers` has, and those of generation, join them.
"""

CAUSAL = "is_causal"
"""The field that changes logits where it is false: a token then sees those behind it.

Without it `transformers` takes it for true in every family here.
"""

QUANTIZED = ("quantization_config", "compression_config", "quantization")
"""Fields that say how weights are quantized; the last is that of MLX."""
OWN_EXPORT = "mxfp4"
"""The field of an export of the format transformers, which runs by code of its own."""

SILU = ("silu", "swish")
"""Names of the one activation that the port computes."""


class Window(NamedTuple):
  """How a family's configs encode the sliding window of all layers, in tokens or None.

  `fields` names the config fields that are read and written.
  """

  fields: frozenset[str]
  write: Callable[[int | None], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """What distinguishes the models of one architecture.

  Attributes:
    name: `model_type` in the config, and `ModelConfig.family`. `transformers` must have
      a config class for it.
    architecture: Its entry in `architectures`.
    flags: Switches of the same name in `config.json` and `ModelConfig`.
    fixed: Fields of `ModelConfig` that are constant for the family and absent from its
      configs.
    window: How a sliding window is encoded, by default not at all.
  """

  name: str
  architecture: str
  flags: tuple[str, ...] = ()
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  window: Window = Window(frozenset(), lambda _: {})

  def read(self, values: Mapping[str, Any], *, dtype: str = "float32") -> ModelConfig:
    """Translates a parsed `config.json`; see `from_hf_config`."""
    for name in (NAMES[field] for field in REQUIRED):
      if values.get(name) is None:
        raise ValueRefusal(
          "config.json",
          expected=f"a field {name}",
          got="none",
          mend="use the config of the model",
        )
    # Before the class of transformers computes with them.
    check_sizes(values)
    _refuse_quantized(values)
    known = TRANSLATED | self.window.fields | {*NAMES.values(), *self.flags}
    _refuse_unread(values, self.name, known | _harmless())
    # Absent fields get the defaults of transformers only here: what is checked above
    # was written by someone.
    values = _standardized(self.name, values)
    if (activation := values["hidden_act"]) not in SILU:
      raise NotImplementedRefusal(
        "config.json",
        expected="the activation silu",
        got=f"hidden_act {activation}",
        mend="choose another checkpoint",
      )
    fields: dict[str, Any] = {k: values.get(name) for k, name in NAMES.items()}
    # As transformers has it where a config does not say.
    if fields["head_dim"] is None:
      fields["head_dim"] = fields["hidden_size"] // fields["num_heads"]
    theta, scaling = _read_rope(values)
    vocabulary = fields["vocab_size"]
    bos = token_ids(fields.pop("bos_id"), "bos_token_id", vocabulary)
    return ModelConfig(
      family=self.name,
      **fields,
      **{flag: values[flag] for flag in self.flags},
      **self.fixed,
      rope_theta=theta,
      rope_scaling=scaling,
      sliding_window=self._read_window(values),
      bos_id=next(iter(bos), None),
      eos_ids=token_ids(values.get("eos_token_id"), "eos_token_id", vocabulary),
      dtype=dtype,
    )

  def _read_window(self, values: Mapping[str, Any]) -> int | None:
    """Returns the window of all layers, or None; rejects layers of several kinds."""
    window = values.get("sliding_window") if self.window.fields else None
    kinds = set(values.get("layer_types") or ())
    # A window has no effect where all layers see the whole past.
    if kinds == {"full_attention"}:
      return None
    if kinds - {"full_attention" if window is None else "sliding_attention"}:
      raise NotImplementedRefusal(
        "config.json",
        expected="layer_types of one kind that fits sliding_window",
        got=", ".join(sorted(map(str, kinds))),
        mend="choose a checkpoint whose layers all attend alike",
      )
    return window

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


import_torch = True
"""Whether `transformers` may import torch where that is installed, for seconds.

Configs and tokenizers do not need it. Only commands turn it off: `transformers` then
takes torch for not installed as long as the process lives.
"""


def quiet_transformers() -> Any:
  """Imports `transformers`, which takes a second, without its advice to add torch."""
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  if not import_torch and not {"torch", "transformers"} & sys.modules.keys():
    # Not found while `transformers` asks once and for all whether it is there.
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
      from transformers.utils import is_torch_available

      is_torch_available()
    finally:
      del sys.modules["torch"]
  import transformers

  return transformers


@functools.cache
def _harmless() -> frozenset[str]:
  """Returns `HARMLESS` and the fields of all configs and of generation."""
  transformers = quiet_transformers()
  # All but this one, which says which matrix is the head.
  every = transformers.PretrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
  return HARMLESS | every | transformers.GenerationConfig().to_dict().keys()


def _standardized(family: str, values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of a config as the class of `transformers` understands them."""
  if family == "mistral" and "layer_types" in values:
    raise NotImplementedRefusal(
      "config.json",
      expected="a mistral config without layer_types",
      got=f"{', '.join(sorted({str(kind) for kind in values['layer_types'] or ()}))}, "
      "with which transformers takes it for a ministral",
      mend="choose another checkpoint",
    )
  # The class writes into the dicts that it is given.
  given = {k: v for k, v in copy.deepcopy(dict(values)).items() if k != "model_type"}
  try:
    return quiet_transformers().AutoConfig.for_model(family, **given).to_dict()
  except Exception as error:
    text = " ".join(str(error).split())[:300]
    raise ValueRefusal(
      "config.json",
      expected=f"fields that transformers accepts of a {family} model",
      got=f"{type(error).__name__} ({text})",
      mend="use the config of the model",
    ) from error


def token_ids(value: Any, name: str, vocabulary: int) -> tuple[int, ...]:
  """Returns the ids of a field: none, one or several.

  Ids outside the vocabulary, such as -1 or the default of a larger model, are left out:
  no model can make them.

  Raises:
    ValueError: The field has something else.
  """
  ids = [] if value is None else value if isinstance(value, list) else [value]
  # By exact type: to `isinstance`, true is an integer.
  if bad := [one for one in ids if type(one) is not int]:
    raise ValueRefusal(
      "config.json",
      expected=f"token ids as {name}",
      got=repr(bad[0]),
      mend="write integers",
    )
  return tuple(dict.fromkeys(one for one in ids if 0 <= one < vocabulary))


def check_sizes(values: Mapping[str, Any]) -> None:
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
  """Rejects fields that are not read, unless they are null, false or empty.

  `CAUSAL` is the other way round: it changes nothing only if it is true.

  Rates of dropout matter in training alone.
  """
  unread = [
    f"{name}={reprlib.repr(value)}"
    for name, value in values.items()
    if name not in known
    # Bookkeeping of transformers and of Unsloth.
    and not name.startswith(("_", "unsloth_"))
    and not name.endswith(("dropout", "pdrop"))
    and (value is not True if name == CAUSAL else _is_set(value))
  ]
  if unread:
    raise NotImplementedRefusal(
      "config.json",
      expected=f"only fields that the {family} family reads or that change no logit",
      got=", ".join(unread),
      mend="remove them if they change nothing, or choose another checkpoint",
    )


def _is_set(value: Any) -> bool:
  return value not in (None, "", [], {}) and value is not False


def quantized_kind(values: Mapping[str, Any]) -> str | None:
  """Names how a config says that its weights are quantized; None if it does not."""
  for field in QUANTIZED:
    if not (scheme := values.get(field)):
      continue
    if not isinstance(scheme, Mapping):
      return f"{field}={scheme!r}"
    default = "MLX" if {"bits", "group_size"} == scheme.keys() - {"mode"} else "unknown"
    if any(str(key).startswith(("load_in_", "bnb_")) for key in scheme):
      default = "bitsandbytes"
    method = scheme.get("quant_method") or scheme.get("quant_algo") or default
    details = [
      f"{key}={scheme[key]}"
      for key in "bits w_bit load_in_4bit load_in_8bit fmt format quant_type".split()
      if scheme.get(key)
    ]
    return f"{method} ({', '.join(details)})" if details else str(method)
  return "mxjax export --format transformers" if values.get(OWN_EXPORT) else None


def _refuse_quantized(values: Mapping[str, Any]) -> None:
  if kind := quantized_kind(values):
    imported = ", or convert it with `mxjax import`" if "mxfp4-pack" in kind else ""
    raise NotImplementedRefusal(
      "config.json",
      expected="unquantized weights",
      got=f"already quantized weights of the kind {kind}",
      mend=f"load the checkpoint that was quantized{imported}",
    )


def _read_rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """Reads the base and scaling of the rotary frequencies of a standardized config."""
  rope: dict[str, Any] = values["rope_parameters"]
  theta: Any = rope.get("rope_theta")
  kind, partial = rope.get("rope_type"), rope.get("partial_rotary_factor")
  # Models whose layers are of several kinds have a dict of fields for each kind.
  nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
  if nested or kind not in ("default", "llama3") or partial not in (None, 1):
    raise NotImplementedRefusal(
      "config.json",
      expected="rope type default or llama3 on all of the head",
      got=f"one for each of {', '.join(nested)}"
      if nested
      else f"type {kind} on the fraction {1.0 if partial is None else partial}",
      mend="choose a checkpoint whose rotary frequencies are not changed so: with "
      "others every logit would be another",
    )
  # A field that this type does not read was meant for another type, and would be
  # ignored in silence.
  read = ROPE_READ | (set(ROPE_NAMES.values()) if kind == "llama3" else set())
  unread = [f"{k}={v!r}" for k, v in rope.items() if k not in read and v is not None]
  if unread:
    raise NotImplementedRefusal(
      "config.json",
      expected=f"only what the rope type {kind} reads",
      got=", ".join(unread),
      mend="name the rope_type, or remove what is not used",
    )
  if type(theta) not in (int, float):
    raise ValueRefusal(
      "config.json",
      expected="a number as rope_theta",
      got=repr(theta),
      mend="use the config of the model",
    )
  if kind == "default":
    return float(theta), None
  fields: dict[str, Any] = {k: rope.get(name) for k, name in ROPE_NAMES.items()}
  if bad := [k for k, v in fields.items() if type(v) not in (int, float)]:
    raise ValueRefusal(
      "config.json",
      expected="numbers in the rope type llama3",
      got=f"{', '.join(f'{key}={fields[key]!r}' for key in bad)}",
      mend="use the config of the model",
    )
  position = fields.pop("original_max_position")
  factors = {field: float(value) for field, value in fields.items()}
  return float(theta), RopeScaling(**factors, original_max_position=position)
