"""A bfloat16 layer rounds where transformers rounds, bit for bit up to sums' order."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mxjax.layers.linear import add_bias
from mxjax.models import CausalLM
from tests import tiny

LENGTH = 24


def rounded(x):
  """Rounds to bfloat16, kept as float32: each call is a rounding of transformers."""
  return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def norm(x, weight):
  inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5))
  return rounded(rounded(x * inverse) * weight)


def rotated(x):
  """Tables, both products and their sum are rounded."""
  half = x.shape[-1] // 2
  angles = np.arange(LENGTH)[:, None] / 1e4 ** (np.arange(half)[None] / half)
  cos, sin = (rounded(f(angles))[:, None] for f in (np.cos, np.sin))
  first, second = x[..., :half], x[..., half:]
  turned = [rounded(first * cos) - rounded(second * sin)]
  turned.append(rounded(second * cos) + rounded(first * sin))
  return rounded(np.concatenate(turned, -1))


def attention(queries, keys, values):
  """Softmax of unrounded scores; weights are rounded before they are divided."""
  keys, values = (a.repeat(2, axis=1) for a in (keys, values))
  scores = np.einsum("thd,shd->hts", queries, keys) / np.float32(4)
  scores = np.where(np.tril(np.ones((LENGTH, LENGTH), bool)), scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  sums = weights.sum(-1).T[..., None]
  return rounded(np.einsum("hts,shd->thd", rounded(weights), values) / sums)


def layer(x, params):
  """One decoder layer of transformers on `[LENGTH, d]`, with the taps of ours."""
  weight = lambda block, name: np.asarray(params[block][name]["weight"], np.float32)
  linear = lambda x, *name: rounded(x @ weight(*name).T)
  scale = lambda name: np.asarray(params[name]["weight"], np.float32)
  inputs = norm(x, scale("input_layernorm"))
  project = lambda name: linear(inputs, "self_attn", name).reshape(LENGTH, -1, 16)
  queries, keys, values = map(project, ("q_proj", "k_proj", "v_proj"))
  attended = attention(rotated(queries), rotated(keys), values).reshape(LENGTH, -1)
  hidden = rounded(x + linear(attended, "self_attn", "o_proj"))
  inner = norm(hidden, scale("post_attention_layernorm"))
  gate, up = (linear(inner, "mlp", name) for name in ("gate_proj", "up_proj"))
  product = rounded(rounded(gate / (1 + np.exp(-gate))) * up)
  output = rounded(hidden + linear(product, "mlp", "down_proj"))
  taps = {"qkv_input": inputs, "value": values, "o_input": attended}
  taps |= {"gate_up_input": inner, "gate": gate, "up": up, "down_input": product}
  return taps | {"output": output}


@pytest.fixture(scope="module")
def both():
  """What leaves each step here and in the oracle, float32 `[LENGTH, width]`."""
  model = CausalLM(tiny.config(dtype="bfloat16"))
  params = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
  params = jax.tree.map(lambda a: a * (8 if a.ndim > 1 else 1), params["layers_0"])
  x = jax.random.normal(jax.random.key(1), (1, LENGTH, 64)).astype(jnp.bfloat16)
  output, taps = jax.jit(model.layer_with_taps)(params, x)
  wide = lambda a: np.asarray(a.astype(jnp.float32))
  got = {name: wide(tap[0]) for name, tap in (taps | {"output": output}).items()}
  return got, layer(wide(x)[0], params)


@pytest.mark.parametrize(
  "step", ["qkv_input", "value", "o_input", "gate_up_input", "down_input", "output"]
)
def test_every_step_has_the_bits_of_transformers(both, step):
  got, want = (side[step].reshape(LENGTH, -1) for side in both)
  # A sum in another order moves some of the values that lie between two others.
  assert (got != want).mean() < 0.01, np.mean(got != want)


def test_what_follows_in_float32_sees_the_rounded_values():
  y, bias = (jax.random.normal(jax.random.key(i), (4, 8)) for i in range(2))
  y, bias = y.astype(jnp.bfloat16), bias[0].astype(jnp.bfloat16)
  got = jax.jit(lambda *a: add_bias(*a).astype(jnp.float32))(y, bias)
  np.testing.assert_array_equal(got, rounded(got))
