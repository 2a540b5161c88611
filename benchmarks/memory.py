"""Memory of loaded quantized models, and what the compact storage costs.

  python benchmarks/memory.py --data ../shared/data

SmolLM2-135M is loaded and its bytes are counted in the arrays. For the paper's 8B and
32B models the same count is made of shapes alone. `mxjax plan` predicts all of them
from their configs, and stands beside. The price of a packed embedding (and tied head)
is shown on the float model, where nothing else is quantized; that of bfloat16
refinement tables on one-code linears with random rotations.
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import prefill_cpu
import provenance

from mxjax import models
from mxjax.audit import plan, sizes
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.layers.inference_packing import pack_for_inference
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models import families
from mxjax.models.parameters import insert, parameter_shapes
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.numerics.realization.activation_quantizers import OneCode
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping import input_maps

GOAL = 0.45
CONFIGS = pathlib.Path(__file__).parent.parent / "tests/golden/paper_configs.json"
PREDICTED = ("Qwen3-8B", "Qwen3-32B")
TARGETS = PAPER_CONTRACT.targets


def rows_of(variants, planned=None):
  """Bytes of the kinds of storage, the ratio to bfloat16, and what plan says."""
  rows = {}
  for name, params in variants.items():
    report = sizes.size_report(params)
    rows[name] = {
      "bytes": report["total"],
      "bf16_bytes": report["bf16_total"],
      "to_bf16": report["total"] / report["bf16_total"],
    }
    if planned:
      rows[name]["planned_bytes"] = planned.loaded[name]
    print(
      f"  {name:48s} {rows[name]['bytes'] / 1e6:9.1f} MB {rows[name]['to_bf16']:.3f}"
    )
  return rows


STORAGES = {
  "as quantized": {"tables": False},
  "bfloat16 tables": {"tables": True},
  "bfloat16 tables, int8 embeddings": {"tables": True, "embeddings": "int8"},
  "bfloat16 tables, MXFP4 embeddings": {"tables": True, "embeddings": "mxfp4"},
}


def storages(params):
  """A model's params under each storage option."""
  return {
    name: pack_for_inference(params, **options) for name, options in STORAGES.items()
  }


def with_recovery(params, config):
  """Params with the recovery leaves of HiRes in every layer."""
  heads = jnp.ones(config.num_kv_heads, jnp.float32)
  one = jnp.ones((), jnp.float32)
  result = dict(params)
  for index in range(config.num_layers):
    layer = result[f"layers_{index}"]
    result[f"layers_{index}"] = {
      **layer,
      "self_attn": {
        **layer["self_attn"],
        "value_recovery": ValueRecovery(heads, heads),
      },
      "mlp": {**layer["mlp"], "mlp_recovery": MlpRecovery(one, one, one, one)},
    }
  return result


def hires_linear(rows, width):
  """A HiRes leaf of a shape."""
  blocks = width // mxfp4.BLOCK_SIZE
  square = jnp.zeros((blocks, 32, 32), jnp.float32)
  return QuantizedLinear(
    mxfp4.MXTensor(
      jnp.zeros((rows, width // 2), jnp.uint8), jnp.zeros((rows, blocks), jnp.uint8)
    ),
    input_maps.BlockDense(square),
    OneCode(jnp.zeros((blocks, 528), jnp.float32), square),
  )


def hires_model(config):
  """HiRes params of a config, all zeros: only their shapes are looked at."""
  params = {}
  for path, shape in parameter_shapes(config).items():
    is_target = len(path) > 2 and path[-1] == "weight" and path[-2] in TARGETS
    leaf = hires_linear(*shape) if is_target else jnp.zeros(shape, jnp.bfloat16)
    insert(params, path, leaf)
  return with_recovery(params, config)


def shapes_of(config):
  """HiRes params of a config under each storage, as shapes; no memory is taken."""
  return {
    name: jax.eval_shape(
      lambda options=options: pack_for_inference(hires_model(config), **options)
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
  made = provenance.stamp(hidden=("--data", "--out"))
  model, params = models.from_pretrained(None)
  result = {**made, "goal": GOAL, "sizes": {}}
  nearest = prefill_cpu.quantize(params, "nearest")
  print("SmolLM2-135M, nearest")
  result["sizes"]["SmolLM2-135M, nearest"] = rows_of(storages(nearest))
  print("SmolLM2-135M, HiRes")
  hires = prefill_cpu.quantize(params, "one code")
  planned = plan.plan(model.config)
  result["sizes"]["SmolLM2-135M, HiRes"] = rows_of(
    storages(with_recovery(hires, model.config)), planned
  )
  configs = json.loads(CONFIGS.read_text())
  for name in PREDICTED:
    print(f"{name}, HiRes, shapes only")
    config = families.from_hf_config(configs[name])
    result["sizes"][f"{name}, HiRes"] = rows_of(shapes_of(config), plan.plan(config))
  path = pathlib.Path(options.data) / "wikitext2/smollm2_test_8x2048.npy"
  windows = np.load(path).reshape(-1, options.length)[: options.windows]
  result["perplexity"] = {}
  out = pathlib.Path(options.out)
  for name, variant in {
    "float": params,
    "float, int8 embeddings": pack_for_inference(params, embeddings="int8"),
    "float, MXFP4 embeddings": pack_for_inference(params, embeddings="mxfp4"),
    "one code": hires,
    "one code, bfloat16 tables": pack_for_inference(hires),
  }.items():
    value = perplexity(model, variant, windows).values[0]
    result["perplexity"][name] = value
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"  perplexity {value:8.3f} {name}", flush=True)


if __name__ == "__main__":
  main()
