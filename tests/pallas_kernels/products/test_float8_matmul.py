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


@pytest.mark.parametrize("shape", [(5, 7, 64), (70, 130, 96)])
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_rows_outside_the_range_are_taken_in_bfloat16(shape, implementation):
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
  # Without the rows outside there is nothing to mend, and the product stays as it is.
  marked = float8.Float8Inputs(inputs.values, jnp.full_like(inputs.scales, BIAS))
  plain = np.asarray(product(marked, weight, unit, implementation=implementation))
  np.testing.assert_array_equal(got[1:-1], plain[1:-1])
  assert (np.abs(plain - want) > bound)[[0, -1]].any(axis=1).all()


def test_mending_touches_no_other_row():
  x = tensor(130, 64, -3, 3)
  weight = tensor(96, 64, -8, -6, seed=2)
  inputs = of_tensor(x)
  marked = jnp.full((130, 96), 7.0)
  mend = functools.partial(float8_matmul.mend, interpret=True)
  np.testing.assert_array_equal(mend(marked, inputs, weight), marked)
  broken = float8.Float8Inputs(inputs.values, inputs.scales.at[70, 1].set(255))
  got = np.asarray(mend(marked, broken, weight))
  assert np.isnan(got[70]).all() and (np.delete(got, 70, axis=0) == 7.0).all()


def test_the_product_is_one_of_float8():
  x, weight = tensor(5, 64, -3, 3), tensor(7, 64, -8, -6)
  arguments = float8.of_tensor(x), weight, jnp.float32(2.0**-12)
  for implementation, others in (("interpret", 0), ("xla", 1)):
    text = product.lower(*arguments, implementation=implementation).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    narrow = ["f8E5M2" in line and "f8E4M3FN" in line for line in products]
    assert narrow.count(True) == 1
    assert implementation == "interpret" or narrow.count(False) == others


def test_widths_that_differ_are_refused():
  x = float8.of_tensor(tensor(5, 64, -3, 3))
  with pytest.raises(ValueError, match=r"expected x \[n, d\]"):
    product(x, tensor(7, 96, -3, 3), jnp.float32(1))
