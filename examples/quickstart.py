"""Quantize a model, compare it with the float model, save it and read it back.

  python examples/quickstart.py [FOLDER]

FOLDER is a Hugging Face folder or a hub id; without one, a small Llama-family model of
this repository is used. A minute on two CPU cores.
"""

import sys
import tempfile

import mxjax
from mxjax.evaluation.datasets import load_tokens
from mxjax.evaluation.measures.operator_error import operator_error
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.layers.sizes import size_report


def main(source="models/trained/llama", method="hires", sequences=8, length=128):
  """Prints perplexities, operator error and size; returns them as a dict."""
  model, params = mxjax.from_pretrained(source)
  tokenizer = mxjax.load_tokenizer(source)
  window = {"count": sequences, "length": length}
  tokens = load_tokens(None, tokenizer, split="calibration", **window)
  unseen = load_tokens(None, tokenizer, split="test", **window)

  calib = mxjax.Calibration(model, tokens)
  qparams = mxjax.quantize(params, calib, method)
  logits = model.apply({"params": qparams}, unseen)  # the same call as before

  with tempfile.TemporaryDirectory() as folder:
    mxjax.save_checkpoint(f"{folder}/checkpoint", qparams, model.config)
    model, restored = mxjax.load(f"{folder}/checkpoint")

  size = size_report(restored)
  results = {
    "logits": logits.shape,
    "float perplexity": perplexity(model, params, unseen).mean,
    "quantized perplexity": perplexity(model, restored, unseen).mean,
    "operator error": operator_error(model, params, restored, unseen[:1]),
    "bits a weight": size["quantized_linears"]["bits_per_weight"],
  }
  for name, value in results.items():
    print(f"{name:22}{value if name == 'logits' else format(value, '.4f')}")
  return results


if __name__ == "__main__":
  main(*sys.argv[1:2])
