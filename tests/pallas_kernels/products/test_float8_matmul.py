import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import mxfp4_decode
from mxjax.pallas_kernels.products import float8, float8_matmul
from mxjax.pallas_kernels.refinement import one_code
from tests.pallas_kernels.operands import exact
from tests.pallas_kernels.operands import packed as tensor

product = jax.jit(
  float8_matmul.float8_matmul, static_argnames=("dtype", "implementation")
)
of_tensor = jax.jit(float8.of_tensor)
BIAS = mxfp4.SCALE_BIAS


def test_every_code_at_every_scale_is_held():
  # What an encoder gives, less what XLA flushes on a CPU.
  bytes_ = np.append(np.arange(3, 253), mxfp4.NOT_FINITE).astype(np.uint8)
  codes = np.tile(np.arange(16), (len(bytes_), 2))
  every = mxfp4.MXTensor(mxfp4.pack(jnp.asarray(codes)), jnp.asarray(bytes_[:, None]))
  narrow, want = of_tensor(every), mxfp4.decode(every, jnp.float32)
  outside = np.asarray(float8.is_outside(float8.exponents(every.scales)))[:, 0]
  assert (bytes_[~outside] == np.arange(BIAS - 15, BIAS + 14)).all()
  np.testing.assert_array_equal(narrow.decoded().astype(jnp.float32), want)
  inside = narrow.values[~outside].astype(jnp.float32)
  np.testing.assert_array_equal(inside, want[~outside])


def test_bytes_are_read_as_the_library_reads_them():
  byte = np.arange(256, dtype=np.uint8)
  got = float8.from_byte(jnp.asarray(byte, jnp.int16))
  np.testing.assert_array_equal(got, byte.view(float8.FORM).astype(np.float32))
  is_number = ~np.isnan(np.asarray(got))
  np.testing.assert_array_equal(float8.to_byte(got)[is_number], byte[is_number])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 70])
def test_the_refinement_kernel_writes_them(rows):
  rng = np.random.default_rng(0)
  scale = np.exp2(rng.integers(-24, 24, (rows, 3))).repeat(32, 1)
  x = jnp.asarray(rng.standard_normal((rows, 96)) * scale, jnp.bfloat16)
  x = x.at[1, :32].set(0)
  refine = functools.partial(one_code.refine, x, form="float8")
  want = of_tensor(mxfp4.encode(x))
  for implementation in ("interpret", "xla"):
    got = refine(implementation=implementation)
    np.testing.assert_array_equal(got.scales, want.scales)
    got, values = (np.asarray(a.values, np.float32) for a in (got, want))
    np.testing.assert_array_equal(got, values)
    assert not got[1, :32].any()


@pytest.mark.slow
def test_rows_of_several_inputs_are_shifted_in_one_launch_in_either_order():
  xs = [tensor(5, 384, float8.LOWEST, float8.HIGHEST, seed=seed) for seed in (1, 2)]
  outside = np.array([1, 2]), np.array([5, 9])
  values = np.array([float8.LOWEST - 1, float8.HIGHEST + 1]) + BIAS
  xs[1] = mxfp4.MXTensor(
    xs[1].codes, xs[1].scales.at[outside].set(values.astype(np.uint8))
  )
  each = [of_tensor(x) for x in xs]
  want = [float8_matmul._shifted_by_xla(x) for x in each]
  assert want[1][1][2] == 2 and not np.array_equal(want[1][0], each[1].values)
  for by_blocks in (False, True):
    given = [x.by_blocks() for x in each] if by_blocks else each
    got = float8_matmul.shifted_each(given, interpret=True)
    for (moved, unit), (values, by_row), x in zip(got, want, given, strict=True):
      np.testing.assert_array_equal(unit, by_row)
      held = float8.Float8Inputs(moved, x.scales, by_blocks).in_order().values
      np.testing.assert_array_equal(held.view(np.uint8), values.view(np.uint8))
      [plain, _] = float8_matmul._shifted_by_xla(x)
      np.testing.assert_array_equal(moved.view(np.uint8), plain.view(np.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 7, 64), (70, 130, 96)])
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_rows_outside_the_range_are_shifted_into_it(shape, implementation):
  rows, outputs, width = shape
  x = tensor(rows, width, float8.LOWEST, float8.HIGHEST, seed=1)
  outside = np.array([0, rows - 1]), np.array([0, 1])
  values = np.array([float8.LOWEST - 1, float8.HIGHEST + 1]) + BIAS
  x = mxfp4.MXTensor(x.codes, x.scales.at[outside].set(values.astype(np.uint8)))
  weight = tensor(outputs, width, -20, -6, seed=2)
  unit, fits = mxfp4_decode.float8_range(weight)
  assert fits
  inputs = of_tensor(x)
  got = np.asarray(product(inputs, weight, unit, implementation=implementation))
  want, bound = exact(x, weight)
  assert got.dtype == np.float32 and (np.abs(got - want) <= bound).all()
  # Taken for rows inside, they are wrong, and the others stay as they are.
  marked = float8.Float8Inputs(inputs.values, jnp.full_like(inputs.scales, BIAS))
  plain = np.asarray(product(marked, weight, unit, implementation=implementation))
  np.testing.assert_array_equal(got[1:-1], plain[1:-1])
  assert (np.abs(plain - want) > bound)[[0, -1]].any(axis=1).all()


