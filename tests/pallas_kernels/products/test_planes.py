import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels.products import planes
from tests.pallas_kernels import ptx_machine
from tests.pallas_kernels.operands import elements


def registers(halves):
  """uint32 registers that hold two 16-bit values each."""
  return np.ascontiguousarray(halves).view(np.uint16).view(np.uint32)


def run(ptx, *operands):
  """16-bit results, bfloat16, of 16-bit operands."""
  return ptx_machine.run(ptx, *map(registers, operands)).view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("position", range(4))
def test_ptx_of_every_word_is_what_the_reference_decodes(position):
  word = np.arange(1 << 16, dtype=np.uint16)
  for seed, exponent in enumerate((-120, -3, 0, 121)):
    # The neighbour in the register must not matter.
    shuffled = np.random.default_rng(seed).permutation(word)
    scale = np.full(word.shape, 2.0**exponent, ml_dtypes.bfloat16)
    got = run(planes.plane_ptx(position), shuffled, scale)
    code = (shuffled >> (4 * position)) & 15
    want = elements(code) * 2.0**exponent
    np.testing.assert_array_equal(got.astype(np.float64), want)
    assert (np.signbit(got) == (code >= 8)).all()
    operands = jnp.asarray(shuffled.view(np.int16)), jnp.asarray(scale)
    plain = planes.plane(*operands, position, interpret=True)
    np.testing.assert_array_equal(np.asarray(plain), got)


def test_ptx_of_every_scale_byte():
  byte = np.arange(256, dtype=np.uint16)
  got = run(planes.scale_ptx(), byte)
  want = np.exp2(byte.astype(np.float64) - 127)
  want[255] = np.nan
  np.testing.assert_array_equal(got.astype(np.float64), want)
  plain = planes.scales(jnp.asarray(byte.view(np.int16)), interpret=True)
  np.testing.assert_array_equal(plain.astype(jnp.float32), got.astype(np.float32))


def test_the_whole_range_of_scales_is_exact():
  word = np.repeat(np.arange(16, dtype=np.uint16), 256)
  byte = np.tile(np.arange(256, dtype=np.uint16), 16)
  got = run(planes.plane_ptx(0), word, run(planes.scale_ptx(), byte))
  want = elements(word) * np.exp2(byte.astype(float) - 127)
  want = np.where(byte == 255, np.nan, want)
  # Beyond the largest bfloat16 there is infinity, here and in the reference.
  largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
  want = np.where(np.abs(want) > largest, np.copysign(np.inf, want), want)
  np.testing.assert_array_equal(got.astype(np.float64), want)


def test_planes_are_every_fourth_column():
  codes = np.random.default_rng(0).integers(0, 16, (3, 64), np.uint8)
  word = np.asarray(planes.words(mxfp4.pack(jnp.asarray(codes)))).view(np.uint16)
  dense = np.asarray(planes.of_tile(jnp.asarray(codes)))
  for position in range(planes.COUNT):
    got = (word >> (4 * position)) & 15
    np.testing.assert_array_equal(got, codes[:, position::4])
    np.testing.assert_array_equal(dense[position], codes[:, position::4])


def test_the_machine_refuses_what_it_does_not_know():
  with pytest.raises(KeyError, match="vote"):
    ptx_machine.run("{ vote.b32 $0, $1; }", np.zeros(2, np.uint32))
