"""Two-sided rounding of a layer's linears on a CPU: the native kernel or XLA.

  python benchmarks/two_sided_cpu.py [--repeats 5]

Both sides round linears of SmolLM2-135M-Instruct's shapes, as `hires-next` does, in one
process, in turns. Weights and moments are random; `loss` is that of the kernel's codes
over that of XLA's, whose sums run in another order.
"""

import common
import jax
import jax.numpy as jnp
import numpy as np

from mxjax.numerics.realization import gptq, two_sided

SHAPES = {"q, o": (576, 576), "k, v": (576, 192), "gate, up": (576, 1536)}
SHAPES |= {"down": (1536, 576)}
"""Inputs and outputs."""
DAMPING, PASSES = 0.1, 3


def moment(rng, width):
  """Of correlated vectors, float32 `[width, width]`, mean diagonal 1."""
  mixed = np.eye(width) + 0.5 * rng.standard_normal((width, width)) / width**0.5
  vectors = rng.standard_normal((2 * width, width)) @ mixed
  found = vectors.T @ vectors
  return jnp.asarray(found * width / np.trace(found), jnp.float32)


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--repeats", type=int, default=5)
  options = parser.parse_args()
  made = common.stamp()
  rows, lines = [], []
  for name, (inputs, outputs) in SHAPES.items():
    rng = np.random.default_rng(inputs + outputs)
    weight = jnp.asarray(rng.standard_normal((inputs // 32, 32, outputs)), jnp.float32)
    hessian, of_outputs = moment(rng, inputs), moment(rng, outputs)
    upper = gptq.factor(hessian, damping=DAMPING).upper
    coupled = two_sided.coupling(gptq.factor(of_outputs).upper)

    def run(implementation, operands=(weight, upper, coupled, hessian)):
      how = {"scales": "searched", "passes": PASSES, "implementation": implementation}
      found = two_sided.reconstruct(*operands, jnp.float32(DAMPING), **how)
      return jax.block_until_ready(found)

    decoded = [run(side).decoded for side in ("native", "xla")]
    losses = [
      float(two_sided.loss(weight, one, hessian, of_outputs)) for one in decoded
    ]
    calls = {side: lambda side=side: run(side) for side in ("native", "xla")}
    seconds, processor = common.in_turns(calls, options.repeats)
    middle = common.medians(seconds)
    row = {"linears": name, "inputs": inputs, "outputs": outputs, "seconds": seconds}
    row |= {"processor_seconds": processor, "loss": losses[0] / losses[1]}
    row["ratio"] = middle["xla"] / middle["native"]
    rows.append(row)
    cells = [*(f"{middle[side]:.3f}" for side in calls), f"{row['ratio']:.1f}"]
    lines.append([name, *cells, f"{row['loss']:.5f}"])
  print(common.markdown(["linears", "native, s", "XLA, s", "ratio", "loss"], lines))
  common.write(options.out, {**made, "rows": rows})


if __name__ == "__main__":
  main()
