"""Compares the peak memory that `mxjax plan` predicts with what runs take.

  python benchmarks/plan_memory.py [CASE ...]

Quantizes by HiRes in a process of its own for each case, started as the command line
starts (freed memory stays with the process), and compares its peak resident memory with
the plan's rule of thumb. All cases but the embedded model are random sharded
checkpoints. Without names all cases run; those not named stay as they are in the
result, as do the rows of an earlier version, which planned every stage.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile

import common
import jax.numpy as jnp
import numpy as np
from safetensors.flax import save_file

from mxjax import models
from mxjax.audit import plan
from mxjax.models.loading import weights
from mxjax.models.parameters import parameter_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One run; a width of 0 is the embedded model, of which `layers` are taken."""

  layers: int = 3
  width: int = 512
  intermediate: int = 1536
  vocabulary: int = 1024
  sequences: int = 16
  length: int = 1024
  chunk: int = 1
  on_disk: bool = True
  dtype: str = "float32"


CASES = {
  "floor": Case(layers=1, width=128, intermediate=384, sequences=1, length=64),
  "small": Case(),
  "small in bfloat16": Case(dtype="bfloat16"),
  "chunk of two": Case(layers=2, chunk=2),
  "many sequences": Case(layers=2, sequences=128),
  "wide": Case(layers=2, width=2048, intermediate=6144, sequences=4),
  "embedded model in memory": Case(
    layers=2, width=0, sequences=8, length=2048, on_disk=False
  ),
}
CODE = """
import dataclasses, json, pathlib, resource, sys, tempfile
import numpy as np
import mxjax
from mxjax import models
from mxjax.devices import execution
from mxjax.storage import layer_store
folder, case = json.loads(sys.argv[1])
execution.keep_freed_memory()
model, params = models.open_pretrained(
  folder and pathlib.Path(folder), dtype=case["dtype"]
)
config = dataclasses.replace(model.config, num_layers=case["layers"])
model = type(model)(config)
if not case["on_disk"]:
  # The whole model is held, as always, also where fewer layers are quantized.
  params = whole = params.load()
  names = {model.layer_name(i) for i in range(config.num_layers)}
  params = {k: v for k, v in whole.items() if k in names or not k.startswith("layers")}
shape = case["sequences"], case["length"]
tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape)
with tempfile.TemporaryDirectory() as scratch:
  store = None if not case["on_disk"] else layer_store.LayerStore(pathlib.Path(scratch))
  mxjax.quantize(
    params, mxjax.Calibration(model, tokens), into=store, chunk=case["chunk"],
    check=False,
  )
print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def make_checkpoint(folder, case):
  """Random weights, one shard a layer."""
  config = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": case.vocabulary,
    "hidden_size": case.width,
    "intermediate_size": case.intermediate,
    "num_hidden_layers": case.layers,
    "num_attention_heads": case.width // 64,
    "max_position_embeddings": case.length,
  }
  (folder / "config.json").write_text(json.dumps(config))
  rng, shards = np.random.default_rng(0), {}
  for path, shape in parameter_shapes(weights.read_config(folder)).items():
    value = rng.standard_normal(shape, np.float32) * 0.02 if len(shape) > 1 else 1.0
    array = jnp.broadcast_to(jnp.asarray(value, jnp.bfloat16), shape)
    shard = shards.setdefault(f"model-{path[0]}.safetensors", {})
    shard[weights.tensor_name(path)] = array
  for file, tensors in shards.items():
    save_file(tensors, folder / file)
  index = {name: file for file, tensors in shards.items() for name in tensors}
  (folder / weights.INDEX_FILE).write_text(json.dumps({"weight_map": index}))


def measure(case):
  """A JSON-ready row: both peaks and their ratio."""
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch) if case.width else None
    if folder:
      make_checkpoint(folder, case)
    # In memory a run holds all layers, however many of them the case quantizes.
    planned = plan.plan(
      models.load_config(folder, dtype=case.dtype),
      sequences=case.sequences,
      length=case.length,
      on_disk=case.on_disk,
    )
    request = json.dumps([str(folder) if folder else None, dataclasses.asdict(case)])
    command = [sys.executable, "-c", CODE, request]
    peak = int(subprocess.check_output(command))
  return {
    "case": dataclasses.asdict(case),
    "planned_peak": planned.peak,
    "measured_peak": peak,
    "ratio": planned.peak / peak,
  }


def main():
  parser = common.parser(__doc__)
  parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
  options = parser.parse_args()
  for name in options.cases or CASES:
    row = {**common.stamp(), **measure(CASES[name])}
    print(name, f"{row['ratio']:.2f}", flush=True)
    rows = common.read(options.out, {}) | {name: row}
    common.write(options.out, {name: rows[name] for name in CASES if name in rows})


if __name__ == "__main__":
  main()
