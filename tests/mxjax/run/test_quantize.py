"""`quantize` end to end: bits, order of measurements, records and refusals."""

import dataclasses
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import methods
from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration
from mxjax.evaluation.measures.operator_error import operator_error, operator_errors
from mxjax.methods.hires import stage3
from mxjax.methods.program import LinearResult
from mxjax.models import CausalLM
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.run import folder
from mxjax.run.quantize import run
from mxjax.run.recover import measure
from mxjax.run.setup import Setup
from mxjax.storage import atomic_io
from tests.mxjax.quantized import assert_same, at, replaced, without
from tests.tiny import leaves_of

VALUES, MLP = "self_attn/value_recovery", "mlp/mlp_recovery"


@pytest.fixture(scope="module")
def model(tiny_model):
  return tiny_model


@pytest.fixture(scope="module")
def params(tiny_params):
  return tiny_params


@pytest.fixture(scope="module")
def hires(tiny_hires):
  return tiny_hires.params


@pytest.fixture(scope="module")
def quantize(params, tiny_calib):
  return lambda method="hires", calib=tiny_calib, **options: mxjax.quantize(
    params, calib, method, check=False, probe=False, **options
  )


@pytest.fixture(scope="module")
def layer_with_taps(model):
  return jax.jit(model.layer_with_taps)


@pytest.fixture(scope="module")
def entering(model, layer_with_taps, tiny_tokens):
  """Hidden states entering each layer of some params, whole model at once."""

  def run(params):
    hidden = [model.embed(params, jnp.asarray(tiny_tokens))]
    for index in range(model.num_layers):
      hidden.append(layer_with_taps(params[model.layer_name(index)], hidden[-1])[0])
    return hidden

  return run


def test_the_two_entrances_take_the_same_arguments():
  first, second = (inspect.signature(one) for one in (mxjax.quantize, run))
  assert first.parameters == second.parameters
  assert first.return_annotation != second.return_annotation


def test_params_outside_the_layers_are_found_by_the_models_own_names(model, params):
  class Renamed(CausalLM):
    def layer_name(self, index):
      return f"block{index}"

  renamed = {key.replace("layers_", "block"): params[key] for key in params}
  outer = streams.outer_params(Renamed(model.config), renamed)
  assert set(outer) == set(params) - {"layers_0", "layers_1"}


def test_every_target_becomes_a_legal_operator(model, params, hires):
  leaves = leaves_of(hires)
  assert len(leaves) == 14
  for leaf in leaves:
    mxfp4.check_legal(leaf.weight)
  keys = lambda tree: {k: set(v) for k, v in tree["layers_0"].items()}
  assert keys(without(without(hires, VALUES), MLP)) == keys(params)
  tokens = jnp.arange(12, dtype=jnp.int32)[None]
  run = jax.jit(model.apply)
  logits, exact = run({"params": hires}, tokens), run({"params": params}, tokens)
  assert logits.shape == exact.shape
  assert 0 < float(jnp.abs(logits - exact).mean()) < float(jnp.abs(exact).mean())


@pytest.mark.slow
def test_a_quantized_model_has_gradients_at_its_embedding(model, params, hires):
  tokens = jnp.arange(40, dtype=jnp.int32)[None]

  def gradient(params):
    def loss(table):
      logits = model.apply({"params": {**params, "embed_tokens": table}}, tokens)
      return -jax.nn.log_softmax(logits)[..., 3].mean()

    return jax.jit(jax.grad(loss))(params["embed_tokens"])["weight"].astype("float32")

  exact, got = gradient(params), gradient(hires)
  cosine = jnp.vdot(exact, got) / jnp.linalg.norm(exact) / jnp.linalg.norm(got)
  # Not 1: the loud channels move the hidden states that the gradients are taken at.
  assert 0.4 < cosine < 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hires", "brq", "rtn"])
def test_a_shared_store_does_not_change_a_bit(
  quantize, tiny_build, hires, tmp_path, method, monkeypatch
):
  """Filled by another method, then read by this one."""
  alone = hires if method == "hires" else tiny_build(method).params
  store = tmp_path / "store"
  quantize("gptq", store=store)
  if method != "hires":
    # Everything these need has been reduced already: the float model stays at rest.
    monkeypatch.setattr(streams, "capture", None)
  assert_same(alone, quantize(method, store=store))


def test_a_store_keeps_other_tokens_apart(quantize, model, tiny_tokens, tmp_path):
  store = tmp_path / "store"
  quantize("gptq", store=store)
  other = Calibration(model, tiny_tokens[::-1].copy())
  assert_same(quantize("gptq", other), quantize("gptq", other, store=store))
  assert len(list(store.iterdir())) == 2


