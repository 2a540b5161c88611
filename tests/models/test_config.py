import dataclasses
import functools
import json
import math
import pathlib
import subprocess
import sys

import pytest

from mxjax import models
from mxjax.models import ModelConfig, RopeScaling, families
from mxjax.models.families import to_hf_config
from mxjax.models.families.hf_config import Family
from mxjax.models.parameters import parameter_shapes
from tests import refusals, tiny

SCALES = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
SCALING = RopeScaling(**SCALES, original_max_position=64)
HF_SCALING = SCALES | {"original_max_position_embeddings": 64}
BASE = tiny.config(head_dim=32, tie_embeddings=False, bos_id=0, eos_ids=(1, 2))
SLIDING = {"use_sliding_window": True, "sliding_window": 64}
HF = dict(
  model_type="llama",
  vocab_size=96,
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=2,
  num_attention_heads=4,
)


def hf(family, **fields):
  """A sparse config of a family."""
  return HF | {"model_type": family} | fields


def test_json_round_trip_gives_an_equal_config():
  for changes in ({}, dict(rope_scaling=SCALING, bos_id=1, eos_ids=(2, 3))):
    config = tiny.config(**changes)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_wrong_fields_are_refused_by_name():
  values = tiny.config().to_dict() | {"colour": 1}
  del values["vocab_size"]
  scaling = RopeScaling(**SCALES | {"factor": 0}, original_max_position=64)
  changes = [
    *(({"norm_eps": one}, "norm_eps") for one in (0, -1e-5, math.nan, "1e-5", True)),
    ({"rope_theta": math.inf}, "rope_theta"),
    ({"tie_embeddings": "no"}, "tie_embeddings"),
    ({"eos_ids": (2.0,)}, "eos_ids"),
    ({"bos_id": 2**31}, "bos_id"),
    ({"rope_scaling": scaling}, "factor"),
    ({"num_kv_heads": 3}, "num_kv_heads"),
    ({"qk_norm": "tail"}, "'tail'"),
    ({"sliding_window": 0}, "sliding_window", "got 0"),
    ({"head_dim": 7}, "even"),
    ({"dtype": "float64"}, "'float64'"),
  ]
  refusals.check(
    [
      (lambda: ModelConfig.from_dict(values), "vocab_size", "colour"),
      *((functools.partial(tiny.config, **change), *said) for change, *said in changes),
    ]
  )


def test_sizes_that_are_none_are_refused_before_they_are_used():
  """Those of a file: a size is compared, multiplied and allocated."""
  sizes = [
    *(("num_attention_heads", one) for one in (0, "4", 4.0, True, -4)),
    *(("num_hidden_layers", one) for one in (10**30, 2**13, 2.5)),
    ("head_dim", 2**20),
    ("vocab_size", 10**30),
  ]
  without = {name: value for name, value in HF.items() if name != "hidden_size"}
  refusals.check(
    [
      (lambda: families.from_hf_config(without), "hidden_size"),
      *(
        (functools.partial(families.from_hf_config, hf(family, **{name: value})), name)
        for family in ("llama", "qwen2")
        for name, value in sizes
      ),
    ]
  )


def test_a_sparse_hf_config_takes_the_defaults_of_transformers():
  config = families.from_hf_config(HF)
  assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 8, 10000.0)
  assert not config.tie_embeddings
  assert (config.bos_id, config.eos_ids) == (1, (2,))


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


@pytest.mark.parametrize("beside", ["rope_parameters", "rope_scaling"])
def test_of_two_spellings_of_rope_the_older_one_wins(beside):
  """As in transformers, which moves it to the newer field."""
  llama3 = HF_SCALING | {"rope_type": "llama3", "rope_theta": 5e5}
  both = {"rope_parameters": {"rope_type": "default"}, "rope_scaling": None}
  config = families.from_hf_config(HF | both | {beside: llama3})
  assert (config.rope_scaling, config.rope_theta) == (SCALING, 5e5)


