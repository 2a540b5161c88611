"""Quantizing a model whose linears have one shape, so that little is compiled."""

import os
import pathlib
import subprocess
import sys

import numpy as np

from tests import tiny

PLAIN = ("--no-baseline", "--no-agreement", "--sample", "0")
"""Nothing beside the method itself."""
ROOT = pathlib.Path(__file__).parents[3]


def write(path):
  """Writes a folder of three layers, and token ids for it."""
  path.mkdir()
  heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
  sizes = {"hidden_size": 32, "intermediate_size": 32, "max_positions": 64}
  tiny.save_folder(path, num_layers=3, **heads, **sizes)
  np.save(path / "ids.npy", np.arange(64, dtype=np.int32).reshape(2, 32) % 60)
  return path


def quantize(folder, out, method, *extra):
  """The words of a command."""
  ids = str(folder / "ids.npy")
  sizes = ("--sequences", "2", "--length", "32", "--windows", "2", *PLAIN)
  data = ("--calib", ids, "--data", ids, "--window-length", "32", "--log", "json")
  words = ("quantize", str(folder), "--out", str(out), "--method", method)
  return [*words, *data, *sizes, *extra]


def start(words, stderr, path=()):
  """Runs a command in another process; `path` precedes the checkout on its path."""
  python_path = os.pathsep.join(map(str, [*path, ROOT]))
  return subprocess.Popen(
    [sys.executable, "-m", "mxjax", *words],
    env=os.environ | {"PYTHONPATH": python_path, "JAX_PLATFORMS": "cpu"},
    cwd=ROOT,
    stdout=subprocess.DEVNULL,
    stderr=stderr,
    text=True,
  )
