"""A quantization method of your own: a program that overrides one hook.

It tries a few random sign patterns before the Hadamard transform of every linear
and keeps the one under which the weights round best. Codes, activations, the contract,
the checkpoint and the evaluation are those of every other method.
"""

import dataclasses

import jax
import jax.numpy as jnp

import mxjax
from mxjax.methods import GPTQ, get
from mxjax.methods.gptq import Gptq
from mxjax.methods.program import Shaping
from mxjax.numerics import mxfp4
from mxjax.numerics.shaping.input_maps import Hadamard


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestSigns(Gptq):
  name: str = "best-signs"
  tries: int = 4

  def shape(self, weight, inputs):
    width = weight.shape[0] * mxfp4.BLOCK_SIZE
    draw = lambda seed: jax.random.rademacher(jax.random.key(seed), (width,), jnp.int8)
    maps = [Hadamard(32, draw(seed)) for seed in range(self.tries)]
    errors = [float(self.error(m.fold(weight), inputs.rules)) for m in maps]
    best = errors.index(min(errors))
    return Shaping(maps[best], {"best_seed": best})  # the record goes into the report

  def error(self, folded, rules):
    return jnp.square(mxfp4.round_blocks(folded, rules) - folded).sum()


def main(source="models/trained/llama", sequences=4, length=64):
  model, params = mxjax.from_pretrained(source)
  tokens = jax.random.randint(
    jax.random.key(0), (sequences, length), 0, model.config.vocab_size
  )
  calib = mxjax.Calibration(model, tokens)
  exact = model.apply({"params": params}, tokens)
  errors = {}
  for method in (GPTQ, get("brq"), BestSigns()):
    qparams = mxjax.quantize(params, calib, method)
    error = model.apply({"params": qparams}, tokens) - exact
    errors[method.name] = float(jnp.square(error).mean() / jnp.square(exact).mean())
    print(f"{method.name:12}{errors[method.name]:.4f}  relative error of the logits")
  return errors


if __name__ == "__main__":
  main()
