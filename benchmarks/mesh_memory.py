"""Bytes that each of eight virtual devices holds while a model is quantized.

  python benchmarks/mesh_memory.py

The same random model and tokens on meshes of several shapes, by RTN with both recovery
fits: the streams of HiRes and little to compile. At the begin of every stage the live
arrays of each device are summed; temporaries of compiled programs are not in it. The
codes of every mesh are compared with those of one device.
"""

import dataclasses
import gc
import hashlib
import os
import pathlib
import sys

DEVICES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
sys.path.append(str(pathlib.Path(__file__).parents[1]))

import common
import jax
import numpy as np

from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.devices import mesh as meshes
from mxjax.devices.placement import Placement
from mxjax.methods.hires import stage3
from mxjax.models import CausalLM
from mxjax.run.quantize import run
from tests import tiny

SHAPES = (None, (2, 1), (8, 1), (4, 2), (1, 8))
TOKENS = (16, 128)
PROGRAM = dataclasses.replace(
  methods.RTN, name="rtn+recovery", recover=(stage3.ATTENTION, stage3.MLP)
)
CONFIG = tiny.config(
  vocab_size=1024,
  hidden_size=256,
  intermediate_size=768,
  num_heads=8,
  num_kv_heads=4,
  head_dim=32,
  max_positions=TOKENS[1],
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
  at_rest, peaks = held(), {}

  def follow(now):
    before = peaks.get(now.stage, [0] * DEVICES)
    peaks[now.stage] = [max(a, b) for a, b in zip(before, held(), strict=True)]

  result = run(
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
  }, bits(result.params)


def main():
  options = common.parser(__doc__).parse_args()
  model = CausalLM(CONFIG)
  params = model.init(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
  params = jax.tree.map(np.asarray, params)
  tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, TOKENS)
  rows, first = [], None
  for shape in SHAPES:
    row, now = measure(model, params, tokens.astype(np.int32), shape)
    first = first or now
    rows.append(row | {"same_bits_as_one_device": now == first})
    print(rows[-1], flush=True)
  result = {"model": CONFIG.to_dict(), "calibration": TOKENS, "program": PROGRAM.name}
  common.write(options.out, common.stamp() | result | {"rows": rows})


if __name__ == "__main__":
  main()
