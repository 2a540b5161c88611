"""Folders of other programs: read bit for bit, or refused by name."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import save_file

from mxjax.models.loading import weights
from mxjax.numerics import mxfp4
from mxjax.storage import export


def test_gpt_oss_experts_decode_to_transformers_bits(golden, tmp_path):
  name = "model.layers.3.mlp.experts"
  scales, bias = golden["experts/scales"], np.arange(12.0).reshape(2, 6)
  rng = np.random.default_rng(0)
  tensors = {
    f"{name}.gate_up_proj_blocks": golden["experts/blocks"],
    f"{name}.gate_up_proj_scales": scales,
    f"{name}.gate_up_proj_bias": bias.astype(np.float32),
    f"{name}.down_proj_blocks": rng.integers(0, 256, (2, 64, 1, 16), np.uint8),
    f"{name}.down_proj_scales": np.full((2, 64, 1), 120, np.uint8),
  }
  save = lambda: save_file(
    {k: jnp.asarray(v) for k, v in tensors.items()}, tmp_path / weights.SINGLE_FILE
  )
  save()
  (experts,) = export.read_gpt_oss_experts(tmp_path).values()
  assert (experts.gate.shape, experts.down.shape) == ((2, 3, 64), (2, 64, 32))
  bits = golden["experts/decoded_bits"].transpose(0, 2, 1)
  for start, part in enumerate((experts.gate, experts.up)):
    decoded = np.asarray(mxfp4.decode(part)).view(np.uint16)
    np.testing.assert_array_equal(decoded, bits[:, start::2])
  np.testing.assert_array_equal(experts.up_bias, bias[:, 1::2])
  assert experts.down_bias is None
  tensors[f"{name}.gate_up_proj_scales"] = scales[:, :, :1]
  save()
  with pytest.raises(ValueError, match="gate_up_proj_blocks of shape"):
    export.read_gpt_oss_experts(tmp_path)


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
