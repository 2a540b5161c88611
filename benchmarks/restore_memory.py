"""Memory of processes that restore a checkpoint whole, or their part of it.

  python benchmarks/restore_memory.py [--width 4096] [--layers 6] [--vocabulary 16384]

Writes a checkpoint of random HiRes linears and restores it in children: one process
that takes it whole, then 2 and 4 processes joined by jax.distributed, each with one
device of the mesh model=2 or model=4. Each child tells the bytes it holds, its peak of
resident memory and the bytes it read from files, both counted from when the restore
began. Then the same under a hard limit on data memory (RLIMIT_DATA), which each child
sets to what it has at that moment and a share of the checkpoint more: who gets through.

glibc keeps freed buffers of up to 32 MB for later unless it is told not to; peaks are
given both ways, the limits with MALLOC_MMAP_THRESHOLD_ set. Linux only.
"""

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

import common
import jax
import jax.numpy as jnp
import numpy as np

from mxjax.devices import mesh as meshes
from mxjax.models import ModelConfig
from mxjax.storage import checkpoint

PROCESSES = (1, 2, 4)
LIMITS = (0.5, 0.75, 1.25)
"""Shares of the checkpoint that a limited child may add to what it holds."""
RETURNING = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Makes glibc hand freed buffers of a megabyte and more back at once."""


def save(folder, width, layers, vocabulary):
  """Writes the checkpoint; the bytes of its arrays, and of the largest."""
  import memory

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
  rng = np.random.default_rng(0)

  def contents(shape, dtype):
    """At random: restoring does not look at them, but zeros would not be stored."""
    if dtype == jnp.uint8:
      return jnp.asarray(rng.integers(0, 256, shape, "uint8"))
    return jnp.asarray(rng.random(shape, "float32"), dtype)

  params = memory.hires_model(config, contents)
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
  lines = pathlib.Path("/proc/self", file).read_text().splitlines()
  return int(next(x for x in lines if x.startswith(f"{name}:")).split()[1])


def child(folder, process, processes, port, limit):
  """Restores what this process holds; prints what it took."""
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
  shards = [s for leaf in jax.tree.leaves(params) for s in leaf.addressable_shards]
  row = {
    "held": sum(shard.data.nbytes for shard in shards),
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
  assert limit or all("failed" not in row for row in rows), rows
  return rows


def table(result):
  """The table of docs/guides/devices.md."""
  head = ["processes", "held by each, MB", "peak, MB", "peak, handed back, MB"]
  head += ["read, MB", *(f"limit {share:.0%}" for share in LIMITS)]
  lines = []
  most = lambda each, key: f"{max(one[key] for one in each) / 1e6:.0f}"
  for row in result["restored"]:
    each, returning = row["each"], row["each_returning"]
    limits = (x for x in result["limits"] if x["processes"] == row["processes"])
    peaks = (most(some, "peak_above_start") for some in (each, returning))
    cells = [str(row["processes"]), most(each, "held"), *peaks, most(each, "read")]
    ends = ("restored" if x["restored"] else "out of memory" for x in limits)
    lines.append([*cells, *ends])
  return common.markdown(head, lines)


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--width", type=int, default=4096)
  parser.add_argument("--layers", type=int, default=6)
  parser.add_argument("--vocabulary", type=int, default=16384)
  options = parser.parse_args()
  result = common.stamp("orbax-checkpoint", "tensorstore")
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch, "checkpoint")
    save(pathlib.Path(f"{folder}.small"), 512, 1, 64)
    shape = options.width, options.layers, options.vocabulary
    result["checkpoint"] = save(folder, *shape)
    result["restored"] = [
      {
        "processes": count,
        "each": restore(folder, count, environment={}),
        "each_returning": restore(folder, count),
      }
      for count in PROCESSES
    ]
    result["limits"] = []
    for share in LIMITS:
      for count in PROCESSES:
        limit = int(share * result["checkpoint"]["bytes"])
        ends = {row.get("failed") for row in restore(folder, count, limit)}
        failed = sorted(ends - {None})
        row = {"share": share, "bytes": limit, "processes": count}
        result["limits"].append(row | {"restored": not failed, "failed": failed})
  common.write(options.out, result, table(result))


if __name__ == "__main__":
  if sys.argv[1:2] == ["--child"]:
    child(sys.argv[2], *map(int, sys.argv[3:]))
  else:
    main()
