"""What the learned baselines take to learn, in products of the same time.

  python benchmarks/learning_work.py

`mxjax.evaluation.estimates` tells how long a build takes from the products that it
makes. Here a step of every baseline that learns by gradients is timed on
SmolLM2-135M-Instruct, beside products of matrices:

  spinquant, focus  a step on one sequence of 2,048 tokens, as passes of it: the time
                    of the step over that of one product with every target weight
  batquant          a step of all groups of one layer, at two numbers of tokens, as
                    passes of a token, and FLOP for each weight whatever the tokens

The least of some times counts, because what else the machine does only adds to it.
"""

import dataclasses
import time

import common
import jax
import numpy as np

from mxjax import methods, models
from mxjax.calibration.calibration import Calibration
from mxjax.evaluation.estimates import products_a_second
from mxjax.models import CausalLM
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.run.quantize import run

LENGTH, TIMES = 2048, 2
TOKENS, STEPS = (512, 2048), (2, 6)
"""Of a sequence of batquant, and of a build."""


def least(call, times=TIMES):
  """The least time of a call, which has run once before."""
  jax.block_until_ready(call())
  seconds = []
  for _ in range(times):
    start = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - start)
  return min(seconds)


def step_seconds(name, params, calib):
  """Of a step of `prepare` on one sequence, which is the whole of `calib`."""
  learning = methods.get(name).prepare(params, calib, PAPER_CONTRACT)
  assert learning.sequences == 1
  start = learning.start()
  return least(lambda: learning.step(start, ()))


def build_seconds(name, params, calib):
  """Of the quantization of all layers, with what is compiled before."""

  def stage():
    made = run(params, calib, name, check=False, probe=False)
    return made.record.clock.seconds["quantization"]

  stage()
  return min(stage() for _ in range(TIMES))


def target_weights(model, params):
  return sum(
    params[model.layer_name(index)][sublayer][name]["weight"].size
    for index in range(model.num_layers)
    for sublayer, name in model.projection_taps
  )


def main():
  options = common.parser(__doc__).parse_args()
  made = common.stamp()
  model, params = models.from_pretrained()
  rng = np.random.default_rng(0)
  draw = lambda rows: rng.integers(0, 49152, (rows, LENGTH)).astype(np.int32)
  rates = [products_a_second("float32")]
  one_pass = 2 * target_weights(model, params) * LENGTH
  found = {}
  for name in ("spinquant", "focus"):
    calib = Calibration(model, draw(1))
    seconds = step_seconds(f"{name}:batch=1", params, calib)
    rates.append(products_a_second("float32"))
    found[name] = {"step_seconds": seconds}
  # One layer of the same shapes, because this method learns from layer to layer.
  first = CausalLM(dataclasses.replace(model.config, num_layers=1))
  others = {model.layer_name(index) for index in range(1, model.num_layers)}
  own = {name: params[name] for name in params if name not in others}
  calib, weights, seconds = Calibration(first, draw(4)), target_weights(first, own), {}
  for tokens in TOKENS:
    few, many = (
      build_seconds(f"batquant:tokens={tokens}:steps={steps}", own, calib)
      for steps in STEPS
    )
    seconds[tokens] = (many - few) / (STEPS[1] - STEPS[0])
    rates.append(products_a_second("float32"))
  # The least times go with the highest rate: that of a machine without other work.
  rate = max(rates)
  for name in found:
    found[name]["passes"] = found[name]["step_seconds"] * rate / one_pass
  # A line through both: what a token takes, and what a step takes without any.
  few, many = (4 * tokens for tokens in TOKENS)
  a_token = (seconds[TOKENS[1]] - seconds[TOKENS[0]]) / (many - few)
  fixed = seconds[TOKENS[0]] - few * a_token
  found["batquant"] = {
    "step_seconds": seconds,
    "passes": a_token * rate / (2 * weights),
    "flop_a_weight": fixed * rate / weights,
  }
  print(found, flush=True)
  common.write(options.out, {**made, "products_a_second": rate, "found": found})


if __name__ == "__main__":
  main()
