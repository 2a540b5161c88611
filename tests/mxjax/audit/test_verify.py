import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.audit import verify, verify_linears
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.numerics.realization import one_code
from mxjax.numerics.realization.activation_quantizers import (
  Clipped,
  Nearest,
  OneCode,
  Unrounded,
)
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping import input_maps
from mxjax.storage import checkpoint

Q = ("layers_0", "self_attn", "q_proj", "weight")
DOWN = ("layers_1", "mlp", "down_proj", "weight")


def quantized(rng, weight, kind):
  """Leaves as the methods make them: maps, tables and codes that belong together."""
  rows, width = weight.shape
  blocks = width // 32
  weight = jnp.asarray(rng.standard_normal((rows, width)), jnp.float32)
  if kind == "hadamard":
    rotation = input_maps.Hadamard(32)
    folded = rotation.fold(mxfp4.to_blocks(weight))
    return QuantizedLinear(mxfp4.encode(mxfp4.from_blocks(folded)), rotation, Nearest())
  tensor = mxfp4.encode(weight)
  if kind == "rtn":
    return QuantizedLinear(tensor, None, Nearest())
  matrix = jnp.eye(32)[None] + 0.2 * jnp.asarray(
    rng.standard_normal((blocks, 32, 32)), jnp.float32
  )
  decoded = mxfp4.to_blocks(mxfp4.decode(tensor, jnp.float32))
  gram, cross = one_code.tables(mxfp4.to_blocks(weight), decoded)
  rounding = OneCode(one_code.pack_symmetric(gram), cross)
  return QuantizedLinear(tensor, input_maps.BlockDense(matrix), rounding)


@pytest.fixture(scope="module")
def params(tiny_model):
  rng = np.random.default_rng(0)
  tree = tiny_model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
  for index in range(2):
    layer = tree[f"layers_{index}"]
    for block, kind in (("self_attn", "hires"), ("mlp", ("hadamard", "rtn")[index])):
      for linear in layer[block].values():
        linear["weight"] = quantized(rng, linear["weight"], kind)
    layer["self_attn"]["value_recovery"] = ValueRecovery(
      jnp.float32([1.1, 0.9]), jnp.float32([0.01, -0.02])
    )
    scalars = [jnp.float32(value) for value in (0.05, -0.05, 0.025, 1.5)]
    layer["mlp"]["mlp_recovery"] = MlpRecovery(*scalars)
  return tree


@pytest.fixture
def saved(params, tiny_config, tmp_path):
  return checkpoint.save_checkpoint(tmp_path / "out", params, tiny_config)


def replaced(tree, path, value):
  """The tree with another value at a path; None takes the key away."""
  key, *rest = path
  new = dict(tree)
  if rest:
    new[key] = replaced(tree[key], rest, value)
  elif value is None:
    del new[key]
  else:
    new[key] = value
  return new


def at(tree, path):
  for key in path:
    tree = tree[key]
  return tree


def faults_of(params, config):
  audit = verify.Audit("")
  verify._check_params(params, config, PAPER_CONTRACT, audit, 0)
  return audit.faults


def test_a_sound_checkpoint_has_no_faults(saved):
  found = verify.verify(saved)
  assert found.faults == []
  assert found.counts["quantized linears"] == 14
  assert found.counts["recovery leaves"] == 4
  assert found.is_paper_contract
  assert json.loads(json.dumps(found.to_dict()))["faults"] == []
  assert found.lines()[-1].endswith("everything holds")


def leaf_faults(params, config, path, **changes):
  leaf = dataclasses.replace(at(params, path), **changes)
  return faults_of(replaced(params, path, leaf), config)


def test_illegal_payloads(params, tiny_config):
  leaf = at(params, Q)
  scales = leaf.weight.scales.at[3, 1].set(255)
  (fault,) = leaf_faults(
    params, tiny_config, Q, weight=dataclasses.replace(leaf.weight, scales=scales)
  )
  assert fault.startswith("layers_0/self_attn/q_proj/weight: payload: 1 scale bytes")
  codes = leaf.weight.codes.astype(jnp.int32)
  (fault,) = leaf_faults(
    params, tiny_config, Q, weight=dataclasses.replace(leaf.weight, codes=codes)
  )
  assert "expected uint8 codes" in fault
  (fault,) = leaf_faults(params, tiny_config, Q, rounding=Unrounded())
  assert fault.endswith("its inputs are not rounded to A4.")


def test_tables_that_are_not_of_the_codes(params, tiny_config):
  leaf = at(params, Q)
  codes = leaf.weight.codes ^ jnp.uint8(8)
  other = dataclasses.replace(leaf.weight, codes=codes)
  (fault,) = leaf_faults(params, tiny_config, Q, weight=other)
  assert "its table G_Q is not that of its codes" in fault


def test_maps_that_lose_information_or_are_not_finite(params, tiny_config):
  matrix = at(params, Q).input_map.matrix
  singular = input_maps.BlockDense(matrix.at[0, 5].set(matrix[0, 6]))
  (fault,) = leaf_faults(params, tiny_config, Q, input_map=singular)
  assert "its map does not reproduce the folded function" in fault
  nan = input_maps.BlockDense(matrix.at[0, 0, 0].set(jnp.nan))
  (fault,) = leaf_faults(params, tiny_config, Q, input_map=nan)
  assert "input_map/matrix has 1 NaN or inf of 2048 values" in fault


