"""Backward pass of a quantized layer on a CPU: operands moved in memory or not.

  python benchmarks/backward_cpu.py [--tokens 1024] [--repeats 7]

Both sides differentiate one layer of SmolLM2-135M-Instruct, rounded to nearest, as
scale distillation does, in one process, in turns; "not moved" leaves the transposed
operands of products to XLA. Products are in bfloat16 whatever the processor: without
instructions for it the library takes float32, where there is nothing to move. Processor
time is that of all threads.
"""

import common
import jax
import jax.numpy as jnp

from mxjax import methods, models
from mxjax.calibration import gradients
from mxjax.calibration.calibration import replace_weights
from mxjax.layers import quantized_linear
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.scale_distillation import PredictionDivergence
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.realization.activation_quantizers import Nearest

INDEX = 3


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--tokens", type=int, default=1024)
  parser.add_argument("--repeats", type=int, default=7)
  options = parser.parse_args()
  made = common.stamp()
  implementations.has_bfloat16_products = lambda: True
  model, params = models.from_pretrained(None)
  layer = params[model.layer_name(INDEX)]
  leaves = {
    (block, name): QuantizedLinear(
      mxfp4.encode(layer[block][name]["weight"]), None, Nearest()
    )
    for block, name in model.projection_taps
  }
  layer = replace_weights(layer, leaves)
  [own] = methods.get("rtn+tune").tune.initial([layer], model)
  shape = 1, options.tokens, model.config.hidden_size
  hidden, cotangent = (jax.random.normal(jax.random.key(i), shape) for i in (0, 1))

  def side(move):
    """Compiles the backward pass with operands that `move` returns."""
    # A class of its own, so that what is compiled for the other side is not used.
    objective = type("Objective", (PredictionDivergence,), {})
    objective = objective(model, mxfp4.PAPER_RULES)
    call = lambda: gradients._backward(
      *(objective, "layer", 3, cotangent, None, own, hidden, layer)
    )
    kept, quantized_linear._moved = quantized_linear._moved, move
    found = call()
    quantized_linear._moved = kept
    return call, found[2]

  sides = [side(quantized_linear._moved), side(lambda matrix: matrix)]
  gap = float(jnp.abs(sides[0][1] - sides[1][1]).max() / jnp.abs(sides[1][1]).max())
  names = "moved", "not moved"
  calls = {
    name: lambda call=call: jax.block_until_ready(call())
    for name, (call, _) in zip(names, sides, strict=True)
  }
  times = common.in_turns(calls, options.repeats)[1]
  middle = common.medians(times)
  ratio = middle["not moved"] / middle["moved"]
  cells = [*(f"{middle[name]:.3f}" for name in names), f"{ratio:.2f}", f"{gap:.0e}"]
  print(common.markdown(["moved, s", "not moved, s", "ratio", "gap"], [cells]))
  common.write(options.out, {**made, "processor_seconds": times, "gap": gap})


if __name__ == "__main__":
  main()
