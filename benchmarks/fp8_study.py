"""Could W4A4 run on FP8 tensor cores exactly? Counted on real weights and inputs.

  python benchmarks/fp8_study.py --data ../shared/data

E2M1 values have two significant bits and so has every FP8 format. What can fail is
range: a product on tensor cores has one scale for a whole row of each operand, or for
the whole operand, so a block's power of two relative to that must be absorbed by the
FP8 exponent. The test is the cast itself: a block passes if all its values return from
FP8 unchanged. `float8_matmul` has one scale for a weight, and none for inputs.

Operands are those of the embedded SmolLM2-135M: nearest MXFP4 of its 210 linears, as
they are and behind the Hadamard-32 map, and of their inputs on real text.

The second table emulates sums that keep only some leading bits, which is how Hopper's
FP8 instructions have been reported to add: within 32 products everything is aligned
to the largest exponent and truncated. That report is not verified here.
"""

import argparse
import functools
import importlib.metadata
import json
import pathlib

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
  """Nearest MXFP4 of `[n, d]`, possibly behind the map."""
  blocks = mxfp4.to_blocks(x.astype(jnp.float32))
  blocks = Hadamard(32).apply(blocks) if has_map else blocks
  tensor = mxfp4.encode(mxfp4.from_blocks(blocks))
  return mxfp4.decode(tensor, jnp.float32), tensor.scales


def fits(values, scales, name, scale="row"):
  """Which blocks `[n, d/32]` survive the cast, relative to the top of row or operand.

  Or as they are: `scale` is `row`, `operand` or `none`.
  """
  dtype, top = FORMATS[name]
  exponent = scales.astype(np.int32) - 127
  row = {
    "row": exponent.max(1, keepdims=True),
    "operand": exponent.max(keepdims=True),
    "none": np.full((1, 1), top),
  }[scale]
  blocks = values.reshape(*scales.shape, 32).astype(np.float64)
  relative = np.ldexp(blocks, (top - row)[..., None])
  back = relative.astype(np.float32).astype(dtype).astype(np.float64)
  return (back == relative).all(-1)


def count(operands):
  """Shares over a list of (values, scales), and how far scales spread in rows."""
  shares, spread = {}, np.zeros(64, np.int64)
  for name in FORMATS:
    verdicts = [fits(values, scales, name) for values, scales in operands]
    blocks = np.concatenate([v.ravel() for v in verdicts])
    rows = np.concatenate([v.all(1) for v in verdicts])
    shares[name] = {
      "blocks": len(blocks),
      "blocks_exact": float(blocks.mean()),
      "blocks_not_exact": int((~blocks).sum()),
      "rows_exact": float(rows.mean()),
      "operands_exact": float(np.mean([v.all() for v in verdicts])),
      "operands_exact_with_one_scale": float(
        np.mean([fits(*operand, name, "operand").all() for operand in operands])
      ),
      "operands_exact_with_no_scale": float(
        np.mean([fits(*operand, name, "none").all() for operand in operands])
      ),
    }
  widest = 0
  for values, scales in operands:
    is_zero = ~values.reshape(*scales.shape, 32).any(-1)
    low = np.where(is_zero, 255, scales).min(1).astype(int)
    high = np.where(is_zero, 0, scales).max(1).astype(int)
    spread += np.bincount(np.clip(high - low, 0, 63), minlength=64)
    widest = max(widest, int(high.max() - low.min()))
  shares["largest_spread_of_an_operand"] = widest
  shares["rows_by_spread_of_exponents"] = {
    str(k): int(v) for k, v in enumerate(spread) if v
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
  rows = {str(bits): [] for bits in ACCUMULATOR_BITS}
  quantization = []
  for (x, _), (w, _), (x_float, w_float) in zip(
    inputs, weights, float_pairs, strict=True
  ):
    x, w = x[:16].astype(np.float64), w[:32].astype(np.float64)
    exact = x @ w.T
    target = x_float[:16].astype(np.float64) @ w_float[:32].astype(np.float64).T
    norm = np.linalg.norm(target)
    quantization.append(np.linalg.norm(exact - target) / norm)
    for bits in ACCUMULATOR_BITS:
      got = truncated_product(x, w, bits)
      rows[str(bits)].append(np.linalg.norm(got - exact) / norm)
  return {
    "relative_error_of_W4A4": float(np.median(quantization)),
    "relative_error_of_sums_by_bits": {
      bits: {"median": float(np.median(v)), "largest": float(np.max(v))}
      for bits, v in rows.items()
    },
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--data", default="../shared/data")
  parser.add_argument("--tokens", type=int, default=512)
  parser.add_argument("--out", default="benchmarks/results/fp8_study.json")
  options = parser.parse_args()
  path = pathlib.Path(options.data) / "wikitext2/smollm2_test_8x2048.npy"
  tokens = np.load(path)[:1, : options.tokens].astype(np.int32)
  model, params = models.from_pretrained(None)
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
      for has_map in (False, True):
        for kind, array in (("weights", weight), ("inputs", x)):
          pair = encode(array, has_map)
          operands[kind, has_map].append(tuple(np.asarray(a) for a in pair))
  result = {
    "command": f"python benchmarks/fp8_study.py --tokens {options.tokens}",
    "model": "SmolLM2-135M-Instruct, embedded",
    "tokens": options.tokens,
    "jax": importlib.metadata.version("jax"),
    "exact": {},
  }
  for (kind, has_map), tensors in operands.items():
    name = f"{kind}, {'Hadamard-32' if has_map else 'native'}"
    result["exact"][name] = count(tensors)
    for form in FORMATS:
      got = result["exact"][name][form]
      print(
        f"{name:24s} {form}: {100 * got['blocks_exact']:.4f} % of {got['blocks']} "
        f"blocks, {100 * got['rows_exact']:.3f} % of rows, "
        f"{100 * got['operands_exact']:.1f} % of operands, with one scale "
        f"{100 * got['operands_exact_with_one_scale']:.1f} %, with none "
        f"{100 * got['operands_exact_with_no_scale']:.1f} %"
      )
  result["sums"] = accumulation(
    operands["inputs", False], operands["weights", False], pairs
  )
  print(json.dumps(result["sums"], indent=1))
  out = pathlib.Path(options.out)
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
  main()
