import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import mxfp4_decode
from tests.pallas_kernels import ptx_machine
from tests.pallas_kernels.operands import (
  elements,
  every_code_and_scale,
  packed,
  rounded,
)

decode = jax.jit(mxfp4_decode.decode, static_argnames="implementation")
decode_float8 = jax.jit(mxfp4_decode.decode_float8, static_argnames="implementation")


@pytest.mark.parametrize(
  ("implementation", "dtype"),
  [
    ("xla", ml_dtypes.bfloat16),
    ("xla", np.float32),
    ("xla", np.float16),
    ("interpret", ml_dtypes.bfloat16),
  ],
)
def test_every_code_at_every_scale_byte_is_what_float64_says(implementation, dtype):
  """Beyond the type there is infinity with the sign, and 255 is NaN, zeros included."""
  tensor, wide = every_code_and_scale()
  if implementation == "interpret":
    # Interpreted on a CPU, subnormals are flushed; `test_ptx_of_every_byte` has them.
    tensor, wide = jax.tree.map(lambda a: a[3:], (tensor, wide))
  want = rounded(wide, dtype)
  if implementation == "xla":
    got = jax.jit(mxfp4.decode, static_argnums=1)(tensor, dtype)
  else:
    got = decode(tensor, implementation=implementation)
  got = np.asarray(got)
  assert got.dtype == want.dtype and np.isinf(got[-3:-1].astype(np.float64)).any()
  np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
  is_number = ~np.isnan(want)
  np.testing.assert_array_equal(got[is_number], want[is_number])
  np.testing.assert_array_equal(np.signbit(got)[is_number], np.signbit(want)[is_number])


@pytest.mark.parametrize("implementation", [None, "xla", "interpret"])
def test_nothing_decodes_to_nothing(implementation):
  for shape in ((0, 64), (3, 0, 32)):
    codes, scales = (jnp.zeros((*shape[:-1], shape[-1] // n), "uint8") for n in (2, 32))
    got = decode(mxfp4.MXTensor(codes, scales), implementation=implementation)
    assert got.shape == shape and got.dtype == jnp.bfloat16


def test_ptx_of_every_byte_at_every_scale():
  byte, scale = (a.ravel() for a in np.meshgrid(np.arange(256), np.arange(255)))
  factor = np.exp2(scale - 127.0).astype(ml_dtypes.bfloat16).view(np.uint16)
  got = ptx_machine.run(
    mxfp4_decode.bfloat16_ptx(),
    byte.astype(np.uint32),
    factor.astype(np.uint32) * 0x10001,
  )
  got = got.view(ml_dtypes.bfloat16).reshape(-1, 2)
  codes = np.stack([byte & 15, byte >> 4], 1)
  want = elements(codes) * np.exp2(scale - 127.0)[:, None]
  largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
  want = np.where(np.abs(want) > largest, np.copysign(np.inf, want), want)
  np.testing.assert_array_equal(got.astype(np.float64), want)
  np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_ptx_of_every_word_at_every_factor():
  word = np.arange(1 << 16, dtype=np.uint32)
  code = np.stack([(word >> (4 * i)) & 15 for i in range(4)], 1)
  top = mxfp4_decode.TOP
  for exponent in range(top - mxfp4_decode.SPREAD, top + 1):
    half = np.float16(2.0**exponent).view(np.uint16).astype(np.uint32)
    factor = np.full(word.shape, half * 0x10001, np.uint32)
    got = ptx_machine.run(mxfp4_decode.float8_ptx(), word, factor)
    as_float8 = got.view(np.uint8).view(mxfp4_decode.FLOAT8).reshape(-1, 4)
    want = elements(code) * 2.0**exponent
    np.testing.assert_array_equal(as_float8.astype(np.float64), want)
  signed = jnp.asarray(word.view(np.int32)), jnp.asarray(factor.view(np.int32))
  plain = mxfp4_decode.float8_word(*signed, interpret=True)
  np.testing.assert_array_equal(np.asarray(plain).view(np.uint32), got)


def test_the_kernel_decodes_as_the_reference():
  tensor = packed(70, 96, -124, 123)
  got = decode(tensor, implementation="interpret")
  assert got.dtype == jnp.bfloat16 and got.shape == tensor.shape
  np.testing.assert_array_equal(got, mxfp4.decode(tensor, jnp.bfloat16))


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_a_tensor_inside_the_range_is_exact(implementation):
  tensor = packed(40, 64, -7 - mxfp4_decode.SPREAD, -7)
  # A block of zeros has the lowest byte and is in nobody's way.
  tensor = mxfp4.MXTensor(tensor.codes.at[3, :16].set(0), tensor.scales.at[3, 0].set(0))
  unit, fits = mxfp4_decode.float8_range(tensor)
  got = decode_float8(tensor, unit, implementation=implementation)
  assert bool(fits) and got.dtype == mxfp4_decode.FLOAT8
  back = got.astype(jnp.float32) * unit
  np.testing.assert_array_equal(back, mxfp4.decode(tensor, jnp.float32))


def test_one_power_of_two_more_does_not_fit():
  tensor = packed(40, 64, -8 - mxfp4_decode.SPREAD, -7)
  assert not mxfp4_decode.float8_range(tensor)[1]
  broken = mxfp4.MXTensor(tensor.codes, tensor.scales.at[:].set(255))
  assert not mxfp4_decode.float8_range(broken)[1]
