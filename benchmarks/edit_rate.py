"""How often refinement changes a code, by the number of a linear's outputs.

  python benchmarks/edit_rate.py [--tokens 8192] [--blocks 4]

Weights and inputs are independent normal numbers, rounded to the nearest codes. Then
the coordinates of a block interact only by chance: two columns of decoded weights have
a correlation of about one over the root of the number of outputs. The rates of models
are averages over the blocks of their linears' inputs. The columns from `changed, K_Q =
0` on are of the rule without K_Q, which `hires-next` uses with two codes.

The last three columns change the exponents of input blocks, too, whose maximum the
floor rule clips: from 7 scales on they take the next exponent (`rounds_up=true`), with
no code changed and with two, or each block takes the better of both exponents, by the
error after two codes were changed.
"""

import dataclasses

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
HEADINGS = {
  "full": "blocks with a changed code",
  "full_error": "squared error, nearest = 1",
  "sensitivity": "changed, K_Q = 0",
  "second_code": "second code changed, K_Q = 0",
  "one_code_error": "input error, one code",
  "two_codes_error": "input error, two codes",
  "up_error": "input error, `rounds_up`",
  "two_codes_up_error": "input error, two codes, `rounds_up`",
  "two_codes_better_error": "input error, two codes, better of both exponents",
}
"""What is measured, and how tables name it."""


def input_errors(inputs, gram):
  """Squared errors that rounding the inputs adds to the outputs; nearest codes are 1.

  `inputs` are float32 `[blocks, 32, n]` and `gram` is W'W, `[blocks, 32, 32]`. Returns
  them by rule, and the share of blocks in which a second code changes.
  """

  def errors(elements, exponent):
    error = elements * mxfp4.scale_of(exponent)[..., None, :] - inputs
    return (error * jnp.einsum("bij,bjn->bin", gram, error)).sum(-2)

  refined = lambda changes, rules: few_codes.refine(
    inputs, gram, rules, changes=changes
  )
  nearest = lambda rules: (
    mxfp4.round_elements(inputs, mxfp4.block_exponent(inputs, rules)[:, None], rules),
    mxfp4.block_exponent(inputs, rules),
  )
  floor = mxfp4.PAPER_RULES
  up = few_codes.scale_rules(floor, rounds_up=True)
  # `rceil` takes the next exponent wherever the floor rule clips.
  never_clipped = dataclasses.replace(floor, scale_rule="rceil")
  (one, _), two = refined(1, floor), refined(2, floor)
  of_blocks = {
    "one_code_error": errors(*refined(1, floor)),
    "two_codes_error": errors(*two),
    "up_error": errors(*nearest(up)),
    "two_codes_up_error": errors(*refined(2, up)),
    "two_codes_better_error": jnp.minimum(
      errors(*two), errors(*refined(2, never_clipped))
    ),
  }
  base = errors(*nearest(floor)).sum()
  found = {name: float(each.sum() / base) for name, each in of_blocks.items()}
  return {"second_code": float((one != two[0]).any(-2).mean()), **found}


def measured(key, outputs, blocks, tokens):
  """Rates and errors of one number of outputs, means over blocks and tokens."""
  keys = jax.random.split(key)
  weight = jax.random.normal(keys[0], (blocks, 32, outputs))
  inputs = jax.random.normal(keys[1], (blocks, 32, tokens))
  decoded = mxfp4.round_blocks(weight)
  gram, cross = one_code.tables(weight, decoded)
  full = one_code.refine(inputs, gram, cross)
  sensitivity = one_code.refine(inputs, gram, jnp.zeros_like(cross))
  at_nearest = full.nearest_objective.sum()
  gap_gram, _ = one_code.tables(weight, decoded - weight)
  mismatch = (inputs * jnp.einsum("bij,bjn->bin", gap_gram, inputs)).sum()
  taken = jnp.minimum(full.score, 0).sum()
  return {
    "full": float((full.score < 0).mean()),
    "full_error": float((at_nearest + taken + mismatch) / (at_nearest + mismatch)),
    "sensitivity": float((sensitivity.score < 0).mean()),
    **input_errors(inputs, gram),
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
  head = ["outputs", *HEADINGS.values()]
  rows = [(str(outputs), by_outputs[outputs]) for outputs in OUTPUTS]
  lines = [
    [name, *(f"{row[what]:.3f}" for what in HEADINGS)]
    for name, row in [*rows, *models.items()]
  ]
  common.write(options.out, result, common.markdown(head, lines))


if __name__ == "__main__":
  main()
