import fractions
import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4, native, precision
from mxjax.numerics.native import encode as native_encode
from mxjax.pallas_kernels.mxfp4_encode import encode
from tests import refusals
from tests.cases import slow

decode = jax.jit(mxfp4.decode, static_argnums=1)
unpack, to_blocks, from_blocks = map(
  jax.jit, (mxfp4.unpack, mxfp4.to_blocks, mxfp4.from_blocks)
)
round_blocks = jax.jit(mxfp4.round_blocks, static_argnums=1)

F = fractions.Fraction
GRID = [F(0), F(1, 2), F(1), F(3, 2), F(2), F(3), F(4), F(6)]
RULES = [
  mxfp4.Rules(scale_rule=scale, tie_rule=tie)
  for scale in ("floor", "even", "rceil")
  for tie in ("away", "even")
]


def floor_log2(value):
  """Exact floor(log2) of a positive rational."""
  e = value.numerator.bit_length() - value.denominator.bit_length()
  while F(2) ** e > value:
    e -= 1
  while F(2) ** (e + 1) <= value:
    e += 1
  return e


def exact_block(values, rules):
  """Codes, exponent and decode factor from the rule's sentence, in rationals."""
  magnitudes = [F(abs(float(v))) for v in values]
  largest = max(magnitudes)
  if largest == 0:
    exponent = -127
  else:
    e = floor_log2(largest)
    mantissa = largest / F(2) ** e
    exponent = {
      "floor": e - 2,
      "even": e - 1 if mantissa >= F(7, 4) else e - 2,
      "rceil": e - 2 if mantissa <= F(3, 2) else e - 1,
    }[rules.scale_rule]
    exponent = min(max(exponent, -127), 127)
  factor = F(2) ** exponent
  codes = []
  for value, magnitude in zip(values, magnitudes, strict=True):
    scaled = magnitude / factor
    best = 0
    for index in range(1, 8):
      now, before = abs(GRID[index] - scaled), abs(GRID[best] - scaled)
      tie_up = rules.tie_rule == "away" or index % 2 == 0
      if now < before or (now == before and tie_up):
        best = index
    codes.append(best + (8 if math.copysign(1.0, value) < 0 else 0))
  return codes, exponent, factor


