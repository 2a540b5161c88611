"""Audits: a sound checkpoint passes, and every kind of fault is one sentence."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.audit import arithmetic, verify, verify_linears
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.numerics.realization.activation_quantizers import (
  Clipped,
  FewCodes,
  Nearest,
  Unrounded,
)
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping import input_maps
from mxjax.storage import checkpoint, digested_json
from tests.mxjax import quantized
from tests.mxjax.quantized import at, replaced

Q = "layers_0/self_attn/q_proj/weight"
DOWN = "layers_1/mlp/down_proj/weight"


@pytest.fixture(scope="module")
def params(tiny_params):
  return quantized.model(tiny_params, quantized.MIXED, recovery=True)


@pytest.fixture
def saved(params, tiny_config, tmp_path):
  return checkpoint.save_checkpoint(tmp_path / "out", params, tiny_config)


@pytest.fixture
def fault_of(params, tiny_config):
  """The one fault of the params with another value at a path."""

  def audit(path, value):
    found = verify.Audit("")
    changed = replaced(params, path, value)
    verify._check_params(changed, tiny_config, PAPER_CONTRACT, found, 0)
    (fault,) = found.faults
    return fault

  return audit


@pytest.fixture
def leaf_fault(params, fault_of):
  """The one fault of a leaf with other fields."""
  return lambda path, **changes: fault_of(
    path, dataclasses.replace(at(params, path), **changes)
  )


def test_a_sound_checkpoint_has_no_faults(saved):
  found = verify.verify(saved)
  assert found.faults == []
  assert found.counts["quantized linears"] == 14
  assert found.counts["recovery leaves"] == 4
  assert found.is_paper_contract
  assert json.loads(json.dumps(found.to_dict()))["faults"] == []
  assert found.lines()[-1].endswith("everything holds")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rtn", "hires:rounding=sensitivity"])
def test_learned_codes_have_no_faults(
  method, tiny_params, tiny_config, tiny_calib, tmp_path
):
  """Their tables G_Q are those of the new codes."""
  tuned = f"{method}+tune:epochs=8:length=32:label_weight=0:code_rate=0.05"
  params = mxjax.quantize(tiny_params, tiny_calib, tuned, check=False, probe=False)
  saved = checkpoint.save_checkpoint(tmp_path / "out", params, tiny_config)
  found = verify.verify(saved)
  assert found.faults == []
  assert found.counts["quantized linears"] == 14


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_stated_arithmetic_is_that_of_the_model(
  params, tiny_config, tmp_path, dtype
):
  layers = [{"linears": {"q": {"hessian_products": "float32"}, "k": {}}}]
  attention = {"sequences": "pallas", "branching": "xla"}
  stated = arithmetic.arithmetic(params, dtype, layers, attention)
  assert stated == {
    **{"model": dtype, "hessian_products": ["float32"]},
    **{"maps": ["float32"], "tables": ["float32"], "unquantized": ["bfloat16"]},
    **{"recovery": ["float32"], "attention": attention},
    "recovery_rounded": {"attention": dtype, "mlp": dtype},
  }
  config = dataclasses.replace(tiny_config, dtype=dtype)
  for name, change, faults in (
    ("sound", {}, []),
    (
      "other",
      {"maps": ["float16"]},
      [
        "arithmetic: the manifest states maps as ['float16'], the model has "
        "['float32'].",
      ],
    ),
  ):
    extra = {"arithmetic": stated | change}
    saved = checkpoint.save_checkpoint(tmp_path / name, params, config, extra=extra)
    assert verify.verify(saved).faults == faults


def test_illegal_payloads(params, leaf_fault):
  weight = at(params, Q).weight
  scales = dataclasses.replace(weight, scales=weight.scales.at[3, 1].set(255))
  codes = dataclasses.replace(weight, codes=weight.codes.astype(jnp.int32))
  begin = "layers_0/self_attn/q_proj/weight: payload: expected no scale bytes"
  assert leaf_fault(Q, weight=scales).startswith(begin)
  assert "expected uint8 codes" in leaf_fault(Q, weight=codes)
  unrounded = leaf_fault(Q, rounding=Unrounded())
  assert unrounded.endswith("its inputs are not rounded to A4.")


def test_tables_that_are_not_of_the_codes(params, leaf_fault):
  weight = at(params, Q).weight
  other = dataclasses.replace(weight, codes=weight.codes ^ jnp.uint8(8))
  assert "its table G_Q is not that of its codes" in leaf_fault(Q, weight=other)


def test_maps_that_lose_information_or_are_not_finite(params, leaf_fault):
  matrix = at(params, Q).input_map.matrix
  singular = input_maps.BlockDense(matrix.at[0, 5].set(matrix[0, 6]))
  fault = leaf_fault(Q, input_map=singular)
  assert "its map does not reproduce the folded function" in fault
  nan = input_maps.BlockDense(matrix.at[0, 0, 0].set(jnp.nan))
  fault = leaf_fault(Q, input_map=nan)
  assert "input_map/matrix has 1 NaN or inf of 2048 values" in fault


@pytest.mark.parametrize(
  ("before", "after", "message"),
  [
    (1.7, 1.0, "differ from the nearest codes in more than 0 places"),
    (1.0, 1.1, "not E2M1 under a power-of-two scale"),
  ],
)
def test_operands_that_are_not_the_rule(params, monkeypatch, before, after, message):
  real = mxfp4.round_blocks
  wrong = lambda x, rules: real(x * before, rules) * after
  monkeypatch.setattr(mxfp4, "round_blocks", wrong)
  # What was compiled before rounds as it should.
  monkeypatch.setattr(verify_linears, "_run", verify_linears._run.__wrapped__)
  faults = verify_linears.faults(at(params, DOWN), np.random.default_rng(0))
  assert any(message in fault for fault in faults)


@pytest.mark.parametrize("rounds_up", [False, True])
def test_a_few_codes_differ_from_the_nearest_under_their_own_exponents(
  params, rounds_up
):
  leaf = at(params, Q)
  rule = FewCodes(leaf.rounding.gram, 2, rounds_up)
  faults = lambda rule: [
    *verify_linears.faults(
      dataclasses.replace(leaf, rounding=rule), np.random.default_rng(0)
    )
  ]
  assert not faults(rule)

  class Understated(FewCodes):
    edits = 1

  class Floored(FewCodes):
    def scale_rules(self, rules):
      return rules

    def round(self, *args, **kwargs):
      return FewCodes.round(rule, *args, **kwargs)

  for wrong, named in ((Understated, 1), (Floored, 2)):
    jax.tree_util.register_dataclass(wrong)
    found = faults(wrong(rule.gram, 2, rounds_up))
    message = f"differ from the nearest codes in more than {named} places"
    is_wrong = wrong is Understated or rounds_up
    assert any(message in fault for fault in found) == is_wrong


def test_clipped_operands_are_legal_but_not_nearest(params):
  shares = jnp.full((3,), 0.5, jnp.float32)
  clipped = dataclasses.replace(at(params, DOWN), rounding=Clipped(shares, shares))
  assert not list(verify_linears.faults(clipped, np.random.default_rng(0)))


def test_coverage(params, fault_of):
  weight = jnp.zeros(at(params, Q).shape, jnp.bfloat16)
  unquantized = "q_proj/weight is a target of the contract and is not quantized."
  assert fault_of(Q, weight).endswith(unquantized)
  missing = fault_of("layers_0/self_attn/q_proj", None)
  assert missing == "layers_0/self_attn/q_proj/weight is missing."
  swapped = fault_of(DOWN, at(params, Q))
  assert "down_proj/weight has shape (64, 64), expected (64, 96)" in swapped
  bad = at(params, "norm/weight").at[0].set(jnp.inf)
  assert fault_of("norm/weight", bad).startswith("norm/weight has 1 NaN or inf")
  rules = dataclasses.replace(at(params, DOWN), rules=mxfp4.Rules(tie_rule="even"))
  assert "tie_rule='even'), not the contract's." in fault_of(DOWN, rules)


def test_recovery_beyond_bounds_and_allowance(leaf_fault, fault_of):
  mlp, values = "layers_0/mlp/mlp_recovery", "layers_0/self_attn/value_recovery"
  loud = leaf_fault(mlp, gate_scale=jnp.float32(0.06))
  assert "|alpha| + |beta| + |eta| is 0.135000, above the bound of 0.125" in loud
  wide = leaf_fault(mlp, up_scale=jnp.zeros(96, jnp.float32))
  assert "up_scale is float32 (96,), its allowance is float32 ()" in wide
  many = fault_of(values, ValueRecovery(jnp.ones(4), jnp.ones(4)))
  assert "scale is float32 (4,), its allowance is float32 (2,)" in many
  broken = leaf_fault(values, offset=jnp.float32([0, jnp.nan]))
  assert broken.endswith("offset is not finite.")
  extra = fault_of("layers_0/mlp/hidden_bias", jnp.zeros(3))
  assert "layers_0/mlp/hidden_bias is no parameter of this model" in extra


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
  manifest["digest"] = digested_json.digest(manifest)
  file.write_text(json.dumps(manifest))
  (fault,) = verify.verify(saved).faults
  assert fault.startswith("contract: the manifest states the hash")


def test_no_checkpoint_there(tmp_path):
  with pytest.raises(FileNotFoundError, match="mxjax.json, got no such file"):
    verify.verify(tmp_path)


@pytest.mark.parametrize("scale_rule", ["even", "rceil"])
def test_linears_of_other_rules_are_sound_too(tiny_params, scale_rule):
  rules, rng = mxfp4.Rules(scale_rule=scale_rule), np.random.default_rng(0)
  weight = mxfp4.encode(tiny_params["layers_0"]["mlp"]["up_proj"]["weight"], rules)
  leaf = QuantizedLinear(weight, None, Nearest(), rules=rules)
  assert [*verify_linears.faults(leaf, rng)] == []


def test_a_head_of_its_own_is_no_fault_beside_a_tied_config(
  params, tiny_config, tmp_path
):
  assert tiny_config.tie_embeddings
  own = {**params, "lm_head": {"weight": 2 * params["embed_tokens"]["weight"]}}
  path = checkpoint.save_checkpoint(tmp_path / "out", own, tiny_config)
  assert verify.verify(path).faults == []


def test_a_model_of_your_own_is_a_fault_and_no_crash(params, tmp_path):
  path = checkpoint.save_checkpoint(tmp_path / "out", params, {"width": 64})
  (fault,) = verify.verify(path).faults
  assert fault.startswith("model config: expected that of a model of mxjax.models")


@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**90])
def test_the_auditors_decoder_is_the_format(scale):
  x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
  tensor = mxfp4.encode(jnp.asarray(x * np.float32(scale)))
  ours = verify_linears.decode(np.asarray(tensor.codes), np.asarray(tensor.scales))
  np.testing.assert_array_equal(ours, np.asarray(mxfp4.decode(tensor, jnp.float32)))


def test_the_auditors_nearest_codes_are_the_rule():
  x = np.random.default_rng(1).standard_normal((4, 32, 50)).astype(np.float32)
  for rule in ("even", "floor"):
    how = {"rounds_up": rule == "even"}
    ours, either = verify_linears._nearest(x.astype(np.float64), **how)
    rules = mxfp4.Rules(scale_rule=rule)
    theirs = np.asarray(mxfp4.round_blocks(jnp.asarray(x), rules))
    assert either.mean() < 0.01
    np.testing.assert_array_equal(ours[~either], theirs[~either])
  assert verify_linears.illegal_blocks(theirs.astype(np.float64)) == 0
  theirs = theirs.astype(np.float64)
  theirs[2, 7, 9] = 5.0 * np.abs(theirs[2, :, 9]).max() / 6
  assert verify_linears.illegal_blocks(theirs) == 1
