import dataclasses
import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax import models
from mxjax.models import generation, transformer
from mxjax.models.parameters import parameter_shapes
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery


def with_leaf(params, layer, block, name, leaf):
  """A copy of the params with one more or another leaf."""
  changed = {**params[layer], block: {**params[layer][block], name: leaf}}
  return {**params, layer: changed}


def test_logits_equal_transformers(each_golden, tmp_path):
  model, params = models.from_pretrained(each_golden.save(tmp_path / "hf"))
  logits = jax.jit(model.apply)({"params": params}, each_golden.tokens)
  assert logits.dtype == jnp.float32
  at = logits[:, each_golden.positions]
  np.testing.assert_allclose(at, each_golden.logits, atol=1e-4)
  assert np.abs(each_golden.logits).max() > 1


def test_layer_by_layer_equals_apply(family_golden, tmp_path):
  model, params = models.from_pretrained(family_golden.save(tmp_path / "hf"))
  hidden = model.embed(params, family_golden.tokens)
  layer = jax.jit(model.layer)
  for index in range(model.num_layers):
    hidden = layer(params[model.layer_name(index)], hidden)
  whole = jax.jit(lambda p, x: model.apply({"params": p}, x))
  np.testing.assert_allclose(
    model.logits(params, hidden), whole(params, family_golden.tokens), atol=1e-6
  )


def test_init_makes_the_tree_that_the_loaders_expect(each_golden, tmp_path):
  model, params = models.from_pretrained(each_golden.save(tmp_path / "hf"))
  abstract = jax.eval_shape(model.init, jax.random.key(0), each_golden.tokens)
  assert set(abstract) == {"params"}
  leaves = flax.traverse_util.flatten_dict(abstract["params"])
  shapes = {path: leaf.shape for path, leaf in leaves.items()}
  assert shapes == parameter_shapes(model.config)
  assert jax.tree.structure(params) == jax.tree.structure(abstract["params"])
  assert {leaf.dtype for leaf in leaves.values()} == {jnp.dtype("bfloat16")}


def test_equal_configs_share_one_compilation(tiny):
  model, params, tokens = tiny
  traces = []

  @functools.partial(jax.jit, static_argnames="model")
  def run(model, layer_params, hidden):
    traces.append(model)
    return model.layer(layer_params, hidden)

  hidden = model.embed(params, tokens)
  run(model, params["layers_0"], hidden)
  run(models.CausalLM(model.config), params["layers_1"], hidden)
  assert len(traces) == 1


@pytest.mark.slow
def test_bfloat16_compute_stays_close_and_ends_in_float32(golden, tmp_path):
  model, params = models.from_pretrained(golden.save(tmp_path / "hf"), dtype="bfloat16")
  hidden = model.layer(params["layers_0"], model.embed(params, golden.tokens))
  assert hidden.dtype == jnp.bfloat16
  logits = model.apply({"params": params}, golden.tokens)
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(logits, golden.logits, atol=0.1)


@pytest.mark.parametrize("is_post_norm", [False, True])
def test_norms_round_where_those_of_transformers_do(tiny, is_post_norm):
  """LlamaRMSNorm rounds before the scale and after it, Olmo2RMSNorm after it alone."""
  config = dataclasses.replace(tiny[0].config, is_post_norm=is_post_norm)
  rng = np.random.default_rng(0)
  x, scale = rng.standard_normal((64, 96)), 1 + rng.random((1, 96))
  x, scale = (jnp.asarray(each, jnp.bfloat16) for each in (x, scale))
  norm = transformer.RMSNorm(96, config)
  got = norm.apply({"params": {"weight": scale[0]}}, x)
  wide = np.asarray(x, np.float32)
  normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + config.norm_eps)
  once = jnp.asarray(normal * np.asarray(scale, np.float32)).astype(jnp.bfloat16)
  twice = jnp.asarray(normal).astype(jnp.bfloat16) * scale
  assert (once != twice).mean() > 0.1
  want, other = (once, twice) if is_post_norm else (twice, once)
  # The last bit of a float32 decides a tie here and there.
  assert (got != want).mean() < 0.01 < (got != other).mean()


def test_a_float64_scope_around_a_layer_changes_nothing(tiny, float64):
  model, params, tokens = tiny
  output, taps = model.layer_with_taps(params["layers_0"], model.embed(params, tokens))
  assert {a.dtype for a in (output, *taps.values())} == {jnp.dtype("float32")}
  with jax.enable_x64(False):
    want = model.layer(params["layers_0"], model.embed(params, tokens))
  np.testing.assert_allclose(output, want, atol=1e-6)


def test_token_ids_outside_the_vocabulary_are_not_clipped(tiny):
  model, params, _ = tiny
  ids = jnp.array([[5, model.config.vocab_size, -1, -2]], jnp.int32)
  hidden = model.embed(params, ids)
  assert bool(jnp.isfinite(hidden[0, 0]).all())
  assert bool(jnp.isnan(hidden[0, 1:]).all())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_sequences_have_no_logits(dtype, tiny):
  config = dataclasses.replace(tiny[0].config, dtype=dtype)
  model = transformer.CausalLM(config)
  logits = model.apply({"params": tiny[1]}, jnp.zeros((0, 5), jnp.int32))
  assert logits.shape == (0, 5, config.vocab_size)
  cache = generation.empty_cache(model, 0, 8)
  some = jnp.zeros((0, 3), jnp.int32)
  assert generation.next_logits(model, tiny[1], cache, some)[0].shape[0] == 0


