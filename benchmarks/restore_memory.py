"""Memory of processes that restore a checkpoint whole, or their part of it.

  python benchmarks/restore_memory.py [--width 4096] [--layers 6] [--vocabulary 16384]

Writes a checkpoint of random HiRes linears and restores it in children: one process
that takes it whole, then 2 and 4 processes joined by jax.distributed, each with one
device of the mesh model=2 or model=4. Each child tells the bytes it holds, its peak of
resident memory and the bytes it read from files, both counted from when the restore
began. Then the same under a hard limit on data memory (RLIMIT_DATA), which each child
sets to what it has at that moment and a share of the checkpoint more: who gets through.

glibc keeps freed buffers of up to 32 MB for later unless it is told not to; peaks are
given both ways, the limits with MALLOC_MMAP_THRESHOLD_ set. Linux only. Writes
benchmarks/results/restore_memory.json and its table.
"""

import argparse
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"

import provenance

HERE = pathlib.Path(__file__).parent
RESULT = HERE / "results" / "restore_memory.json"
PROCESSES = (1, 2, 4)
LIMITS = (0.5, 0.75, 1.25)
"""Shares of the checkpoint that a limited child may add to what it holds."""
RETURNING = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Makes glibc hand freed buffers of a megabyte and more back at once."""


def random_linear(rng, rows, width):
  """A HiRes leaf with random contents: restoring does not look at them."""
  import jax.numpy as jnp

  from mxjax.layers.quantized_linear import QuantizedLinear
  from mxjax.numerics import mxfp4
  from mxjax.numerics.realization.activation_quantizers import OneCode
  from mxjax.numerics.shaping import input_maps

  blocks = width // mxfp4.BLOCK_SIZE
  codes = lambda *shape: jnp.asarray(rng.integers(0, 256, shape, "uint8"))
  table = lambda *shape: jnp.asarray(rng.random(shape, "float32"))
  return QuantizedLinear(
    mxfp4.MXTensor(codes(rows, width // 2), codes(rows, blocks)),
    input_maps.BlockDense(table(blocks, 32, 32)),
    OneCode(table(blocks, 528), table(blocks, 32, 32)),
  )


def random_params(config):
  import jax.numpy as jnp
  import numpy as np

  from mxjax.models.parameters import insert, parameter_shapes
  from mxjax.numerics.contract import PAPER_CONTRACT

  rng, params = np.random.default_rng(0), {}
  for path, shape in parameter_shapes(config).items():
    is_target = len(path) > 2 and path[-2] in PAPER_CONTRACT.targets
    leaf = (
      random_linear(rng, *shape)
      if is_target
      else jnp.asarray(rng.random(shape, "float32"), jnp.bfloat16)
    )
    insert(params, path, leaf)
  return params


def save(folder, width, layers, vocabulary):
  """Writes the checkpoint; the bytes of its arrays, and of the largest."""
  import jax

  from mxjax.models import ModelConfig
  from mxjax.storage import checkpoint

  config = ModelConfig(
    vocab_size=vocabulary,
    hidden_size=width,
    intermediate_size=3 * width,
    num_layers=layers,
    num_heads=width // 128,
    num_kv_heads=width // 512,
    head_dim=128,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope_theta=1e4,
    max_positions=2048,
  )
  params = random_params(config)
  checkpoint.save_checkpoint(folder, params, config)
  sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
  files = sum(1 for file in folder.rglob("*") if file.is_file())
  return {
    "bytes": sum(sizes),
    "largest_array": max(sizes),
    "arrays": len(sizes),
    "files": files,
  }


def field(file, name):
  """A number of a file in /proc/self, in the file's unit."""
  for line in pathlib.Path("/proc/self", file).read_text().splitlines():
    if line.startswith(f"{name}:"):
      return int(line.split()[1])
  raise ValueError(f"no {name} in /proc/self/{file}")


