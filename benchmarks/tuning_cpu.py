"""What a step of scale distillation is made of on a CPU, side by side.

  python benchmarks/tuning_cpu.py [--tokens 1024] [--rounds 5]

Products: legal values of the shapes of SmolLM2-135M's linears, in float32 and in
bfloat16, of which `implementations.exact_products` chooses one. Steps: the gradient of
the divergence on one chunk of tokens through the whole model with rules of two codes,
with outputs of linears kept for the backward pass, as scale distillation does, and
computed again. Both pairs run in turn in one process. The weights are the embedded
model's; maps are random rotations and nothing is calibrated.
"""

import functools

import common
import jax
import jax.numpy as jnp
import numpy as np
import prefill_cpu

from mxjax import models
from mxjax.calibration import gradients, streams
from mxjax.devices import execution
from mxjax.methods.scale_distillation import PredictionDivergence, ScaleDistillation
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.precision import float32_sums

SHAPES = (576, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)
"""Outputs and inputs of a layer's linears; k and v are one here."""
DTYPES = "float32", "bfloat16"


class Rerun(PredictionDivergence):
  """Computes outputs of linears again in the backward pass."""

  kept = ()


def products(tokens):
  """A call for each dtype: all products of a layer."""
  multiply = jax.jit(float32_sums)
  legal = lambda shape: mxfp4.decode(
    mxfp4.encode(jax.random.normal(jax.random.key(0), shape)), jnp.bfloat16
  )
  pairs = [(legal((m, d)), legal((tokens, d)).T) for m, d in SHAPES]

  def run(pairs):
    jax.block_until_ready([multiply(*pair) for pair in pairs])

  cast = lambda dtype: jax.tree.map(lambda a: a.astype(dtype), pairs)
  return {dtype: functools.partial(run, cast(dtype)) for dtype in DTYPES}


def steps(tokens):
  """A call for each way of the backward pass; both return the same to rounding."""
  model, params = models.from_pretrained()
  quantized = prefill_cpu.quantize(params, "two codes")
  ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, tokens))
  ids = jnp.asarray(ids, jnp.int32)
  [teacher] = streams.final_hiddens(model, params, [ids])
  layers = [quantized[model.layer_name(i)] for i in range(model.num_layers)]
  own = ScaleDistillation().initial(layers, model)
  examples = [gradients.Example(ids, teacher)]

  def run(objective):
    made = objective(model, mxfp4.PAPER_RULES)
    return jax.block_until_ready(
      gradients.gradients(made, quantized, None, own, examples).own
    )

  for kept, again in zip(
    *(jax.tree.leaves(run(way)) for way in (PredictionDivergence, Rerun)), strict=True
  ):
    np.testing.assert_allclose(kept, again, rtol=1e-3, atol=1e-5 * np.abs(again).max())
  ways = {"kept": PredictionDivergence, "computed again": Rerun}
  return {name: functools.partial(run, objective) for name, objective in ways.items()}


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--tokens", type=int, default=1024)
  parser.add_argument("--rounds", type=int, default=5)
  options = parser.parse_args()
  made = common.stamp() | {
    "has_bfloat16_products": implementations.has_bfloat16_products()
  }
  execution.keep_freed_memory()
  lines = []
  for name, calls in {
    "products of a layer": products(options.tokens),
    "a step": steps(options.tokens),
  }.items():
    for call in calls.values():
      call()
    made[name] = common.in_turns(calls, options.rounds)[0]
    middle = common.medians(made[name])
    (first, ours), (second, theirs) = middle.items()
    cells = f"{first} {ours:.3f}", f"{second} {theirs:.3f}", f"{theirs / ours:.2f}"
    lines.append([name, *cells])
  common.write(options.out, made)
  print(common.markdown(["", "s", "s", "ratio"], lines))


if __name__ == "__main__":
  main()
