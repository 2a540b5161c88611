import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import methods
from mxjax.calibration import streams
from mxjax.calibration.activations import Activations
from mxjax.calibration.calibration import Calibration
from mxjax.evaluation.measures.operator_error import operator_error, operator_errors
from mxjax.methods import recovery_fits
from mxjax.models import CausalLM
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.realization import gptq
from mxjax.running import pipeline, recovery
from tests.tiny import leaves_of


@pytest.fixture(scope="module")
def model(tiny_model):
  return tiny_model


@pytest.fixture(scope="module")
def params(tiny_params):
  return tiny_params


@pytest.fixture(scope="module")
def tokens():
  return np.random.default_rng(1).integers(0, 61, (5, 32)).astype(np.int32)


@pytest.fixture(scope="module")
def hires(model, params, tokens):
  return pipeline.quantize_with_record(
    params, Calibration(model, tokens), methods.HIRES, check=False
  )


def assert_same_bits(left, right):
  a, b = jax.tree.leaves(left), jax.tree.leaves(right)
  assert jax.tree.structure(left) == jax.tree.structure(right)
  for x, y in zip(a, b, strict=True):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_every_target_becomes_a_legal_operator(model, params, hires):
  leaves = leaves_of(hires.params)
  assert len(leaves) == 14
  for leaf in leaves:
    mxfp4.check_legal(leaf.weight)
  keys = lambda tree: {k: set(v) for k, v in tree["layers_0"].items()}
  grown = keys(hires.params)
  grown["self_attn"].remove("value_recovery")
  grown["mlp"].remove("mlp_recovery")
  assert grown == keys(params)
  tokens = jnp.arange(12, dtype=jnp.int32)[None]
  logits = jax.jit(model.apply)({"params": hires.params}, tokens)
  exact = model.apply({"params": params}, tokens)
  assert logits.shape == exact.shape
  assert 0 < float(jnp.abs(logits - exact).mean()) < float(jnp.abs(exact).mean())


def test_the_same_run_gives_the_same_bits(model, params, tokens, hires):
  again = mxjax.quantize(params, Calibration(model, tokens), check=False)
  assert_same_bits(hires.params, again)


@pytest.mark.parametrize(("method", "chunk"), [("hires", 2), ("gptq", 5)])
def test_the_chunk_size_does_not_change_a_bit(
  model, params, tokens, hires, method, chunk
):
  """Chunks of which the last is smaller, and all sequences in one."""
  calib = Calibration(model, tokens)
  quantize = lambda **options: mxjax.quantize(
    params, calib, method, check=False, **options
  )
  alone = hires.params if method == "hires" else quantize()
  assert_same_bits(alone, quantize(chunk=chunk))


@pytest.mark.parametrize("method", ["hires", "brq", "rtn"])
def test_a_shared_store_does_not_change_a_bit(
  model, params, tokens, tmp_path, method, monkeypatch
):
  """Filled by another method, then read by this one."""
  calib = Calibration(model, tokens)
  alone = mxjax.quantize(params, calib, method, check=False)
  store = tmp_path / "store"
  mxjax.quantize(params, calib, "gptq", check=False, store=store)
  if method != "hires":
    # Everything these need has been reduced already: the float model stays at rest.
    monkeypatch.setattr(streams, "capture", None)
  shared = mxjax.quantize(params, calib, method, check=False, store=store)
  assert_same_bits(alone, shared)


def test_a_store_keeps_other_tokens_apart(model, params, tokens, tmp_path):
  store = tmp_path / "store"
  mxjax.quantize(params, Calibration(model, tokens), "gptq", check=False, store=store)
  other = Calibration(model, tokens[::-1].copy())
  alone = mxjax.quantize(params, other, "gptq", check=False)
  shared = mxjax.quantize(params, other, "gptq", check=False, store=store)
  assert_same_bits(alone, shared)
  assert len(list(store.iterdir())) == 2


def test_quantized_upstream_shows_hooks_what_earlier_layers_pass_on(
  model, params, tokens
):
  calib = Calibration(model, tokens)
  options = {"name": "gptq", "upstream": "quantized"}
  program = dataclasses.replace(methods.GPTQ, **options)
  ours = mxjax.quantize(params, calib, program, check=False)
  plain = mxjax.quantize(params, calib, "gptq", check=False)
  assert_same_bits(ours["layers_0"], plain["layers_0"])
  # Layer 1 by hand: the float layer on the outputs of the quantized layer 0.
  entering = quantized_stream(model, ours, tokens)[1]
  _, taps = model.layer_with_taps(params["layers_1"], entering)
  x = np.asarray(taps["down_input"], np.float64).reshape(-1, 96)
  hessian = jnp.asarray(x.T @ x / len(x), jnp.float32)
  weight = params["layers_1"]["mlp"]["down_proj"]["weight"]
  blocks = mxfp4.to_blocks(weight.astype(jnp.float32))
  expected = gptq.reconstruct(blocks, gptq.factor(hessian).upper).tensor()
  got = ours["layers_1"]["mlp"]["down_proj"]["weight"].weight
  assert (np.asarray(got.codes) == np.asarray(expected.codes)).mean() > 0.98
  theirs = plain["layers_1"]["mlp"]["down_proj"]["weight"].weight
  assert (np.asarray(got.codes) != np.asarray(theirs.codes)).mean() > 0.02


