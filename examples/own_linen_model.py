"""Quantize a Flax linen model of your own.

`mxjax.quantize` sees a model only through the protocol `CausalLanguageModel`: one
layer at a time, and the input of every linear in it.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

import mxjax

WIDTH, VOCABULARY, LAYERS = 64, 50, 2


class Linear(nn.Module):
  shape: tuple[int, int]  # [out_features, in_features]

  @nn.compact
  def __call__(self, x):
    self.sow("taps", "input", x)
    # Not `self.param`, which refuses a quantized leaf in place of an array.
    init = lambda: nn.initializers.lecun_normal()(self.make_rng("params"), self.shape)
    return mxjax.linear(x, self.variable("params", "weight", init).value)


class MLP(nn.Module):
  @nn.compact
  def __call__(self, x):
    hidden = nn.gelu(Linear((2 * WIDTH, WIDTH), name="up_proj")(x))
    return Linear((WIDTH, 2 * WIDTH), name="down_proj")(hidden)


class Layer(nn.Module):
  @nn.compact
  def __call__(self, x):
    past = jnp.cumsum(x, axis=1) / jnp.arange(1.0, x.shape[1] + 1)[None, :, None]
    return x + MLP(name="mlp")(nn.RMSNorm()(past))


class Model(nn.Module):
  num_layers = LAYERS
  projection_taps = {("mlp", "up_proj"): "up_proj", ("mlp", "down_proj"): "down_proj"}
  layer_name = nn.nowrap(lambda self, index: f"layers_{index}")
  embed = nn.nowrap(lambda self, params, tokens: params["table"][tokens])
  layer = nn.nowrap(lambda self, params, x: Layer().apply({"params": params}, x))
  logits = nn.nowrap(lambda self, params, x: x @ params["table"].T)

  @nn.nowrap
  def layer_with_taps(self, params, x):
    output, state = Layer().apply({"params": params}, x, mutable=["taps"])
    return output, {name: tap["input"][0] for name, tap in state["taps"]["mlp"].items()}

  @nn.compact
  def __call__(self, tokens):
    table = self.param("table", nn.initializers.normal(1.0), (VOCABULARY, WIDTH))
    layers = [Layer(name=self.layer_name(index)) for index in range(LAYERS)]
    return nn.Sequential(layers)(table[tokens]) @ table.T


def main(method="gptq"):
  model, tokens = Model(), jax.random.randint(jax.random.key(1), (4, 32), 0, VOCABULARY)
  params = model.init(jax.random.key(0), tokens)["params"]
  calib = mxjax.Calibration(model, tokens, VOCABULARY)
  contract = mxjax.Contract(targets=("up_proj", "down_proj"))
  qparams = mxjax.quantize(params, calib, method, contract=contract)
  before, after = (model.apply({"params": p}, tokens) for p in (params, qparams))
  print(
    "relative error of the logits:", float(jnp.std(after - before) / jnp.std(before))
  )
  return qparams, before, after


if __name__ == "__main__":
  main()