@pytest.mark.slow
def test_hires_beats_the_methods_it_builds_on(model, params, hires, tiny_build):
  test = np.random.default_rng(2).integers(0, 61, (1, 64)).astype(np.int32)
  error = lambda quantized: operator_error(model, params, quantized, test)
  best = error(hires)
  assert best < error(tiny_build("brq").params) and best < error(
    tiny_build("rtn").params
  )


def test_gptq_beats_rtn_on_the_calibration_loss(model, params, tiny_tokens, tiny_build):
  gptq_errors, rtn_errors = (
    operator_errors(model, params, tiny_build(name).params, tiny_tokens)
    for name in ("gptq", "rtn")
  )
  better = [gptq_errors[path] < rtn_errors[path] for path in rtn_errors]
  assert np.mean(better) > 0.7


def test_recovery_in_one_pass_equals_separate_passes(
  model, params, tiny_calib, hires, layer_with_taps, entering
):
  """Attention on the Stage-II model, MLP on the attention-corrected one."""
  setup = Setup.of(params, tiny_calib, methods.HIRES, PAPER_CONTRACT)
  attention_only = without(hires, MLP)
  float_entering, sequences = entering(params), range(len(tiny_calib.tokens))
  for fit, state, path in (
    (stage3.ATTENTION, without(attention_only, VALUES), VALUES),
    (stage3.MLP, attention_only, MLP),
  ):
    hidden = entering(state)
    for index, name in enumerate(("layers_0", "layers_1")):
      values = layer_with_taps(params[name], float_entering[index])[1]["value"]
      with precision.float64_scope():
        stream = [hidden[index][s : s + 1] for s in sequences]
        taps = [{"value": values[s : s + 1]} for s in sequences]
        moments, _ = measure(setup, fit, state[name], params[name], stream, taps)
        leaf, _ = fit.solve(moments)
      expected = jax.tree.leaves(at(hires[name], path))
      for got, one in zip(jax.tree.leaves(leaf), expected, strict=True):
        np.testing.assert_allclose(got, one, atol=2e-5)


def test_the_record_says_what_happened(tiny_hires):
  record = tiny_hires.record
  assert json.loads(json.dumps(record.to_dict()))["program"]["name"] == "hires"
  linear = record.layers[0]["linears"]["mlp/up_proj"]
  assert linear["damping"] == pytest.approx(0.01)
  assert linear["error_final"] <= linear["error_mapped_nearest"]
  assert set(linear["balance_steps"]) <= {0.0, 0.5, 1.0}
  losses = np.asarray(linear["balance_losses"], float)
  chosen = np.asarray(linear["balance_steps"])
  index = np.select([chosen == 1, chosen == 0.5], [0, 1], 2)
  accepted = np.take_along_axis(losses, index[None], 0)[0]
  assert (accepted <= losses[2]).all()
  assert max(linear["interaction_spectral_norm"]) <= 1 / 8
  assert len(linear["interaction_spectral_norm"]) == 2
  fits = record.layers[1]["recovery"]
  assert fits["attention"]["error_after"] <= fits["attention"]["error_before"]
  assert abs(fits["mlp"]["alpha"]) + abs(fits["mlp"]["beta"]) <= 1 / 8
  assert set(record.clock.seconds) >= {"calibration", "quantization"}


def test_each_finished_layer_is_on_disk_with_its_checksum(quantize, tmp_path):
  quantize("rtn", run_dir=tmp_path)
  state = folder.read_state(tmp_path)
  assert [one["name"] for one in state["layers"]] == ["layers_0", "layers_1"]
  listed = folder.listed_files(state)
  assert len(listed) == 3 and not atomic_io.damaged_files(tmp_path, listed)
  assert not list(tmp_path.rglob("*.partial"))


def test_progress_rises_and_ends_in_the_last_layer(quantize):
  seen = []
  quantize("hires", on_progress=seen.append)
  fractions = [p.fraction for p in seen]
  assert fractions == sorted(fractions)
  assert seen[-1].layer == 1
  stages = [p.stage for p in seen if p.layer == 0 and not p.stage.endswith("_proj")]
  assert stages == [
    "calibration",
    "quantization",
    "attention recovery",
    "mlp recovery",
  ]


@pytest.mark.slow
def test_differentiating_the_float_model_is_told_and_timed(
  tiny_params, model, tiny_tokens
):
  seen = []
  result = run(
    *(tiny_params, Calibration(model, tiny_tokens[:2]), "rtn:weighting=fisher"),
    on_progress=seen.append,
    check=False,
    probe=False,
  )
  labels = [p.stage for p in seen]
  assert labels[:5] == [*(f"output gradients {i}/4" for i in range(4)), "calibration"]
  fractions = [p.fraction for p in seen]
  assert fractions == sorted(fractions)
  assert fractions[3] < fractions[4] == pytest.approx(0.1)
  seconds = result.record.clock.seconds
  assert seconds["output gradients"] > 0
  assert list(seconds).index("output gradients") < list(seconds).index("calibration")


