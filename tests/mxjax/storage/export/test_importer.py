"""Folders of other programs: read bit for bit, or refused by name."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import save_file

from mxjax.models.loading import weights
from mxjax.numerics import mxfp4
from mxjax.storage import export
from tests.mxjax.storage.export.models import source, tensors_in


def test_gpt_oss_experts_decode_to_transformers_bits(golden, tmp_path):
  name = "model.layers.3.mlp.experts"
  blocks, scales = golden["experts/blocks"], golden["experts/scales"]
  rng = np.random.default_rng(0)
  down = rng.integers(0, 256, (2, 64, 1, 16), dtype=np.uint8)
  bias = np.arange(12, dtype=np.float32).reshape(2, 6)
  tensors = {
    f"{name}.gate_up_proj_blocks": blocks,
    f"{name}.gate_up_proj_scales": scales,
    f"{name}.gate_up_proj_bias": bias,
    f"{name}.down_proj_blocks": down,
    f"{name}.down_proj_scales": np.full((2, 64, 1), 120, np.uint8),
  }
  save_file(
    {k: jnp.asarray(v) for k, v in tensors.items()}, tmp_path / "model.safetensors"
  )
  (experts,) = export.read_gpt_oss_experts(tmp_path).values()
  assert (experts.gate.shape, experts.down.shape) == ((2, 3, 64), (2, 64, 32))
  bits = golden["experts/decoded_bits"].transpose(0, 2, 1)
  for start, part in enumerate((experts.gate, experts.up)):
    decoded = np.asarray(mxfp4.decode(part)).view(np.uint16)
    np.testing.assert_array_equal(decoded, bits[:, start::2])
  np.testing.assert_array_equal(experts.up_bias, bias[:, 1::2])
  assert experts.down_bias is None
  tensors[f"{name}.gate_up_proj_scales"] = scales[:, :, :1]
  save_file(
    {k: jnp.asarray(v) for k, v in tensors.items()}, tmp_path / "model.safetensors"
  )
  with pytest.raises(ValueError, match="gate_up_proj_blocks of shape"):
    export.read_gpt_oss_experts(tmp_path)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"quant_method": "awq"}, "quant_method 'awq'"),
    ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ({"config_groups": {}}, "groups 0, not 1"),
  ],
)
def test_other_schemes_are_refused_by_name(rtn, tiny_config, tmp_path, change, message):
  out = export.write_compressed_tensors(tmp_path / "out", source(rtn, tiny_config))
  file = out / "config.json"
  values = json.loads(file.read_text())
  values["quantization_config"] |= change
  file.write_text(json.dumps(values))
  with pytest.raises(ValueError, match=message):
    export.read_compressed_tensors(out)


def test_other_bits_and_transforms_are_refused(hadamard, tiny_config, tmp_path):
  out = export.write_compressed_tensors(
    tmp_path / "out", source(hadamard, tiny_config), transforms=True
  )
  file = out / "config.json"
  original = file.read_text()
  values = json.loads(original)
  scheme = values["quantization_config"]
  scheme["config_groups"]["group_0"]["weights"]["group_size"] = 16
  file.write_text(json.dumps(values))
  with pytest.raises(ValueError, match="group_size 16, not 32"):
    export.read_compressed_tensors(out)
  values = json.loads(original)
  groups = values["quantization_config"]["transform_config"]["config_groups"]
  groups["hadamard_32"]["type"] = "random-matrix"
  file.write_text(json.dumps(values))
  with pytest.raises(ValueError, match="type hadamard .* got hadamard_32"):
    export.read_compressed_tensors(out)


def test_damaged_tensors_are_named(rtn, tiny_config, tmp_path):
  out = export.write_compressed_tensors(tmp_path / "out", source(rtn, tiny_config))
  good = {name: jnp.asarray(value) for name, value in tensors_in(out).items()}
  name = "model.layers.0.mlp.up_proj"
  for change, message in (
    ({f"{name}.weight_scale": None}, f"{name}.weight_scale beside its weight_packed"),
    (
      {f"{name}.weight_scale": good[f"{name}.weight_scale"].at[0, 0].set(255)},
      f"{name}: 1 scale bytes are 255",
    ),
    ({"model.norm.weight": None}, "norm.weight is missing"),
    ({"model.extra.weight": jnp.ones(3)}, "extra.weight is unexpected"),
  ):
    tensors = {k: v for k, v in (good | change).items() if v is not None}
    save_file(tensors, out / weights.SINGLE_FILE)
    with pytest.raises(ValueError, match=message):
      export.read_compressed_tensors(out)
