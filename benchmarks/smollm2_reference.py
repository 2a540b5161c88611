"""The embedded SmolLM2-135M beside known numbers of the same weights in torch.

  python benchmarks/smollm2_reference.py --data ../shared/data

Token counts show that the tokenizer rebuilt from the GGUF file is the model's own, and
perplexities that the weights are read as they were meant: with the rows of q and k
left as llama.cpp permutes them, perplexity is 15 times as high. Float32 arithmetic on
the bfloat16 weights on both sides. Writes benchmarks/results/smollm2_reference.json
and exits with 1 where a number is off.
"""

import argparse
import json
import pathlib
import sys
import time

import numpy as np
import provenance

from mxjax import models
from mxjax.evaluation import datasets
from mxjax.evaluation.measures.perplexity import perplexity

RESULT = pathlib.Path(__file__).parent / "results" / "smollm2_reference.json"
TEXT = "wikitext2/wiki.test.raw"
IDS = "wikitext2/smollm2_test_8x2048.npy"
LENGTH = 2048
EXPECTED_TOKENS = 303_415
EXPECTED = {"first 20 windows of the text": 20.848, "8 windows of fixed ids": 19.262}
"""Perplexities by an independent torch implementation on the same tokens."""
TOLERANCE = 0.02


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--data", type=pathlib.Path, default="../shared/data")
  parser.add_argument("--out", type=pathlib.Path, default=RESULT)
  options = parser.parse_args()
  made = provenance.stamp(hidden=("--data", "--out"))
  model, params = models.from_pretrained(None)
  tokenizer = models.load_tokenizer(None)
  ids = tokenizer.encode((options.data / TEXT).read_text())
  tests = {
    "first 20 windows of the text": datasets.windows(ids, 20, LENGTH, TEXT),
    "8 windows of fixed ids": np.load(options.data / IDS),
  }
  tokens = {"text": TEXT, "tokens": len(ids), "expected": EXPECTED_TOKENS}
  result = {**made, "tokens": tokens, "tolerance": TOLERANCE, "perplexity": {}}
  is_right = len(ids) == EXPECTED_TOKENS
  for name, windows in tests.items():
    start = time.perf_counter()
    value = perplexity(model, params, windows).mean
    result["perplexity"][name] = {
      "windows": list(windows.shape),
      "value": value,
      "expected": EXPECTED[name],
      "seconds": time.perf_counter() - start,
    }
    is_right &= abs(value - EXPECTED[name]) <= TOLERANCE
    print(f"{name}: {value:.3f}, expected {EXPECTED[name]}", flush=True)
  result["is_right"] = bool(is_right)
  options.out.write_text(json.dumps(result, indent=1) + "\n")
  return int(not is_right)


if __name__ == "__main__":
  sys.exit(main())