def child(folder, process, processes, port, limit):
  """Restores what this process holds; prints what it took."""
  import jax

  from mxjax.devices import mesh as meshes
  from mxjax.storage import checkpoint

  mesh = None
  if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    mesh = meshes.make(1, processes)
  # What restoring imports and starts is there before memory is looked at.
  checkpoint.restore_checkpoint(f"{folder}.small", mesh=mesh)
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # Forgets the peak so far.
  before, read = field("status", "VmRSS") * 1024, field("io", "rchar")
  if limit:
    data = field("status", "VmData") * 1024 + limit
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
  params, _ = checkpoint.restore_checkpoint(folder, mesh=mesh)
  held = sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(params)
    for shard in leaf.addressable_shards
  )
  row = {
    "held": held,
    "peak_above_start": field("status", "VmHWM") * 1024 - before,
    "start": before,
    "read": field("io", "rchar") - read,
  }
  print(json.dumps(row), flush=True)


def restore(folder, processes, limit=0, environment=RETURNING):
  """What each child tells; of one that did not get through, its last words."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  # Stacks of threads count as data, as large as they may become.
  begin = ["sh", "-c", 'ulimit -s 1024 && exec "$@"', "sh"]
  begin += [sys.executable, __file__, "--child", str(folder)]
  children = [
    subprocess.Popen(
      [*begin, *map(str, (process, processes, port, limit))],
      env=os.environ | environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for process in range(processes)
  ]
  rows = []
  for one in children:
    output, errors = one.communicate()
    if one.returncode == 0:
      rows.append(json.loads(output))
      continue
    said = errors.strip().splitlines()[-1:] or [signal.Signals(-one.returncode).name]
    rows.append({"failed": said[0][:200]})
  return rows


def table(result):
  """The table of docs/guides/devices.md."""
  head = ["processes", "held by each, MB", "peak, MB", "peak, handed back, MB"]
  head += ["read, MB", *(f"limit {share:.0%}" for share in LIMITS)]
  lines = []
  for row in result["restored"]:
    most = lambda each, key: f"{max(one[key] for one in each) / 1e6:.0f}"
    each, returning = row["each"], row["each_returning"]
    limits = (x for x in result["limits"] if x["processes"] == row["processes"])
    lines.append([
      str(row["processes"]),
      most(each, "held"),
      most(each, "peak_above_start"),
      most(returning, "peak_above_start"),
      most(each, "read"),
      *("restored" if limit["restored"] else "out of memory" for limit in limits),
    ])  # fmt: skip
  return provenance.markdown(head, lines)


def restored(folder, processes, environment):
  """What each child tells; all of them must get through."""
  rows = restore(folder, processes, environment=environment)
  assert all("failed" not in row for row in rows), rows
  return rows


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--width", type=int, default=4096)
  parser.add_argument("--layers", type=int, default=6)
  parser.add_argument("--vocabulary", type=int, default=16384)
  parser.add_argument("--out", type=pathlib.Path, default=RESULT)
  options = parser.parse_args()
  result = provenance.stamp(("orbax-checkpoint", "tensorstore"), hidden=("--out",))
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch, "checkpoint")
    save(pathlib.Path(f"{folder}.small"), 512, 1, 64)
    size = options.width, options.layers, options.vocabulary
    result["checkpoint"] = save(folder, *size)
    print(result["checkpoint"], flush=True)
    result["restored"], result["limits"] = [], []
    for count in PROCESSES:
      row = {
        "processes": count,
        "each": restored(folder, count, {}),
        "each_returning": restored(folder, count, RETURNING),
      }
      result["restored"].append(row)
      print(row, flush=True)
    for share in LIMITS:
      for count in PROCESSES:
        limit = int(share * result["checkpoint"]["bytes"])
        rows = restore(folder, count, limit)
        failed = sorted({row["failed"] for row in rows if "failed" in row})
        row = {"share": share, "bytes": limit, "processes": count}
        row |= {"restored": not failed, "failed": failed}
        result["limits"].append(row)
        print(row, flush=True)
  options.out.write_text(json.dumps(result, indent=1) + "\n")
  options.out.with_suffix(".md").write_text(table(result))


if __name__ == "__main__":
  if sys.argv[1:2] == ["--child"]:
    child(sys.argv[2], *map(int, sys.argv[3:]))
  else:
    main()
