import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import mxfp4_decode
from mxjax.pallas_kernels.mosaic import device
from mxjax.pallas_kernels.products import float8
from mxjax.pallas_kernels.products.float8_matmul import float8_matmul
from mxjax.pallas_kernels.products.matmul import matmul
from tests.pallas_kernels.operands import exact, packed

interpreted = pytest.mark.skipif(
  device.obstacle() is not None, reason=str(device.obstacle())
)


@pytest.fixture(autouse=True)
def mosaic(monkeypatch):
  monkeypatch.setenv("MXJAX_PALLAS_BACKEND", "mosaic")


def check(got, x, weight, rounding=0.0):
  want, bound = exact(x, weight)
  error = np.abs(np.asarray(got, np.float64) - want)
  assert got.shape == want.shape and (error <= bound + rounding * np.abs(want)).all()


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("is_packed", [True, False])
def test_one_program_takes_tile_after_tile_through_its_stages(is_packed, monkeypatch):
  monkeypatch.setattr(device, "MULTIPROCESSORS", 1)
  # Two tiles of three steps: more than there are stages, and not twice as many.
  x, weight = packed(64, 384, -3, 3), packed(256, 384, -8, -6, seed=2)
  operand = x if is_packed else mxfp4.decode(x, jnp.bfloat16)
  check(matmul(operand, weight, implementation="interpret"), x, weight)


@interpreted
@pytest.mark.slow
def test_the_last_rows_overlap_and_the_result_is_rounded_once():
  x, weight = packed(70, 256, -3, 3), packed(128, 256, -8, -6, seed=2)
  got = matmul(x, weight, dtype=jnp.bfloat16, implementation="interpret")
  check(got, x, weight, rounding=2.0**-8)


@interpreted
@pytest.mark.slow
def test_float8_is_exact_and_rows_outside_the_range_are_taken_in_bfloat16():
  x = packed(66, 256, float8.LOWEST, float8.HIGHEST)
  x = mxfp4.MXTensor(x.codes, x.scales.at[65, 1].set(float8.HIGHEST + 1 + 127))
  weight = packed(128, 256, -20, -6, seed=2)
  # Zeros, whatever the table of their scale would be.
  zero = weight.scales.at[5, 3].set(0)
  weight = mxfp4.MXTensor(weight.codes.at[5, 48:64].set(0x2A), zero)
  unit, fits = mxfp4_decode.float8_range(weight)
  assert fits
  inputs = float8.of_tensor(x)
  got = float8_matmul(inputs, weight, unit, implementation="interpret")
  check(got, x, weight)


def test_shapes_that_do_not_fit_are_refused_in_one_sentence():
  for rows, width, outputs in ((63, 128, 128), (64, 96, 128), (64, 128, 64)):
    x, weight = packed(rows, width, 0, 1), packed(outputs, width, 0, 1)
    with pytest.raises(NotImplementedError, match="64 rows or more, widths of 128"):
      matmul(x, weight, implementation="interpret")
    unit, inputs = jnp.float32(1), float8.of_tensor(x)
    with pytest.raises(NotImplementedError, match="64 rows or more, widths of 128"):
      float8_matmul(inputs, weight, unit, implementation="interpret")
  # None takes the reference instead.
  check(jax.jit(matmul)(x, weight), x, weight)