def test_ablations_are_programs(quantize, model, tiny_tokens):
  plain = dataclasses.replace(
    methods.HIRES,
    name="ablation",
    use_interaction=False,
    use_balance=False,
    weights="rtn",
    rounding="nearest",
    recover=(),
  )
  quantized = quantize(plain, Calibration(model, tiny_tokens[:2]))
  assert "value_recovery" not in quantized["layers_0"]["self_attn"]
  assert plain.describe()["options"]["use_balance"] is False


class TestBadInputs:
  def test_a_width_that_is_not_a_multiple_of_32(self, tiny_calib, tiny_config):
    odd = CausalLM(dataclasses.replace(tiny_config, intermediate_size=80))
    shapes = jax.eval_shape(odd.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    params = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), shapes["params"])
    with pytest.raises(ValueError, match="layers_0/mlp/down_proj of input width 80"):
      mxjax.quantize(params, dataclasses.replace(tiny_calib, model=odd))

  def test_a_nan_weight_leaves_nothing_behind(self, params, tiny_calib, tmp_path):
    path = "layers_1/mlp/up_proj/weight"
    bad = replaced(params, path, at(params, path).at[3, 4].set(jnp.nan))
    with pytest.raises(ValueError, match="layers_1/mlp/up_proj with 1 NaN or inf"):
      mxjax.quantize(bad, tiny_calib, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()

  @pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
      (np.zeros((0, 32), np.int32), ValueError, r"got shape \(0, 32\)"),
      (np.full((1, 8), 61), ValueError, "the vocabulary of 61, the first is 61"),
      (np.full((1, 8), -1), ValueError, "the first is -1"),
      (np.zeros((1, 3), np.int32), ValueError, "of at least 4 tokens"),
      (np.zeros((1, 8)), TypeError, "float64"),
    ],
  )
  def test_calibration_tokens(self, model, tokens, error, message):
    with pytest.raises(error, match=message):
      Calibration(model, tokens)

  def test_an_existing_run_folder(self, quantize, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="never overwritten"):
      quantize(run_dir=tmp_path)

  def test_an_unknown_method(self, quantize):
    with pytest.raises(ValueError, match="got 'awq'"):
      quantize("awq")

  @pytest.mark.parametrize(
    ("names", "message"),
    [
      (
        ("q_proj", "query", "up"),
        r"\(q_proj, query, up\).*\(q_proj, k_proj.*no query, up;",
      ),
      ((), r"2 layers \(q_proj.*got no target"),
    ],
  )
  def test_targets_that_the_model_does_not_have(self, quantize, names, message):
    with pytest.raises(ValueError, match=message):
      quantize(contract=mxjax.Contract(targets=names))

  def test_recovery_of_parts_that_the_model_does_not_have(self, params, tiny_calib):
    class Plain(CausalLM):
      def layer_with_taps(self, layer_params, hidden):
        output, taps = super().layer_with_taps(layer_params, hidden)
        return output, {name: taps[name] for name in taps if name != "gate"}

    calib = dataclasses.replace(tiny_calib, model=Plain(tiny_calib.model.config))
    with pytest.raises(
      ValueError, match=r"\(attention, mlp\).*: mlp lacks the tap gate;"
    ):
      mxjax.quantize(params, calib)

  def test_an_already_quantized_model(self, tiny_calib, hires):
    with pytest.raises(ValueError, match="already quantized"):
      mxjax.quantize(hires, tiny_calib)

  def test_a_collapsed_model_fails_loudly(self, params, tiny_calib):
    class Broken(mxjax.Program):
      def quantize_linear(self, weight, inputs):
        leaf, record = super().quantize_linear(weight, inputs)
        codes = jnp.full_like(leaf.weight.codes, 0x77)
        broken = dataclasses.replace(leaf.weight, codes=codes)
        return LinearResult(dataclasses.replace(leaf, weight=broken), record)

    with pytest.raises(FloatingPointError, match="collapsed under broken: loss"):
      mxjax.quantize(params, tiny_calib, Broken(name="broken"))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, list])
def test_tokens_in_place_of_a_calibration_are_told_what_to_pass(
  kind, tiny_params, tiny_tokens
):
  with pytest.raises(mxjax.Refusal) as refused:
    mxjax.quantize(tiny_params, kind(tiny_tokens[:2]))
  assert refused.value.expected == "calib: Calibration"
  assert refused.value.mend == "pass mxjax.Calibration(model, tokens)"
