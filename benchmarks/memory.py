"""Memory of loaded quantized models, and what the compact storage costs.

  python benchmarks/memory.py

SmolLM2-135M-Instruct is loaded and its bytes are counted in the arrays. For the paper's
8B and 32B models the same count is made of shapes alone. `mxjax plan` predicts all of
them from their configs, and stands beside. The price of a packed embedding (and tied
head) is shown on the float model, where nothing else is quantized; that of bfloat16
refinement tables on one-code linears with random rotations.
"""

import functools
import json
import pathlib

import common
import jax
import jax.numpy as jnp
import prefill_cpu

from mxjax import models
from mxjax.audit import plan
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.layers import sizes
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

CONFIGS = pathlib.Path(__file__).parents[1] / "tests/golden/paper_configs.json"
PREDICTED = ("Qwen3-8B", "Qwen3-32B")
WINDOWS, LENGTH = 4, 512
STORAGES = {
  "as quantized": {"tables": False},
  "bfloat16 tables": {"tables": True},
  "bfloat16 tables, int8 embeddings": {"tables": True, "embeddings": "int8"},
}


def rows_of(pack, planned=None):
  """Bytes of `pack(**options)` for each storage, beside bfloat16 and the plan."""
  rows = {}
  for name, options in STORAGES.items():
    report = sizes.size_report(pack(**options))
    rows[name] = {
      "bytes": report["total"],
      "bf16_bytes": report["bf16_total"],
      "to_bf16": report["total"] / report["bf16_total"],
    }
    if planned:
      rows[name]["planned_bytes"] = planned.loaded[name]
  return rows


def shapes_of(config, **options):
  """HiRes params of a config under a storage, as shapes; no memory is taken."""
  make = lambda: with_recovery(hires_model(config), config)
  return jax.eval_shape(lambda: pack_for_inference(make(), **options))


def with_recovery(params, config):
  """Params with the recovery leaves of HiRes in every layer."""
  heads = jnp.ones(config.num_kv_heads, jnp.float32)
  one = jnp.ones((), jnp.float32)
  leaves = {
    ("self_attn", "value_recovery"): ValueRecovery(heads, heads),
    ("mlp", "mlp_recovery"): MlpRecovery(one, one, one, one),
  }
  result = dict(params)
  for index in range(config.num_layers):
    layer = dict(result[f"layers_{index}"])
    for (block, name), leaf in leaves.items():
      layer[block] = layer[block] | {name: leaf}
    result[f"layers_{index}"] = layer
  return result


def hires_linear(rows, width, array=jnp.zeros):
  """A HiRes leaf of a shape, of `array(shape, dtype)`."""
  blocks = width // mxfp4.BLOCK_SIZE
  codes = array((rows, width // 2), jnp.uint8), array((rows, blocks), jnp.uint8)
  square = lambda: array((blocks, 32, 32), jnp.float32)
  rounding = OneCode(array((blocks, 528), jnp.float32), square())
  return QuantizedLinear(
    mxfp4.MXTensor(*codes), input_maps.BlockDense(square()), rounding
  )


def hires_model(config, array=jnp.zeros):
  """HiRes params of a config without recovery, of `array(shape, dtype)`."""
  params = {}
  for path, shape in parameter_shapes(config).items():
    is_target = path[-1] == "weight" and path[-2] in PAPER_CONTRACT.targets
    leaf = hires_linear(*shape, array) if is_target else array(shape, jnp.bfloat16)
    insert(params, path, leaf)
  return params


def main():
  options = common.parser(__doc__, data=True).parse_args()
  made = common.stamp()
  model, params = models.from_pretrained()
  hires = prefill_cpu.quantize(params, "one code")
  pack = lambda params: functools.partial(pack_for_inference, params)
  nearest = prefill_cpu.quantize(params, "nearest")
  whole = with_recovery(hires, model.config)
  sizes_ = {
    "SmolLM2-135M-Instruct, nearest": rows_of(pack(nearest)),
    "SmolLM2-135M-Instruct, HiRes": rows_of(pack(whole), plan.plan(model.config)),
  }
  for name in PREDICTED:
    config = families.from_hf_config(json.loads(CONFIGS.read_text())[name])
    shapes = functools.partial(shapes_of, config)
    sizes_[f"{name}, HiRes"] = rows_of(shapes, plan.plan(config))
  for name, rows in sizes_.items():
    print(name, {storage: f"{row['to_bf16']:.3f}" for storage, row in rows.items()})
  windows = common.smollm2_ids(options.data)[1].reshape(-1, LENGTH)[:WINDOWS]
  result = made | {"sizes": sizes_, "perplexity": {}}
  for name, variant in {
    "float": params,
    "float, int8 embeddings": pack_for_inference(params, embeddings="int8"),
    "one code": hires,
    "one code, bfloat16 tables": pack_for_inference(hires),
  }.items():
    result["perplexity"][name] = perplexity(model, variant, windows).values[0]
    common.write(options.out, result)
    print(f"perplexity {result['perplexity'][name]:8.3f} {name}", flush=True)


if __name__ == "__main__":
  main()
