import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mxjax import mxfp4
from mxjax.pallas_kernels import matmul, mxfp4_decode
from tests.pallas_kernels import ptx_machine

FORMS = ("float8_e4m3fn", "float8_e5m2")
decode = jax.jit(mxfp4_decode.decode, static_argnames="implementation")
float8 = jax.jit(mxfp4_decode.float8, static_argnames=("form", "implementation"))
product = jax.jit(matmul.float8_matmul, static_argnames=("dtype", "implementation"))


def tensor(rows, width, *, low, high, seed=0):
  """Random codes whose scale bytes lie in a range and reach both ends of it."""
  rng = np.random.default_rng(seed)
  scales = rng.integers(low, high + 1, (rows, width // 32)).astype(np.uint8)
  scales[0, :2] = low, high
  codes = rng.integers(0, 256, (rows, width // 2)).astype(np.uint8)
  return mxfp4.MXTensor(jnp.asarray(codes), jnp.asarray(scales))


def values(codes):
  magnitude = np.array(mxfp4.MAGNITUDES)[codes & 7]
  return np.where(codes >= 8, -magnitude, magnitude)


def test_ptx_of_every_byte_at_every_scale():
  byte, scale = (a.ravel() for a in np.meshgrid(np.arange(256), np.arange(1, 255)))
  factor = np.exp2(scale - 127.0).astype(ml_dtypes.bfloat16).view(np.uint16)
  got = ptx_machine.run(
    mxfp4_decode.bfloat16_ptx(),
    byte.astype(np.uint32),
    factor.astype(np.uint32) * 0x10001,
  )
  got = got.view(ml_dtypes.bfloat16).reshape(-1, 2)
  want = values(np.stack([byte & 15, byte >> 4], 1)) * np.exp2(scale - 127.0)[:, None]
  largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
  want = np.where(np.abs(want) > largest, np.copysign(np.inf, want), want)
  np.testing.assert_array_equal(got.astype(np.float64), want)
  np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("form", FORMS)
def test_ptx_of_every_word_at_every_factor(form):
  word = np.arange(1 << 16, dtype=np.uint32)
  code = np.stack([(word >> (4 * i)) & 15 for i in range(4)], 1)
  top = mxfp4_decode.TOP[form]
  for exponent in range(top - mxfp4_decode.SPREAD[form], top + 1):
    half = np.float16(2.0**exponent).view(np.uint16).astype(np.uint32)
    factor = np.full(word.shape, half * 0x10001, np.uint32)
    got = ptx_machine.run(mxfp4_decode.float8_ptx(form), word, factor)
    as_float8 = got.view(np.uint8).view(jnp.dtype(form)).reshape(-1, 4)
    np.testing.assert_array_equal(
      as_float8.astype(np.float64), values(code) * 2.0**exponent
    )
  signed = jnp.asarray(word.view(np.int32)), jnp.asarray(factor.view(np.int32))
  plain = mxfp4_decode.float8_word(*signed, form, interpret=True)
  np.testing.assert_array_equal(np.asarray(plain).view(np.uint32), got)


def test_the_kernel_decodes_as_the_reference():
  packed = tensor(70, 96, low=3, high=250)
  got = decode(packed, implementation="interpret")
  assert got.dtype == jnp.bfloat16 and got.shape == packed.shape
  np.testing.assert_array_equal(got, mxfp4.decode(packed, jnp.bfloat16))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_a_tensor_inside_the_range_is_exact(form, implementation):
  spread = mxfp4_decode.SPREAD[form]
  packed = tensor(40, 64, low=120 - spread, high=120)
  # A block of zeros has the lowest byte and is in nobody's way.
  packed = mxfp4.MXTensor(packed.codes.at[3, :16].set(0), packed.scales.at[3, 0].set(0))
  got = float8(packed, form, implementation=implementation)
  assert bool(got.is_exact) and got.values.dtype == jnp.dtype(form)
  back = got.values.astype(jnp.float32) * 2.0 ** int(got.exponent)
  np.testing.assert_array_equal(back, mxfp4.decode(packed, jnp.float32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_one_power_of_two_more_is_said_not_to_be(form, implementation):
  spread = mxfp4_decode.SPREAD[form] + 1
  packed = tensor(40, 64, low=120 - spread, high=120)
  assert not float8(packed, form, implementation=implementation).is_exact
  broken = mxfp4.MXTensor(packed.codes, packed.scales.at[:].set(255))
  assert not float8(broken, form, implementation=implementation).is_exact


@pytest.mark.parametrize("spread", [14, 15])
def test_the_product_is_exact_or_taken_in_bfloat16(spread):
  x = tensor(5, 64, low=110, high=112, seed=1)
  weight = tensor(7, 64, low=120 - spread, high=120, seed=2)
  exact = [np.asarray(mxfp4.decode(t, jnp.float32), np.float64) for t in (x, weight)]
  bound = 64 * 2.0**-24 * (np.abs(exact[0]) @ np.abs(exact[1]).T)
  for implementation in ("interpret", "xla"):
    got = product(x, weight, implementation=implementation)
    assert got.dtype == jnp.float32
    assert (np.abs(np.asarray(got, np.float64) - exact[0] @ exact[1].T) <= bound).all()


def test_the_product_takes_float8_only_where_it_is_exact():
  x, weight = tensor(5, 64, low=110, high=112), tensor(7, 64, low=120, high=120)
  text = product.lower(x, weight, implementation="xla").as_text()
  products = [line for line in text.splitlines() if "dot_general" in line]
  assert sorted("f8E5M2" in line and "f8E4M3FN" in line for line in products) == [
    False,
    True,
  ]