def test_the_model_type_decides_and_not_the_architectures():
  fields = {"architectures": ["MistralForCausalLM"], "num_attention_heads": 8}
  config = families.from_hf_config(HF | fields)
  assert (config.family, config.sliding_window, config.num_kv_heads) == (
    "llama",
    None,
    8,
  )


@pytest.mark.parametrize("ids", [-1, 96, [2, 96, -1]])
def test_ids_that_no_model_makes_end_nothing(ids):
  config = families.from_hf_config(HF | {"eos_token_id": ids, "bos_token_id": -1})
  assert config.eos_ids == ((2,) if isinstance(ids, list) else ())
  assert config.bos_id is None


@pytest.mark.parametrize(
  "fields",
  [
    {"pruned_heads": {}, "task_specific_params": None, "prefix": ""},
    {"attention_dropout": 0.1, "resid_pdrop": 0.1, "classifier_dropout": 0.2},
    {"temperature": 0.6, "max_new_tokens": 9, "output_attentions": True},
    {"is_causal": True},
    {"unsloth_version": "2024", "_attn_implementation": "sdpa", "dtype": "float16"},
    {"hidden_act": "swish", "quantization_config": None, "num_labels": 2},
  ],
)
def test_what_changes_no_logit_is_no_reason_to_refuse(fields):
  assert families.from_hf_config(HF | fields) == families.from_hf_config(HF)


@pytest.mark.parametrize(
  ("scheme", "kind"),
  [
    ({"quant_method": "gptq", "bits": 4}, r"gptq \(bits=4\)"),
    ({"quant_method": "fp8", "fmt": "e4m3"}, r"fp8 \(fmt=e4m3\)"),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
    ({"group_size": 64, "bits": 4}, "MLX"),
    (
      {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
      "mxjax import",
    ),
  ],
)
def test_quantized_weights_are_refused_by_their_kind(scheme, kind):
  with pytest.raises(NotImplementedError, match=f"already quantized.*{kind}"):
    families.from_hf_config(HF | {"quantization_config": scheme})


def test_what_transformers_refuses_is_refused_with_its_reason():
  with pytest.raises(ValueError, match="accepts of a llama model, got .*rms_norm_eps"):
    families.from_hf_config(HF | {"rms_norm_eps": "small"})


def test_several_eos_ids_are_kept():
  assert families.from_hf_config(HF | {"eos_token_id": [2, 5]}).eos_ids == (2, 5)
  assert families.from_hf_config(HF | {"eos_token_id": 0}).eos_ids == (0,)


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
  usual = dict(attention_bias=False, qkv_bias=False, qk_norm=None, is_post_norm=False)
  usual |= dict(sliding_window=None, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None)
  usual |= dict(head_dim=8, num_kv_heads=32, family=family)
  assert {name: getattr(config, name) for name in usual} == usual | special
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
    (SLIDING | {"max_window_layers": 0}, 64),
    (SLIDING, None),
    (SLIDING | {"layer_types": ["sliding_attention"] * 2}, 64),
  ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_window_of_qwen_slides_only_where_it_is_switched_on(family, fields, window):
  config = families.from_hf_config(hf(family, num_key_value_heads=4, **fields))
  assert config.sliding_window == window


CHANGING = [
  ("llama", {"model_type": None}, "model_type of llama", "got none"),
  ("llama", {"model_type": "gpt2"}, "got gpt2"),
  ("llama", {"sliding_window": 4096}, "got sliding_window=4096"),
  (
    "llama",
    {"layer_types": ["full_attention", "sliding_attention"]},
    "full",
    "sliding",
  ),
  ("llama", {"final_logit_softcapping": 30.0}, "got final_logit_softcapping=30.0"),
  ("llama", {"embedding_multiplier": 12.0, "num_experts": 8}, "=12.0, num_experts=8"),
  ("llama", {"rope_interleaved": True}, "rope_interleaved"),
  ("qwen3", {"is_causal": False}, "qwen3 family", "is_causal=False"),
  ("llama", {"is_causal": None}, "is_causal=None"),
  ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
  ("llama", {"quantization_config": {"bits": 4}}, "already quantized"),
  ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "type yarn"),
  ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type linear"),
  ("llama", {"partial_rotary_factor": 0.5}, "fraction 0.5"),
  ("llama", {"rope_scaling": {"factor": 2.0}}, "got factor=2.0; name the rope_type"),
  ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
  ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "full", "sliding"),
  ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "got sliding_attention"),
  ("mistral", {"layer_types": ["full_attention"] * 2}, "takes it for a ministral"),
  ("mistral", {"attention_bias": True}, "mistral family", "attention_bias"),
  ("qwen2", {"mlp_bias": True}, "qwen2 family", "mlp_bias"),
  ("olmo2", {"sliding_window": 8}, "olmo2 family", "sliding_window=8"),
  ("olmo2", {"layer_types": ["linear_attention"] * 2}, "got linear_attention"),
  ("llama", {"qk_norm": True}, "llama family", "qk_norm=True"),
]
"""Fields that would change a result, by family, and what the refusal must name."""