def test_shifted_rows_are_exact_where_their_blocks_lie_within_28_powers_of_two():
  rng = np.random.default_rng(3)
  # Row by row, the largest exponent and how far below it the others may be.
  tops = np.array([-20, -100, 60, 120, -15, 13, 14, -110])
  scales = tops[:, None] - rng.integers(0, 29, (8, 5))
  scales[:, 2] = tops
  bytes_ = np.clip(scales + BIAS, 1, 252).astype(np.uint8)
  bytes_[:, 4] = 0
  codes = mxfp4.pack(jnp.asarray(rng.integers(0, 16, (8, 160))))
  # Where the scale byte is 0, an encoder writes zeros.
  codes = codes.at[:, 64:].set(0)
  inputs = of_tensor(mxfp4.MXTensor(codes, jnp.asarray(bytes_)))
  want = np.asarray(
    mxfp4.decode(mxfp4.MXTensor(codes, jnp.asarray(bytes_)), jnp.float32)
  )
  by_kernel = float8_matmul.shifted(inputs, interpret=True)
  by_xla = jax.jit(float8_matmul._shifted_by_xla)(inputs)
  bits = lambda a: np.asarray(a).view(np.uint8 if a.dtype == float8.FORM else np.uint32)
  for one, other in zip(by_kernel, by_xla, strict=True):
    np.testing.assert_array_equal(bits(one), bits(other))
  values, unit = by_kernel
  stay = (~np.asarray(float8.is_outside(float8.exponents(inputs.scales)))).all(axis=1)
  assert stay.any() and (np.asarray(unit)[stay] == 1).all()
  np.testing.assert_array_equal(bits(values[stay]), bits(inputs.values[stay]))
  got = np.asarray(values, np.float64) * np.asarray(unit, np.float64)[:, None]
  np.testing.assert_array_equal(got, np.asarray(want, np.float64))


def test_what_is_far_below_the_largest_block_is_rounded_and_nothing_else():
  codes = mxfp4.pack(jnp.asarray(np.tile(np.arange(16), (2, 4))))
  exponents = np.array([[0, -40], [20, -9]])
  x = mxfp4.MXTensor(codes, jnp.asarray((exponents + BIAS).astype(np.uint8)))
  values, unit = float8_matmul.shifted(of_tensor(x), interpret=True)
  got = np.asarray(values, np.float64) * np.asarray(unit, np.float64)[:, None]
  want = np.asarray(mxfp4.decode(x, jnp.float32), np.float64)
  step = 2.0 ** (exponents.max(1) - 29)[:, None]
  assert (np.abs(got - want) <= step / 2).all()
  np.testing.assert_array_equal(got[:, :32], want[:, :32])
  assert not got[0, 32:].any() and want[0, 32:].any()


@pytest.mark.slow
def test_shifting_touches_no_other_row_and_keeps_what_is_not_finite():
  x = tensor(130, 64, -3, 3)
  weight = tensor(96, 64, -8, -6, seed=2)
  unit, _ = mxfp4_decode.float8_range(weight)
  inputs = of_tensor(x)
  plain = product(inputs, weight, unit, implementation="interpret")
  broken = float8.Float8Inputs(inputs.values, inputs.scales.at[70, 1].set(255))
  for implementation in ("interpret", "xla"):
    got = np.asarray(product(broken, weight, unit, implementation=implementation))
    assert np.isnan(got[70]).all()
    np.testing.assert_array_equal(np.delete(got, 70, 0), np.delete(plain, 70, 0))


def test_the_product_is_one_of_float8():
  x, weight = tensor(5, 64, -3, 3), tensor(7, 64, -8, -6)
  arguments = float8.of_tensor(x), weight, jnp.float32(2.0**-12)
  for implementation in ("interpret", "xla"):
    text = product.lower(*arguments, implementation=implementation).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    narrow = ["f8E5M2" in line and "f8E4M3FN" in line for line in products]
    assert narrow == [True]


def test_widths_that_differ_are_refused():
  x = float8.of_tensor(tensor(5, 64, -3, 3))
  with pytest.raises(ValueError, match=r"expected x \[n, d\]"):
    product(x, tensor(7, 96, -3, 3), jnp.float32(1))