def test_a_missing_leaf_is_an_error(tiny):
  model, params, tokens = tiny
  layer = params["layers_1"]
  broken = {**layer, "mlp": {k: v for k, v in layer["mlp"].items() if k != "up_proj"}}
  with pytest.raises(flax.errors.ScopeParamNotFoundError, match="up_proj"):
    model.apply({"params": {**params, "layers_1": broken}}, tokens)


def test_taps_are_what_the_linears_saw(tiny):
  model, params, tokens = tiny
  layer, hidden = params["layers_0"], model.embed(params, tokens)
  output, taps = jax.jit(model.layer_with_taps)(layer, hidden)
  np.testing.assert_allclose(output, model.layer(layer, hidden), rtol=1e-5, atol=1e-6)
  assert set(taps) == {*model.projection_taps.values(), "value", "gate", "up"}
  names = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
  assert [name for _, name in model.projection_taps] == names
  assert all("weight" in layer[block][name] for block, name in model.projection_taps)
  for name, tap in [("gate_proj", "gate"), ("up_proj", "up")]:
    weight = layer["mlp"][name]["weight"]
    want = np.asarray(taps["gate_up_input"]) @ np.asarray(weight).T
    np.testing.assert_allclose(taps[tap], want, atol=1e-5)
  weight = np.asarray(layer["self_attn"]["v_proj"]["weight"])
  value = np.asarray(taps["qkv_input"]) @ weight.T
  assert taps["value"].shape == (*tokens.shape, 2, 8)
  np.testing.assert_allclose(taps["value"].reshape(value.shape), value, atol=1e-5)
  product = jax.nn.silu(taps["gate"]) * taps["up"]
  np.testing.assert_allclose(taps["down_input"], product, atol=1e-6)
  residual = taps["o_input"] @ layer["self_attn"]["o_proj"]["weight"].T
  residual += taps["down_input"] @ layer["mlp"]["down_proj"]["weight"].T
  np.testing.assert_allclose(output, hidden + residual, atol=1e-5)


def test_capture_is_absent_unless_asked(tiny):
  model, params, tokens = tiny
  assert isinstance(model.apply({"params": params}, tokens), jax.Array)
  _, state = model.apply({"params": params}, tokens, mutable=[transformer.CALIBRATION])
  taps = state["calibration"]["layers_1"]["self_attn"]
  assert taps["qkv_input"].shape == (*tokens.shape, 32)


def test_value_recovery_acts_after_the_tap(tiny):
  model, params, tokens = tiny
  recovery = ValueRecovery(scale=jnp.array([2.0, 1.0]), offset=jnp.array([0.0, 0.5]))
  hidden = model.embed(params, tokens)
  changed = with_leaf(params, "layers_0", "self_attn", "value_recovery", recovery)
  _, before = model.layer_with_taps(params["layers_0"], hidden)
  _, after = model.layer_with_taps(changed["layers_0"], hidden)
  np.testing.assert_array_equal(before["value"], after["value"])
  # Attention is linear in the values and its weights sum to one.
  plain, corrected = (
    np.asarray(taps["o_input"]).reshape(*tokens.shape, 2, 2, 8)
    for taps in (before, after)
  )
  scale, offset = (np.reshape(v, (2, 1, 1)) for v in ([2.0, 1.0], [0.0, 0.5]))
  np.testing.assert_allclose(corrected, scale * plain + offset, atol=1e-5)


def test_mlp_recovery_acts_after_the_taps(tiny):
  model, params, tokens = tiny
  values = dict(gate_shift=0.0, gate_scale=0.0, up_scale=0.25, gate_deviation=1.0)
  recovery = MlpRecovery(**{k: jnp.asarray(v) for k, v in values.items()})
  changed = with_leaf(params, "layers_0", "mlp", "mlp_recovery", recovery)
  hidden = model.embed(params, tokens)
  _, before = model.layer_with_taps(params["layers_0"], hidden)
  _, after = model.layer_with_taps(changed["layers_0"], hidden)
  np.testing.assert_array_equal(before["up"], after["up"])
  np.testing.assert_allclose(
    after["down_input"], 1.25 * before["down_input"], rtol=1e-5, atol=1e-7
  )


def test_a_weight_may_be_any_pytree(tiny, monkeypatch):
  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class Halved:
    double: jax.Array

  plain = transformer.linear_many
  value = lambda w: w.double / 2 if isinstance(w, Halved) else w
  halving = lambda x, weights: plain(x, [value(w) for w in weights])
  monkeypatch.setattr(transformer, "linear_many", halving)
  model, params, tokens = tiny
  weight = params["layers_0"]["mlp"]["up_proj"]["weight"]
  halved = {"weight": Halved(2 * weight)}
  changed = with_leaf(params, "layers_0", "mlp", "up_proj", halved)
  run = jax.jit(lambda p: model.apply({"params": p}, tokens))
  np.testing.assert_allclose(run(changed), run(params), atol=1e-6)
