import functools
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mxjax.numerics import implementations
from mxjax.pallas_kernels import codec, mxfp4_decode, pairs
from mxjax.pallas_kernels.products import planes
from tests import targets
from tests.cases import slow
from tests.pallas_kernels import ptx_machine

BOUNDARIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def registers(values):
  """Pairs of bfloat16 as uint32, and as the int32 that kernels see."""
  word = np.ascontiguousarray(values).view(np.uint32)[:, 0]
  return word, jnp.asarray(word.view(np.int32))[:, None]


def twice(result):
  """A register's two bfloat16 in float64, `[n, 2]`."""
  return result.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2)


DEVICES = [targets.AMPERE, *slow(targets.ADA), targets.HOPPER, *slow(targets.BLACKWELL)]


@pytest.mark.parametrize("exponent", [-127, *slow(-126, -90, -1), 0, *slow(3), 125])
@pytest.mark.parametrize("device", [targets.AMPERE, targets.HOPPER])
def test_ptx_encodes_every_pair_to_the_nearest_values(device, exponent, monkeypatch):
  monkeypatch.setattr(implementations, "target", lambda: device)
  halves = np.arange(1 << 16, dtype=np.uint16)
  halves = halves[(halves & 0x7FFF) < 0x7F80]
  values = halves.view(ml_dtypes.bfloat16).astype(np.float64)
  # No larger value is in a block of this exponent.
  halves = halves[np.abs(values) < 2.0 ** (exponent + 3)]
  shuffled = np.random.default_rng(0).permutation(halves)
  x = np.stack([halves, shuffled], axis=1)
  word, seen = registers(x)
  factor = np.full(word.shape, ((127 - exponent) << 7) * 0x10001, np.uint32)
  same = jnp.asarray(factor.view(np.int32))[:, None]
  x = x.view(ml_dtypes.bfloat16).astype(np.float64)
  index = np.searchsorted(BOUNDARIES, np.abs(x) / 2.0**exponent, side="right")
  want = np.copysign(MAGNITUDES[index], x)
  got = twice(ptx_machine.run(pairs.nearest_ptx(), word, factor))
  plain = np.asarray(pairs.nearest_values(seen, same), np.float64)
  for values in (got, plain):
    np.testing.assert_array_equal(values, want)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(x))
  code = index + 8 * np.signbit(x)
  byte = code[:, 0] | (code[:, 1] << 4)
  np.testing.assert_array_equal(ptx_machine.run(pairs.codes_ptx(), word, factor), byte)
  np.testing.assert_array_equal(pairs.nearest_codes(seen, same)[:, 0], byte)


def ported():
  """Each PTX that asked for sm_90, and all that reads it: of every device."""
  return {
    "codes": (pairs.codes_ptx, 2),
    "nearest": (pairs.nearest_ptx, 2),
    "packed": (lambda: pairs.PACKED_PTX, 1),
    "decode": (mxfp4_decode.bfloat16_ptx, 2),
    **{
      f"plane {position}": (functools.partial(planes.plane_ptx, position), 2)
      for position in range(planes.COUNT)
    },
  }


def as_of_hopper(ptx):
  """PTX whose fused products with -0 are the products of two that sm_90 has."""
  return re.sub(r"fma(\.rn\.bf16x2 .*), zero;", r"mul\1;", ptx)


@pytest.mark.parametrize("name", ported())
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_ptx_of_every_device_computes_the_same_bits(name, device, monkeypatch):
  """On all halves, NaN and inf included, beside another and by every power of two."""
  make, operands = ported()[name]
  monkeypatch.setattr(implementations, "target", lambda: targets.HOPPER)
  fastest = as_of_hopper(make())
  assert "mul.rn.bf16x2" in fastest and "fma" not in fastest
  monkeypatch.setattr(implementations, "target", lambda: device)
  ptx = make()
  if device.capability < (9, 0):
    # What `ptxas` refuses before sm_90.
    assert not re.search(r"mul\.rn\.bf16|(add|min|max)\.[us]16x2", ptx)
  low = np.arange(1 << 16, dtype=np.uint32)
  word = low | np.random.default_rng(0).permutation(low) << np.uint32(16)
  factors = [0, 0x0040, 0x7F80, 0x7FC0, *range(1 << 7, 255 << 7, 7 << 7)]
  for factor in factors if operands == 2 else [0]:
    given = [word, np.full(word.shape, factor * 0x10001, np.uint32)][:operands]
    got, want = (ptx_machine.run(each, *given) for each in (ptx, fastest))
    np.testing.assert_array_equal(got, want)


def test_the_larger_of_a_row_and_its_factor_are_found_in_either_half():
  for column in (0, 1, 31):
    x = np.full((1, 32), 2.0**-126, np.float32)
    x[0, column] = -3 * 2.0**100
    word, _ = registers(x.astype(ml_dtypes.bfloat16).view(np.uint16).reshape(-1, 2))
    word = jnp.asarray(word.view(np.int32))[None]
    exponent = codec.block_exponent(pairs.largest(word))
    np.testing.assert_array_equal(exponent, [99])
    np.testing.assert_array_equal(pairs.factor_words(exponent), [28 << 7 | 28 << 23])


def test_ptx_packs_every_pair_of_values():
  codes = np.stack(np.meshgrid(np.arange(16), np.arange(16)), axis=-1).reshape(-1, 2)
  values = np.copysign(MAGNITUDES[codes & 7], np.where(codes > 7, -1.0, 1.0))
  word, _ = registers(values.astype(ml_dtypes.bfloat16).view(np.uint16))
  want = codes[:, 0] | codes[:, 1] << 4
  np.testing.assert_array_equal(ptx_machine.run(pairs.PACKED_PTX, word), want)
  plain = pairs.packed_codes(jnp.asarray(values, jnp.bfloat16))
  np.testing.assert_array_equal(plain[:, 0], want)


def test_ptx_joins_upper_halves():
  x = np.random.default_rng(0).standard_normal((100, 2)).astype(np.float32)
  even, odd = np.ascontiguousarray(x.T).view(np.uint32)
  got = ptx_machine.run(pairs.UPPER_PTX, even, odd)
  np.testing.assert_array_equal(got, (even >> 16) | (odd & 0xFFFF0000))
