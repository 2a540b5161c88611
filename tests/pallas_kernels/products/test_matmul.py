import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels.products import matmul as matmul_kernel
from mxjax.pallas_kernels.products import planes
from mxjax.pallas_kernels.products.matmul import Tile, matmul
from tests.pallas_kernels.operands import exact

run = jax.jit(matmul, static_argnames="implementation")


@functools.partial(jax.jit, static_argnames="tile")
def launch(x, weight, tile):
  return matmul_kernel.launch([x], [weight], tile=tile, interpret=True)[0]


def problem(rows, outputs, width, seed=0, spread=20):
  """Random operands whose block scales differ by many powers of two."""
  rng = np.random.default_rng(seed)

  def draw(n):
    scales = np.exp2(rng.integers(-spread, spread, (n, width // 32))).repeat(32, 1)
    return jnp.asarray(rng.standard_normal((n, width)) * scales, jnp.float32)

  return mxfp4.encode(draw(rows)), mxfp4.encode(draw(outputs))


def check(got, *operands):
  want, bound = exact(*operands)
  assert (np.abs(np.asarray(got, np.float64) - want) <= bound).all()


@pytest.mark.parametrize(
  ("rows", "outputs", "width", "is_packed"),
  [(1, 64, 64, False), (5, 70, 96, True), (70, 40, 192, False)],
)
def test_the_kernel_equals_exact_products_summed(rows, outputs, width, is_packed):
  x, weight = problem(rows, outputs, width)
  operand = x if is_packed else mxfp4.decode(x, jnp.bfloat16)
  got = run(operand, weight, implementation="interpret")
  assert got.shape == (rows, outputs) and got.dtype == jnp.float32
  check(got, x, weight)
  check(run(operand, weight, implementation="xla"), x, weight)


def test_splitting_the_columns_changes_only_the_order_of_sums():
  x, weight = problem(7, 96, 256, seed=1)
  got = launch(x, weight, tile=Tile(16, 32, 64, splits=2))
  check(got, x, weight)


def test_integers_are_exact_whatever_the_order():
  rng = np.random.default_rng(2)
  x, w = (jnp.asarray(rng.integers(-4, 5, (n, 128)), jnp.float32) for n in (33, 40))
  tensors = mxfp4.encode(x.at[:, ::32].set(4.0)), mxfp4.encode(w.at[:, ::32].set(4.0))
  got = launch(*tensors, tile=Tile(16, 32, 64))
  np.testing.assert_array_equal(got, exact(*tensors)[0])


def test_every_code_at_every_scale_decodes_exactly():
  codes = mxfp4.pack(jnp.asarray(np.tile(np.arange(16), (250, 2))))
  # Exponents that reach subnormals are the backend's to flush in a product.
  weight = mxfp4.MXTensor(codes, jnp.arange(3, 253, dtype=jnp.uint8)[:, None])
  identity = planes.split(jnp.eye(32, dtype=jnp.bfloat16))
  got = launch(identity, weight, tile=Tile(32, 64, 64))
  np.testing.assert_array_equal(got.T, mxfp4.decode(weight, jnp.float32))


def test_a_block_marked_not_finite_gives_nan():
  x, weight = problem(3, 32, 64)
  broken = mxfp4.MXTensor(x.codes, x.scales.at[1, 0].set(mxfp4.NOT_FINITE))
  got = np.asarray(run(broken, weight, implementation="interpret"))
  assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize(
  ("rows", "outputs", "width"), [(1, 4096, 4096), (2048, 96, 576), (9, 64, 96)]
)
def test_every_split_has_as_many_steps(rows, outputs, width):
  tile = Tile.of(rows, outputs, width)
  assert -(-width // tile.columns) % tile.splits == 0 and tile.columns % 64 == 0


@pytest.mark.parametrize(
  ("outputs", "width", "splits"),
  [
    (6144, 4096, 4),  # 384 programs, three for most of 132; two splits: two for some.
    (4096, 12288, 8),  # 512, four for most; with four splits two, as evenly.
    (24576, 4096, 1),
    (64, 4096, 16),
    (200_000, 4096, 1),
  ],
)
def test_multiprocessors_get_equally_many_programs_at_most_four(outputs, width, splits):
  assert Tile.of(1, outputs, width).splits == splits


def test_operands_that_do_not_fit_are_refused():
  _, weight = problem(2, 32, 64)
  with pytest.raises(TypeError, match="bfloat16 or packed, got float32"):
    matmul(jnp.ones((2, 64)), weight)
  with pytest.raises(ValueError, match=r"expected x \[n, d\]"):
    matmul(jnp.ones((2, 32), jnp.bfloat16), weight)


@pytest.mark.parametrize("is_packed", [False, True])
def test_products_that_share_a_launch_are_those_of_one_each(is_packed):
  pairs = [problem(5, m, 64, seed=m) for m in (70, 32)]
  inputs = [x if is_packed else mxfp4.decode(x, jnp.bfloat16) for x, _ in pairs]
  weights = [w for _, w in pairs]
  each = jax.jit(matmul_kernel.matmul_each, static_argnames="implementation")
  for y, pair in zip(
    each(inputs, weights, implementation="interpret"), pairs, strict=True
  ):
    check(y, *pair)
