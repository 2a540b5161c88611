"""Bytes that each of eight virtual devices holds while a model is quantized.

  python benchmarks/mesh_memory.py [--width 256] [--sequences 16] [--length 128]

The same random model and tokens on meshes of several shapes, by RTN with both recovery
fits: the streams of HiRes and little to compile. At the begin of every stage the live
arrays of each device are summed; temporaries of compiled programs are not in it. The
codes of every mesh are compared with those of one device. Writes
benchmarks/results/mesh_memory.json.
"""

import argparse
import dataclasses
import datetime
import gc
import hashlib
import json
import os
import pathlib
import platform
import sys

DEVICES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax
import numpy as np

from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.devices import mesh as meshes
from mxjax.devices.placement import Placement
from mxjax.methods import recovery_fits
from mxjax.models import CausalLM, ModelConfig
from mxjax.running import pipeline

RESULT = pathlib.Path(__file__).parent / "results" / "mesh_memory.json"
SHAPES = (None, (2, 1), (8, 1), (4, 2), (1, 8))
PROGRAM = dataclasses.replace(
  methods.RTN, name="rtn+recovery", recover=(recovery_fits.ATTENTION, recovery_fits.MLP)
)


def held():
  """Bytes of live arrays by device, each buffer once: a shard is an array as well."""
  gc.collect()
  buffers = {}
  for array in jax.live_arrays():
    for shard in array.addressable_shards:
      place = shard.device.id, shard.data.unsafe_buffer_pointer()
      buffers[place] = shard.data.nbytes
  total = [0] * DEVICES
  for (device, _), size in buffers.items():
    total[device] += size
  return total


def bits(params):
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(params):
    digest.update(np.asarray(leaf).tobytes())
  return digest.hexdigest()


def measure(model, params, tokens, shape):
  mesh = meshes.make(*shape) if shape else None
  on_mesh = Placement(mesh).shard_rows(params)
  if mesh is None:
    on_mesh = jax.tree.map(jax.numpy.asarray, params)
  at_rest = held()
  peaks = {}

  def follow(now):
    now_held = held()
    before = peaks.get(now.stage, [0] * DEVICES)
    peaks[now.stage] = [max(a, b) for a, b in zip(before, now_held, strict=True)]

  result = pipeline.quantize_with_record(
    on_mesh,
    Calibration(model, tokens),
    PROGRAM,
    mesh=mesh,
    check=False,
    on_progress=follow,
  )
  used = mesh.size if mesh else 1
  peak = [max(stage[i] for stage in peaks.values()) for i in range(DEVICES)]
  return {
    "mesh": Placement(mesh).describe(),
    "devices": used,
    "params_at_rest_per_device": max(at_rest),
    "peak_lead": peak[0],
    "peak_others": max(peak[1:used], default=None),
    "peak_by_stage_lead": {stage: now[0] for stage, now in peaks.items()},
    "result_bits": bits(result.params),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--width", type=int, default=256)
  parser.add_argument("--layers", type=int, default=2)
  parser.add_argument("--sequences", type=int, default=16)
  parser.add_argument("--length", type=int, default=128)
  options = parser.parse_args()
  config = ModelConfig(
    vocab_size=1024,
    hidden_size=options.width,
    intermediate_size=3 * options.width,
    num_layers=options.layers,
    num_heads=options.width // 32,
    num_kv_heads=options.width // 64,
    head_dim=32,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope_theta=1e4,
    max_positions=options.length,
  )
  model = CausalLM(config)
  params = model.init(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
  params = jax.tree.map(np.asarray, params)
  shape = options.sequences, options.length
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape)
  rows = []
  for mesh in SHAPES:
    rows.append(measure(model, params, tokens.astype(np.int32), mesh))
    print({k: v for k, v in rows[-1].items() if "stage" not in k}, flush=True)
  expected = rows[0]["result_bits"]
  for row in rows:
    row["same_bits_as_one_device"] = row.pop("result_bits") == expected
  result = {
    "command": " ".join(["python", *sys.argv]),
    "machine": {
      "platform": platform.platform(),
      "cores": os.cpu_count(),
      "virtual_devices": DEVICES,
      "python": platform.python_version(),
      "jax": jax.__version__,
      "date": datetime.date.today().isoformat(),
    },
    "model": config.to_dict(),
    "calibration": list(shape),
    "program": PROGRAM.name,
    "rows": rows,
  }
  RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
  main()
