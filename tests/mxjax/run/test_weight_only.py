"""The weight-only form: MXFP4 weights, inputs as they are, outside the contract."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.audit import verify
from mxjax.calibration.calibration import Calibration
from mxjax.evaluation import evaluating
from mxjax.evaluation.report import page
from mxjax.evaluation.subjects import Subject
from mxjax.evaluation.tables.comparing import compare
from mxjax.layers.inference_packing import pack_for_inference
from mxjax.layers.linear import linear
from mxjax.methods.program import Program, Realization
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.numerics.realization import gptq
from mxjax.numerics.realization.activation_quantizers import Nearest, Unrounded
from mxjax.run.quantize import run
from mxjax.storage import checkpoint, export
from tests import refusals
from tests.cases import slow
from tests.mxjax.quantized import at, replaced

PAPER_HASH = "1e3704463dbe126631242052e64865cd4abbd39ad55af8a1f7653d755a155a65"
WEIGHT_ONLY = dataclasses.replace(PAPER_CONTRACT, activations="float")
UP = "layers_1/mlp/up_proj/weight"
NAMES = "gptq", "brq", "hires:recover=none"
TOKENS = np.random.default_rng(0).integers(0, 61, (3, 32)).astype(np.int32)


def exact(x, leaf):
  """Decoded weights times mapped float inputs, in float64."""
  with precision.float64_scope():
    blocks = mxfp4.to_blocks(jnp.asarray(np.asarray(x), jnp.float64))
    if leaf.input_map is not None:
      blocks = leaf.input_map.apply(blocks)
    weight = np.asarray(mxfp4.decode(leaf.weight, jnp.float32), np.float64)
    return np.asarray(mxfp4.from_blocks(blocks)) @ weight.T


def error(computed, expected):
  gap = np.asarray(computed, np.float64) - expected
  return np.linalg.norm(gap) / np.linalg.norm(expected)


@pytest.mark.parametrize("name", [*NAMES[:2], *slow(*NAMES[2:])])
def test_the_output_is_that_of_decoded_weights_and_float_inputs(tiny_build, name):
  """The codes are those of W4A4, so that the difference of both is A4 alone."""
  strict = at(tiny_build(name).params, UP)
  leaf = at(tiny_build(f"{name}:activations=float").params, UP)
  assert isinstance(leaf.rounding, Unrounded)
  same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
  same((leaf.weight, leaf.input_map), (strict.weight, strict.input_map))
  x = jnp.asarray(np.random.default_rng(1).standard_normal((7, 64)), jnp.float32)
  expected = exact(x, leaf)
  assert error(linear(x, leaf), expected) < 1e-6
  # What fails if the inputs were rounded after all.
  assert error(linear(x, strict), expected) > 0.03
  narrow = x.astype(jnp.bfloat16)
  # A map's output and the product are each rounded to bfloat16.
  assert error(linear(narrow, leaf), exact(narrow, leaf)) < 2**-7
  assert linear(narrow, leaf).dtype == jnp.bfloat16


def test_bfloat16_inputs_without_a_map_are_rounded_once(tiny_build):
  leaf = at(tiny_build("gptq:activations=float").params, UP)
  x = jnp.asarray(np.random.default_rng(1).standard_normal((7, 64)), jnp.bfloat16)
  got, expected = np.asarray(linear(x, leaf), np.float64), exact(x, leaf)
  assert (np.abs(got - expected) <= 2**-8 * np.abs(expected) + 1e-6).all()


def test_nothing_weight_only_has_the_papers_contract(tiny_build):
  assert PAPER_CONTRACT.hash == PAPER_HASH
  strict, loose = (
    tiny_build(name).record for name in ("gptq", "gptq:activations=float")
  )
  assert (strict.contract_hash, strict.form) == (PAPER_HASH, "W4A4")
  assert (loose.contract_hash, loose.form) == (WEIGHT_ONLY.hash, "W4A16")
  assert loose.program["options"]["activations"] == "float"
  # What W4A4 programs and contracts say of themselves is what it was.
  assert "activations" not in strict.program["options"]
  assert "activations" not in PAPER_CONTRACT.to_dict()
  assert {one["rounding"] for one in loose.layers[0]["linears"].values()} == {"none"}


class Careless(Program):
  """A program of a user's own that does not round its inputs and does not say so."""

  def quantize_weight(self, weight, inputs, input_map):
    codes = gptq.round_to_nearest(weight, inputs.rules)
    return Realization(codes, Unrounded())


@pytest.mark.slow
def test_programs_and_contracts_that_differ_are_refused(tiny_model, tiny_params):
  calib = Calibration(tiny_model, TOKENS)
  quantize = lambda method, **options: (
    lambda: run(tiny_params, calib, method, check=False, **options)
  )
  refusals.check(
    [
      (quantize(Careless(name="careless")), "layers_0", "legal A4", "Unrounded"),
      (quantize("gptq", contract=WEIGHT_ONLY), "gptq, which rounds them"),
      (lambda: Contract(activations="fp8"), "mxfp4 or float", "'fp8'"),
    ]
  )
  marked = run(
    tiny_params, calib, Careless(name="careless", activations="float"), check=False
  )
  assert marked.record.contract_hash == WEIGHT_ONLY.hash


