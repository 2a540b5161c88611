"""Quantize a Flax nnx model of your own, layer by layer.

An nnx module holds its params: `model.params` are they as a dict, and `mxjax.apply`
runs the module with others in their place.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import mxjax

WIDTH, CLASSES, LAYERS = 64, 10, 3


class Layer(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
    self.expand = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
    self.shrink = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

  def __call__(self, x):
    return x + self.shrink(nnx.gelu(self.expand(self.norm(x))))


class Classifier(nnx.Module):
  def __init__(self, rngs):
    self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
    self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

  def __call__(self, x):
    for layer in self.layers:
      x = layer(x)
    return self.head(x)


def main(method="gptq"):
  module = Classifier(nnx.Rngs(0))
  features = jax.random.normal(jax.random.key(1), (256, WIDTH))

  # In the memory of one layer's inputs, because the layers follow each other.
  model = mxjax.FlaxModel(module=module, layers=r"layers/\d+")
  qparams = mxjax.quantize(model.params, mxjax.Calibration(model, features), method)

  before, after = module(features), mxjax.apply(module, qparams, features)
  same = (before.argmax(-1) == after.argmax(-1)).mean(dtype=jnp.float32)
  print(f"the same class for {same:.0%} of the inputs")
  return qparams, before, after


if __name__ == "__main__":
  main()
