"""Quantize a vision transformer, with attention from Flax, on images.

No part of it is a decoder's: images in, classes out, no tokens and no causal mask.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

import mxjax

WIDTH, HEADS, CLASSES, LAYERS = 64, 2, 10, 2


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, mask):
    normal = nn.LayerNorm()(x)
    x = x + nn.MultiHeadDotProductAttention(HEADS, name="attention")(normal, mask=mask)
    hidden = nn.gelu(nn.Dense(4 * WIDTH, name="expand")(nn.LayerNorm()(x)))
    return x + nn.Dense(WIDTH, name="shrink")(hidden)


class VisionTransformer(nn.Module):
  @nn.compact
  def __call__(self, batch):
    x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), name="patches")(batch["image"])
    x = x.reshape(x.shape[0], -1, WIDTH)
    x += self.param("position", nn.initializers.normal(0.1), (1, *x.shape[1:]))
    mask = jnp.broadcast_to(batch["seen"][:, None, None, :], (x.shape[0], 1, 1, 16))
    for index in range(LAYERS):
      x = Block(name=f"block_{index}")(x, mask)
    return nn.Dense(CLASSES, name="head")(x.mean(1))


def main(method="gptq", layers=r"block_\d+"):
  module, keys = VisionTransformer(), jax.random.split(jax.random.key(0), 3)
  image = jax.random.normal(keys[1], (8, 16, 16, 3))
  batch = {"image": image, "seen": jax.random.bernoulli(keys[2], 0.9, (8, 16))}
  params = module.init(keys[0], batch)["params"]

  model = mxjax.FlaxModel(module=module, layers=layers)
  qparams = mxjax.quantize(params, mxjax.Calibration(model, batch), method)

  forward = jax.jit(lambda params: mxjax.apply(module, {"params": params}, batch))
  before, after = forward(params), forward(qparams)
  print(
    "relative error of the outputs:", float(jnp.std(after - before) / jnp.std(before))
  )
  return qparams, before, after


if __name__ == "__main__":
  main()