@functools.cache
def adversarial_rows():
  rng = np.random.default_rng(0)
  rows = [rng.standard_normal(32) for _ in range(20)]
  edges = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 0.5, 1, 1.5, 2, 3, 4]
  edges += [e / 3 for e in edges]
  for exponent in (-126, -125, -120, -30, -1, 0, 1, 77, 124, 125):
    for top in (4.0, 7.0, 7.999, 6.0, 6.5):
      row = []
      for edge in edges[: 30 if exponent < 120 else 15]:
        value = np.float32(math.ldexp(edge, exponent))
        row += [value, np.nextafter(value, np.float32(0)), -value]
        row += [np.nextafter(value, np.float32(np.inf))]
      row = [v for v in row if abs(v) < top * 2.0**exponent]
      row = (row + [0.0, -0.0] * 32)[: 31 * (len(row) // 31 + 1)]
      for start in range(0, len(row) - 30, 31):
        rows.append([*row[start : start + 31], math.ldexp(top, min(exponent, 125))])
  for power in (*range(-149, 128, 3), 127):
    value = np.float32(math.ldexp(1.0, power))
    for top in (value, np.nextafter(value, np.float32(0))):
      rows.append([top, *(top * np.float32(k / 40) for k in range(31))])
  rows += [np.zeros(32), -np.zeros(32), np.full(32, 1e-45), np.full(32, -3.4e38)]
  rows.append(np.float32(1e-45) * rng.integers(-100, 100, 32))
  return np.asarray(rows, np.float64).astype(np.float32)


@functools.cache
def exact_blocks(rules):
  """`exact_block` of every adversarial row, once for all encoders of some rules."""
  return [exact_block(row, rules) for row in adversarial_rows()]


ENCODERS = [(RULES[0], "xla"), *slow(*[(rules, "xla") for rules in RULES[1:]])] + [
  (rules, "native") for rules in RULES if rules.tie_rule == "away"
]


@pytest.mark.parametrize(("rules", "implementation"), ENCODERS, ids=str)
def test_encode_equals_exact_rationals(rules, implementation):
  rows = adversarial_rows()
  tensor = encode(rows, rules, implementation=implementation)
  codes = np.asarray(unpack(tensor.codes))
  decoded = np.asarray(decode(tensor, jnp.float32))
  scales = np.asarray(tensor.scales)[:, 0].tolist()
  every = zip(exact_blocks(rules), codes, scales, decoded, strict=True)
  for (expected, exponent, factor), got, scale, values in every:
    assert scale - 127 == exponent
    assert got.tolist() == expected
    representable = exponent <= 125  # 4 * 2^126 is beyond float32
    if representable:
      exact = [GRID[c & 7] * factor * (-1 if c & 8 else 1) for c in expected]
      assert [F(float(v)) for v in values] == exact
      assert np.signbit(values).tolist() == [bool(c & 8) for c in expected]


@hypothesis.given(
  st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32
  )
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_encode_equals_exact_rationals_on_any_finite_row(row):
  tensor = mxfp4.encode(np.asarray(row, np.float32))
  expected, exponent, _ = exact_block(row, mxfp4.PAPER_RULES)
  assert np.asarray(unpack(tensor.codes)).tolist() == expected
  assert int(tensor.scales[0]) == exponent + 127


CASES = "gauss heavy outlier bf16 zeros ties pow2 range denormal denormal_ties"


@pytest.mark.parametrize("case", CASES.split())
def test_golden_encodings(vectors, case):
  tensor = mxfp4.encode(vectors[f"enc/{case}/x"])
  np.testing.assert_array_equal(unpack(tensor.codes), vectors[f"enc/{case}/codes"])
  np.testing.assert_array_equal(tensor.scales, vectors[f"enc/{case}/exps"])
  for dtype in (jnp.float32, jnp.bfloat16):
    decoded = np.asarray(decode(tensor, dtype)).astype(np.float64)
    expected = vectors[f"enc/{case}/decoded"]
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(expected))


def test_golden_float64_clips_the_exponent_at_both_ends(vectors, float64):
  tensor = mxfp4.encode(jnp.asarray(vectors["enc/wide/x_f64"]))
  np.testing.assert_array_equal(unpack(tensor.codes), vectors["enc/wide/codes"])
  np.testing.assert_array_equal(tensor.scales, vectors["enc/wide/exps"])


def test_fake_quantizer_equals_decode_of_encode():
  x = np.random.default_rng(1).standard_t(1.5, (40, 96)).astype(np.float32)
  blocks = to_blocks(jnp.asarray(x))
  for rules in RULES:
    fake = from_blocks(round_blocks(blocks, rules))
    real = decode(mxfp4.encode(x, rules), jnp.float32)
    np.testing.assert_array_equal(fake, real)


def test_encode_of_decode_is_the_identity():
  rng = np.random.default_rng(2)
  codes = rng.integers(0, 16, (50, 64)).astype(np.uint8)
  # A block without a code of 4 or more would have a smaller exponent.
  codes[:, ::32] = 7
  tensor = mxfp4.MXTensor(
    mxfp4.pack(jnp.asarray(codes)),
    jnp.asarray(rng.integers(3, 250, (50, 2)), jnp.uint8),
  )
  again = mxfp4.encode(decode(tensor, jnp.float32))
  jax.tree.map(np.testing.assert_array_equal, again, tensor)


def test_half_precision_inputs_are_exact():
  x = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)
  for dtype in (jnp.bfloat16, jnp.float16):
    half = jnp.asarray(x).astype(dtype)
    got, expected = mxfp4.encode(half), mxfp4.encode(half.astype(jnp.float32))
    np.testing.assert_array_equal(got.codes, expected.codes)


