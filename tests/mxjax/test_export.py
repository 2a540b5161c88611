"""Exports against the formats, golden files of the libraries, and themselves."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.flax import save_file

from mxjax import code_refinement, export, input_maps, models, mxfp4
from mxjax.export import compressed_tensors, dequant, features
from mxjax.mlp_recovery import MlpRecovery
from mxjax.models import weights
from mxjax.quantized_linear import (
  Clipped,
  Nearest,
  OneCode,
  QuantizedLinear,
  Unrounded,
  linear,
)
from mxjax.value_recovery import ValueRecovery
from tests.conftest import GOLDEN

TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12)


@pytest.fixture(scope="module")
def golden():
  return np.load(GOLDEN / "exports.npz")


def replaced(params, make):
  """Params whose target linears are `make(block, name, weight)`."""
  new = {}
  for key, value in params.items():
    if not key.startswith("layers_"):
      new[key] = value
      continue
    new[key] = dict(value)
    for block in ("self_attn", "mlp"):
      new[key][block] = {
        name: {**part, "weight": make(block, name, part["weight"])}
        for name, part in value[block].items()
      }
  return new


@pytest.fixture(scope="module")
def rtn(tiny_params):
  make = lambda block, name, weight: QuantizedLinear(
    mxfp4.encode(weight), None, Nearest()
  )
  return replaced(tiny_params, make)


@pytest.fixture(scope="module")
def hires(tiny_params):
  """Maps, tables and both recoveries, all of them far from the identity."""
  rng = np.random.default_rng(0)
  random = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)

  def make(block, name, weight):
    blocks = weight.shape[1] // 32
    matrix = jnp.eye(32, dtype=jnp.float32)[None] + 0.1 * random(blocks, 32, 32)
    gram = random(blocks, 32, 32)
    rounding = OneCode(
      code_refinement.pack_symmetric(gram @ gram.mT), random(blocks, 32, 32)
    )
    return QuantizedLinear(
      mxfp4.encode(weight), input_maps.BlockDense(matrix), rounding
    )

  params = replaced(tiny_params, make)
  for index in range(2):
    layer = params[f"layers_{index}"]
    layer["self_attn"]["value_recovery"] = ValueRecovery(
      jnp.float32([1.3, 0.8]), jnp.float32([0.05, -0.2])
    )
    scalars = [jnp.float32(value) for value in (0.1, -0.2, 0.15, 1.5)]
    layer["mlp"]["mlp_recovery"] = MlpRecovery(*scalars)
  return params


def source(params, config):
  return export.Source(params, config, facts={"digest": "ab"})


def same(left, right):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def tensors_in(folder):
  found = {}
  for path in sorted(folder.glob("*.safetensors")):
    with safe_open(path, framework="flax") as file:
      found |= {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
  return found


def with_leaf(params, leaf):
  """The params with one linear replaced."""
  layer = params["layers_0"]
  mlp = {**layer["mlp"], "down_proj": {"weight": leaf}}
  return {**params, "layers_0": {**layer, "mlp": mlp}}


# --- the formats, as the libraries that own them see them


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


# --- compressed-tensors


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
  make = lambda leaf: (
    dataclasses.replace(leaf, rounding=Unrounded())
    if isinstance(leaf, QuantizedLinear)
    else leaf
  )
  params = jax.tree.map(make, rtn, is_leaf=lambda n: isinstance(n, QuantizedLinear))
  out = export.write_compressed_tensors(tmp_path / "out", source(params, tiny_config))
  scheme = json.loads((out / "config.json").read_text())["quantization_config"]
  assert scheme["config_groups"]["group_0"]["input_activations"] is None
  imported = export.read_compressed_tensors(out)
  assert not imported.rounds_inputs
  same(imported.params, params)


@pytest.fixture
def hadamard(tiny_params):
  make = lambda block, name, weight: QuantizedLinear(
    mxfp4.encode(weight),
    input_maps.Hadamard(64 if weight.shape[1] == 64 else 32),
    Nearest(),
  )
  return replaced(tiny_params, make)


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


def odd_leaf(kind, leaf):
  """A leaf with one thing that compressed-tensors has no place for."""
  blocks = leaf.shape[1] // 32
  shares = jnp.full((blocks,), 0.9, jnp.float32)
  return dataclasses.replace(
    leaf,
    **{
      "gains": lambda: {"gain": jnp.float32(1.1)},
      "clipping": lambda: {"rounding": Clipped(shares, shares)},
      "rules": lambda: {"rules": mxfp4.Rules(scale_rule="mx43")},
    }[kind](),
  )


@pytest.mark.parametrize("kind", ["gains", "clipping", "rules"])
def test_each_feature_is_refused_by_name_and_can_be_dropped(
  rtn, tiny_config, tmp_path, kind
):
  leaf = rtn["layers_0"]["mlp"]["down_proj"]["weight"]
  params = with_leaf(rtn, odd_leaf(kind, leaf))
  with pytest.raises(ValueError, match=rf"cannot hold {kind} .*--drop {kind}"):
    export.write_compressed_tensors(tmp_path / "out", source(params, tiny_config))
  dropped = export.drop(params, [kind])
  assert export.held(dropped) == {}
  new = dropped["layers_0"]["mlp"]["down_proj"]["weight"]
  kept = (
    np.asarray(new.weight.codes).tobytes() == np.asarray(leaf.weight.codes).tobytes()
  )
  assert kept == (kind != "rules")
  out = export.write_compressed_tensors(tmp_path / "out", source(dropped, tiny_config))
  same(export.read_compressed_tensors(out).params, dropped)


def test_everything_hires_has_is_named_and_dropped(hires, tiny_config, tmp_path):
  names = ["maps", "refinement", "value-recovery", "mlp-recovery"]
  assert set(export.held(hires)) == set(names)
  with pytest.raises(ValueError) as caught:
    export.write_compressed_tensors(tmp_path / "out", source(hires, tiny_config))
  assert all(name in str(caught.value) for name in names)
  with pytest.raises(ValueError, match="maps cannot be dropped alone"):
    export.drop(hires, ["maps"])
  dropped = export.drop(hires, features.parse("maps,refinement,recovery"))
  assert export.held(dropped) == {}
  leaf = hires["layers_1"]["self_attn"]["q_proj"]["weight"]
  native = np.asarray(export.features.effective_weight(leaf)).astype(np.float32)
  same(
    dropped["layers_1"]["self_attn"]["q_proj"]["weight"].weight, mxfp4.encode(native)
  )


def test_unknown_names_are_refused():
  with pytest.raises(ValueError, match="got colour; use these names"):
    features.parse("maps,colour")


# --- dequant


MAPS = {
  "none": lambda rng: None,
  "dense": lambda rng: input_maps.BlockDense(
    jnp.asarray(np.eye(32) + 0.1 * rng.normal(size=(2, 32, 32)), jnp.float32)
  ),
  "hadamard": lambda rng: input_maps.Hadamard(
    64, jnp.asarray(rng.choice([-1, 1], 64), jnp.int8)
  ),
  "kronecker": lambda rng: input_maps.Kronecker(
    jnp.asarray(rng.normal(size=(8, 8)), jnp.float32),
    jnp.asarray(rng.normal(size=(2, 4, 4)), jnp.float32),
  ),
  "two-level": lambda rng: input_maps.TwoLevel(
    jnp.asarray(rng.normal(size=(2, 2)), jnp.float32),
    jnp.asarray(rng.normal(size=(32, 32)), jnp.float32),
  ),
}


@pytest.mark.parametrize("name", MAPS)
def test_effective_weight_is_map_codes_and_gain_together(name):
  rng = np.random.default_rng(1)
  weight = mxfp4.encode(jnp.asarray(rng.normal(size=(48, 64)), jnp.float32))
  leaf = QuantizedLinear(weight, MAPS[name](rng), Unrounded(), jnp.float32(1.25))
  x = jnp.asarray(rng.normal(size=(7, 64)), jnp.float32)
  effective = np.asarray(features.effective_weight(leaf))
  assert effective.dtype == np.float64
  expected = np.asarray(linear(x, leaf), np.float64)
  ours = np.asarray(x, np.float64) @ effective.T
  assert np.abs(ours - expected).max() <= 2e-6 * np.abs(expected).max()


def unrounded(params):
  make = lambda leaf: (
    dataclasses.replace(leaf, rounding=Unrounded())
    if isinstance(leaf, QuantizedLinear)
    else leaf
  )
  return jax.tree.map(make, params, is_leaf=lambda n: isinstance(n, QuantizedLinear))


def test_dequant_computes_the_model_without_activation_rounding(
  hires, tiny_config, tiny_model, tmp_path
):
  """Maps and both recoveries are in weights and biases; only A4 is gone."""
  out = export.write_dequant(
    tmp_path / "out", source(hires, tiny_config), dtype=jnp.float32
  )
  model, params = models.from_pretrained(out)
  assert model.config.attention_bias and model.config.mlp_bias
  ours = model.apply({"params": params}, TOKENS)
  expected = tiny_model.apply({"params": unrounded(hires)}, TOKENS)
  strict = tiny_model.apply({"params": hires}, TOKENS)
  error = float(jnp.abs(ours - expected).max())
  assert error < 1e-4 * float(jnp.abs(expected).max())
  assert float(jnp.abs(strict - expected).max()) > 100 * error
  manifest = json.loads((out / "mxjax_export.json").read_text())
  assert manifest["without_meaning_here"] == ["refinement"]
  assert set(manifest["folded_into_weights"]) == {
    "maps",
    "value-recovery",
    "mlp-recovery",
  }
  assert 0 < manifest["largest_relative_rounding_error"] < 1e-7


def test_dequant_of_plain_codes_is_exact_in_bfloat16(rtn, tiny_config, tmp_path):
  out = export.write_dequant(tmp_path / "out", source(rtn, tiny_config))
  tensors = tensors_in(out)
  leaf = rtn["layers_0"]["self_attn"]["v_proj"]["weight"]
  # No product with a map here, which would lose the signs of zeros.
  np.testing.assert_array_equal(
    tensors["model.layers.0.self_attn.v_proj.weight"].view(np.uint16),
    np.asarray(mxfp4.decode(leaf.weight)).view(np.uint16),
  )
  manifest = json.loads((out / "mxjax_export.json").read_text())
  assert manifest["largest_relative_rounding_error"] == 0
  assert not any(name.endswith("bias") for name in tensors)


def test_a_family_without_mlp_bias_cannot_take_the_mlp_recovery(
  hires, tiny_config, tmp_path
):
  qwen = dataclasses.replace(tiny_config, family="qwen3")
  assert set(dequant.cannot_hold(hires, qwen)) == {"mlp-recovery"}
  mistral = dataclasses.replace(tiny_config, family="mistral")
  with pytest.raises(ValueError, match="family mistral cannot hold .*value-recovery"):
    export.write_dequant(tmp_path / "out", source(hires, mistral))


def test_a_rotated_head_unties_the_config(rtn, tiny_config, tmp_path):
  head = {"weight": 2 * rtn["embed_tokens"]["weight"]}
  out = export.write_compressed_tensors(
    tmp_path / "out", source({**rtn, "lm_head": head}, tiny_config)
  )
  values = json.loads((out / "config.json").read_text())
  assert values["tie_word_embeddings"] is False
  same(export.read_compressed_tensors(out).params["lm_head"], head)


# --- our own state


def test_own_state_round_trip_is_bit_for_bit(hires, tiny_config, tmp_path):
  out = export.write_state(
    tmp_path / "out", source(hires, tiny_config), shard_bytes=50_000
  )
  assert (out / weights.INDEX_FILE).is_file()
  params, state = export.read_state(out)
  same(params, hires)
  assert models.ModelConfig.from_dict(state["model_config"]) == tiny_config
  assert state["digest"] == "ab"


def test_a_changed_byte_of_own_state_is_named(rtn, tiny_config, tmp_path):
  out = export.write_state(tmp_path / "out", source(rtn, tiny_config))
  file = out / weights.SINGLE_FILE
  data = bytearray(file.read_bytes())
  data[-1] ^= 1
  file.write_bytes(data)
  with pytest.raises(ValueError, match=r"1 of \d+ arrays .*: \S+;"):
    export.read_state(out)


# --- reading other people's


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


def test_nothing_is_overwritten_and_nothing_half_written_stays(
  rtn, tiny_config, tmp_path, monkeypatch
):
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "file").write_text("keep")
  with pytest.raises(FileExistsError, match="never overwritten"):
    export.write_state(tmp_path / "mine", source(rtn, tiny_config))

  def fail(*arguments):
    raise OSError("disk full")

  monkeypatch.setattr(compressed_tensors, "write_manifest", fail)
  with pytest.raises(OSError, match="disk full"):
    export.write_compressed_tensors(tmp_path / "out", source(rtn, tiny_config))
  assert [path.name for path in tmp_path.iterdir()] == ["mine"]
