"""Quantize a Flax nnx model of your own.

An nnx module holds its params and `mxjax.quantize` takes them as a dict: an adapter
goes from one to the other, a layer at a time, with `nnx.split` and `nnx.merge`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import mxjax

WIDTH, VOCABULARY, LAYERS = 64, 50, 2


class Linear(nnx.Module):
  def __init__(self, in_features, out_features, rngs):
    weight = nnx.initializers.lecun_normal()(rngs.params(), (out_features, in_features))
    self.weight = nnx.Param(weight)

  def __call__(self, x):
    return mxjax.linear(x, self.weight.get_value())


class Layer(nnx.Module):
  def __init__(self, rngs):
    up, down = Linear(WIDTH, 2 * WIDTH, rngs), Linear(2 * WIDTH, WIDTH, rngs)
    self.mlp = nnx.Dict(up_proj=up, down_proj=down)
    self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

  def __call__(self, x):
    past = jnp.cumsum(x, axis=1) / jnp.arange(1.0, x.shape[1] + 1)[None, :, None]
    normal = self.norm(past)
    hidden = nnx.gelu(self.mlp.up_proj(normal))
    return x + self.mlp.down_proj(hidden), {"up": normal, "down": hidden}


def from_params(params):
  """The module around a layer's params, whose weights may be quantized leaves."""
  graph, state = nnx.split(nnx.eval_shape(lambda: Layer(nnx.Rngs(0))))
  nnx.replace_by_pure_dict(state, params)
  return nnx.merge(graph, state)


class Adapter:  # any hashable object with these members
  num_layers = LAYERS
  projection_taps = {("mlp", "up_proj"): "up", ("mlp", "down_proj"): "down"}
  layer_name = lambda self, index: f"layers_{index}"
  embed = lambda self, params, tokens: params["table"][tokens]
  layer_with_taps = lambda self, params, x: from_params(params)(x)
  layer = lambda self, params, x: from_params(params)(x)[0]
  logits = lambda self, params, x: x @ params["table"].T


def main(method="gptq"):
  rngs, tokens = nnx.Rngs(0), jax.random.randint(jax.random.key(1), (4, 32), 0, 50)
  layers = [nnx.to_pure_dict(nnx.split(Layer(rngs))[1]) for _ in range(LAYERS)]
  params = {f"layers_{index}": layer for index, layer in enumerate(layers)}
  params["table"] = jax.random.normal(rngs.params(), (VOCABULARY, WIDTH))
  calib = mxjax.Calibration(Adapter(), tokens, VOCABULARY)
  contract = mxjax.Contract(targets=("up_proj", "down_proj"))
  qparams = mxjax.quantize(params, calib, method, contract=contract)
  return from_params(qparams["layers_0"]), from_params(params["layers_0"])


if __name__ == "__main__":
  for module in main():
    print(type(module.mlp.up_proj.weight.get_value()).__name__)
