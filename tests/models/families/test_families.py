"""HiRes end to end on a tiny model of every family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.evaluation.measures.operator_error import operator_error
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models import CausalLM
from mxjax.run.quantize import run
from tests import tiny

SPECIAL = {
  "llama": dict(attention_bias=True, mlp_bias=True),
  "mistral": dict(sliding_window=8, tie_embeddings=False),
  "qwen2": dict(qkv_bias=True),
  "qwen3": dict(qk_norm="head", tie_embeddings=False),
  "olmo2": dict(qk_norm="projection", is_post_norm=True, tie_embeddings=False),
}
TOKENS = np.random.default_rng(1).integers(0, 61, (4, 32)).astype(np.int32)


def loud_params(model):
  """Random params in which biases, norms and a loud channel matter."""
  params = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
  rng = np.random.default_rng(0)

  def louder(path, leaf):
    name = jax.tree_util.keystr(path)
    noise = rng.standard_normal(leaf.shape)
    if "bias" in name or "norm" in name:
      return jnp.asarray(("norm" in name) + 0.3 * noise, jnp.bfloat16)
    if "proj" not in name:
      return leaf
    noise[:, rng.integers(leaf.shape[-1])] *= 6.0
    return jnp.asarray(0.15 * noise, jnp.bfloat16)

  return jax.tree_util.tree_map_with_path(louder, params)


@pytest.fixture(
  scope="module",
  params=[
    pytest.param(name, marks=[pytest.mark.slow] * (name != "olmo2"))
    for name in sorted(SPECIAL)
  ],
)
def quantized(request):
  """Model, float params and what HiRes made of them."""
  family = request.param
  model = CausalLM(tiny.config(family=family, **SPECIAL[family]))
  params = loud_params(model)
  result = run(
    params, Calibration(model, TOKENS), methods.HIRES, check=False, probe=False
  )
  return model, params, result


def test_every_target_is_quantized_and_all_else_is_kept_bit_for_bit(quantized):
  model, params, result = quantized
  is_linear = lambda node: isinstance(node, QuantizedLinear)
  old = dict(jax.tree_util.tree_leaves_with_path(params))
  new = dict(jax.tree_util.tree_leaves_with_path(result.params, is_leaf=is_linear))
  replaced = {path for path, leaf in new.items() if is_linear(leaf)}
  assert len(replaced) == 7 * model.num_layers
  kept = old.keys() - replaced
  for path in kept:
    assert new[path].dtype == jnp.bfloat16
    np.testing.assert_array_equal(new[path], old[path])
  biases = [path for path in kept if "bias" in jax.tree_util.keystr(path)]
  per_layer = {"llama": 7, "qwen2": 3}.get(model.config.family, 0)
  assert len(biases) == per_layer * model.num_layers
  assert ("lm_head" in result.params) is not model.config.tie_embeddings


def test_recovery_fits_what_the_layer_computes(quantized):
  _, params, result = quantized
  for layer in result.record.layers:
    fits = layer["recovery"]
    assert fits["attention"]["error_after"] < fits["attention"]["error_before"]
    mlp = fits["mlp"]
    # Robust medians over cells are not the least-squares fit: nearly no worse.
    assert mlp["error_after_linearized"] < 1.01 * mlp["error_before"] < 1
    new = result.params[layer["name"]]
    assert new["self_attn"]["value_recovery"].scale.shape == (2,)
    assert "mlp_recovery" in new["mlp"]


def test_hires_beats_rtn_on_unseen_tokens(quantized):
  model, params, result = quantized
  test = np.random.default_rng(2).integers(0, 61, (1, 64)).astype(np.int32)
  calib, options = Calibration(model, TOKENS), dict(check=False, probe=False)
  rtn = mxjax.quantize(params, calib, "rtn", **options)
  errors = [operator_error(model, params, q, test) for q in (result.params, rtn)]
  assert errors[0] < 0.9 * errors[1]


def test_the_same_call_runs_the_quantized_model(quantized):
  model, params, result = quantized
  run = jax.jit(model.apply)
  exact = np.asarray(run({"params": params}, TOKENS))
  logits = np.asarray(run({"params": result.params}, TOKENS))
  error = np.square(logits - exact).mean() / np.square(exact).mean()
  assert 0 < error < 0.5
