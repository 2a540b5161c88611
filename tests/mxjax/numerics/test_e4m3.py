"""E4M3 vectors against a reference in numpy that is written from the format alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import e4m3


def value_of(code):
  """The value of a code by the definition of E4M3FN, float64; 0x7F and 0xFF are NaN."""
  exponent, mantissa = code >> 3 & 15, code & 7
  if exponent == 15 and mantissa == 7:
    return np.nan
  leading, power = (1, exponent - 7) if exponent else (0, -6)
  return (-1) ** (code >> 7) * (leading + mantissa / 8) * 2.0**power


VALUES = np.array([value_of(code) for code in range(256)])
MAGNITUDES = VALUES[:127]


def encoded(x):
  """Codes and scale bytes of `[n, d]` by exhaustion: the least scale, the nearest."""
  x = np.asarray(x, np.float64)
  codes, scales = np.zeros(x.shape, np.uint8), np.zeros(len(x), np.uint8)
  for row, vector in enumerate(x):
    if not np.isfinite(vector).all():
      codes[row], scales[row] = [0x80 * (v < 0) + 0x7F for v in vector], 255
      continue
    exponent = -126
    while np.abs(vector).max() > 448 * 2.0**exponent:
      exponent += 1
    scales[row] = exponent + 127
    distances = np.abs(np.abs(vector)[:, None] / 2.0**exponent - MAGNITUDES)
    for column, distance in enumerate(distances):
      nearest = np.flatnonzero(distance == distance.min())
      # Of two at the same distance, the code whose last bit is zero.
      code = next(c for c in nearest if len(nearest) == 1 or c % 2 == 0)
      codes[row, column] = code | 0x80 * bool(np.signbit(vector[column]))
  return codes, scales


def bits_of(x):
  """What `encode` gives, compiled, as numpy."""
  made = jax.jit(e4m3.encode)(jnp.asarray(x))
  return np.asarray(made.codes), np.asarray(made.scales)


def check(x):
  got, want = bits_of(x), encoded(np.asarray(x.astype(np.float32)))
  np.testing.assert_array_equal(got[1], want[1])
  is_finite = want[1] != 255
  np.testing.assert_array_equal(got[0][is_finite], want[0][is_finite])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_codes_and_scales_are_those_of_the_definition(dtype):
  rng = np.random.default_rng(0)
  sizes = 2.0 ** rng.integers(-40, 40, (200, 1)).astype(np.float64)
  spread = 2.0 ** rng.integers(-18, 1, (200, 24)).astype(np.float64)
  x = sizes * spread * rng.standard_normal((200, 24))
  check(np.asarray(x, np.float32).astype(dtype))


def test_ties_go_to_even_and_neighbours_to_their_side():
  # Midpoints of all neighbours, subnormal ones too, and floats beside the midpoints,
  # which a conversion by way of float16 rounds to the tie and then to even.
  middle = ((MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2).astype(np.float32)
  around = [np.nextafter(middle, np.float32(side)) for side in (0, 1000)]
  rows = np.stack([middle, *around, MAGNITUDES[1:].astype(np.float32)])
  rows = np.concatenate([rows, np.full((4, 1), 448, np.float32)], axis=1)
  check(np.concatenate([rows, -rows, rows * 2.0**30]).astype(np.float32))


def test_the_scale_is_the_least_power_of_two_that_does_not_saturate():
  largest = np.array([448, np.nextafter(np.float32(448), np.float32(1000)), 449, 447])
  powers = 2.0 ** np.arange(-100.0, 101.0, 25.0)
  x = (largest[:, None, None] * powers[None, :, None]).reshape(-1, 1)
  codes, scales = bits_of(x.astype(np.float32))
  check(x.astype(np.float32))
  # The largest code is that of 448, and half of it is the least of a largest value.
  assert codes.max() == 0x7E and codes.min() == 0x76
  by_hand = np.array([0, 1, 1, 0])[:, None] + np.log2(powers)[None] + 127
  np.testing.assert_array_equal(scales, by_hand.ravel())


def test_zeros_keep_their_sign_and_what_is_not_finite_is_nan_as_a_whole():
  zeros = np.array([[0.0, -0.0]], np.float32)
  made = e4m3.encode(jnp.asarray(zeros))
  assert made.codes.tolist() == [[0, 0x80]]
  np.testing.assert_array_equal(made.decode(jnp.float32), zeros)
  for bad in (np.nan, np.inf, -np.inf):
    x = np.array([[1.0, bad], [1.0, 2.0]], np.float32)
    made = e4m3.encode(jnp.asarray(x))
    assert made.scales[0] == 255
    np.testing.assert_array_equal(made.decode(jnp.float32), [[np.nan] * 2, [1, 2]])


def test_finite_floats_of_any_bits_are_encoded_and_subnormal_ones_may_be_zeros():
  bits = np.random.default_rng(4).integers(0, 2**32, (4000, 2), np.uint32)
  # A third of the vectors is near the least normal float, or below it.
  bits[::3] &= 0x81FFFFFF
  bits[bits & 0x7F800000 == 0x7F800000] ^= 0x40000000
  x = bits.view(np.float32)
  got, want = bits_of(x), encoded(x)
  np.testing.assert_array_equal(got[1], want[1])
  subnormal = np.abs(x) < np.finfo(np.float32).tiny
  is_zero = got[0] & 0x7F == 0
  assert (subnormal & (x != 0)).sum() > 100 and is_zero.any()
  is_same = got[0] == want[0]
  keeps_sign = got[0] >> 7 == np.signbit(x)
  assert (is_same | subnormal & is_zero & keeps_sign).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_code_is_decoded_exactly(dtype):
  codes = jnp.tile(jnp.arange(256, dtype=jnp.uint8), (3, 1))
  scales = jnp.asarray([127, 30, 220], jnp.uint8)
  got = np.asarray(e4m3.ScaledE4M3(codes, scales).decode(dtype).astype(jnp.float32))
  want = VALUES * 2.0 ** (np.asarray(scales, np.float64)[:, None] - 127)
  np.testing.assert_array_equal(got, want)


def test_the_error_is_within_its_bound_and_what_is_decoded_encodes_to_itself():
  rng = np.random.default_rng(1)
  x = rng.standard_normal((50, 64)).astype(np.float32)
  x *= 2.0 ** rng.integers(-12, 1, x.shape)
  made = e4m3.encode(jnp.asarray(x))
  got = np.asarray(made.decode(jnp.float32), np.float64)
  least = 2.0 ** (np.asarray(made.scales, np.float64)[:, None] - 127 - 10)
  assert (np.abs(got - x) <= np.maximum(np.abs(x) / 16, least)).all()
  assert (np.abs(got - x) > np.abs(x) / 18).any()
  again = e4m3.encode(jnp.asarray(got, jnp.float32))
  np.testing.assert_array_equal(again.decode(jnp.float32), got)


def test_rounding_survives_compilation_with_what_reads_it():
  """XLA may drop a narrow conversion and its inverse; not these."""
  x = jnp.asarray(np.random.default_rng(2).standard_normal((8, 32)), jnp.bfloat16)
  both = jax.jit(lambda x: e4m3.encode(x).decode(x.dtype))
  apart = e4m3.encode(x).decode(x.dtype)
  np.testing.assert_array_equal(both(x), apart)
  assert (np.asarray(apart != x)).mean() > 0.5


def test_a_power_of_two_costs_little_precision():
  """What the module says of its choice, on Gaussian vectors of 64."""
  x = np.random.default_rng(3).standard_normal((2000, 64)).astype(np.float32)
  by_power = np.asarray(e4m3.encode(jnp.asarray(x)).decode(jnp.float32))
  finest = np.abs(x).max(1, keepdims=True) / 448
  steps = np.searchsorted((MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2, np.abs(x) / finest)
  by_float = np.sign(x) * MAGNITUDES[steps] * finest
  error = lambda y: float(np.sqrt(np.square(y - x).mean() / np.square(x).mean()))
  assert [round(error(y), 4) for y in (by_float, by_power)] == [0.0251, 0.0266]
