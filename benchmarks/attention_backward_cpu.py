"""Backward pass of a float layer on a CPU: attention's own, or that of JAX.

  python benchmarks/attention_backward_cpu.py [--tokens 2048] [--repeats 7]

Both sides differentiate one layer of SmolLM2-135M-Instruct by its hidden states, as the
Fisher pass does, in one process, in turns. "by JAX" differentiates the same forward
pass operation by operation.
"""

import common
import jax
import jax.numpy as jnp

from mxjax import models
from mxjax.devices import execution
from mxjax.models import softmax_attention

INDEX = 3


def by_jax(queries, keys, values, chunks):
  """What `softmax_attention.attend_chunks` computes, for JAX to differentiate."""
  return [
    softmax_attention.attend(
      queries[..., chunk.start : chunk.stop],
      softmax_attention._parts(keys, values, chunk),
    )
    for chunk in chunks
  ]


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--tokens", type=int, default=2048)
  parser.add_argument("--repeats", type=int, default=7)
  options = parser.parse_args()
  made = common.stamp()
  execution.keep_freed_memory()
  model, params = models.from_pretrained(None)
  layer = params[model.layer_name(INDEX)]
  shape = 1, options.tokens, model.config.hidden_size
  hidden, cotangent = (jax.random.normal(jax.random.key(i), shape) for i in (0, 1))

  def back(layer, hidden, cotangent):
    pull = jax.vjp(lambda rows: model.layer(layer, rows), hidden)[1]
    return pull(cotangent)[0]

  own = jax.jit(lambda *args: back(*args))
  first = own(layer, hidden, cotangent)
  # Replaced while the other side is traced.
  kept, softmax_attention.attend_chunks = softmax_attention.attend_chunks, by_jax
  other = jax.jit(lambda *args: back(*args))
  second = other(layer, hidden, cotangent)
  softmax_attention.attend_chunks = kept
  gap = float(jnp.abs(first - second).max() / jnp.abs(second).max())
  sides = {"own": own, "by JAX": other}
  calls = {
    name: lambda run=run: jax.block_until_ready(run(layer, hidden, cotangent))
    for name, run in sides.items()
  }
  seconds, processor = common.in_turns(calls, options.repeats)
  middle = common.medians(seconds)
  ratio = middle["by JAX"] / middle["own"]
  cells = [*(f"{middle[name]:.3f}" for name in sides), f"{ratio:.2f}", f"{gap:.0e}"]
  print(common.markdown(["own, s", "by JAX, s", "ratio", "gap"], [cells]))
  result = {"seconds": seconds, "processor_seconds": processor, "gap": gap}
  common.write(options.out, {**made, **result, "ratio": ratio})


if __name__ == "__main__":
  main()
