"""Compares the memory that `mxjax plan` predicts with what a run measures.

  python benchmarks/plan_memory.py [--layers 6] [--on-disk | --no-on-disk]

Writes a random sharded checkpoint, quantizes it by HiRes in a process of its own and
compares the peak resident memory of each stage. Writes
benchmarks/results/plan_memory.json.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import jax.numpy as jnp
import numpy as np
import provenance
from safetensors.flax import save_file

from mxjax import plan
from mxjax.models import weights
from mxjax.models.parameters import parameter_shapes

RESULT = pathlib.Path(__file__).parent / "results" / "plan_memory.json"
CODE = """
import json, pathlib, sys, tempfile
import numpy as np
from mxjax import layer_store, methods, models, pipeline
from mxjax.calibration import Calibration
folder, on_disk, sequences, length, chunk = json.loads(sys.argv[1])
model, params = models.open_pretrained(pathlib.Path(folder))
params = params if on_disk else params.load()
shape = (sequences, length)
tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, shape)
with tempfile.TemporaryDirectory() as scratch:
  store = layer_store.LayerStore(pathlib.Path(scratch)) if on_disk else None
  result = pipeline.quantize_with_record(
    params, Calibration(model, tokens), methods.get("hires"),
    into=store, chunk=chunk, check=False,
  )
print(json.dumps(result.record.clock.peak_bytes))
"""


def make_checkpoint(folder, options):
  """Random weights, one shard a layer."""
  config = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": options.width,
    "intermediate_size": 3 * options.width,
    "num_hidden_layers": options.layers,
    "num_attention_heads": options.width // 64,
    "max_position_embeddings": options.length,
  }
  (folder / "config.json").write_text(json.dumps(config))
  rng = np.random.default_rng(0)
  shards = {}
  for path, shape in parameter_shapes(weights.read_config(folder)).items():
    value = rng.standard_normal(shape, np.float32) * 0.02 if len(shape) > 1 else 1.0
    array = jnp.broadcast_to(jnp.asarray(value, jnp.bfloat16), shape)
    shards.setdefault(f"model-{path[0]}.safetensors", {})[weights.tensor_name(path)] = (
      array
    )
  for file, tensors in shards.items():
    save_file(tensors, folder / file)
  index = {name: file for file, tensors in shards.items() for name in tensors}
  (folder / weights.INDEX_FILE).write_text(json.dumps({"weight_map": index}))


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--layers", type=int, default=3)
  parser.add_argument("--width", type=int, default=512)
  parser.add_argument("--sequences", type=int, default=16)
  parser.add_argument("--length", type=int, default=1024)
  parser.add_argument("--chunk", type=int, default=1)
  parser.add_argument("--on-disk", action=argparse.BooleanOptionalAction, default=True)
  options = parser.parse_args()
  made = provenance.stamp()
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    make_checkpoint(folder, options)
    planned = plan.plan(
      weights.read_config(folder),
      sequences=options.sequences,
      length=options.length,
      chunk=options.chunk,
    )
    request = [
      str(folder),
      options.on_disk,
      options.sequences,
      options.length,
      options.chunk,
    ]
    done = subprocess.run(
      [sys.executable, "-c", CODE, json.dumps(request)],
      stdout=subprocess.PIPE,
      text=True,
      check=True,
    )
  measured = json.loads(done.stdout)
  # The kernel keeps the highest mark only: a stage is as high as those before it.
  highest, stages = 0, {}
  for stage in ("calibration", "quantization", "attention recovery", "mlp recovery"):
    highest = max(highest, planned.memory[stage])
    stages[stage] = {"planned": planned.memory[stage], "measured": measured[stage]}
  peak = max(measured.values())
  report = {
    **made,
    "options": vars(options),
    "stages": stages,
    "planned_peak": highest,
    "measured_peak": peak,
    "ratio": highest / peak,
  }
  RESULT.write_text(json.dumps(report, indent=1) + "\n")
  print(json.dumps(report, indent=1))


if __name__ == "__main__":
  main()
