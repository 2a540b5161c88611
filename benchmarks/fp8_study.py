"""Could W4A4 run on FP8 tensor cores exactly? Counted on real weights and inputs.

  python benchmarks/fp8_study.py [--tokens 512]

E2M1 values have two significant bits and so has every FP8 format. What can fail is
range: a product on tensor cores has one scale for a whole row of each operand, or for
the whole operand, so a block's power of two relative to that must be absorbed by the
FP8 exponent. The test is the cast itself: a block passes if all its values return from
FP8 unchanged. `float8_matmul` has one scale for a weight, and none for inputs.

Operands are those of the embedded SmolLM2-135M-Instruct: nearest MXFP4 of its 210
linears, as they are and behind the Hadamard-32 map, and of their inputs on real text.

`sums` emulates those that keep only some leading bits, which is how Hopper's FP8
instructions have been reported to add: within 32 products everything is aligned to the
largest exponent and truncated. That report is not verified here.
"""

import functools

import common
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mxjax import models
from mxjax.numerics import mxfp4
from mxjax.numerics.shaping.input_maps import Hadamard

FORMATS = {"E5M2": (ml_dtypes.float8_e5m2, 13), "E4M3": (ml_dtypes.float8_e4m3fn, 6)}
"""The type, and the exponent of a block that puts 6 * 2^k just inside its range."""
ACCUMULATOR_BITS = (13, 14, 23)


@functools.partial(jax.jit, static_argnames="has_map")
def encode(x, has_map):
  """Nearest MXFP4 of `[n, d]`, possibly behind the map: values and exponents."""
  blocks = mxfp4.to_blocks(x.astype(jnp.float32))
  blocks = Hadamard(32).apply(blocks) if has_map else blocks
  tensor = mxfp4.encode(mxfp4.from_blocks(blocks))
  return mxfp4.decode(tensor, jnp.float32), tensor.scales.astype(jnp.int32) - 127


def fits(values, exponents, name, scale="row"):
  """Which blocks `[n, d/32]` survive the cast, relative to the top of row or operand.

  Or as they are: `scale` is `row`, `operand` or `none`.
  """
  dtype, top = FORMATS[name]
  highest = {
    "row": exponents.max(1, keepdims=True),
    "operand": exponents.max(keepdims=True),
    "none": np.full((1, 1), top),
  }[scale]
  blocks = values.reshape(*exponents.shape, 32).astype(np.float64)
  relative = np.ldexp(blocks, (top - highest)[..., None])
  back = relative.astype(np.float32).astype(dtype).astype(np.float64)
  return (back == relative).all(-1)


def count(operands):
  """Shares over a list of (values, exponents), by format."""
  shares = {}
  for name in FORMATS:
    verdicts = [fits(*operand, name) for operand in operands]
    whole = lambda scale, name=name: float(
      np.mean([fits(*operand, name, scale).all() for operand in operands])
    )
    blocks = np.concatenate([v.ravel() for v in verdicts])
    shares[name] = {
      "blocks": len(blocks),
      "blocks_exact": float(blocks.mean()),
      "blocks_not_exact": int((~blocks).sum()),
      "rows_exact": float(np.concatenate([v.all(1) for v in verdicts]).mean()),
      "operands_exact": float(np.mean([v.all() for v in verdicts])),
      "operands_exact_with_one_scale": whole("operand"),
      "operands_exact_with_no_scale": whole("none"),
    }
  return shares


def truncated_product(x, w, bits, group=32):
  """X W^T where each group of products and the sum so far keep `bits` leading bits."""
  total = np.zeros((x.shape[0], w.shape[0]))
  for start in range(0, x.shape[1], group):
    part = slice(start, start + group)
    terms = x[:, None, part] * w[None, :, part]
    largest = np.maximum(np.abs(terms).max(-1), np.abs(total))
    unit = np.exp2(np.floor(np.log2(np.maximum(largest, 1e-300))) - bits)
    total = (np.trunc(terms / unit[..., None]).sum(-1) + np.trunc(total / unit)) * unit
  return total


def accumulation(inputs, weights, float_pairs):
  """Relative error of truncated sums beside that of W4A4 itself."""
  errors, quantization = {bits: [] for bits in ACCUMULATOR_BITS}, []
  for (x, _), (w, _), pair in zip(inputs, weights, float_pairs, strict=True):
    x, w = x[:16].astype(np.float64), w[:32].astype(np.float64)
    exact = x @ w.T
    target = pair[0].astype(np.float64) @ pair[1].astype(np.float64).T
    norm = np.linalg.norm(target)
    quantization.append(np.linalg.norm(exact - target) / norm)
    for bits, found in errors.items():
      found.append(np.linalg.norm(truncated_product(x, w, bits) - exact) / norm)
  return {
    "relative_error_of_W4A4": float(np.median(quantization)),
    "relative_error_of_sums_by_bits": {
      str(bits): {"median": float(np.median(v)), "largest": float(np.max(v))}
      for bits, v in errors.items()
    },
  }


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--tokens", type=int, default=512)
  options = parser.parse_args()
  tokens = common.smollm2_ids(options.data)[1][:1, : options.tokens]
  model, params = models.from_pretrained()
  run_layer = jax.jit(model.layer_with_taps)
  operands = {(kind, m): [] for kind in ("weights", "inputs") for m in (False, True)}
  pairs = []
  hidden = model.embed(params, jnp.asarray(tokens))
  for index in range(model.num_layers):
    layer = params[model.layer_name(index)]
    hidden, taps = run_layer(layer, hidden)
    for (block, name), tap in model.projection_taps.items():
      weight = layer[block][name]["weight"]
      x = taps[tap].reshape(-1, weight.shape[1])
      pairs.append((np.asarray(x[:16]), np.asarray(weight[:32], np.float32)))
      for kind, has_map in operands:
        found = encode(weight if kind == "weights" else x, has_map)
        operands[kind, has_map].append(tuple(map(np.asarray, found)))
  result = common.stamp() | {"tokens": options.tokens, "exact": {}}
  for (kind, has_map), tensors in operands.items():
    name = f"{kind}, {'Hadamard-32' if has_map else 'native'}"
    result["exact"][name] = count(tensors)
    for form, got in result["exact"][name].items():
      print(f"{name}, {form}: {got['blocks_not_exact']} of {got['blocks']} not exact")
  sides = operands["inputs", False], operands["weights", False]
  result["sums"] = accumulation(*sides, pairs)
  common.write(options.out, result)


if __name__ == "__main__":
  main()
