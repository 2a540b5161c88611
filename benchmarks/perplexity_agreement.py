"""Perplexity of the same windows by mxjax and by transformers with torch.

Run it in the environment of benchmarks/harness_agreement.py:

  .venv-harness/bin/python benchmarks/perplexity_agreement.py [--windows 2]

The embedded SmolLM2-135M-Instruct, saved as a Hugging Face folder, on fixed token ids
of WikiText-2 (test) and C4, in float32 and in bfloat16 arithmetic on both sides. Exits
with 1 where a float32 perplexity differs by more than 1e-4 of itself.

In bfloat16, torch on a CPU approximates the exponential of attention to 1e-4. So
transformers runs twice more, with an attention of the same roundings and the exact
exponential: once as it is, once with the keys summed in the reverse order, which shows
how far the order of sums alone moves a perplexity. `--dtypes` runs one precision.
"""

import pathlib
import sys
import tempfile

import common
import harness_agreement
import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from mxjax.evaluation.measures.perplexity import window_losses

TOLERANCE = 1e-4
QUERIES = 256
"""Of attention at once."""
FLOAT32 = [("mxjax", "transformers")]
BFLOAT16 = [
  *FLOAT32,
  ("mxjax", "exact exponential"),
  ("transformers", "exact exponential"),
  ("keys reversed", "exact exponential"),
]
"""What is compared; the last two names are transformers, too."""


def exact_attention(module, queries, keys, values, mask, scaling=None, **options):
  """Causal attention of torch's rounding, and with the exact exponential."""
  del options
  assert mask is None
  width = queries.shape[1] // keys.shape[1]
  keys, values = (a.repeat_interleave(width, 1).float() for a in (keys, values))
  positions = torch.arange(keys.shape[2])
  if module.config.is_reversed:
    keys, values, positions = keys.flip(2), values.flip(2), positions.flip(0)
  chunks = []
  for some in torch.arange(queries.shape[2]).split(QUERIES):
    scores = queries[:, :, some].float() @ keys.transpose(2, 3) * scaling
    scores = scores.masked_fill(positions > some[:, None], -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    product = weights.to(queries.dtype).float() @ values
    chunks.append((product / weights.sum(-1, keepdim=True)).to(queries.dtype))
  return torch.cat(chunks, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register("exact", exact_attention)
AttentionMaskInterface.register("exact", sdpa_mask)


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


def measure(twins, tokens, dtype):
  """Losses of the windows by side."""
  losses = {"mxjax": window_losses(twins.model, twins.params, tokens)}
  losses["transformers"] = torch_losses(twins.torch, tokens)
  if dtype == "bfloat16":
    twins.torch.set_attn_implementation("exact")
    for side, is_reversed in {
      "exact exponential": False,
      "keys reversed": True,
    }.items():
      twins.torch.config.is_reversed = is_reversed
      losses[side] = torch_losses(twins.torch, tokens)
    twins.torch.set_attn_implementation("sdpa")
  return losses


def compare(losses, one, other):
  """Perplexities and their relative difference."""
  difference = losses[one] - losses[other]
  return {
    "perplexities": [float(np.exp(losses[side].mean())) for side in (one, other)],
    "relative_difference": float(np.expm1(difference.mean())),
  }


def table(report):
  """One row a text, precision and comparison."""
  lines = []
  for place, found in report["perplexity"].items():
    for sides, pair in found["pairs"].items():
      line = [*place.split(", "), str(found["windows"]), *sides.split(" / ")]
      line += [f"{value:.5f}" for value in pair["perplexities"]]
      line += [f"{pair['relative_difference']:+.0e}"]
      lines.append(line)
  head = ["text", "precision", "windows", "one", "other", "perplexity, one"]
  return common.markdown([*head, "other", "relative difference"], lines)


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--windows", type=int, default=2, help="of each text, the first")
  parser.add_argument("--threads", type=int, default=1, help="of torch")
  parser.add_argument("--dtypes", default="float32,bfloat16")
  options = parser.parse_args()
  torch.set_num_threads(options.threads)
  report = {"tolerance": TOLERANCE, "perplexity": {}}
  c4, wikitext = common.smollm2_ids(options.data)
  for dtype in options.dtypes.split(","):
    with tempfile.TemporaryDirectory() as scratch:
      twins = harness_agreement.Twins(pathlib.Path(scratch), dtype)
    for text, ids in {"WikiText-2": wikitext, "C4": c4}.items():
      tokens = ids[: options.windows]
      losses = measure(twins, tokens, dtype)
      pairs = FLOAT32 if dtype == "float32" else BFLOAT16
      report["perplexity"][f"{text}, {dtype}"] = common.stamp(
        *harness_agreement.PACKAGES
      ) | {
        "windows": len(tokens),
        "length": tokens.shape[1],
        "losses": {side: found.tolist() for side, found in losses.items()},
        "pairs": {" / ".join(pair): compare(losses, *pair) for pair in pairs},
      }
      common.write(options.out, report, table(report))
  report["is_right"] = all(
    abs(found["pairs"]["mxjax / transformers"]["relative_difference"]) <= TOLERANCE
    for name, found in report["perplexity"].items()
    if "float32" in name
  )
  common.write(options.out, report, table(report))
  sys.exit(not report["is_right"])


if __name__ == "__main__":
  main()
