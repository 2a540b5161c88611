"""Functions of blocks called a few blocks at a time; room for large arrays."""

import os
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.devices import execution


@pytest.mark.parametrize("blocks", [1, 48, 49, 100, 192])
def test_blocks_in_parts_are_the_blocks(blocks):
  seen = []

  def both(x, y):
    seen.append(x.shape[0])
    return x + y, jax.nn.relu(x)

  x = jnp.asarray(np.random.default_rng(0).standard_normal((blocks, 4)), jnp.float32)
  added, positive = execution.call_in_batches(both, x, 2 * x)
  assert np.array_equal(added, 3 * x)
  assert np.array_equal(positive, np.maximum(x, 0))
  assert sum(seen) == blocks
  assert max(seen) <= execution.BLOCKS_AT_ONCE
  assert len(seen) == -(-blocks // execution.BLOCKS_AT_ONCE)


def test_a_gpu_takes_all_blocks_in_one_program(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  seen = []
  execution.call_in_batches(lambda x: seen.append(x.shape[0]) or x, jnp.ones((128, 4)))
  assert seen == [128]


FRAGMENTED = """
import numpy as np
from mxjax.devices import execution
assert execution.keep_freed_memory()
resident = lambda: 4096 * int(open("/proc/self/statm").read().split()[1])
pieces = [np.ones(1 << 20, np.uint8) for _ in range(400)]
full = resident()
# Every other piece stays: what is free lies between them.
kept = pieces[::2]
del pieces
print(full - resident() > 100e6)
print(execution.trim_malloc(execution.LARGE_BYTES - 1), full - resident() > 100e6)
print(execution.trim_malloc(execution.LARGE_BYTES), full - resident() > 100e6)
"""


@pytest.mark.skipif(
  platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's"
)
@pytest.mark.slow
def test_freed_memory_goes_back_before_a_large_array_only():
  done = subprocess.run(
    [sys.executable, "-c", FRAGMENTED], capture_output=True, text=True, check=True
  )
  assert done.stdout.split() == ["False", "False", "False", "True", "True"]


THREADS = """
import jax, jax.numpy as jnp, threadpoolctl
from mxjax.devices import execution
from mxjax.methods import program
from mxjax.numerics import mxfp4
from mxjax.numerics.shaping.input_maps import BlockDense

identity = jnp.eye(32)[None]

def threads():
  return {one["num_threads"] for one in threadpoolctl.threadpool_info()}

seen = []

def noted(blocks):
  jax.block_until_ready(jnp.linalg.inv(identity))  # Now SciPy's library is there.
  seen.append(threads())
  return blocks

class Noted(BlockDense):
  def fold(self, blocks):
    return noted(blocks)

jax.tree_util.register_dataclass(Noted)
execution.call_in_batches(noted, identity)

class Program(program.Program):
  def shape(self, weight, inputs):
    return program.Shaping(Noted(identity))

  def quantize_weight(self, weight, inputs, input_map):
    assert threads() == {2}, "threads are not back"
    raise StopIteration

try:
  Program().quantize_linear(jnp.ones((32, 32)), None)
except StopIteration:
  print(seen)
"""


@pytest.mark.slow
def test_small_matrices_are_decomposed_without_threads():
  environment = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
  done = subprocess.run(
    [sys.executable, "-c", THREADS],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.stdout.strip() == "[{1}, {1}]", done.stderr
