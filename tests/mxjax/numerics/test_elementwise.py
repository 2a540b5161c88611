import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import elementwise


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rms_norm_works_under_strict_promotion(dtype):
  x = jax.random.normal(jax.random.key(0), (2, 3, 16)).astype(dtype)
  weight = jnp.arange(16, dtype=jnp.bfloat16)
  got = elementwise.rms_norm(x, weight, 1e-5)
  assert got.dtype == dtype
  wide = np.asarray(x.astype(jnp.float32), np.float64)
  want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.arange(16)
  tolerance = 1e-6 if dtype == jnp.float32 else 1e-2
  np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=tolerance)


def test_rms_norm_of_bfloat16_sums_in_float32():
  # 1 + 4095 * 2**-8: a bfloat16 sum would stop growing.
  x = jnp.full((1, 4096), 2.0**-4, jnp.bfloat16).at[0, 0].set(1.0)
  got = elementwise.rms_norm(x, jnp.ones(4096, jnp.bfloat16), 0.0)
  assert float(got[0, 0]) == pytest.approx((17 / 4096) ** -0.5, rel=4e-3)


def test_gated_product():
  gate, up = jnp.array([0.0, 2.0]), jnp.array([3.0, 3.0])
  want = [0.0, 6.0 / (1.0 + np.exp(-2.0))]
  np.testing.assert_allclose(elementwise.gated_product(gate, up), want, rtol=1e-6)


@pytest.mark.parametrize(
  "place",
  [(..., slice(1, 3)), (..., slice(0, 4)), (slice(0, 9), slice(0, None))],
  ids=["some columns", "all columns", "all of a tile"],
)
def test_a_sum_into_a_slice_has_no_empty_array(place):
  total = np.arange(12, dtype=np.float32).reshape(3, 4)
  want = total.copy()
  part = np.full_like(want[place], 0.5)
  want[place] += part
  add = jax.jit(lambda total, part: elementwise.add_to_slice(total, place, part))
  np.testing.assert_array_equal(add(total, part), want)
  assert "tensor<0x" not in add.lower(total, part).as_text()
