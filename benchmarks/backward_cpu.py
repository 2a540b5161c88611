"""Backward pass of a quantized layer on a CPU: operands moved in memory or not.

  python benchmarks/backward_cpu.py [--tokens 1024] [--repeats 7]

Both sides differentiate one layer of SmolLM2-135M, rounded to nearest, as scale
distillation does, in one process, in turns; "not moved" leaves the transposed operands
of products to XLA. Processor time is that of all threads.
"""

import argparse
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import provenance

from mxjax import methods, models
from mxjax.calibration import gradients
from mxjax.calibration.calibration import replace_weights
from mxjax.layers import quantized_linear
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.scale_distillation import PredictionDivergence
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import Nearest

HERE = pathlib.Path(__file__).parent / "results"
INDEX = 3


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--tokens", type=int, default=1024)
  parser.add_argument("--repeats", type=int, default=7)
  parser.add_argument("--out", type=pathlib.Path, default=HERE / "backward_cpu.json")
  options = parser.parse_args()
  made = provenance.stamp(hidden=("--out",))
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
  times = {"moved": [], "not moved": []}
  for _ in range(options.repeats):
    for name, (call, _) in zip(times, sides, strict=True):
      start = time.process_time()
      jax.block_until_ready(call())
      times[name].append(time.process_time() - start)
  result = {**made, "processor_seconds": times, "gap": gap}
  options.out.write_text(json.dumps(result, indent=1) + "\n")
  medians = [statistics.median(each) for each in times.values()]
  cells = [*(f"{value:.3f}" for value in medians), f"{medians[1] / medians[0]:.2f}"]
  table = provenance.markdown(
    ["moved, s", "not moved, s", "ratio", "gap"], [[*cells, f"{gap:.0e}"]]
  )
  options.out.with_suffix(".md").write_text(table)
  print(table)


if __name__ == "__main__":
  main()
