"""The golden two-layer network, quantized end to end and held to an oracle.

The oracle is a float64 program written without JAX. The network has no rotary
positions: here they turn by less than 1e-27 radians a token.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import methods
from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration
from mxjax.models import CausalLM, RopeScaling
from mxjax.numerics import mxfp4
from mxjax.run.quantize import run
from tests import tiny
from tests.mxjax.quantized import without

pytestmark = pytest.mark.slow

PROJECTIONS = {
  "q": ("self_attn", "q_proj"),
  "k": ("self_attn", "k_proj"),
  "v": ("self_attn", "v_proj"),
  "o": ("self_attn", "o_proj"),
  "gate": ("mlp", "gate_proj"),
  "up": ("mlp", "up_proj"),
  "down": ("mlp", "down_proj"),
}


@pytest.fixture(scope="module")
def network(vectors):
  """The model, its params and its 16 sequences of 32 tokens."""
  embedding = vectors["toy/E"]
  sequences, length, width = embedding.shape
  config = tiny.config(
    vocab_size=sequences * length,
    hidden_size=width,
    norm_eps=1e-6,
    rope_scaling=RopeScaling(
      factor=1e28,
      low_freq_factor=1e6,
      high_freq_factor=2e6,
      original_max_position=1,
    ),
    max_positions=length,
  )
  ones = {"weight": jnp.ones(width)}
  params = {
    "embed_tokens": {"weight": jnp.asarray(embedding.reshape(-1, width))},
    "norm": ones,
  }
  for layer in range(2):
    blocks = {"input_layernorm": ones, "post_attention_layernorm": ones}
    blocks |= {"self_attn": {}, "mlp": {}}
    for short, (block, name) in PROJECTIONS.items():
      weight = jnp.asarray(vectors[f"toy/L{layer}/{short}/W"])
      blocks[block][name] = {"weight": weight}
    params[f"layers_{layer}"] = blocks
  tokens = np.arange(sequences * length, dtype=np.int32).reshape(sequences, length)
  return CausalLM(config), params, tokens


@pytest.fixture(scope="module")
def quantized(network):
  model, params, tokens = network
  return run(
    params, Calibration(model, tokens), methods.HIRES, check=False, probe=False
  )


def test_float_outputs_are_the_oracles(network, vectors):
  model, params, tokens = network
  (got,) = streams.final_hiddens(model, params, [jnp.asarray(tokens[:2])])
  np.testing.assert_allclose(got, vectors["toy/y_ref"], atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("short", list(PROJECTIONS))
def test_shaping_and_codes_are_the_oracles(quantized, vectors, layer, short):
  block, name = PROJECTIONS[short]
  leaf = quantized.params[f"layers_{layer}"][block][name]["weight"]
  golden = lambda key: vectors[f"toy/L{layer}/{short}/{key}"]
  record = quantized.record.layers[layer]["linears"][f"{block}/{name}"]
  # Near a tie of J_b another step is as good; the coordinates then differ.
  losses = np.asarray(record["balance_losses"], float)
  nearest_rival = np.nanmin(np.abs(losses[:2] - losses[2]), axis=0) / losses[2]
  clear = nearest_rival > 1e-4
  assert clear.mean() >= 0.5
  got, expected = np.asarray(leaf.input_map.matrix), golden("U")
  scale = np.abs(expected).max((1, 2))
  gap = np.abs(got - expected).max((1, 2)) / scale
  assert (gap[clear] < 1e-4).all(), gap
  codes = np.asarray(mxfp4.unpack(leaf.weight.codes))
  same = (codes == golden("codes")).reshape(len(codes), -1, 32)
  assert same[:, clear].mean() > 0.99
  exponents = np.asarray(leaf.weight.scales) == golden("exps")
  assert exponents[:, clear].mean() > 0.995


@pytest.mark.parametrize("layer", [0, 1])
def test_recovery_is_the_oracles(quantized, vectors, layer):
  golden = lambda key: vectors[f"toy/L{layer}/{key}"]
  values = quantized.params[f"layers_{layer}"]["self_attn"]["value_recovery"]
  got = np.stack([values.scale, values.offset], -1)
  np.testing.assert_allclose(got, golden("ab"), atol=2e-3)
  leaf = quantized.params[f"layers_{layer}"]["mlp"]["mlp_recovery"]
  theta = np.array([leaf.gate_shift, leaf.gate_scale, leaf.up_scale])
  np.testing.assert_allclose(theta, golden("theta"), atol=2e-3)
  np.testing.assert_allclose(leaf.gate_deviation, golden("sigma_g"), rtol=2e-3)


def test_output_errors_of_the_stages_are_the_oracles(network, quantized, vectors):
  model, params, tokens = network
  full = quantized.params
  attention = without(full, "mlp/mlp_recovery")
  shaped = without(attention, "self_attn/value_recovery")
  nearest = mxjax.quantize(
    params, Calibration(model, tokens), "rtn", check=False, probe=False
  )
  exact, *others = (
    np.asarray(jnp.concatenate(streams.final_hiddens(model, p, list(tokens[:, None]))))
    for p in (params, nearest, shaped, attention, full)
  )
  errors = [((got - exact) ** 2).sum() / (exact**2).sum() for got in others]
  np.testing.assert_allclose(errors, vectors["toy/relerr"], rtol=0.05)
