import dataclasses

import pytest

from mxjax.models import ModelConfig, RopeScaling, families
from mxjax.models.families import to_hf_config
from mxjax.models.families.hf_config import Family
from mxjax.models.parameters import parameter_shapes

BASE = ModelConfig(
  vocab_size=61,
  hidden_size=64,
  intermediate_size=96,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=32,
  norm_eps=1e-5,
  rope_theta=5e5,
  max_positions=128,
  bos_id=0,
  eos_ids=(1, 2),
)
SCALING = RopeScaling(
  factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)
CASES = {
  "llama": {"rope_scaling": SCALING, "attention_bias": True, "mlp_bias": True},
  "mistral": {"family": "mistral", "sliding_window": 16, "eos_ids": (2,)},
  "mistral, all of the past": {"family": "mistral"},
  "qwen2": {"family": "qwen2", "qkv_bias": True, "sliding_window": 16},
  "qwen3": {"family": "qwen3", "qk_norm": "head", "attention_bias": True},
  "qwen3, window": {"family": "qwen3", "qk_norm": "head", "sliding_window": 8},
  "olmo2": {
    "family": "olmo2",
    "qk_norm": "projection",
    "is_post_norm": True,
    "tie_embeddings": True,
    "eos_ids": (),
    "bos_id": None,
  },
}


@pytest.mark.parametrize("name", CASES)
def test_a_written_config_reads_back_as_the_same_model(name):
  config = dataclasses.replace(BASE, **CASES[name])
  assert families.from_hf_config(to_hf_config(config)) == config


def test_what_a_family_cannot_say_is_named():
  config = dataclasses.replace(BASE, family="mistral", mlp_bias=True)
  with pytest.raises(NotImplementedError, match="mlp_bias would read False, not True"):
    to_hf_config(config)


def test_a_new_family_is_one_object_and_its_registration(monkeypatch):
  """Read, written, and refused where a field is unknown: no other file knows it."""
  family = Family(
    name="toy",
    architecture="ToyForCausalLM",
    defaults={"norm_eps": 1e-6, "max_positions": 512},
    flags=("mlp_bias",),
    fixed={"qk_norm": "head", "is_post_norm": True},
  )
  monkeypatch.setitem(families.FAMILIES, "toy", family)
  monkeypatch.setitem(families.ARCHITECTURES, "ToyForCausalLM", family)
  special = {"mlp_bias": True, "qk_norm": "head", "is_post_norm": True}
  config = dataclasses.replace(BASE, family="toy", **special)
  values = to_hf_config(config)
  assert families.from_hf_config(values) == config
  assert len(parameter_shapes(config)) == 3 + 2 * (2 + 2 + 7 + 3)
  with pytest.raises(NotImplementedError, match="toy family.*attention_bias=True"):
    families.from_hf_config(values | {"attention_bias": True})
