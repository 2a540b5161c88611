import json

import pytest

from mxjax.models import ModelConfig, RopeScaling, families

FIELDS = dict(
  vocab_size=96,
  hidden_size=32,
  intermediate_size=64,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  norm_eps=1e-5,
  rope_theta=1e4,
  max_positions=128,
)
SCALING = RopeScaling(
  factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)
HF = dict(
  architectures=["LlamaForCausalLM"],
  vocab_size=96,
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=2,
  num_attention_heads=4,
)
HF_SCALING = dict(
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=64,
)


def test_json_round_trip_gives_an_equal_config():
  config = ModelConfig(**FIELDS, rope_scaling=SCALING, bos_id=1, eos_ids=(2, 3))
  assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
  plain = ModelConfig(**FIELDS)
  assert ModelConfig.from_dict(json.loads(json.dumps(plain.to_dict()))) == plain


def test_from_dict_names_missing_and_unknown_fields():
  values = ModelConfig(**FIELDS).to_dict() | {"colour": 1}
  del values["vocab_size"]
  with pytest.raises(ValueError, match=r"missing fields \['vocab_size'\].*'colour'"):
    ModelConfig.from_dict(values)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"num_kv_heads": 3}, "num_kv_heads"),
    ({"head_dim": 7}, "even"),
    ({"dtype": "float64"}, "'float64'"),
  ],
)
def test_inconsistent_fields_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    ModelConfig(**(FIELDS | change))


def test_a_sparse_hf_config_takes_the_defaults_of_transformers():
  config = families.from_hf_config(HF)
  assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 8, 10000.0)
  assert not config.tie_embeddings
  assert config.eos_ids == ()


@pytest.mark.parametrize(
  "rope",
  [
    {"rope_parameters": HF_SCALING | {"rope_type": "llama3", "rope_theta": 5e5}},
    {"rope_scaling": HF_SCALING | {"rope_type": "llama3"}, "rope_theta": 5e5},
    {"rope_scaling": HF_SCALING | {"type": "llama3"}, "rope_theta": 5e5},
  ],
  ids=["transformers 5", "transformers 4", "transformers 4, old key"],
)
def test_rope_of_transformers_4_and_5_read_the_same(rope):
  config = families.from_hf_config(HF | rope)
  assert config.rope_scaling == SCALING
  assert config.rope_theta == 5e5


def test_several_eos_ids_are_kept():
  assert families.from_hf_config(HF | {"eos_token_id": [2, 5]}).eos_ids == (2, 5)
  assert families.from_hf_config(HF | {"eos_token_id": 0}).eos_ids == (0,)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"architectures": ["FalconForCausalLM"]}, "LlamaForCausalLM, .*, got FalconFor"),
    ({"architectures": None, "model_type": "gpt2"}, "got gpt2"),
    ({"sliding_window": 4096}, "got sliding_window=4096"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "full.*, sliding"),
    ({"final_logit_softcapping": 30.0}, "got final_logit_softcapping=30.0"),
    ({"embedding_multiplier": 12.0, "num_experts": 8}, "=12.0, num_experts=8"),
    ({"rope_interleaved": True}, "rope_interleaved"),
    ({"hidden_act": "gelu"}, "hidden_act gelu"),
    ({"quantization_config": {"bits": 4}}, "already quantized"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "type yarn"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type linear"),
    ({"partial_rotary_factor": 0.5}, "fraction 0.5"),
  ],
)
def test_what_would_change_the_result_is_refused_by_name(change, message):
  with pytest.raises(NotImplementedError, match=message):
    families.from_hf_config(HF | change)


def test_a_missing_field_is_named():
  with pytest.raises(ValueError, match="hidden_size"):
    families.from_hf_config({k: v for k, v in HF.items() if k != "hidden_size"})


def hf(family, **fields):
  """A sparse config of a family."""
  architecture = families.FAMILIES[family].architecture
  return HF | {"architectures": [architecture]} | fields


@pytest.mark.parametrize(
  ("family", "special"),
  [
    ("llama", {}),
    ("mistral", {"sliding_window": 4096, "num_kv_heads": 8}),
    ("qwen2", {"qkv_bias": True, "num_kv_heads": 32}),
    ("qwen3", {"qk_norm": "head", "head_dim": 128, "num_kv_heads": 32}),
    ("olmo2", {"qk_norm": "projection", "is_post_norm": True, "norm_eps": 1e-5}),
  ],
)
def test_each_family_fills_in_what_makes_it_special(family, special):
  config = families.from_hf_config(hf(family, num_attention_heads=32, hidden_size=256))
  plain = ModelConfig(
    **{**FIELDS, "norm_eps": 1e-6, "hidden_size": 256, "num_heads": 32},
  )
  changed = {
    field: getattr(config, field)
    for field in ("attention_bias", "qkv_bias", "qk_norm", "is_post_norm", "head_dim")
    + ("sliding_window", "norm_eps", "rope_theta", "rope_scaling", "num_kv_heads")
    if getattr(config, field) != getattr(plain, field)
  }
  expected = {} if "num_kv_heads" in special else {"num_kv_heads": 32}
  assert changed == special | expected
  assert config.family == family
  assert ModelConfig.from_dict(config.to_dict()) == config


def test_a_null_window_sees_all_of_the_past_and_an_absent_one_does_not():
  fields = {"num_key_value_heads": 4}
  absent = families.from_hf_config(hf("mistral", **fields))
  assert absent.sliding_window == 4096
  null = families.from_hf_config(hf("mistral", sliding_window=None, **fields))
  assert null.sliding_window is None


@pytest.mark.parametrize(
  ("fields", "window"),
  [
    ({}, None),
    ({"use_sliding_window": False, "sliding_window": 64}, None),
    ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, 64),
    ({"use_sliding_window": True, "sliding_window": 64}, None),
    (
      {
        "use_sliding_window": True,
        "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 2,
      },
      64,
    ),
  ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_window_of_qwen_slides_only_where_it_is_switched_on(family, fields, window):
  config = families.from_hf_config(hf(family, num_key_value_heads=4, **fields))
  assert config.sliding_window == window


@pytest.mark.parametrize(
  ("family", "change", "message"),
  [
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "full.*sliding"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "got sliding_attention"),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "got full_attention"),
    ("mistral", {"attention_bias": True}, "mistral family.*attention_bias"),
    ("qwen2", {"mlp_bias": True}, "qwen2 family.*mlp_bias"),
    ("olmo2", {"sliding_window": 8}, "olmo2 family.*sliding_window=8"),
    ("olmo2", {"layer_types": ["linear_attention"] * 2}, "got linear_attention"),
    ("llama", {"qk_norm": True}, "llama family.*qk_norm=True"),
  ],
)
def test_a_field_that_a_family_would_ignore_is_refused(family, change, message):
  with pytest.raises(NotImplementedError, match=message):
    families.from_hf_config(hf(family, num_key_value_heads=4, **change))
