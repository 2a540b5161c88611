"""Perplexity of the same windows by mxjax and by transformers with torch.

Run it in the environment of benchmarks/harness_agreement.py:

  .venv-harness/bin/python benchmarks/perplexity_agreement.py [--windows 2]

The embedded SmolLM2-135M, saved as a Hugging Face folder, on fixed token ids of
WikiText-2 (test) and C4, in float32 and in bfloat16 arithmetic on both sides. Exits
with 1 where a float32 perplexity differs by more than 1e-4 of itself.
"""

import math
import pathlib
import sys
import tempfile

import common
import harness_agreement
import numpy as np
import torch

from mxjax.evaluation.measures.perplexity import window_losses

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
  lines = [
    [*name.split(", "), str(found["windows"])]
    + [f"{found[side]:.5f}" for side in ("mxjax", "transformers")]
    + [f"{found['relative_difference']:+.0e}"]
    for name, found in report["perplexity"].items()
  ]
  head = ["text", "precision", "windows", "mxjax", "transformers"]
  return common.markdown([*head, "relative difference"], lines)


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--windows", type=int, default=2, help="of each text, the first")
  parser.add_argument("--threads", type=int, default=1, help="of torch")
  options = parser.parse_args()
  torch.set_num_threads(options.threads)
  report = common.stamp(*harness_agreement.PACKAGES)
  report |= {"tolerance": TOLERANCE, "perplexity": {}}
  c4, wikitext = common.smollm2_ids(options.data)
  for dtype in ("float32", "bfloat16"):
    with tempfile.TemporaryDirectory() as scratch:
      twins = harness_agreement.Twins(pathlib.Path(scratch), dtype)
    for text, ids in {"WikiText-2": wikitext, "C4": c4}.items():
      tokens = ids[: options.windows]
      ours = math.exp(window_losses(twins.model, twins.params, tokens).mean())
      other = math.exp(torch_losses(twins.torch, tokens).mean())
      report["perplexity"][f"{text}, {dtype}"] = {
        "windows": len(tokens),
        "length": tokens.shape[1],
        "mxjax": ours,
        "transformers": other,
        "relative_difference": ours / other - 1,
      }
  differences = {
    name: abs(found["relative_difference"])
    for name, found in report["perplexity"].items()
  }
  report["is_right"] = all(
    value <= TOLERANCE for name, value in differences.items() if "float32" in name
  )
  common.write(options.out, report, table(report))
  sys.exit(not report["is_right"])


if __name__ == "__main__":
  main()
