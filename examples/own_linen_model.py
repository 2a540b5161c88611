"""Quantize a Flax linen model of your own: here a language model without attention.

`mxjax.FlaxModel` finds the dense layers by tracing the model, and `mxjax.apply` runs it
with the quantized params.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

import mxjax

WIDTH, VOCABULARY, LAYERS = 64, 50, 2


class Layer(nn.Module):
  @nn.compact
  def __call__(self, x):
    past = jnp.cumsum(x, axis=1) / jnp.arange(1.0, x.shape[1] + 1)[None, :, None]
    hidden = nn.gelu(nn.Dense(2 * WIDTH, name="expand")(nn.RMSNorm()(past)))
    return x + nn.Dense(WIDTH, name="shrink")(hidden)


class Model(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
    for index in range(LAYERS):
      x = Layer(name=f"layer_{index}")(x)
    return nn.Dense(VOCABULARY, name="head")(x)


def main(method="gptq"):
  module = Model()
  tokens = jax.random.randint(jax.random.key(1), (4, 32), 0, VOCABULARY)
  params = module.init(jax.random.key(0), tokens)["params"]

  # Paths of modules to methods; the first match decides. The head stays as it is.
  rules = {"head": None, ".*/expand": method, ".*": "rtn"}
  model = mxjax.FlaxModel(module=module, rules=rules)
  qparams = mxjax.quantize(params, mxjax.Calibration(model, tokens))

  # `mxjax.apply` takes what `module.apply` takes.
  forward = jax.jit(lambda params: mxjax.apply(module, {"params": params}, tokens))
  before, after = forward(params), forward(qparams)
  print(
    "relative error of the logits:", float(jnp.std(after - before) / jnp.std(before))
  )
  return qparams, before, after


if __name__ == "__main__":
  main()
