import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import implementations, mxfp4
from mxjax.pallas_kernels import lowering, mxfp4_decode
from mxjax.pallas_kernels.mosaic import device, products
from mxjax.pallas_kernels.products import float8
from mxjax.pallas_kernels.products.float8_matmul import float8_matmul
from tests import targets
from tests.pallas_kernels.operands import exact, packed

interpreted = pytest.mark.skipif(
  device.obstacle() is not None, reason=str(device.obstacle())
)


multiply = functools.partial(products.packed_product, interpret=True)


def check(got, x, weight, rounding=0.0):
  want, bound = exact(x, weight)
  error = np.abs(np.asarray(got, np.float64) - want)
  assert got.shape == want.shape and (error <= bound + rounding * np.abs(want)).all()


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("is_packed", [True, False])
def test_one_program_takes_tile_after_tile_through_its_stages(is_packed, monkeypatch):
  monkeypatch.setattr(lowering, "multiprocessors", lambda: 1)
  # Two tiles of three steps: more than there are stages, and not twice as many.
  x, weight = packed(64, 384, -3, 3), packed(256, 384, -8, -6, seed=2)
  operand = x if is_packed else mxfp4.decode(x, jnp.bfloat16)
  check(multiply(operand, weight, dtype=jnp.float32), x, weight)


@interpreted
@pytest.mark.slow
def test_the_last_rows_overlap_and_the_result_is_rounded_once():
  x, weight = packed(70, 256, -3, 3), packed(128, 256, -8, -6, seed=2)
  got = multiply(x, weight, dtype=jnp.bfloat16)
  check(got, x, weight, rounding=2.0**-8)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_float8_is_exact_and_rows_outside_the_range_are_taken_in_bfloat16(
  dtype, monkeypatch
):
  monkeypatch.setattr(implementations, "target", lambda: targets.HOPPER)
  x = packed(66, 256, float8.LOWEST, float8.HIGHEST)
  x = mxfp4.MXTensor(x.codes, x.scales.at[65, 1].set(float8.HIGHEST + 1 + 127))
  weight = packed(128, 256, -20, -6, seed=2)
  # Zeros, whatever the table of their scale would be.
  zero = weight.scales.at[5, 3].set(0)
  weight = mxfp4.MXTensor(weight.codes.at[5, 48:64].set(0x2A), zero)
  unit, fits = mxfp4_decode.float8_range(weight)
  assert fits
  inputs = float8.of_tensor(x)
  run = functools.partial(float8_matmul, dtype=dtype, implementation="interpret")
  traced = str(jax.make_jaxpr(run)(inputs, weight, unit))
  assert (
    "mxjax_float8_product" in traced and "dot_general" not in traced.split("mend")[0]
  )
  got = run(inputs, weight, unit)
  assert got.dtype == dtype
  check(got, x, weight, rounding=0.0 if dtype == jnp.float32 else 2.0**-8)
