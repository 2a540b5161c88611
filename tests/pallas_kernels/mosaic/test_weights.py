import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mxjax.pallas_kernels.mosaic import weights
from mxjax.pallas_kernels.products import float8
from tests.pallas_kernels import ptx_machine
from tests.pallas_kernels.operands import decoded, elements, packed, rounded

WORDS = np.random.default_rng(0).permutation(np.arange(1 << 16, dtype=np.uint16))
CODES = (WORDS[:, None] >> (4 * np.arange(4))) & 15
SEEN = jnp.asarray(WORDS.view(np.int16))[:, None]


@pytest.mark.parametrize("shift", [-13, -1, 0, 13])
def test_ptx_looks_every_word_up_in_a_table(shift):
  tables = [start + shift * step for start, step in weights._TABLE]
  filled = [np.full(WORDS.shape, table, np.uint32) for table in tables]
  got = ptx_machine.run(weights.FLOAT8_PTX, WORDS.astype(np.uint32), *filled)
  wide = got.view(ml_dtypes.float8_e5m2).astype(np.float64).reshape(-1, 4)
  np.testing.assert_array_equal(wide, elements(CODES) * 2.0**shift)
  seen = (jnp.asarray(table.view(np.int32))[:, None] for table in filled)
  plain = np.asarray(weights.float8_values(SEEN, *seen))
  np.testing.assert_array_equal(plain.view(np.uint8), got.view(np.uint8).reshape(-1, 4))


@pytest.mark.parametrize("pair", [0, 1])
@pytest.mark.parametrize("exponent", [-120, 0, 121])
def test_ptx_decodes_a_pair_of_every_word(pair, exponent):
  scale = np.full(WORDS.shape, ((127 + exponent) << 7) * 0x10001, np.uint32)
  got = ptx_machine.run(weights.pair_ptx(pair), WORDS.astype(np.uint32), scale)
  wide = got.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2)
  want = elements(CODES[:, 2 * pair : 2 * pair + 2]) * 2.0**exponent
  np.testing.assert_array_equal(wide, want)
  plain = weights.pair_values(pair)(SEEN, jnp.asarray(scale.view(np.int32))[:, None])
  np.testing.assert_array_equal(np.asarray(plain, np.float64), want)


@pytest.mark.parametrize("pair", [0, 1])
def test_every_code_at_every_scale_byte_is_what_float64_says(pair):
  code = np.arange(16, dtype=np.uint32)
  word = np.repeat(code | code[::-1] << 4, 256) << np.uint32(8 * pair)
  byte = np.tile(np.arange(256), 16)
  # What `as_bfloat16` makes of a scale byte.
  unit = np.where(byte == 0, 1 << 6, byte << 7)
  unit = np.where(byte == 255, 0x7FC0, unit).astype(np.uint32) * 0x10001
  got = ptx_machine.run(weights.pair_ptx(pair), word, unit.astype(np.uint32))
  got = got.view(ml_dtypes.bfloat16).reshape(-1, 2)
  codes = np.repeat(np.stack([code, code[::-1]], 1), 256, axis=0)
  scale = np.where(byte == 255, np.nan, np.ldexp(1.0, byte - 127))
  want = rounded(elements(codes) * scale[:, None], ml_dtypes.bfloat16)
  seen = jnp.asarray(word.astype(np.uint16).view(np.int16))[:, None]
  plain = weights.pair_values(pair)(seen, jnp.asarray(unit.view(np.int32))[:, None])
  got, want, plain = (np.asarray(a).astype(np.float64) for a in (got, want, plain))
  np.testing.assert_array_equal(got, want)
  is_number = ~np.isnan(want)
  signs = (np.signbit(a)[is_number] for a in (got, want))
  np.testing.assert_array_equal(*signs)
  # A CPU flushes subnormals.
  is_normal = byte > 2
  np.testing.assert_array_equal(plain[is_normal], got[is_normal])


def test_pairs_of_columns_are_put_first_and_second():
  x = jnp.arange(24).reshape(2, 12)
  first, second = np.asarray(weights.split(x))
  np.testing.assert_array_equal(first[0], [0, 1, 4, 5, 8, 9])
  np.testing.assert_array_equal(second[1], [14, 15, 18, 19, 22, 23])


@pytest.mark.parametrize("shift", [-13, 0, 13])
def test_ptx_makes_of_a_word_what_its_halves_are(shift):
  words = WORDS.view(np.uint32)
  tables = [start + shift * step for start, step in weights._TABLE]
  filled = [np.full(words.shape, table, np.uint32) for table in tables]
  got = ptx_machine.run(weights.HALVES_PTX, words, *filled, results=2)
  wide = np.stack(got, -1).view(ml_dtypes.float8_e5m2).astype(np.float64)
  np.testing.assert_array_equal(wide.reshape(-1, 4), elements(CODES) * 2.0**shift)


def test_weights_by_blocks_are_in_the_order_of_the_inputs():
  rng = np.random.default_rng(0)
  tensor = packed(64, 128, -9, 9)
  words = np.asarray(tensor.codes).view(np.int32)
  how = {"unit": jnp.int32(127), "interpret": True}
  got = weights.by_blocks(jnp.asarray(words), tensor.scales, **how)
  x = rng.standard_normal((3, 128)).astype(np.float32)
  seen = np.asarray(float8.in_order_of_blocks(jnp.asarray(x)))
  values = np.asarray(got, np.float64)
  np.testing.assert_allclose(seen @ values.T, x @ decoded(tensor).T, rtol=1e-5)
  # A thread has a block, and the n-th registers of four threads follow each other.
  columns = np.asarray(float8.in_order_of_blocks(jnp.arange(128)[None]))[0]
  thread, register, byte = np.ix_(range(4), range(8), range(4))
  place = 16 * register + 4 * thread + byte
  np.testing.assert_array_equal(columns[place], 32 * thread + 4 * register + byte)
  # All columns are there once.
  np.testing.assert_array_equal(np.sort(values), np.sort(decoded(tensor)))