@pytest.mark.parametrize(
  "shape", [(1, 32), (37, 96), (3, 5, 64), (1021, 1056)], ids=str
)
def test_native_encode_has_the_bits_of_the_reference(shape):
  # Any bits that are a finite float32: most blocks span the whole exponent range, so
  # some get one exponent throughout.
  rng = np.random.default_rng(len(shape))
  bits = rng.integers(0, 2**32, shape, np.uint32)
  narrow = rng.integers(0, 255, (*shape[:-1], shape[-1] // 32), np.uint32)
  exponents = np.repeat(narrow << 23, 32, axis=-1)
  bits = np.where(bits % 3 == 0, bits & 0x807FFFFF | exponents, bits)
  x = np.where(bits >> 23 & 255 == 255, bits & 0x80FFFFFF, bits).view(np.float32)
  for rule in ("floor", "even", "rceil"):
    rules = mxfp4.Rules(scale_rule=rule)
    got, expected = (
      encode(x, rules, implementation=name) for name in ("native", "xla")
    )
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_large_arrays_are_encoded_natively_unless_asked_otherwise(monkeypatch):
  x = jnp.ones((native_encode.WORTH_IT // 64, 64), jnp.bfloat16)
  calls = []
  kernel = native_encode.encode
  monkeypatch.setattr(
    native_encode, "encode", lambda *args: calls.append(args) or kernel(*args)
  )
  encode(x)
  encode(x[:-1])
  encode(x, implementation="xla")
  jax.jit(encode)(x)
  assert len(calls) == 1


def test_an_explicit_native_encode_never_falls_back(monkeypatch):
  x = jnp.ones((2, 32))
  natively = functools.partial(encode, implementation="native")
  with pytest.raises(NotImplementedError, match="traced"):
    jax.jit(natively)(x)
  with pytest.raises(NotImplementedError, match="ties even"):
    natively(x, mxfp4.Rules(tie_rule="even"))
  monkeypatch.setattr(native, "is_installed", lambda: False)
  with pytest.raises(NotImplementedError, match="llvmlite"):
    natively(x)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_name(value):
  x = np.ones((4, 64), np.float32)
  x[2, 40] = value
  kind = "1 NaN" if np.isnan(value) else "1 inf"
  for implementation in ("xla", "native", "interpret"):
    with pytest.raises(ValueError, match=kind):
      encode(x, implementation=implementation)
  marked = np.full((4, 2), 125, np.uint8)
  marked[2, 1] = mxfp4.NOT_FINITE
  for traced in (functools.partial(encode, implementation="interpret"), mxfp4.encode):
    tensor = jax.jit(traced)(x)
    np.testing.assert_array_equal(tensor.scales, marked)
  assert np.isnan(np.asarray(decode(tensor, jnp.float32))[2, 32:]).all()
  blocks = round_blocks(to_blocks(jnp.asarray(x)))
  assert np.isnan(np.asarray(from_blocks(blocks))[2, 32:]).all()
  with pytest.raises(ValueError, match="255"):
    mxfp4.check_legal(tensor)


def test_other_widths_kinds_and_damaged_payloads_are_refused_by_name():
  odd, integers = np.ones((2, 33), np.float32), np.ones((2, 32), np.int32)
  tensor = mxfp4.encode(np.ones((4, 64), np.float32))
  mxfp4.check_legal(tensor)
  short = mxfp4.MXTensor(tensor.codes, tensor.scales[:, :1])
  wide = mxfp4.MXTensor(tensor.codes.astype(jnp.int32), tensor.scales)
  both = encode, mxfp4.encode
  refusals.check(
    [
      *((functools.partial(e, odd), "mxfp4.encode", "of 32", "33") for e in both),
      (lambda: mxfp4.check_legal(short), "(4, 2)", "(4, 1)"),
    ]
  )
  refusals.check(
    [
      *((functools.partial(e, integers), "int32") for e in both),
      (lambda: mxfp4.check_legal(wide), "uint8 codes"),
      (
        lambda: precision.require_float64("here", jnp.zeros(3, jnp.float32)),
        "here",
        "float64",
        "float32",
      ),
    ],
    TypeError,
  )


def test_moved_elements_are_rounded_again_at_their_scales():
  """To the nearest, ties to the larger; a zero that stays one keeps its sign."""
  rng = np.random.default_rng(0)
  codes = jnp.asarray(rng.integers(0, 16, (8, 64)), jnp.int32)
  scales = jnp.asarray(rng.integers(1, 250, (8, 2)), jnp.uint8)
  tensor = mxfp4.MXTensor(mxfp4.pack(codes), scales)
  # Quarters meet every tie, of which there is one between two neighbours each.
  moves = rng.integers(-9, 10, codes.shape) / 4
  moved = mxfp4.move(tensor, jnp.asarray(moves, jnp.float32))
  np.testing.assert_array_equal(moved.scales, scales)
  sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  signed = np.array([*sizes, *-sizes])
  wanted = signed[codes] + moves
  distance = np.abs(np.abs(wanted)[..., None] - sizes)
  best = 7 - distance[..., ::-1].argmin(-1)
  is_zero = (best == 0) & (np.asarray(codes) % 8 == 0)
  expected = np.where(is_zero, codes, best + 8 * np.signbit(wanted))
  np.testing.assert_array_equal(mxfp4.unpack(moved.codes), expected)
  same = mxfp4.move(tensor, jnp.zeros(codes.shape))
  np.testing.assert_array_equal(same.codes, tensor.codes)


def test_the_even_column_is_the_low_nibble():
  tensor = mxfp4.encode(np.array([[1.0, -6.0] + [0.0] * 30], np.float32))
  assert int(tensor.codes[0, 0]) == 2 | (15 << 4)


def test_tensor_passes_through_jit_vmap_and_tree_map():
  x = np.random.default_rng(4).standard_normal((3, 5, 64)).astype(np.float32)
  whole = mxfp4.encode(x)
  mapped = jax.vmap(mxfp4.encode)(jnp.asarray(x))
  jax.tree.map(np.testing.assert_array_equal, whole, mapped)
  assert jax.tree.map(lambda a: a[0], whole).shape == (5, 64)


@pytest.mark.parametrize("encoder", [mxfp4.encode, encode])
def test_the_codes_have_no_gradient_and_say_so(encoder):
  decoded = lambda x: decode(encoder(x), jnp.float32).sum()
  x = jnp.linspace(-3, 3, 64).reshape(2, 32)
  with pytest.raises(TypeError, match="codes are integers without a gradient"):
    jax.jit(jax.grad(decoded))(x)
  stopped = jax.grad(lambda x: decoded(jax.lax.stop_gradient(x)) + x.sum())(x)
  np.testing.assert_array_equal(stopped, 1)
