"""How far the last bit of a sum carries where activations are rounded.

  python benchmarks/rounding_spread.py [--methods rtn,spinquant]

Two programs that add in another order differ in the last bits of every activation.
Here the embedding of a trained model is changed by about half of its last bit, with
several seeds, and three things are compared with the unchanged model: perplexity with
activations rounded as compressed-tensors does it, perplexity with weights alone, and
the codes of the rounded inputs of each layer. Same tokens and calibration as
export_roundtrip.py. Writes benchmarks/results/rounding_spread.json.
"""

import argparse
import json
import pathlib

import export_roundtrip
import jax
import jax.numpy as jnp
import numpy as np
import provenance
import trained

from mxjax import methods
from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration, targets
from mxjax.devices import execution
from mxjax.evaluation.cli import exporting
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.running import pipeline
from mxjax.storage.export.compressed_tensors import RUNTIME_RULES

RESULT = pathlib.Path(__file__).parent / "results" / "rounding_spread.json"
NOISE = 2.0**-25
"""Relative: half a unit in the last place of a float32 mantissa of 1."""


def nudged(params, seed):
  """Params whose embedding, and a head tied to it, have other last bits."""
  weight = np.asarray(params["embed_tokens"]["weight"], np.float64)
  noise = np.random.default_rng(seed).standard_normal(weight.shape)
  changed = (weight * (1 + NOISE * noise)).astype(np.float32)
  return {**params, "embed_tokens": {"weight": jnp.asarray(changed)}}


def codes(model, params, tokens):
  """The rounded inputs of every layer's linears: bytes of codes and scales, by tap."""
  names = {model.projection_taps[path] for path in targets(model, PAPER_CONTRACT)}
  stream = streams.embed(model, params, tokens, 1)
  found = []
  for index in range(model.num_layers):
    layer, leaving, seen = params[model.layer_name(index)], [], []
    for part in stream:
      output, taps = execution.block_on_cpu(
        streams.capture(model, layer, part, (), tuple(sorted(names)))
      )
      leaving.append(output)
      seen.append(
        {name: mxfp4.encode(tap, RUNTIME_RULES) for name, tap in taps.items()}
      )
    found.append(jax.tree.map(lambda *parts: np.concatenate(parts), *seen))
    stream = leaving
  return found


def differing(one, other):
  """Shares of codes (four bits each) and of scales that differ, by layer."""
  shares = []
  for ours, theirs in zip(one, other, strict=True):
    counts = np.zeros(4)
    for name in ours:
      flips = ours[name].codes ^ theirs[name].codes
      counts += [
        np.count_nonzero(flips & 15) + np.count_nonzero(flips >> 4),
        2 * flips.size,
        np.count_nonzero(ours[name].scales != theirs[name].scales),
        ours[name].scales.size,
      ]
    shares.append({"codes": counts[0] / counts[1], "scales": counts[2] / counts[3]})
  return shares


def measure(family, method, options):
  subject, tokens = trained.subject(
    family, (options.sequences, options.length), (options.windows, options.length), 1
  )
  model, windows = subject.model, subject.tests["passages"]
  quantized = pipeline.quantize_with_record(
    subject.params, Calibration(model, tokens), methods.get(method)
  ).params
  rounded = exporting.runtime_params(quantized)
  variants = {"rounded": rounded, "weights": export_roundtrip.unrounded(quantized)}
  of = lambda params: perplexity(model, params, windows).mean
  base = {name: of(params) for name, params in variants.items()}
  base_codes = codes(model, rounded, windows)
  rows = []
  for seed in range(1, 1 + options.seeds):
    changes = {n: of(nudged(p, seed)) / base[n] - 1 for n, p in variants.items()}
    flipped = differing(base_codes, codes(model, nudged(rounded, seed), windows))
    rows.append({"seed": seed, "perplexity_change": changes, "differing": flipped})
    print(method, json.dumps(rows[-1]), flush=True)
  return {"perplexity": base, "seeds": rows}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--family", default="llama")
  parser.add_argument("--methods", default="rtn,spinquant")
  parser.add_argument("--sequences", type=int, default=16)
  parser.add_argument("--windows", type=int, default=8)
  parser.add_argument("--length", type=int, default=256)
  parser.add_argument("--seeds", type=int, default=4)
  parser.add_argument("--out", type=pathlib.Path, default=RESULT)
  options = parser.parse_args()
  result = provenance.stamp(hidden=("--out",))
  result |= {"noise": NOISE, "methods": {}}
  for method in options.methods.split(","):
    result["methods"][method] = measure(options.family, method, options)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
  main()