def test_what_would_change_the_result_is_refused_by_name():
  read = lambda family, change: families.from_hf_config(
    hf(family, num_key_value_heads=4) | change
  )
  cases = [
    (functools.partial(read, family, change), *words)
    for family, change, *words in CHANGING
  ]
  refusals.check(cases, NotImplementedError)


CASES = {
  "llama": {"rope_scaling": SCALING, "attention_bias": True, "mlp_bias": True},
  "mistral": {"family": "mistral", "sliding_window": 16, "eos_ids": (2,)},
  "mistral, all of the past": {"family": "mistral"},
  "qwen2": {"family": "qwen2", "qkv_bias": True, "sliding_window": 16},
  "qwen3": {"family": "qwen3", "qk_norm": "head", "attention_bias": True},
  "qwen3, window": {"family": "qwen3", "qk_norm": "head", "sliding_window": 8},
  "olmo2": {
    **{"family": "olmo2", "qk_norm": "projection", "is_post_norm": True},
    **{"tie_embeddings": True, "eos_ids": (), "bos_id": None},
  },
}


@pytest.mark.parametrize("name", CASES)
def test_a_written_config_reads_back_as_the_same_model(name):
  config = dataclasses.replace(BASE, **CASES[name])
  assert families.from_hf_config(to_hf_config(config)) == config


def test_a_new_family_is_one_object_and_its_registration(monkeypatch):
  """Read, written, and refused where a field is unknown: no other file knows it."""
  family = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    flags=("mlp_bias",),
    fixed={"qk_norm": "head", "is_post_norm": True},
  )
  monkeypatch.setitem(families.FAMILIES, "granite", family)
  special = {"mlp_bias": True, "qk_norm": "head", "is_post_norm": True}
  config = dataclasses.replace(BASE, family="granite", **special)
  values = to_hf_config(config)
  assert families.from_hf_config(values) == config
  assert len(parameter_shapes(config)) == 3 + 2 * (2 + 2 + 7 + 3)
  with pytest.raises(NotImplementedError, match="granite family.*attention_bias=True"):
    families.from_hf_config(values | {"attention_bias": True})


WITHOUT_TORCH = """
import sys
sys.path.insert(0, sys.argv[1])
import importlib.util
from mxjax import models
from mxjax.models.families import hf_config
hf_config.import_torch = False
print(models.load_config(sys.argv[2]) == models.load_config(sys.argv[2]))
print("torch" in sys.modules)
import torch
print(torch.__file__.startswith(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_command_reads_a_config_without_torch(tmp_path):
  (tmp_path / "torch").mkdir()
  (tmp_path / "torch" / "__init__.py").write_text("")
  package = tmp_path / "torch-9.0.0.dist-info"
  package.mkdir()
  (package / "METADATA").write_text(
    "Metadata-Version: 2.1\nName: torch\nVersion: 9.0\n"
  )
  model = pathlib.Path(models.__file__).parent / "trained" / "qwen3"
  done = subprocess.run(
    [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path), str(model)],
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout.split() == ["True", "False", "True"]
