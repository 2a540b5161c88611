"""The product that refines its inputs: how work is divided, and what it computes."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.layers.linear import linear_many
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.realization import one_code
from mxjax.numerics.realization.activation_quantizers import OneCode
from mxjax.numerics.shaping.input_maps import BlockDense
from mxjax.pallas_kernels import choice, lowering, mxfp4_decode
from mxjax.pallas_kernels.mosaic import device, fused, refinement, stream_k
from mxjax.pallas_kernels.products import float8
from tests import targets
from tests.pallas_kernels.operands import exact, packed

interpreted = pytest.mark.skipif(
  device.obstacle() is not None, reason=str(device.obstacle())
)
CASES = {
  # Groups without an item; ranges that begin within tiles.
  "one row": (1, (128,), 512, 5, 0),
  # Several items a group, tables of each linear, a row outside float8's range.
  "linears, a row outside": (5, (128, 256), 1024, 2, 20),
  "64 rows": (64, (128,), 1024, 3, 0),
}


def tables(rng, blocks):
  rotation = np.linalg.qr(rng.standard_normal((blocks, 32, 32)))[0]
  matrix = rotation * rng.uniform(0.5, 2, (blocks, 32, 1))
  weight = jnp.asarray(rng.standard_normal((blocks, 32, 96)), jnp.float32)
  gram, cross = one_code.tables(weight, mxfp4.round_blocks(weight))
  packed = one_code.pack_symmetric(gram)
  return refinement.tile.Tables(jnp.asarray(matrix, jnp.float32), packed, cross)


def check(rows, outputs, width, programs, exponent):
  """Compares a launch with exact products of what the refinement alone makes."""
  lowering.multiprocessors = lambda: programs
  rng = np.random.default_rng(0)
  x = rng.standard_t(3, (rows, width))
  x[rows - 1, 64:96] *= 2.0**exponent
  x = jnp.asarray(x, jnp.bfloat16)
  each = [tables(rng, width // 32) for _ in outputs]
  weights = [packed(m, width, -20, -6, seed=1 + i) for i, m in enumerate(outputs)]
  units = [mxfp4_decode.float8_range(weight)[0] for weight in weights]
  got = fused.products(x, each, weights, units, dtype=jnp.float32, interpret=True)
  padded = jnp.pad(x, ((0, 64 - rows), (0, 0)))
  made = refinement.launch(padded, each, form="codes", interpret=True)
  for y, parts, weight in zip(got, made, weights, strict=True):
    inputs = mxfp4.MXTensor(*(part[:rows] for part in parts))
    outside = float8.is_outside(float8.exponents(inputs.scales)).any(axis=1)
    assert outside.sum() == (exponent > 0)
    want, bound = exact(inputs, weight)
    assert y.shape == want.shape
    assert (np.abs(np.asarray(y, np.float64) - want) <= bound).all()


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_product_is_that_of_what_the_refinement_makes(name):
  # The interpreter's threads wait for each other inside XLA, which has as many as there
  # are processors, unless it is told another number before it starts.
  root = pathlib.Path(__file__).parents[3]
  environment = os.environ | {"NPROC": "8", "PYTHONPATH": str(root)}
  words = [sys.executable, __file__, name]
  done = subprocess.run(
    words, env=environment, capture_output=True, text=True, check=False, timeout=600
  )
  assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("multiprocessors", [1, 114, 132])
def test_every_pair_of_blocks_is_refined_once(multiprocessors, monkeypatch):
  monkeypatch.setattr(lowering, "multiprocessors", lambda: multiprocessors)
  for outputs, width in (((12288, 12288), 4096), ((4096, 1024, 1024), 4096)):
    x = jax.ShapeDtypeStruct((8, width), jnp.bfloat16)
    work = fused.work_of(x, outputs, (True, True, True, 1, False), jnp.bfloat16)
    assert work.product.programs <= multiprocessors
    done = []
    for place in range(stream_k.GROUPS * work.product.programs):
      steps = range(int(work.count(place)))
      done += [tuple(map(int, work.item(place, step))) for step in steps]
    every = [(i, pair) for i in range(len(outputs)) for pair in range(width // 64)]
    assert sorted(done) == every


def test_shared_memory_holds_tables_and_stages():
  for rows in (1, 8, 17, 64):
    for dtype in (jnp.bfloat16, jnp.float32):
      x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
      work = fused.work_of(x, [4096, 1024], (True, True, True, 1, False), dtype)
      scratch = fused._scratch(work, dtype)
      arrays = jax.tree.leaves([scratch[n] for n in ("x", "words", "scales", "out")])
      arrays += [*scratch["refined"].values(), scratch["cell"]]
      sizes = [np.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in arrays]
      assert sum(sizes) <= 226 * 1024 and work.product.stages >= 4


def leaf(outputs, blocks=16, map_of=BlockDense):
  weight = packed(outputs, 32 * blocks, -9, -3, seed=outputs)
  table = jnp.zeros((blocks, 32, 32))
  rule = OneCode(jnp.ones((blocks, 528)), table)
  scale = jnp.float32(2.0**-8)
  return QuantizedLinear(weight, map_of(table), rule, float8_scale=scale)


@pytest.mark.slow
def test_linears_of_one_input_are_one_launch_where_it_is_tried(monkeypatch):
  monkeypatch.setattr(implementations, "target", lambda: targets.HOPPER)
  monkeypatch.setattr(device, "obstacle", lambda: None)
  monkeypatch.setattr(device, "compile_obstacle", lambda: None)
  launched = []

  def products(x, tables, tensors, units, *, dtype, interpret):
    launched.append((x.shape, len(tables), [t.shape for t in tensors], len(units)))
    return [jnp.zeros((len(x), t.shape[0]), dtype) for t in tensors]

  monkeypatch.setattr(fused, "products", products)
  run = functools.partial(linear_many, implementation="interpret")

  def launches(rows, leaves, dtype=jnp.bfloat16):
    launched.clear()
    with choice.trying(choice.FLOAT8_FUSED):
      jax.eval_shape(run, jax.ShapeDtypeStruct((rows, 512), dtype), leaves)
    return list(launched)

  two = [leaf(128), leaf(256)]
  shapes = [(128, 512), (256, 512)]
  for rows in (1, 64):
    assert launches(rows, two) == [((rows, 512), 2, shapes, 2)]
  assert "at most 64 rows" in fused.obstacle((65, 512), 128)
  # What it cannot do goes by the table: float32, other outputs, no scale of float8.
  assert not launches(2, two, jnp.float32)
  assert not launches(2, [leaf(128), leaf(100)])
  jax.eval_shape(run, jax.ShapeDtypeStruct((2, 512), jnp.bfloat16), two)
  assert not launched[1:]


if __name__ == "__main__":
  check(*CASES[sys.argv[1]])