def test_recovery_layer_by_layer_sees_corrected_layers(model, params, tokens, hires):
  """The first layer's attention fit is the same; later ones see other inputs."""
  program = dataclasses.replace(methods.HIRES, recovery_by="layer")
  ours = mxjax.quantize(params, Calibration(model, tokens), program, check=False)
  for index, same in ((0, True), (1, False)):
    pick = lambda p, i=index: p[f"layers_{i}"]["self_attn"]["value_recovery"].scale
    assert np.allclose(pick(ours), pick(hires.params), atol=1e-6) == same
  # By hand: layer 1's attention fit on the whole of layer 0, MLP recovery included.
  entering = quantized_stream(model, ours, tokens)[1]
  parent = without(without(ours, "mlp", "mlp_recovery"), "self_attn", "value_recovery")
  _, taps = model.layer_with_taps(parent["layers_1"], entering)
  float_entering = quantized_stream(model, params, tokens)[1]
  _, float_taps = model.layer_with_taps(params["layers_1"], float_entering)
  x, y = (np.asarray(t["value"], np.float64) for t in (taps, float_taps))
  leaf = ours["layers_1"]["self_attn"]["value_recovery"]
  for head in range(x.shape[2]):
    slope, offset = np.polyfit(x[:, :, head].ravel(), y[:, :, head].ravel(), 1)
    np.testing.assert_allclose(leaf.scale[head], slope, atol=2e-5)
    np.testing.assert_allclose(leaf.offset[head], offset, atol=2e-5)


def test_methods_improve_in_order(model, params, tokens, hires):
  test = np.random.default_rng(2).integers(0, 61, (1, 64)).astype(np.int32)
  calib = Calibration(model, tokens)
  error = {"hires": operator_error(model, params, hires.params, test)}
  for name in ("rtn", "brq"):
    quantized = mxjax.quantize(params, calib, name, check=False)
    error[name] = operator_error(model, params, quantized, test)
  assert error["hires"] < error["brq"]
  assert error["hires"] < error["rtn"]


def test_gptq_beats_rtn_on_the_calibration_loss(model, params, tokens):
  calib = Calibration(model, tokens)
  records = {}
  for name in ("rtn", "gptq"):
    result = pipeline.quantize_with_record(
      params, calib, methods.get(name), check=False
    )
    records[name] = result.params
  errors = {
    name: operator_errors(model, params, quantized, tokens)
    for name, quantized in records.items()
  }
  better = [errors["gptq"][p] < errors["rtn"][p] for p in errors["rtn"]]
  assert np.mean(better) > 0.7


def quantized_stream(model, params, tokens):
  """Hidden states entering each layer of some params, whole model at once."""
  hidden = model.embed(params, jnp.asarray(tokens))
  entering = []
  for index in range(model.num_layers):
    entering.append(hidden)
    hidden = model.layer(params[model.layer_name(index)], hidden)
  return entering


def without(params, block, name):
  """Params with one kind of recovery leaf removed from every layer."""
  new = {}
  for key, layer in params.items():
    if not key.startswith("layers_"):
      new[key] = layer
      continue
    kept = {k: v for k, v in layer[block].items() if k != name}
    new[key] = {**layer, block: kept}
  return new


def test_recovery_in_one_pass_equals_separate_passes(model, params, tokens, hires):
  """Attention on the Stage-II model, MLP on the attention-corrected one."""
  attention_only = without(hires.params, "mlp", "mlp_recovery")
  stage_two = without(attention_only, "self_attn", "value_recovery")
  float_entering = quantized_stream(model, params, tokens)
  stages = (
    (recovery_fits.ATTENTION, stage_two, "self_attn", "value_recovery"),
    (recovery_fits.MLP, attention_only, "mlp", "mlp_recovery"),
  )
  for fit, state, block, leaf_name in stages:
    entering = quantized_stream(model, state, tokens)
    for index in range(model.num_layers):
      name = model.layer_name(index)
      _, float_taps = model.layer_with_taps(params[name], float_entering[index])
      with precision.float64_scope():
        stream = [entering[index][s : s + 1] for s in range(len(tokens))]
        taps = [{"value": float_taps["value"][s : s + 1]} for s in range(len(tokens))]
        activations = Activations(Calibration(model, tokens), stream, chunk=1)
        moments = recovery.measure(fit, state[name], params[name], activations, taps)
        leaf, _ = fit.solve(moments)
      jax.tree.map(
        lambda got, expected: np.testing.assert_allclose(got, expected, atol=2e-5),
        leaf,
        hires.params[name][block][leaf_name],
      )


