import json

import pytest

from mxjax.models import ModelConfig, RopeScaling, llama

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
  config = llama.from_hf_config(HF)
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
  config = llama.from_hf_config(HF | rope)
  assert config.rope_scaling == SCALING
  assert config.rope_theta == 5e5


def test_several_eos_ids_are_kept():
  assert llama.from_hf_config(HF | {"eos_token_id": [2, 5]}).eos_ids == (2, 5)
  assert llama.from_hf_config(HF | {"eos_token_id": 0}).eos_ids == (0,)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"architectures": ["FalconForCausalLM"]}, "LlamaForCausalLM, got FalconFor"),
    ({"architectures": None, "model_type": "gpt2"}, "got gpt2"),
    ({"sliding_window": 4096}, "sliding-window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
    ({"hidden_act": "gelu"}, "hidden_act gelu"),
    ({"quantization_config": {"bits": 4}}, "already quantized"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "type yarn"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type linear"),
    ({"partial_rotary_factor": 0.5}, "fraction 0.5"),
  ],
)
def test_what_would_change_the_result_is_refused_by_name(change, message):
  with pytest.raises(NotImplementedError, match=message):
    llama.from_hf_config(HF | change)


def test_a_missing_field_is_named():
  with pytest.raises(ValueError, match="hidden_size"):
    llama.from_hf_config({k: v for k, v in HF.items() if k != "hidden_size"})
