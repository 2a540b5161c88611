"""Checksums of what every method makes of the small trained models.

Run it before a change that must not move a bit, and after it:

  python benchmarks/golden_run.py --out before.json
  python benchmarks/golden_run.py --out after.json --against before.json

Codes and scales of every linear are one checksum each, everything else of the params
(maps, rounding tables, recovery) another, and logits on unseen tokens a third. Methods
that learn take a few steps. Checksums of floats hold for one machine and one version of
JAX; `--against` says which linears differ, and writes a result only to an `--out`.
"""

import hashlib
import json
import pathlib
import sys

import common
import jax
import numpy as np

import mxjax
from mxjax import methods

ROOT = pathlib.Path(__file__).resolve().parents[1]
SEQUENCES, LENGTH = 8, 128
SLOW = {
  "batquant": "batquant:steps=2",
  "spinquant": "spinquant:steps=2",
  "focus": "focus:epochs=1",
}
WORK = [
  *(("llama", SLOW.get(name, name)) for name in methods.METHODS),
  *(("llama", "gptq:scales=static"), ("llama", "gptq:scales=static:order=activation")),
  *((family, "hires") for family in ("mistral", "olmo2", "qwen3")),
]


def digest(leaves):
  """SHA-256 of arrays with their shapes and dtypes, in order."""
  total = hashlib.sha256()
  for leaf in leaves:
    array = np.asarray(leaf)
    total.update(f"{array.shape}{array.dtype}".encode())
    total.update(array.tobytes())
  return total.hexdigest()


def checksums(model, params, tokens):
  """What is compared of one quantized model."""
  is_leaf = lambda node: isinstance(node, mxjax.QuantizedLinear)
  weights, rest = {}, {}
  for path, node in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)[0]:
    name = jax.tree_util.keystr(path)
    if is_leaf(node):
      weights[name] = digest([node.weight.codes, node.weight.scales])
    leaves = jax.tree.leaves(node)
    rest[name] = digest([leaf for leaf in leaves if leaf.dtype != np.uint8])
  logits = jax.jit(model.apply)({"params": params}, tokens)
  return {"weights": weights, "rest": rest, "logits": digest([logits])}


def run(only):
  """Quantizes by every method, or by those of which MODEL/METHOD contains `only`."""
  entries = {}
  for family, method in WORK:
    name = f"{family}/{method}"
    if only in name:
      folder = ROOT / "models" / "trained" / family
      model, params = mxjax.from_pretrained(folder)
      text = (ROOT / "LICENSE").read_text()
      ids = np.asarray(mxjax.load_tokenizer(folder).encode(text), np.int32)
      ids = np.resize(ids, (SEQUENCES + 1) * LENGTH).reshape(-1, LENGTH)
      calib = mxjax.Calibration(model, ids[:-1])
      quantized = mxjax.quantize(params, calib, method)
      entries[name] = checksums(model, quantized, ids[-1:])
      print(name, file=sys.stderr, flush=True)
  return entries


def compare(before, after):
  """One line for each difference."""
  lines = [f"missing: {name}" for name in before.keys() - after]
  for name in before.keys() & after.keys():
    for part in ("weights", "rest"):
      old, new = before[name][part], after[name][part]
      changed = [key for key in old | new if old.get(key) != new.get(key)]
      lines += [f"{name}: {part} of {key}" for key in changed]
    if before[name]["logits"] != after[name]["logits"]:
      lines.append(f"{name}: logits")
  return sorted(lines)


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--against", type=pathlib.Path)
  parser.add_argument("--only", default="", help="a part of MODEL/METHOD")
  options = parser.parse_args()
  entries = run(options.only)
  result = {**common.stamp(), "tokens": [SEQUENCES, LENGTH], "entries": entries}
  if not options.against or options.out != parser.get_default("out"):
    common.write(options.out, result)
  if not options.against:
    return 0
  before = json.loads(options.against.read_text())["entries"]
  before = {k: v for k, v in before.items() if options.only in k}
  lines = compare(before, entries)
  print("\n".join(lines) or f"{len(before)} builds equal, bit for bit")
  return bool(lines)


if __name__ == "__main__":
  sys.exit(main())