@pytest.mark.slow
def test_recovery_is_fitted_to_the_model_without_a4(tiny_build):
  """It equals the fits of the W4A4 model before encoding, which drop its A4."""
  weight_only = tiny_build("rtn+r:activations=float").params
  early = tiny_build("rtn:recover=attention-unrounded+mlp-unrounded").params
  strict = tiny_build("rtn+r").params
  for path in ("self_attn/value_recovery", "mlp/mlp_recovery"):
    ours, same, other = (
      at(params, f"layers_1/{path}") for params in (weight_only, early, strict)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, same)
    assert any(
      (np.asarray(a) != np.asarray(b)).any()
      for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(other), strict=True)
    )


def test_hires_stores_no_tables_of_a4(tiny_build):
  strict, loose = (
    at(tiny_build(name).params, UP)
    for name in ("hires:recover=none", "hires:recover=none:activations=float")
  )
  assert jax.tree.leaves(strict.rounding) and not jax.tree.leaves(loose.rounding)


def test_packing_gives_it_no_float8(tiny_build):
  params = tiny_build("gptq:activations=float").params
  packed = pack_for_inference(params, products="float8")
  assert at(packed, UP).float8_scale is None
  strict = pack_for_inference(tiny_build("gptq").params, products="float8")
  assert at(strict, UP).float8_scale is not None


def test_a_checkpoint_says_what_it_is(tiny_build, tiny_config, tmp_path):
  result = tiny_build("gptq:activations=float")
  save = lambda name, params, **options: checkpoint.save_checkpoint(
    tmp_path / name, params, tiny_config, program=result.record.program, **options
  )
  saved = save("saved", result.params, contract=WEIGHT_ONLY)
  restore = checkpoint.restore_checkpoint
  strict = tiny_build("gptq").params
  refusals.check(
    [
      (lambda: save("no", result.params), "activations=mxfp4", "activations=float"),
      (lambda: save("no", strict, contract=WEIGHT_ONLY), "activations=mxfp4"),
      (lambda: restore(saved), "activations is 'float', expected 'mxfp4'"),
    ]
  )
  assert checkpoint.read_contract(saved) == WEIGHT_ONLY
  params, _ = restore(saved, contract=WEIGHT_ONLY)
  jax.tree.map(np.testing.assert_array_equal, params, dict(result.params))
  audit = verify.verify(saved)
  assert audit.faults == [] and not audit.is_paper_contract
  assert "W4A16, outside the paper's W4A4 contract" in audit.lines()[0]
  assert evaluating._facts(saved)["method"] == "gptq:activations=float [W4A16]"


@pytest.mark.slow
@pytest.mark.parametrize(
  ("change", "told"),
  [
    ({"rounding": Nearest()}, "inputs are rounded to A4, and its contract"),
    ({"rounding": "doubled"}, "operand is not its mapped input"),
  ],
)
def test_the_audit_knows_rounded_inputs(
  tiny_build, tiny_config, monkeypatch, change, told
):
  params = dict(tiny_build("gptq:activations=float").params)
  if change["rounding"] == "doubled":
    double = lambda self, blocks, rules: 2 * blocks
    monkeypatch.setattr(Unrounded, "round_mapped", double)
  else:
    params = replaced(params, UP, dataclasses.replace(at(params, UP), **change))
  jax.clear_caches()
  found = verify.Audit("")
  verify._check_params(params, tiny_config, WEIGHT_ONLY, found, 0)
  jax.clear_caches()
  assert all(told in fault for fault in found.faults) and found.faults


def test_exports_leave_inputs_as_they_are(
  tiny_build, tiny_model, tiny_config, tmp_path
):
  params = tiny_build("gptq:activations=float").params
  source = export.Source(params, tiny_config)
  packed = export.write_compressed_tensors(tmp_path / "packed", source)
  config = json.loads((packed / "config.json").read_text())["quantization_config"]
  assert config["config_groups"]["group_0"]["input_activations"] is None
  again = export.read_compressed_tensors(packed)
  assert not again.rounds_inputs
  jax.tree.map(np.testing.assert_array_equal, at(again.params, UP), at(params, UP))
  logits = lambda some: np.asarray(tiny_model.apply({"params": some}, TOKENS[:1]))
  np.testing.assert_array_equal(logits(again.params), logits(params))
  # Without a map the effective weight is the decoded one, which bfloat16 holds.
  effective, _, rounding = export.dequant.effective_params(params, tiny_config)
  assert rounding == 0
  np.testing.assert_allclose(logits(effective), logits(params), rtol=0.02, atol=0.02)
  folder = export.write_transformers(tmp_path / "torch", source)
  linears = json.loads((folder / "config.json").read_text())["mxfp4"]["linears"]
  assert all("inputs_float" in buffers for buffers in linears.values())


@pytest.mark.slow
def test_a_comparison_shows_what_a4_costs(tiny_model, tiny_params, tmp_path):
  subject = Subject(tiny_model, tiny_params, {"text": TOKENS}, with_agreement=True)
  names = "gptq", "gptq:activations=float"
  rows, _ = compare(subject, TOKENS, names, folder=tmp_path)
  again, _ = compare(subject, TOKENS, names, folder=tmp_path)
  # Finished rows are known by their label and options, and are not made again.
  assert [row["seconds"] for row in again] == [row["seconds"] for row in rows]
  strict, loose = rows
  assert [strict["method"], loose["method"]] == ["gptq", f"{names[1]} [W4A16]"]
  assert loose["operator_error"] < strict["operator_error"]
  assert loose["agreement"]["kl_mean"] < strict["agreement"]["kl_mean"]
  text = page.page(rows, title="t", subtitle="s")
  assert text.count("W4A16, outside the paper&#x27;s contract") == 1
