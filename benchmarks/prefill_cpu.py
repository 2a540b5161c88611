"""Prefill of SmolLM2-135M-Instruct on CPU: quantized forwards beside the float32 one.

  python benchmarks/prefill_cpu.py [--tokens 512] [--rounds 5]

All forwards run in turn, round after round in one process, so that a busy machine
slows all of them. Ratios are medians over rounds of a time in the float32 time of that
round; those of CPU time a busy machine changes less. The weights are the embedded
model's. Maps are random rotations and nothing is calibrated: time does not depend on
what the tables hold, and the linears are legal W4A4 operators.
"""

import functools
import os
import statistics

import common
import jax
import jax.numpy as jnp
import numpy as np

from mxjax import models
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import one_code
from mxjax.numerics.realization.activation_quantizers import (
  FewCodes,
  Nearest,
  OneCode,
)
from mxjax.numerics.shaping.input_maps import BlockDense

CHANGES = {"one code, no K": 1, "two codes": 2, "four codes": 4}
"""Rules of a few codes, without K_Q."""
KINDS = ("nearest", "nearest with maps", "one code", *CHANGES)


@functools.partial(jax.jit, static_argnames="kind")
def quantized(weight, matrix, kind):
  """A leaf of one kind; rotations fold by themselves."""
  blocks = mxfp4.to_blocks(weight.astype(jnp.float32))
  if kind == "nearest":
    return QuantizedLinear(mxfp4.encode(mxfp4.from_blocks(blocks)), None, Nearest())
  blocks = jnp.einsum("bij,bjn->bin", matrix, blocks, precision="highest")
  packed = mxfp4.encode(mxfp4.from_blocks(blocks))
  rounding = Nearest()
  if kind not in KINDS[:2]:
    gram, cross = one_code.tables(blocks, mxfp4.round_blocks(blocks))
    gram = one_code.pack_symmetric(gram)
    changes = CHANGES.get(kind)
    rounding = FewCodes(gram, changes) if changes else OneCode(gram, cross)
  return QuantizedLinear(packed, BlockDense(matrix), rounding)


def quantize(params, kind):
  """Params with every decoder linear replaced by a leaf of a kind."""
  rng = np.random.default_rng(0)
  result = dict(params)
  for name, layer in params.items():
    if name.startswith("layers_"):
      layer = {key: dict(value) for key, value in layer.items()}
      for block, linear in models.PROJECTION_TAPS:
        weight = layer[block][linear]["weight"]
        shape = weight.shape[1] // 32, 32, 32
        matrix = np.linalg.qr(rng.standard_normal(shape))[0].astype(np.float32)
        leaf = quantized(weight, jnp.asarray(matrix), kind)
        layer[block][linear] = layer[block][linear] | {"weight": leaf}
      result[name] = layer
  return result


def variants():
  """Model and params of each forward; float32 is the first."""
  model, params = models.from_pretrained()
  narrow, narrow_params = models.from_pretrained(dtype="bfloat16")
  narrow_params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), narrow_params)
  return {
    "float32": (model, params),
    "bfloat16": (narrow, narrow_params),
    **{kind: (model, quantize(params, kind)) for kind in KINDS},
    "one code in a bfloat16 model": (narrow, quantize(narrow_params, "one code")),
  }


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--tokens", type=int, default=512)
  parser.add_argument("--rounds", type=int, default=5)
  options = parser.parse_args()
  made = common.stamp()
  tokens = np.random.default_rng(0).integers(0, 49152, (1, options.tokens))
  tokens = jnp.asarray(tokens, jnp.int32)
  run_layer = jax.jit(lambda model, layer, x: model.layer(layer, x), static_argnums=0)
  run_head = jax.jit(
    lambda model, params, hidden: model.logits(params, hidden[:, -1:]),
    static_argnums=0,
  )

  def forward(model, params):
    hidden = model.embed(params, tokens)
    for index in range(model.num_layers):
      hidden = run_layer(model, params[model.layer_name(index)], hidden)
    outside = {k: v for k, v in params.items() if "layers_" not in k}
    return jax.block_until_ready(run_head(model, outside, hidden))

  calls = {name: functools.partial(forward, *pair) for name, pair in variants().items()}
  for call in calls.values():
    call()
  result = made | {"tokens": options.tokens}
  for kind, times in zip(
    ("", "cpu_"), common.in_turns(calls, options.rounds), strict=True
  ):
    result[f"{kind}seconds"] = times
    result[f"median_{kind}seconds"] = common.medians(times)
    result[f"{kind}ratio_to_float32"] = {
      name: statistics.median(
        a / b for a, b in zip(spent, times["float32"], strict=True)
      )
      for name, spent in times.items()
    }
  result["load_at_end"] = os.getloadavg()[0]
  common.write(options.out, result)
  for name, ratio in result["ratio_to_float32"].items():
    print(f"{name:28s} {ratio:.2f}, CPU {result['cpu_ratio_to_float32'][name]:.2f}")


if __name__ == "__main__":
  main()
