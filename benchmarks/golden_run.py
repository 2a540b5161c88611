"""Checksums of what every method makes of the small trained models.

Run it before a change that must not move a bit, and after it:

  python benchmarks/golden_run.py --out before.json
  python benchmarks/golden_run.py --against before.json

Codes and scales of every linear are one checksum each, everything else of the params
(maps, rounding tables, recovery) another, and logits on unseen tokens a third. Methods
that learn take a few steps. Checksums of floats hold for one machine and one version of
JAX; `--against` says which linears differ.
"""

import argparse
import datetime
import hashlib
import json
import pathlib
import platform
import sys

import jax
import numpy as np

import mxjax
from mxjax import methods

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEQUENCES, LENGTH = 8, 128
SLOW = {
  "batquant": "batquant:steps=2",
  "spinquant": "spinquant:steps=2",
  "focus": "focus:epochs=1",
}
EXTRA = ("gptq:scales=static", "gptq:scales=static:order=activation")
HIRES_MODELS = ("mistral", "olmo2", "qwen3")


def digest(leaves):
  """SHA-256 of arrays with their shapes and dtypes, in order."""
  total = hashlib.sha256()
  for leaf in leaves:
    array = np.asarray(leaf)
    total.update(f"{array.shape}{array.dtype}".encode())
    total.update(array.tobytes())
  return total.hexdigest()


def is_quantized(node):
  """Whether a node is a quantized linear, by its parts."""
  return hasattr(node, "weight") and hasattr(node.weight, "codes")


def checksums(model, params, tokens):
  """What is compared of one quantized model."""
  nodes, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)
  weights = {
    jax.tree_util.keystr(path): digest([node.weight.codes, node.weight.scales])
    for path, node in nodes
    if is_quantized(node)
  }
  rest = {
    jax.tree_util.keystr(path): digest(
      [leaf for leaf in jax.tree.leaves(node) if leaf.dtype != np.uint8]
    )
    for path, node in nodes
  }
  logits = jax.jit(model.apply)({"params": params}, tokens)
  return {"weights": weights, "rest": rest, "logits": digest([logits])}


def load(name):
  """A trained model, and calibration and test tokens of the license text."""
  folder = ROOT / "models" / "trained" / name
  model, params = mxjax.from_pretrained(folder)
  tokenizer = mxjax.load_tokenizer(folder)
  ids = np.asarray(tokenizer.encode((ROOT / "LICENSE").read_text()), np.int32)
  ids = np.resize(ids, (SEQUENCES + 1) * LENGTH).reshape(-1, LENGTH)
  return model, params, ids[:-1], ids[-1:]


def run(only):
  """Quantizes by every method, or by those whose name contains `only`."""
  entries = {}
  names = [SLOW.get(name, name) for name in methods.METHODS]
  work = [("llama", name) for name in (*names, *EXTRA)]
  work += [(model, "hires") for model in HIRES_MODELS]
  work = [(model, method) for model, method in work if only in f"{model}/{method}"]
  loaded = {}
  for model_name, method in work:
    if model_name not in loaded:
      loaded = {model_name: load(model_name)}
    model, params, calib_tokens, tokens = loaded[model_name]
    calib = mxjax.Calibration(model, calib_tokens)
    quantized = mxjax.quantize(params, calib, method)
    entries[f"{model_name}/{method}"] = checksums(model, quantized, tokens)
    print(f"{model_name}/{method}", file=sys.stderr, flush=True)
  return entries


def compare(before, after):
  """One line for each difference."""
  lines = [f"missing: {name}" for name in before if name not in after]
  for name in before.keys() & after.keys():
    for part in ("weights", "rest"):
      old, new = before[name][part], after[name][part]
      lines += [
        f"{name}: {part} of {key}" for key in old | new if old.get(key) != new.get(key)
      ]
    if before[name]["logits"] != after[name]["logits"]:
      lines.append(f"{name}: logits")
  return sorted(lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=pathlib.Path)
  parser.add_argument("--against", type=pathlib.Path)
  parser.add_argument("--only", default="", help="a part of MODEL/METHOD")
  options = parser.parse_args()
  entries = run(options.only)
  result = {
    "command": "python benchmarks/golden_run.py",
    "date": datetime.date.today().isoformat(),
    "machine": f"{platform.machine()}, {jax.devices()[0].platform}",
    "jax": jax.__version__,
    "tokens": [SEQUENCES, LENGTH],
    "entries": entries,
  }
  if options.out:
    options.out.write_text(json.dumps(result, indent=1) + "\n")
  if options.against:
    before = json.loads(options.against.read_text())["entries"]
    before = {k: v for k, v in before.items() if options.only in k}
    lines = compare(before, entries)
    print("\n".join(lines) or f"{len(before)} builds equal, bit for bit")
    return bool(lines)
  return 0


if __name__ == "__main__":
  sys.exit(main())
