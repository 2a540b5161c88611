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
from tests.mxjax.quantized import assert_same, at, replaced
from tests.mxjax.storage.export.conftest import DOWN


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
  ours = lambda rules: np.asarray(mxfp4.decode(mxfp4.encode(rows, rules), jnp.float32))
  np.testing.assert_array_equal(ours(compressed_tensors.RUNTIME_RULES), rounded)
  for other in (mxfp4.PAPER_RULES, mxfp4.Rules(scale_rule="even")):
    assert (ours(other) != rounded).any()


def test_the_scheme_is_the_librarys_own_preset(golden, rtn, compressed):
  expected = json.loads(str(golden["scheme"]))
  # A field of the newest version, null.
  assert expected.pop("moe_sparsity_config") is None
  assert compressed(rtn)[1] == expected


@pytest.mark.parametrize("shard_bytes", [10**9, 6000])
def test_compressed_tensors_round_trip_is_bit_for_bit(
  rtn, tiny_config, compressed, shard_bytes
):
  out, _ = compressed(rtn, shard_bytes=shard_bytes)
  assert (out / weights.INDEX_FILE).is_file() == (shard_bytes == 6000)
  imported = export.read_compressed_tensors(out)
  assert_same(imported.params, rtn)
  assert imported.rounds_inputs
  assert dataclasses.replace(imported.config, family="llama") == tiny_config


def test_names_bytes_and_the_rest_are_as_specified(rtn, compressed, tensors_in):
  out, _ = compressed(rtn)
  tensors = tensors_in(out)
  name = "model.layers.0.mlp.down_proj"
  codes = np.asarray(mxfp4.unpack(at(rtn, DOWN).weight.codes))
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
  assert {*manifest["files"], "mxjax_export.json"} == {p.name for p in out.iterdir()}


def test_a_linear_left_in_float_is_ignored_by_name(rtn, tiny_params, compressed):
  params = replaced(rtn, DOWN, at(tiny_params, DOWN))
  out, scheme = compressed(params)
  assert scheme["ignore"] == ["lm_head", "model.layers.0.mlp.down_proj"]
  assert_same(export.read_compressed_tensors(out).params, params)


def test_fused_linears_must_be_quantized_alike(rtn, tiny_params, compressed, tmp_path):
  up = "layers_0/mlp/up_proj"
  with pytest.raises(ValueError, match="gate_proj, up_proj of model.layers.0.mlp"):
    compressed(replaced(rtn, up, at(tiny_params, up)))
  assert list(tmp_path.iterdir()) == []


def test_weights_alone_are_a_scheme_without_activations(rtn, unrounded, compressed):
  params = unrounded(rtn)
  out, scheme = compressed(params)
  assert scheme["config_groups"]["group_0"]["input_activations"] is None
  imported = export.read_compressed_tensors(out)
  assert not imported.rounds_inputs
  assert_same(imported.params, params)


def test_shared_hadamards_are_kept_only_on_request(hadamard, compressed):
  with pytest.raises(ValueError, match=r"got maps .* in 14 places.*--transforms"):
    compressed(hadamard)
  out, scheme = compressed(hadamard, transforms=True)
  groups = scheme["transform_config"]["config_groups"]
  sizes = {name: group["head_dim"] for name, group in groups.items()}
  assert sizes == {"hadamard_32": 32, "hadamard_64": 64}
  online, folded = groups["hadamard_32"]["apply"]
  assert (online["location"], folded["location"]) == ("input", "weight_input")
  assert online["targets"] == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
  assert_same(export.read_compressed_tensors(out).params, hadamard)


def test_signed_hadamards_have_no_place(hadamard, compressed):
  signs = input_maps.Hadamard(32, jnp.ones(96, jnp.int8))
  signed = dataclasses.replace(at(hadamard, DOWN), input_map=signs)
  with pytest.raises(ValueError, match="maps .* in 1 places, first layers_0.mlp.down"):
    compressed(replaced(hadamard, DOWN, signed), transforms=True)


def test_a_rotated_head_unties_the_config(rtn, compressed):
  head = {"weight": 2 * rtn["embed_tokens"]["weight"]}
  out, _ = compressed({**rtn, "lm_head": head})
  values = json.loads((out / "config.json").read_text())
  assert values["tie_word_embeddings"] is False
  assert_same(export.read_compressed_tensors(out).params["lm_head"], head)


def test_the_config_asks_for_the_dtype_that_the_library_decodes_to(rtn, compressed):
  # Embedding and norms of float32, as those of a GGUF file are, keep their own.
  wide = {"weight": rtn["embed_tokens"]["weight"].astype(jnp.float32)}
  out, _ = compressed({**rtn, "embed_tokens": wide})
  assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
  assert_same(export.read_compressed_tensors(out).params["embed_tokens"], wide)
