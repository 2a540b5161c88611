"""A trained model quantized on a GPU, beside the same build made on a CPU.

  python benchmarks/gpu_trained.py FILE --data ../shared/data

writes FILE with tokens and what this machine's CPU makes of them; the section "trained
model" of `gpu.py` reads it from MXJAX_GPU_TRAINED. Codes may differ where float32 sums
of another order decide a tie or a nearly equal choice; predictions should not move.
"""

import argparse
import os
import pathlib
import time

import jax
import numpy as np

import mxjax
from mxjax.evaluation.measures.agreement import agreement

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "models" / "trained" / "qwen3"
METHODS = "hires", "hires-next"
SEQUENCES, LENGTH, WINDOWS = 16, 256, 64
CLOSE = 0.02
"""How far the mean KL to the float model may lie above the CPU's, relative to it.

Below it may lie: two builds whose sums have another order differ by about as much."""


def build(tokens, windows):
  """Codes of every linear, KL of every window, and seconds, by method."""
  model, params = mxjax.from_pretrained(FOLDER, dtype="bfloat16")
  results = {}
  for method in METHODS:
    start = time.perf_counter()
    quantized = mxjax.quantize(params, mxjax.Calibration(model, tokens), method)
    jax.block_until_ready(quantized)
    seconds = time.perf_counter() - start
    is_leaf = lambda node: isinstance(node, mxjax.QuantizedLinear)
    linears = filter(is_leaf, jax.tree.leaves(quantized, is_leaf=is_leaf))
    codes = [np.asarray(each.weight.codes).ravel() for each in linears]
    divergence = agreement(model, params, quantized, windows).divergence
    results[method] = np.concatenate(codes), divergence.mean(axis=1), seconds
  return results


def section():
  """Builds by the GPU's kernels and compares with the file's."""
  file = os.environ.get("MXJAX_GPU_TRAINED")
  if file is None:
    return {"left out": "no file of `gpu_trained.py` in MXJAX_GPU_TRAINED"}
  with np.load(file) as arrays:
    stored = dict(arrays)
  made = build(stored["tokens"], stored["windows"])
  results, passed = {}, True
  for method, (codes, divergence, seconds) in made.items():
    wanted = stored[f"{method} divergence"]
    off = divergence - wanted
    nibbles = codes ^ stored[f"{method} codes"]
    differing = ((nibbles & 15 != 0).mean() + (nibbles >> 4 != 0).mean()) / 2
    results[method] = {
      "seconds": seconds,
      "codes_differing": float(differing),
      "KL": float(divergence.mean()),
      "KL of the CPU's": float(wanted.mean()),
      "KL difference": float(off.mean()),
      "standard error": float(off.std(ddof=1) / len(off) ** 0.5),
    }
    passed &= bool(off.mean() <= CLOSE * wanted.mean())
  return {**results, "passed": passed}


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("file", type=pathlib.Path)
  parser.add_argument("--data", type=pathlib.Path, required=True)
  options = parser.parse_args()
  text = (options.data / "wikitext2" / "wiki.valid.tokens").read_text()
  count = (SEQUENCES + WINDOWS) * LENGTH
  ids = np.asarray(mxjax.load_tokenizer(FOLDER).encode(text), np.int32)[:count]
  ids = ids.reshape(-1, LENGTH)
  tokens, windows = ids[:SEQUENCES], ids[SEQUENCES:]
  arrays = {"tokens": tokens, "windows": windows}
  for method, (codes, divergence, seconds) in build(tokens, windows).items():
    arrays |= {f"{method} codes": codes, f"{method} divergence": divergence}
    print(f"{method}: KL {divergence.mean():.5f}, {seconds:.0f} s")
  np.savez_compressed(options.file, **arrays)


if __name__ == "__main__":
  main()
