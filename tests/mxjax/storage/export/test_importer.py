"""Folders of other programs: read bit for bit, or refused by name."""

import json

import jax.numpy as jnp
import pytest
from safetensors.flax import save_file

from mxjax.models.loading import weights
from mxjax.storage import export


def set_in(tree, path, value):
  *parents, last = path.split("/")
  for key in parents:
    tree = tree[key]
  tree[last] = value


@pytest.mark.parametrize(
  ("path", "value", "message"),
  [
    ("quant_method", "awq", "quant_method 'awq'"),
    ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
    ("config_groups", {}, "groups 0, not 1"),
    ("config_groups/group_0/weights/group_size", 16, "group_size 16, not 32"),
    (
      "transform_config/config_groups/hadamard_32/type",
      "random-matrix",
      "type hadamard .* got hadamard_32",
    ),
    (
      "transform_config/config_groups/hadamard_32/head_dim",
      64,
      "head_dim divides the 96 inputs of model.layers.0.mlp.down_proj, got 64",
    ),
    (
      "transform_config/config_groups/hadamard_32/apply",
      [{"targets": ["layers.0.mlp.down_proj"], "location": "input"}],
      "at quantized linears of the folder only, got some at layers.0.mlp.down_proj",
    ),
  ],
)
def test_other_schemes_are_refused_by_name(hadamard, compressed, path, value, message):
  out, scheme = compressed(hadamard, transforms=True)
  set_in(scheme, path, value)
  values = json.loads((out / "config.json").read_text())
  values["quantization_config"] = scheme
  (out / "config.json").write_text(json.dumps(values))
  (out / "mxjax_export.json").unlink()
  with pytest.raises(ValueError, match=message):
    export.read_compressed_tensors(out)


def test_damaged_tensors_are_named(rtn, compressed, tensors_in):
  out, _ = compressed(rtn)
  good = {name: jnp.asarray(value) for name, value in tensors_in(out).items()}
  (out / "mxjax_export.json").unlink()
  name = "model.layers.0.mlp.up_proj"
  scale = f"{name}.weight_scale"
  for change, message in (
    ({scale: None}, f"{scale} beside its weight_packed"),
    ({scale: good[scale].at[0, 0].set(255)}, f"{name}: 1 scale bytes are 255"),
    ({"model.norm.weight": None}, "norm.weight is missing"),
    ({"model.extra.weight": jnp.ones(3)}, "extra.weight is unexpected"),
    ({f"{name}.weight": jnp.ones((96, 64))}, f"{name} packed or plain, got both"),
    # Left out, it would be the embedding in its place.
    ({"lm_head.weight": jnp.ones((61, 64))}, "lm_head.weight to equal the embedding"),
  ):
    tensors = {k: v for k, v in (good | change).items() if v is not None}
    save_file(tensors, out / weights.SINGLE_FILE)
    with pytest.raises(ValueError, match=message):
      export.read_compressed_tensors(out)