def test_the_record_says_what_happened(hires):
  assert json.loads(json.dumps(hires.record.to_dict()))["program"]["name"] == "hires"
  linear = hires.record.layers[0]["linears"]["mlp/up_proj"]
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
  fits = hires.record.layers[1]["recovery"]
  assert fits["attention"]["error_after"] <= fits["attention"]["error_before"]
  assert abs(fits["mlp"]["alpha"]) + abs(fits["mlp"]["beta"]) <= 1 / 8
  assert set(hires.record.clock.seconds) >= {"calibration", "quantization"}


def test_each_finished_layer_is_on_disk_with_its_checksum(
  model, params, tokens, tmp_path
):
  seen = []
  mxjax.quantize(
    params,
    Calibration(model, tokens),
    "rtn",
    check=False,
    run_dir=tmp_path / "run",
    on_progress=seen.append,
  )
  journal = (tmp_path / "run/journal.jsonl").read_text().splitlines()
  lines = [json.loads(line) for line in journal]
  assert [x["event"] for x in lines] == ["start", "layer", "layer", "finished"]
  for line in lines[1:3]:
    file = f"layers/{line['name']}.safetensors"
    data = (tmp_path / "run" / file).read_bytes()
    assert line["files"] == {file: hashlib.sha256(data).hexdigest()}
  fractions = [p.fraction for p in seen]
  assert fractions == sorted(fractions)
  assert seen[-1].layer == 1
  assert not list((tmp_path / "run").rglob("*.partial"))


def test_ablations_are_programs(model, params, tokens):
  calib = Calibration(model, tokens[:2])
  plain = dataclasses.replace(
    methods.HIRES,
    name="ablation",
    use_interaction=False,
    use_balance=False,
    weights="rtn",
    rounding="nearest",
    recover=(),
  )
  quantized = mxjax.quantize(params, calib, plain, check=False)
  assert "value_recovery" not in quantized["layers_0"]["self_attn"]
  record = plain.describe()
  assert record["options"]["use_balance"] is False


class TestBadInputs:
  def test_a_width_that_is_not_a_multiple_of_32(self, params, tokens, tiny_config):
    config = dataclasses.replace(tiny_config, intermediate_size=80)
    model = CausalLM(config)
    odd = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    with pytest.raises(ValueError, match="layers_0/mlp/down_proj has input width 80"):
      mxjax.quantize(odd, Calibration(model, tokens))

  def test_a_nan_weight_leaves_nothing_behind(self, model, params, tokens, tmp_path):
    bad = jax.tree.map(lambda a: a, params)
    weight = bad["layers_1"]["mlp"]["up_proj"]["weight"]
    bad["layers_1"]["mlp"]["up_proj"]["weight"] = weight.at[3, 4].set(jnp.nan)
    with pytest.raises(ValueError, match="layers_1/mlp/up_proj has 1 NaN or inf"):
      mxjax.quantize(bad, Calibration(model, tokens), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()

  @pytest.mark.parametrize(
    ("tokens", "message"),
    [
      (np.zeros((0, 32), np.int32), r"got shape \(0, 32\)"),
      (np.full((1, 8), 61), "outside the vocabulary of 61, the first is 61"),
      (np.full((1, 8), -1), "the first is -1"),
      (np.zeros((1, 3), np.int32), "too short"),
    ],
  )
  def test_calibration_tokens(self, model, tokens, message):
    with pytest.raises(ValueError, match=message):
      Calibration(model, tokens)

  def test_text_instead_of_ids(self, model):
    with pytest.raises(TypeError, match="float64"):
      Calibration(model, np.zeros((1, 8)))

  def test_an_existing_run_folder(self, model, params, tokens, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="never overwritten"):
      mxjax.quantize(params, Calibration(model, tokens), run_dir=tmp_path)

  def test_an_unknown_method(self, model, params, tokens):
    with pytest.raises(ValueError, match="unknown method 'awq'"):
      mxjax.quantize(params, Calibration(model, tokens), "awq")

  def test_an_already_quantized_model(self, model, tokens, hires):
    with pytest.raises(ValueError, match="already quantized"):
      mxjax.quantize(hires.params, Calibration(model, tokens))

  def test_a_collapsed_model_fails_loudly(self, model, params, tokens):
    class Broken(mxjax.Program):
      def quantize_linear(self, weight, inputs):
        leaf = super().quantize_linear(weight, inputs)
        codes = jnp.full_like(leaf.weight.codes, 0x77)
        return dataclasses.replace(
          leaf, weight=dataclasses.replace(leaf.weight, codes=codes)
        )

    with pytest.raises(FloatingPointError, match="broken collapsed"):
      mxjax.quantize(params, Calibration(model, tokens), Broken(name="broken"))
