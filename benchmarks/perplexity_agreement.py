"""Perplexity of the same windows by mxjax and by transformers with torch.

Run it in the environment of benchmarks/harness_agreement.py:

  .venv-harness/bin/python benchmarks/perplexity_agreement.py --data ../shared/data

The embedded SmolLM2-135M, saved as a Hugging Face folder, on fixed token ids of
WikiText-2 (test) and C4, in float32 and in bfloat16 arithmetic on both sides. Writes
benchmarks/results/perplexity_agreement.json and exits with 1 where a float32
perplexity differs by more than 1e-4 of itself.
"""

import argparse
import json
import math
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import harness_agreement
import numpy as np
import provenance
import torch
import transformers

from mxjax import models
from mxjax.evaluation.measures.perplexity import window_losses
from mxjax.models.loading import weights

RESULT = pathlib.Path(__file__).parent / "results" / "perplexity_agreement.json"
IDS = {
  "WikiText-2": "wikitext2/smollm2_test_8x2048.npy",
  "C4": "c4/smollm2_calib_16x2048.npy",
}
TOLERANCE = 1e-4


def torch_losses(model, tokens):
  """Mean loss of each window, nats; softmax in float64."""
  losses = []
  for row in torch.from_numpy(tokens.astype(np.int64)):
    with torch.inference_mode():
      logits = model(row[None]).logits[0, :-1]
    # In parts: float64 logits of a whole window would take 800 MB.
    parts = [
      torch.nn.functional.cross_entropy(some.double(), ids, reduction="sum")
      for some, ids in zip(logits.split(256), row[1:].split(256), strict=True)
    ]
    losses.append(float(sum(parts)) / (len(row) - 1))
  return np.asarray(losses)


def table(report):
  """One row a text and precision."""
  head = ["text", "precision", "windows", "mxjax", "transformers"]
  head += ["relative difference"]
  lines = [
    [
      *name.split(", "),
      str(found["windows"]),
      f"{found['mxjax']:.5f}",
      f"{found['transformers']:.5f}",
      f"{found['relative_difference']:+.0e}",
    ]
    for name, found in report["perplexity"].items()
  ]
  return provenance.markdown(head, lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--data", type=pathlib.Path, default="../shared/data")
  parser.add_argument("--windows", type=int, default=2, help="of each text, the first")
  parser.add_argument("--dtypes", default="float32,bfloat16")
  parser.add_argument("--threads", type=int, default=1, help="of torch")
  parser.add_argument("--out", type=pathlib.Path, default=RESULT)
  options = parser.parse_args()
  torch.set_num_threads(options.threads)
  packages = ("torch", "transformers")
  report = provenance.stamp(packages=packages, hidden=("--data", "--out"))
  report |= {"model": "SmolLM2-135M-Instruct", "tolerance": TOLERANCE, "perplexity": {}}
  is_right = True
  with tempfile.TemporaryDirectory() as scratch:
    for dtype in options.dtypes.split(","):
      model, params = models.from_pretrained(dtype=dtype)
      config = harness_agreement.hf_config(model.config)
      weights.save_folder(pathlib.Path(scratch), config, params)
      theirs = transformers.AutoModelForCausalLM.from_pretrained(
        scratch, dtype=getattr(torch, dtype)
      )
      for text, file in IDS.items():
        tokens = np.load(options.data / file)[: options.windows]
        sides = window_losses(model, params, tokens), torch_losses(theirs, tokens)
        ours, other = (math.exp(losses.mean()) for losses in sides)
        found = {
          "windows": len(tokens),
          "length": tokens.shape[1],
          "mxjax": ours,
          "transformers": other,
          "relative_difference": ours / other - 1,
        }
        report["perplexity"][f"{text}, {dtype}"] = found
        print(text, dtype, found, flush=True)
        is_right &= dtype != "float32" or abs(ours / other - 1) <= TOLERANCE
  report["is_right"] = is_right
  options.out.write_text(json.dumps(report, indent=1) + "\n")
  options.out.with_suffix(".md").write_text(table(report))
  sys.exit(not is_right)


if __name__ == "__main__":
  main()
