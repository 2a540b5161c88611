"""Products of legal MXFP4 values on a CPU in float32 and in bfloat16, side by side.

  python benchmarks/products_cpu.py [--tokens 1024] [--rounds 15]

The shapes are those of a layer of SmolLM2-135M-Instruct. Both dtypes run in turn in one
process; `implementations.product_dtype` chooses one by the processor.
"""

import functools

import common
import jax
import jax.numpy as jnp

from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.precision import float32_sums

SHAPES = (576, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)
"""Outputs and inputs of a layer's linears; k and v are one here."""
DTYPES = "float32", "bfloat16"


def calls(tokens):
  """A call for each dtype: all products of a layer."""
  multiply = jax.jit(float32_sums)
  legal = lambda shape: mxfp4.decode(
    mxfp4.encode(jax.random.normal(jax.random.key(0), shape)), jnp.bfloat16
  )
  pairs = [(legal((m, d)), legal((tokens, d)).T) for m, d in SHAPES]

  def run(pairs):
    for pair in pairs:
      jax.block_until_ready(multiply(*pair))

  cast = lambda dtype: jax.tree.map(lambda a: a.astype(dtype), pairs)
  return {dtype: functools.partial(run, cast(dtype)) for dtype in DTYPES}


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--tokens", type=int, default=1024)
  parser.add_argument("--rounds", type=int, default=15)
  options = parser.parse_args()
  facts = {"has_bfloat16_products": implementations.has_bfloat16_products()}
  made, sides = common.stamp() | facts, calls(options.tokens)
  for call in sides.values():
    call()
  made["seconds"] = common.in_turns(sides, options.rounds)[0]
  middle = made["median_seconds"] = common.medians(made["seconds"])
  made["ratio"] = middle["bfloat16"] / middle["float32"]
  common.write(options.out, made)
  cells = [*(f"{middle[dtype]:.4f}" for dtype in DTYPES), f"{made['ratio']:.2f}"]
  print(common.markdown([*(f"{dtype}, s" for dtype in DTYPES), "ratio"], [cells]))


if __name__ == "__main__":
  main()
