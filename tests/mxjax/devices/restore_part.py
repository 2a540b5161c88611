"""One of two processes that restore a checkpoint, its part as JSON: test_mesh.py.

python restore_part.py FOLDER PORT PROCESS
"""

import hashlib
import json
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from mxjax.devices import mesh as meshes
from mxjax.storage import checkpoint


def bytes_read():
  """Bytes this process has read from files, imports among them (Linux)."""
  return int(pathlib.Path("/proc/self/io").read_text().split()[1])


def main(folder, port, process):
  jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
  mesh = meshes.make(1, 2)
  # The first time loads libraries as well.
  checkpoint.restore_checkpoint(folder, verify=False, mesh=mesh)
  before = bytes_read()
  params, _ = checkpoint.restore_checkpoint(folder, verify=False, mesh=mesh)
  read = bytes_read() - before
  (codes,) = params["proj"]["weight"].weight.codes.addressable_shards
  rows = codes.index[0].indices(params["proj"]["weight"].weight.codes.shape[0])
  digest = hashlib.sha256(np.asarray(codes.data).tobytes()).hexdigest()
  print(json.dumps({"read": read, "rows": rows[:2], "codes": digest}))


if __name__ == "__main__":
  main(*sys.argv[1:])
