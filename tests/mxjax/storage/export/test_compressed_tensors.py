"""compressed-tensors folders: the library's golden files, and round trips."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.models.loading import weights
from mxjax.numerics import mxfp4
from mxjax.numerics.shaping import input_maps
from mxjax.storage import export
from mxjax.storage.export import compressed_tensors
from tests.mxjax.storage.export.models import (
  same,
  source,
  tensors_in,
  unrounded,
  with_leaf,
)


def test_the_library_decompresses_to_our_decoded_bits(golden):
  tensor = mxfp4.MXTensor(
    jnp.asarray(golden["compressed/packed"]), jnp.asarray(golden["compressed/scale"])
  )
  bits = np.asarray(mxfp4.decode(tensor)).view(np.uint16)
  np.testing.assert_array_equal(bits, golden["compressed/weight_bits"])


def test_the_library_compresses_a_weight_on_the_grid_to_our_bytes(golden):
  weight = jnp.asarray(golden["encoded/weight_bits"].view(jnp.bfloat16))
  tensor = mxfp4.encode(weight)
  np.testing.assert_array_equal(tensor.codes, golden["encoded/packed"])
  np.testing.assert_array_equal(tensor.scales, golden["encoded/scale"])


def test_the_librarys_activation_rule_is_the_one_we_say(golden):
  rows, rounded = golden["activations/rows"], golden["activations/rounded"]
  ours = lambda rules: np.asarray(
    mxfp4.decode(mxfp4.encode(rows, rules), jnp.float32, rules)
  )
  np.testing.assert_array_equal(ours(compressed_tensors.RUNTIME_RULES), rounded)
  assert (ours(mxfp4.PAPER_RULES) != rounded).any()
  half = mxfp4.Rules(scale_rule="even")
  assert (ours(half) != rounded).any()


def test_the_scheme_is_the_librarys_own_preset(golden, rtn, tiny_config, tmp_path):
  export.write_compressed_tensors(tmp_path / "out", source(rtn, tiny_config))
  values = json.loads((tmp_path / "out" / "config.json").read_text())
  expected = json.loads(str(golden["scheme"]))
  # A field of the newest version, null.
  assert expected.pop("moe_sparsity_config") is None
  assert values["quantization_config"] == expected


@pytest.mark.parametrize("shard_bytes", [10**9, 6000])
def test_compressed_tensors_round_trip_is_bit_for_bit(
  rtn, tiny_config, tmp_path, shard_bytes
):
  out = export.write_compressed_tensors(
    tmp_path / "out", source(rtn, tiny_config), shard_bytes=shard_bytes
  )
  assert (out / weights.INDEX_FILE).is_file() == (shard_bytes == 6000)
  imported = export.read_compressed_tensors(out)
  same(imported.params, rtn)
  assert imported.rounds_inputs
  assert dataclasses.replace(imported.config, family="llama") == tiny_config


def test_names_bytes_and_the_rest_are_as_specified(rtn, tiny_config, tmp_path):
  out = export.write_compressed_tensors(tmp_path / "out", source(rtn, tiny_config))
  tensors = tensors_in(out)
  name = "model.layers.1.mlp.down_proj"
  codes = np.asarray(
    mxfp4.unpack(rtn["layers_1"]["mlp"]["down_proj"]["weight"].weight.codes)
  )
  assert f"{name}.weight" not in tensors
  packed = tensors[f"{name}.weight_packed"]
  assert (packed.dtype, packed.shape) == (np.uint8, (64, 48))
  np.testing.assert_array_equal(packed & 15, codes[:, 0::2])
  np.testing.assert_array_equal(packed >> 4, codes[:, 1::2])
  scale = tensors[f"{name}.weight_scale"]
  assert (scale.dtype, scale.shape) == (np.uint8, (64, 3))
  assert tensors["model.embed_tokens.weight"].dtype == jnp.bfloat16
  assert "lm_head.weight" not in tensors
  assert len(tensors) == 2 * 14 + 2 + 4
  manifest = json.loads((out / "mxjax_export.json").read_text())
  assert manifest["quantized_linears"] == 14
  assert set(manifest["files"]) == {
    p.name for p in out.iterdir() if p.name != "mxjax_export.json"
  }


def test_a_linear_left_in_float_is_ignored_by_name(
  rtn, tiny_config, tiny_params, tmp_path
):
  plain = tiny_params["layers_0"]["mlp"]["down_proj"]["weight"]
  params = with_leaf(rtn, plain)
  out = export.write_compressed_tensors(tmp_path / "out", source(params, tiny_config))
  scheme = json.loads((out / "config.json").read_text())["quantization_config"]
  assert scheme["ignore"] == ["lm_head", "model.layers.0.mlp.down_proj"]
  same(export.read_compressed_tensors(out).params, params)


def test_fused_linears_must_be_quantized_alike(rtn, tiny_config, tiny_params, tmp_path):
  layer = {**rtn["layers_0"]}
  plain = tiny_params["layers_0"]["mlp"]["up_proj"]
  layer["mlp"] = {**layer["mlp"], "up_proj": plain}
  mixed = source({**rtn, "layers_0": layer}, tiny_config)
  with pytest.raises(ValueError, match="join gate_proj, up_proj of model.layers.0.mlp"):
    export.write_compressed_tensors(tmp_path / "out", mixed)
  assert list(tmp_path.iterdir()) == []


def test_weights_alone_are_a_scheme_without_activations(rtn, tiny_config, tmp_path):
  params = unrounded(rtn)
  out = export.write_compressed_tensors(tmp_path / "out", source(params, tiny_config))
  scheme = json.loads((out / "config.json").read_text())["quantization_config"]
  assert scheme["config_groups"]["group_0"]["input_activations"] is None
  imported = export.read_compressed_tensors(out)
  assert not imported.rounds_inputs
  same(imported.params, params)


def test_shared_hadamards_are_kept_only_on_request(hadamard, tiny_config, tmp_path):
  model = source(hadamard, tiny_config)
  with pytest.raises(
    ValueError, match=r"cannot hold maps .* in 14 places.*--transforms"
  ):
    export.write_compressed_tensors(tmp_path / "out", model)
  out = export.write_compressed_tensors(tmp_path / "out", model, transforms=True)
  scheme = json.loads((out / "config.json").read_text())["quantization_config"]
  groups = scheme["transform_config"]["config_groups"]
  assert {name: group["head_dim"] for name, group in groups.items()} == {
    "hadamard_32": 32,
    "hadamard_64": 64,
  }
  online, folded = groups["hadamard_32"]["apply"]
  assert (online["location"], folded["location"]) == ("input", "weight_input")
  assert online["targets"] == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
  same(export.read_compressed_tensors(out).params, hadamard)


def test_signed_hadamards_have_no_place(hadamard, tiny_config, tmp_path):
  leaf = hadamard["layers_0"]["mlp"]["down_proj"]["weight"]
  signs = jnp.ones(96, jnp.int8)
  signed = dataclasses.replace(leaf, input_map=input_maps.Hadamard(32, signs))
  model = source(with_leaf(hadamard, signed), tiny_config)
  with pytest.raises(ValueError, match="maps .* in 1 places, first layers_0.mlp.down"):
    export.write_compressed_tensors(tmp_path / "out", model, transforms=True)


def test_a_rotated_head_unties_the_config(rtn, tiny_config, tmp_path):
  head = {"weight": 2 * rtn["embed_tokens"]["weight"]}
  out = export.write_compressed_tensors(
    tmp_path / "out", source({**rtn, "lm_head": head}, tiny_config)
  )
  values = json.loads((out / "config.json").read_text())
  assert values["tie_word_embeddings"] is False
  same(export.read_compressed_tensors(out).params["lm_head"], head)
