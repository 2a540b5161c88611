"""Memory of loaded quantized models, and what the compact storage costs.

  python benchmarks/memory.py --data ../shared/data

SmolLM2-135M is loaded and its bytes are counted in the arrays. For the 8B and 32B
shapes the same count is made of shapes alone. The price of a packed embedding (and
tied head) is shown on the float model, where nothing else is quantized; that of
bfloat16 refinement tables on one-code linears with random rotations.
"""

import argparse
import importlib.metadata
import json
import pathlib

import gpu_models
import jax
import jax.numpy as jnp
import numpy as np
import prefill_cpu

from mxjax import models, sizes
from mxjax.compact import compact
from mxjax.evaluation.perplexity import perplexity

GOAL = 0.45


def rows_of(variants):
  """Bytes of the kinds of storage, and the ratio to bfloat16."""
  rows = {}
  for name, params in variants.items():
    report = sizes.size_report(params)
    rows[name] = {
      "bytes": report["total"],
      "bf16_bytes": report["bf16_total"],
      "to_bf16": report["total"] / report["bf16_total"],
    }
    print(
      f"  {name:48s} {rows[name]['bytes'] / 1e6:9.1f} MB {rows[name]['to_bf16']:.3f}"
    )
  return rows


STORAGES = {
  "as the pipeline leaves it": {"tables": False},
  "bfloat16 tables": {"tables": True},
  "bfloat16 tables, int8 embeddings": {"tables": True, "embeddings": "int8"},
  "bfloat16 tables, MXFP4 embeddings": {"tables": True, "embeddings": "mxfp4"},
}


def storages(params):
  """A model's params under each storage option."""
  return {name: compact(params, **options) for name, options in STORAGES.items()}


def shapes_of(shape):
  """HiRes params of a model as shapes; no memory is taken."""
  key = jax.random.key(0)

  def build():
    layers = gpu_models.random_layer(key, shape, True)
    table = jnp.zeros((shape.vocabulary, shape.hidden), jnp.bfloat16)
    weights = {"weight": table}
    return {"layers_0": layers, "embed_tokens": weights, "lm_head": weights}

  def all_layers(storage):
    """Copies the only layer as often as the model has it."""
    one = {k: v for k, v in storage.items() if k != "layers_0"}
    return one | {f"layers_{i}": storage["layers_0"] for i in range(shape.layers)}

  return {
    name: all_layers(
      jax.eval_shape(lambda options=options: compact(build(), **options))
    )
    for name, options in STORAGES.items()
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--data", default="../shared/data")
  parser.add_argument("--windows", type=int, default=4)
  parser.add_argument("--length", type=int, default=512)
  parser.add_argument("--out", default="benchmarks/results/memory.json")
  options = parser.parse_args()
  model, params = models.from_pretrained(None)
  result = {
    "command": f"python benchmarks/memory.py --windows {options.windows} "
    f"--length {options.length}",
    "jax": importlib.metadata.version("jax"),
    "goal": GOAL,
    "sizes": {},
  }
  nearest = prefill_cpu.quantize(params, "nearest")
  print("SmolLM2-135M, nearest")
  result["sizes"]["SmolLM2-135M, nearest"] = rows_of(storages(nearest))
  print("SmolLM2-135M, HiRes")
  hires = prefill_cpu.quantize(params, "one code")
  result["sizes"]["SmolLM2-135M, HiRes"] = rows_of(storages(hires))
  for shape in (gpu_models.QWEN3_8B, gpu_models.QWEN3_32B):
    print(f"{shape.name}, HiRes, predicted")
    result["sizes"][f"{shape.name}, HiRes"] = rows_of(shapes_of(shape))
  path = pathlib.Path(options.data) / "wikitext2/smollm2_test_8x2048.npy"
  windows = np.load(path).reshape(-1, options.length)[: options.windows]
  result["perplexity"] = {}
  out = pathlib.Path(options.out)
  for name, variant in {
    "float": params,
    "float, int8 embeddings": compact(params, embeddings="int8"),
    "float, MXFP4 embeddings": compact(params, embeddings="mxfp4"),
    "one code": hires,
    "one code, bfloat16 tables": compact(hires),
  }.items():
    value = perplexity(model, variant, windows).values[0]
    result["perplexity"][name] = value
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"  perplexity {value:8.3f} {name}", flush=True)


if __name__ == "__main__":
  main()
