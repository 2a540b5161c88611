"""How often refinement changes a code, by the number of a linear's outputs.

  python benchmarks/edit_rate.py [--tokens 8192] [--blocks 4]

Weights and inputs are independent normal numbers, rounded to the nearest codes. Then
the coordinates of a block interact only by chance: two columns of decoded weights have
a correlation of about one over the root of the number of outputs. The rates of models
are averages over the blocks of their linears' inputs. The last columns are of the rule
without K_Q, which `hires-next` uses with two codes.
"""

import common
import jax
import jax.numpy as jnp

from mxjax.numerics import mxfp4
from mxjax.numerics.realization import few_codes, one_code

OUTPUTS = 128, 192, 384, 576, 1024, 1536, 4096, 12288, 14336
MODELS = {
  "Llama-family model of 1M parameters": [
    *[(128, 128)] * 2,
    *[(64, 128)] * 2,
    *[(384, 128)] * 2,
    (128, 384),
  ],
  "SmolLM2-135M-Instruct": [
    *[(576, 576)] * 2,
    *[(192, 576)] * 2,
    *[(1536, 576)] * 2,
    (576, 1536),
  ],
  "Qwen3-8B": [
    *[(4096, 4096)] * 2,
    *[(1024, 4096)] * 2,
    *[(12288, 4096)] * 2,
    (4096, 12288),
  ],
  "Llama-3-8B": [
    *[(4096, 4096)] * 2,
    *[(1024, 4096)] * 2,
    *[(14336, 4096)] * 2,
    (4096, 14336),
  ],
}
"""Outputs and inputs of the linears of a layer."""


def measured(key, outputs, blocks, tokens):
  """Rates and errors of one number of outputs, means over blocks and tokens."""
  keys = jax.random.split(key)
  weight = jax.random.normal(keys[0], (blocks, 32, outputs))
  inputs = jax.random.normal(keys[1], (blocks, 32, tokens))
  decoded = mxfp4.round_blocks(weight)
  gram, cross = one_code.tables(weight, decoded)
  no_cross = jnp.zeros_like(cross)

  def output_error(elements, exponent):
    """The squared error that rounding the inputs adds to the outputs, over all."""
    error = elements * mxfp4.scale_of(exponent)[..., None, :] - inputs
    return (error * jnp.einsum("bij,bjn->bin", gram, error)).sum()

  full = one_code.refine(inputs, gram, cross)
  sensitivity = one_code.refine(inputs, gram, no_cross)
  at_nearest = full.nearest_objective.sum()
  base = output_error(sensitivity.nearest, sensitivity.exponent)
  one, exponent = few_codes.refine(inputs, gram, changes=1)
  two, _ = few_codes.refine(inputs, gram, changes=2)
  gap_gram, _ = one_code.tables(weight, decoded - weight)
  mismatch = (inputs * jnp.einsum("bij,bjn->bin", gap_gram, inputs)).sum()
  taken = jnp.minimum(full.score, 0).sum()
  return {
    "full": float((full.score < 0).mean()),
    "full_error": float((at_nearest + taken + mismatch) / (at_nearest + mismatch)),
    "sensitivity": float((sensitivity.score < 0).mean()),
    "second_code": float((one != two).any(-2).mean()),
    "one_code_error": float(output_error(one, exponent) / base),
    "two_codes_error": float(output_error(two, exponent) / base),
  }


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--tokens", type=int, default=8192)
  parser.add_argument("--blocks", type=int, default=4)
  options = parser.parse_args()
  wanted = {outputs for linears in MODELS.values() for outputs, _ in linears}
  by_outputs = {
    outputs: measured(jax.random.key(outputs), outputs, options.blocks, options.tokens)
    for outputs in sorted({*OUTPUTS, *wanted})
  }
  models = {}
  for name, linears in MODELS.items():
    width = sum(inputs for _, inputs in linears)
    models[name] = {
      what: sum(by_outputs[m][what] * d for m, d in linears) / width
      for what in next(iter(by_outputs.values()))
    }
  result = common.stamp() | {"outputs": by_outputs, "models": models}
  head = [
    "outputs",
    "blocks with a changed code",
    "squared error, nearest = 1",
    "changed, K_Q = 0",
    "second code changed, K_Q = 0",
    "input error, one code",
    "input error, two codes",
  ]
  order = (
    "full",
    "full_error",
    "sensitivity",
    "second_code",
    "one_code_error",
    "two_codes_error",
  )
  rows = [(str(outputs), by_outputs[outputs]) for outputs in OUTPUTS]
  lines = [
    [name, *(f"{row[what]:.3f}" for what in order)]
    for name, row in [*rows, *models.items()]
  ]
  common.write(options.out, result, common.markdown(head, lines))


if __name__ == "__main__":
  main()