def test_operands_that_are_not_the_rule(params, tiny_config, monkeypatch):
  real = mxfp4.round_blocks
  down = {"rules": PAPER_CONTRACT.rules}
  twice = lambda x, rules: real(x * 1.7, rules)
  with monkeypatch.context() as patch:
    patch.setattr(mxfp4, "round_blocks", twice)
    faults = leaf_faults(params, tiny_config, DOWN, **down)
  assert any("differ from the nearest codes in more than 0 places" in f for f in faults)
  with monkeypatch.context() as patch:
    patch.setattr(mxfp4, "round_blocks", lambda x, rules: real(x, rules) * 1.1)
    faults = leaf_faults(params, tiny_config, DOWN, **down)
  assert any("not E2M1 under a power-of-two scale" in f for f in faults)


def test_clipped_operands_are_legal_but_not_nearest(params, tiny_config):
  shares = jnp.full((3,), 0.5, jnp.float32)
  assert not leaf_faults(params, tiny_config, DOWN, rounding=Clipped(shares, shares))


def test_coverage(params, tiny_config):
  weight = jnp.zeros(at(params, Q).shape, jnp.bfloat16)
  (fault,) = faults_of(replaced(params, Q, {"weight": weight}["weight"]), tiny_config)
  assert fault.endswith(
    "q_proj/weight is a target of the contract and is not quantized."
  )
  (fault,) = faults_of(replaced(params, Q[:-1], None), tiny_config)
  assert fault == "layers_0/self_attn/q_proj/weight is missing."
  swapped = replaced(params, DOWN, at(params, Q))
  (fault,) = faults_of(swapped, tiny_config)
  assert "down_proj/weight has shape (64, 64), expected (64, 96)" in fault
  norm = ("norm", "weight")
  bad = replaced(params, norm, at(params, norm).at[0].set(jnp.inf))
  (fault,) = faults_of(bad, tiny_config)
  assert fault.startswith("norm/weight has 1 NaN or inf")


def test_recovery_beyond_bounds_and_allowance(params, tiny_config):
  mlp, values = (
    ("layers_0", "mlp", "mlp_recovery"),
    (
      "layers_0",
      "self_attn",
      "value_recovery",
    ),
  )
  loud = dataclasses.replace(at(params, mlp), gate_scale=jnp.float32(0.06))
  (fault,) = faults_of(replaced(params, mlp, loud), tiny_config)
  assert "|alpha| + |beta| + |eta| is 0.135000, above the bound of 0.125" in fault
  wide = dataclasses.replace(at(params, mlp), up_scale=jnp.zeros(96, jnp.float32))
  (fault,) = faults_of(replaced(params, mlp, wide), tiny_config)
  assert "up_scale is float32 (96,), its allowance is float32 ()" in fault
  many = ValueRecovery(jnp.ones(4, jnp.float32), jnp.ones(4, jnp.float32))
  (fault,) = faults_of(replaced(params, values, many), tiny_config)
  assert "scale is float32 (4,), its allowance is float32 (2,)" in fault
  broken = dataclasses.replace(at(params, values), offset=jnp.float32([0, jnp.nan]))
  (fault,) = faults_of(replaced(params, values, broken), tiny_config)
  assert fault.endswith("offset is not finite.")
  extra = replaced(params, ("layers_0", "mlp", "hidden_bias"), jnp.zeros(3))
  (fault,) = faults_of(extra, tiny_config)
  assert "layers_0/mlp/hidden_bias is no parameter of this model" in fault


def test_files_that_changed_or_came(saved):
  name = sorted(checkpoint.read_manifest(saved)["files"])[-1]
  data = (saved / name).read_bytes()
  (saved / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
  (saved / "extra.bin").write_bytes(b"x")
  assert verify.verify(saved).faults == [
    f"file {name} has another SHA-256.",
    "file extra.bin is not in mxjax.json.",
  ]


def test_a_manifest_whose_contract_is_not_its_hash(saved):
  file = saved / "mxjax.json"
  manifest = json.loads(file.read_text())
  manifest["contract"]["kv_cache"] = True
  file.write_text(json.dumps(manifest))
  (fault,) = verify.verify(saved).faults
  assert "does not match its digest" in fault
  manifest["digest"] = checkpoint.manifest_digest(manifest)
  file.write_text(json.dumps(manifest))
  (fault,) = verify.verify(saved).faults
  assert fault.startswith("contract: the manifest states the hash")


def test_no_checkpoint_there(tmp_path):
  with pytest.raises(FileNotFoundError, match="mxjax.json, got no such file"):
    verify.verify(pathlib.Path(tmp_path))


@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**90])
def test_the_auditors_decoder_is_the_format(scale):
  x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
  tensor = mxfp4.encode(jnp.asarray(x * np.float32(scale)))
  ours = verify_linears.decode(np.asarray(tensor.codes), np.asarray(tensor.scales))
  np.testing.assert_array_equal(ours, np.asarray(mxfp4.decode(tensor, jnp.float32)))


def test_the_auditors_nearest_codes_are_the_rule():
  x = np.random.default_rng(1).standard_normal((4, 32, 50)).astype(np.float32)
  ours, either = verify_linears._nearest(x.astype(np.float64))
  theirs = np.asarray(mxfp4.round_blocks(jnp.asarray(x)))
  assert either.mean() < 0.01
  np.testing.assert_array_equal(ours[~either], theirs[~either])
  assert verify_linears.illegal_blocks(theirs.astype(np.float64)) == 0
  theirs = theirs.astype(np.float64)
  theirs[2, 7, 9] = 5.0 * np.abs(theirs[2, :, 9]).max() / 6
  assert verify_linears.illegal_blocks(theirs) == 1
