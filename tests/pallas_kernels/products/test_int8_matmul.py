import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.layers.linear import linear, linear_onto
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.precision import rounded
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.pallas_kernels import choice
from mxjax.pallas_kernels.products import int8, int8_matmul, matmul
from mxjax.pallas_kernels.products.int8_matmul import Tile
from tests.cases import slow
from tests.pallas_kernels import ptx_machine
from tests.pallas_kernels.operands import elements, exact, packed


@functools.partial(jax.jit, static_argnames="tile")
def launch(inputs, weights, tile=None):
  how = {"tile": tile, "interpret": True}
  return int8_matmul.launch(list(map(int8.of_tensor, inputs)), weights, **how)


def check(got, x, weight):
  want, bound = exact(x, weight)
  assert (np.abs(np.asarray(got, np.float64) - want) <= bound).all()


@pytest.mark.parametrize(
  ("rows", "outputs", "width", "splits"),
  [*slow((1, 64, 512, 1), (2, 70, 96, 1), (4, 33, 1120, 1)), (1, 40, 1536, 3)],
)
def test_the_kernel_equals_exact_products_summed(rows, outputs, width, splits):
  x, weight = packed(rows, width, -20, 20), packed(outputs, width, -20, 20, seed=1)
  [got] = launch([x], [weight], Tile(splits=splits))
  assert got.shape == (rows, outputs) and got.dtype == jnp.float32
  check(got, x, weight)
  # Loads ahead move no number.
  [other] = launch([x], [weight], Tile(splits=splits, ahead=True))
  np.testing.assert_array_equal(got, other)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("rows", "width", "wanted", "dtype"),
  [
    (1, 4096, Tile(8, 128, 1, 8), jnp.bfloat16),
    # One program took all columns before, so the tile stays.
    (2, 512, Tile(), jnp.float32),
    (4, 1120, Tile(16, 64, 1, 8), jnp.bfloat16),
  ],
)
def test_a_product_without_partial_sums_adds_to_a_residual(rows, width, wanted, dtype):
  x, weight = packed(rows, width, -9, 9), packed(70, width, -9, 9, seed=1)
  tile = Tile.undivided([70], width)
  assert tile == wanted
  check(launch([x], [weight], tile)[0], x, weight)
  onto = jnp.asarray(100 * np.random.default_rng(2).standard_normal((rows, 70)))

  @jax.jit
  def run(onto):
    how = {"dtype": dtype, "tile": tile, "onto": onto, "interpret": True}
    return int8_matmul.launch([int8.of_tensor(x)], [weight], **how)[0]

  added = onto.astype(dtype)
  # Two roundings, those of a residual behind a linear.
  want = np.asarray(run(None), np.float64) + np.asarray(added, np.float64)
  np.testing.assert_array_equal(run([added]), want.astype(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["xla", "interpret"])
def test_a_linear_adds_to_a_residual_by_whatever_multiplies(kind):
  weight = QuantizedLinear(packed(40, 1024, -3, 3), None, Nearest())
  x, onto = (
    jax.random.normal(jax.random.key(seed), (1, 2, size), jnp.bfloat16)
    for seed, size in ((0, 1024), (1, 40))
  )

  def run(onto, x):
    return linear_onto(onto, x, weight, implementation=kind)

  def tried(onto, x):
    with choice.trying(choice.INT8_UNDIVIDED):
      return run(onto, x)

  want = rounded(onto + linear(x, weight, implementation=kind))
  np.testing.assert_array_equal(jax.jit(run)(onto, x), want)
  np.testing.assert_array_equal(jax.jit(tried)(onto, x), want)
  # One launch does all of it, and gradients are those of the two operations.
  traced = str(jax.make_jaxpr(tried)(onto, x))
  assert ("int8_matmul" in traced) == (kind == "interpret")
  total = lambda run: lambda *given: run(*given).astype(jnp.float32).sum()
  for got, of_two in zip(
    *(jax.jit(jax.grad(total(f), argnums=(0, 1)))(onto, x) for f in (tried, run)),
    strict=True,
  ):
    np.testing.assert_array_equal(got, of_two)


def test_sums_of_a_block_are_exact():
  x, weight = packed(1, 64, -60, 60), packed(64, 64, -60, 60, seed=1)
  # Nothing in the second block, so that nothing is added to the first's.
  x = mxfp4.MXTensor(x.codes.at[:, 16:].set(0), x.scales)
  [got] = launch([x], [weight])
  np.testing.assert_array_equal(np.asarray(got, np.float64), exact(x, weight)[0])


def test_scales_whose_product_is_no_float32_are_taken_one_by_one():
  codes = jnp.zeros((1, 16), jnp.uint8).at[0, 0].set(0x22)
  far = jnp.full((1, 1), 252, jnp.uint8)
  zero = mxfp4.MXTensor(jnp.zeros((1, 16), jnp.uint8), far)
  [got] = launch([mxfp4.MXTensor(codes, far)], [zero])
  assert np.asarray(got).item() == 0.0


@pytest.mark.parametrize(
  ("outputs", "width", "splits"),
  [([12288, 12288], 4096, 1), ([4096, 1024, 1024], 4096, 4), ([4096], 12288, 8)],
)
def test_multiprocessors_get_at_most_eight_programs(outputs, width, splits):
  assert Tile.of(outputs, width).splits == splits


@pytest.mark.slow
def test_linears_of_one_launch_are_those_of_one_each():
  inputs = [packed(2, 192, -9, 9, seed=s) for s in (0, 1, 2)]
  weights = [packed(m, 192, -9, 9, seed=m) for m in (70, 32, 5)]
  together = launch(inputs, weights)
  for y, *pair in zip(together, inputs, weights, strict=True):
    np.testing.assert_array_equal(y, launch([pair[0]], [pair[1]])[0])
    check(y, *pair)


@pytest.mark.parametrize("of_weight", [False, True])
def test_a_block_marked_not_finite_gives_nan(of_weight):
  x, weight = packed(2, 64, -3, 3), packed(3, 64, -3, 3, seed=1)
  mark = lambda t: mxfp4.MXTensor(t.codes, t.scales.at[1, 0].set(mxfp4.NOT_FINITE))
  [got] = launch([x if of_weight else mark(x)], [mark(weight) if of_weight else weight])
  marked = np.isnan(np.asarray(got))
  assert marked[:, 1].all() if of_weight else marked[1].all()
  assert marked.sum() == (2 if of_weight else 3)


def test_ptx_of_a_block_sums_all_pairs_of_codes():
  rng = np.random.default_rng(0)
  count = 4096
  codes, others = rng.integers(0, 16, (2, count, 32))
  # Every pair of codes meets, at every place of a word.
  for place in range(32):
    pairs = rng.permutation(256)
    rows = slice(256 * (place % 16), 256 * (place % 16) + 256)
    codes[rows, place], others[rows, place] = pairs & 15, pairs >> 4
  words = (codes.reshape(count, 4, 8) << (4 * np.arange(8))).sum(-1).astype(np.uint32)
  values = (2 * elements(others)).astype(np.int8)
  ints = values.reshape(count, 8, 4).view(np.uint32)[..., 0]
  table = np.full(count, int8_matmul._TABLE[0], np.uint32)
  operands = [*words.T.copy(), *ints.T.copy(), table]
  got = ptx_machine.run(int8_matmul.block_ptx(), *operands).view(np.int32)
  want = (2 * elements(codes) * values).sum(-1)
  np.testing.assert_array_equal(got, want)
  plain = int8_matmul._meaning(*[jnp.asarray(a.view(np.int32)) for a in operands])
  np.testing.assert_array_equal(plain, want)


def test_ptx_of_every_scale_byte():
  byte = np.arange(256, dtype=np.uint32)
  got = ptx_machine.run(int8_matmul.scale_ptx(), byte).view(np.float32)
  want = np.exp2(byte.astype(np.float64) - 127)
  want[255] = np.nan
  np.testing.assert_array_equal(got, want)
  plain = int8_matmul.scales(jnp.asarray(byte, jnp.uint8), interpret=True)
  # XLA on a CPU flushes the one subnormal.
  np.testing.assert_array_equal(plain[1:], got[1:])


def test_integers_hold_every_value():
  codes = mxfp4.pack(jnp.asarray(np.tile(np.arange(16), (251, 2))))
  tensor = mxfp4.MXTensor(codes, jnp.arange(2, 253, dtype=jnp.uint8)[:, None])
  held = int8.of_tensor(tensor)
  assert held.values.dtype == jnp.int8 and held.shape == (251, 32)
  want = mxfp4.decode(tensor, jnp.bfloat16).astype(jnp.float32)
  np.testing.assert_array_equal(held.decoded().astype(jnp.float32), want)


def test_a_reference_takes_integers_too():
  x, weight = packed(3, 64, -3, 3), packed(40, 64, -3, 3, seed=1)
  got = matmul.matmul(int8.of_tensor(x), weight, implementation="xla")
  check(got, x, weight)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "name"), [(4, "int8_matmul"), (5, "matmul")])
def test_a_layer_multiplies_integers_for_up_to_four_rows(rows, name):
  weight = QuantizedLinear(packed(33, 64, -3, 3), None, Nearest())
  x = jax.random.normal(jax.random.key(0), (rows, 64), jnp.bfloat16)
  run = lambda x: linear(x, weight, implementation="interpret")
  assert f"mxjax_mxfp4_{name}" in str(jax.make_jaxpr(run)(x))
  got = jax.jit(run)(x)
  want = jax.jit(lambda x: linear(x, weight, implementation="xla"))(x)
  np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, want)), 2**-7)
