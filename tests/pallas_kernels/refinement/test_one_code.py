import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import elementwise, mxfp4
from mxjax.numerics.realization import one_code
from mxjax.numerics.recovery import mlp_recovery
from mxjax.pallas_kernels import codec
from mxjax.pallas_kernels.refinement import fused_inputs, tile
from mxjax.pallas_kernels.refinement import one_code as kernel
from tests.cases import slow

refine = jax.jit(
  kernel.refine, static_argnames=("form", "implementation", "changes", "rounds_up")
)


@jax.jit
def best_change(nearest, slope, curvature):
  return tile.best_change(nearest, slope, *tile.parabolas(curvature))


@functools.cache
def problem(rows=70, blocks=3, seed=0):
  """Heavy-tailed inputs, well-conditioned maps, weights with a real mismatch."""
  rng = np.random.default_rng(seed)
  x = rng.standard_t(4, (rows, 32 * blocks)).astype(np.float32)
  x[3, :32] = 0
  rotation = np.linalg.qr(rng.standard_normal((blocks, 32, 32)))[0]
  matrix = rotation * rng.uniform(0.5, 2, (blocks, 32, 1))
  w = jnp.asarray(rng.standard_normal((blocks, 32, 48)), jnp.float32)
  gram, cross = one_code.tables(w, mxfp4.round_blocks(w))
  packed = one_code.pack_symmetric(gram)
  return jnp.asarray(x), jnp.asarray(matrix, jnp.float32), packed, cross


def objective(tensor, x, matrix, gram, cross):
  """||W^ q - W y||^2 up to a constant, float64 `[n, blocks]`, and its scale."""
  gram = one_code.unpack_symmetric(gram)
  matrix, gram, cross = (np.asarray(a, np.float64) for a in (matrix, gram, cross))
  rows = np.asarray(x, np.float64).reshape(x.shape[0], -1, 32)
  y = np.einsum("nbj,bij->nbi", rows, np.broadcast_to(matrix, gram.shape))
  q = np.asarray(mxfp4.decode(tensor, jnp.float32), np.float64).reshape(y.shape)
  d = q - y
  value = np.einsum("nbi,bij,nbj->nb", d, gram, d)
  value -= 2 * np.einsum("nbi,bij,nbj->nb", d, cross, y)
  return value, np.einsum("nbi,bij,nbj->nb", y, gram, y)


def check_as_good(x, *tables):
  """Both results; the kernel's codes are as good as the reference's."""
  got, want = (refine(x, *tables, implementation=how) for how in ("interpret", "xla"))
  reached, scale = objective(got, x, *tables)
  reference, _ = objective(want, x, *tables)
  # Products that differ in the last bit may choose between codes as good as equal.
  assert (np.abs(reached - reference) <= 1e-5 * scale).all()
  return got, want


@pytest.mark.parametrize(
  ("rows", "dtype"),
  [(4, jnp.bfloat16), *slow((70, jnp.bfloat16)), (70, jnp.float32)],
)
def test_the_kernel_reaches_the_objective_of_the_reference(rows, dtype):
  x, *tables = problem()
  got, want = check_as_good(x[:rows].astype(dtype), *tables)
  np.testing.assert_array_equal(got.scales, want.scales)
  assert (np.asarray(got.codes) != np.asarray(want.codes)).mean() < 1e-3


@pytest.mark.slow
def test_exact_arithmetic_gives_the_codes_of_the_reference_ties_included():
  rng = np.random.default_rng(1)
  x = jnp.asarray(rng.integers(-12, 13, (300, 64)) / 2.0, jnp.bfloat16)
  permutation = np.stack([np.eye(32)[rng.permutation(32)] for _ in range(2)])
  matrix = jnp.asarray(permutation, jnp.float32)
  draw = lambda: jnp.asarray(rng.integers(-2, 3, (2, 32, 4)), jnp.float32)
  gram, cross = one_code.tables(draw(), draw())
  gram = one_code.pack_symmetric(gram)
  want = refine(x, matrix, gram, cross, implementation="xla")
  nearest = refine(x, matrix, implementation="xla")
  assert (np.asarray(want.codes) != np.asarray(nearest.codes)).mean() > 0.01
  for dtype, rows in ((jnp.bfloat16, 300), (jnp.float32, 300), (jnp.bfloat16, 4)):
    few = x[:rows].astype(dtype)
    got = refine(few, matrix, gram, cross, implementation="interpret")
    np.testing.assert_array_equal(got.codes, want.codes[:rows])
    np.testing.assert_array_equal(got.scales, want.scales[:rows])


def sensitivity(tensor, x, matrix, gram):
  """d'G d of every row and block, float64, and x'G x."""
  return objective(tensor, x, matrix, gram, jnp.zeros((len(gram), 32, 32)))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("rows", "changes", "dtype"),
  [
    *slow((1, 3, jnp.bfloat16), (4, 1, jnp.float32), (70, 2, jnp.float32)),
    (70, 4, jnp.bfloat16),
  ],
)
def test_a_few_codes_reach_the_objective_of_the_reference(rows, changes, dtype):
  x, matrix, gram, _ = problem()
  x = x[:rows].astype(dtype)
  call = functools.partial(refine, x, matrix, gram, changes=changes, rounds_up=True)
  got, want = (call(implementation=how) for how in ("interpret", "xla"))
  np.testing.assert_array_equal(got.scales, want.scales)
  (reached, scale), (reference, _) = (
    sensitivity(tensor, x, matrix, gram) for tensor in (got, want)
  )
  # Of changes that are as good as equal, either may come first, and lead elsewhere.
  far = np.abs(reached - reference) > 1e-5 * scale
  assert far.mean() < (0.01 if changes > 1 else 1e-9)
  assert (np.asarray(got.codes) != np.asarray(want.codes)).mean() < 3e-3
  fewer, _ = sensitivity(refine(x, matrix, gram, rounds_up=True), x, matrix, gram)
  assert reached.sum() <= fewer.sum() * (1 + 1e-6)
  if changes > 1:
    assert reached.sum() < 0.99 * fewer.sum()


@pytest.mark.slow
def test_several_changes_are_exact_where_arithmetic_is():
  rng = np.random.default_rng(1)
  x = jnp.asarray(rng.integers(-15, 16, (300, 64)) / 2.0, jnp.bfloat16)
  permutation = np.stack([np.eye(32)[rng.permutation(32)] for _ in range(2)])
  matrix = jnp.asarray(permutation, jnp.float32)
  draw = lambda: jnp.asarray(rng.integers(-2, 3, (2, 32, 4)), jnp.float32)
  gram = one_code.pack_symmetric(one_code.tables(draw(), draw())[0])
  how = {"changes": 3, "rounds_up": True}
  want = refine(x, matrix, gram, implementation="xla", **how)
  for fewer in ({"changes": 2, "rounds_up": True}, {"changes": 3}):
    less = refine(x, matrix, gram, implementation="xla", **fewer)
    assert (np.asarray(want.codes) != np.asarray(less.codes)).mean() > 1e-3
  for dtype, rows in ((jnp.bfloat16, 300), (jnp.float32, 300), (jnp.bfloat16, 4)):
    few = x[:rows].astype(dtype)
    got = refine(few, matrix, gram, implementation="interpret", **how)
    np.testing.assert_array_equal(got.codes, want.codes[:rows])
    np.testing.assert_array_equal(got.scales, want.scales[:rows])


@pytest.mark.slow
def test_two_candidates_are_as_good_as_fifteen_on_a_grid_full_of_ties():
  legal = [m for m in mxfp4.MAGNITUDES] + [-m for m in mxfp4.MAGNITUDES[1:]]
  axes = legal, np.arange(-96, 97) / 8.0, [0.0, 1.0, 2.0, 5.0], [0.5, 1.0]
  nearest, slope, curvature, scale = (
    jnp.asarray(a.reshape(1, -1), jnp.float32) for a in np.meshgrid(*axes)
  )
  score, got = best_change(nearest, slope / scale, curvature)
  want, value = one_code.best_code(nearest, scale, slope, curvature)
  np.testing.assert_array_equal(2 * scale**2 * score, want)
  # Where nothing improves, no code is changed and any will do.
  changed = np.asarray(want) < 0
  np.testing.assert_array_equal(np.asarray(got)[changed], np.asarray(value)[changed])
  assert np.isin(np.abs(got), mxfp4.MAGNITUDES).all()
  assert changed.sum() > 1000


@pytest.mark.parametrize("sign", [1, -1])
def test_the_least_difference_of_two_scores_decides(sign):
  score = np.full((3, 32), -1, np.float32)
  score[1, 20] = np.nextafter(np.float32(-1), np.float32(-2))
  score[2] = np.float32(1e-40) * np.arange(32)
  changed = np.argwhere(jax.jit(tile._is_changed)(jnp.asarray(score)))
  np.testing.assert_array_equal(changed, [[0, 0], [1, 20]])
  # The optimum lies half a step above `nearest`, or one rounding to either side of it.
  middle = np.float32(0.25)
  towards = [np.nextafter(middle, np.float32(to)) for to in (0, 1)]
  slope = -sign * jnp.asarray([[middle, *towards] + [0] * 29], jnp.float32)
  zero, one = jnp.zeros((1, 32)), jnp.ones((1, 32))
  _, value = best_change(zero, slope, one)
  np.testing.assert_array_equal(value[0, :3], [0, 0, sign * 0.5])


def test_a_block_that_cannot_improve_keeps_its_codes():
  x, *_ = problem()
  x = x[:3].at[:, 31].set(-1e-3).at[:, 0].set(-1e-3)
  plain = one_code.pack_symmetric(jnp.tile(jnp.eye(32), (3, 1, 1)))
  got = refine(x, None, plain, jnp.zeros((3, 32, 32)), implementation="interpret")
  want = mxfp4.encode(x)
  assert (mxfp4.unpack(want.codes)[:, [0, 31]] == 8).all()
  np.testing.assert_array_equal(got.codes, want.codes)


def test_flat_coordinates_take_no_nan():
  x, matrix, gram, cross = problem()
  full = one_code.unpack_symmetric(gram)
  flat = one_code.pack_symmetric(full.at[:, 7].set(0).at[:, :, 7].set(0))
  for dtype in (jnp.float32, jnp.bfloat16):
    check_as_good(x.astype(dtype), matrix, flat, cross)


@pytest.mark.parametrize("rows", [*slow(5), 70])
def test_decoded_output_is_the_decoded_codes(rows):
  x, *tables = problem()
  x = x[:rows].astype(jnp.bfloat16)
  for implementation in ("interpret", "xla"):
    form = functools.partial(refine, x, *tables, implementation=implementation)
    codes, values, by_plane = (form(form=f) for f in ("codes", "values", "planes"))
    assert values.dtype == by_plane.values.dtype == jnp.bfloat16
    decoded = mxfp4.decode(codes, jnp.bfloat16)
    np.testing.assert_array_equal(values, decoded)
    np.testing.assert_array_equal(jnp.signbit(values), jnp.signbit(decoded))
    np.testing.assert_array_equal(by_plane.whole(), values)


def test_without_tables_it_is_the_encoder():
  x, *_ = problem()
  got = refine(x, implementation="interpret")
  want = mxfp4.encode(x)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_one_map_serves_all_blocks():
  x, matrix, *_ = problem()
  x = x.astype(jnp.bfloat16)
  shared = refine(x, matrix[:1], implementation="interpret")
  spread = refine(x, jnp.tile(matrix[:1], (3, 1, 1)), implementation="interpret")
  np.testing.assert_array_equal(shared.codes, spread.codes)


def test_three_terms_hold_a_float32_table_smallest_first():
  _, [matrix, *_], *_ = problem()
  terms = tile.joined_terms(matrix).astype(jnp.float32).reshape(32, 4, 32)
  zeros, small, middle, large = jnp.moveaxis(terms, 1, 0)
  assert not zeros.any()
  assert 0 < 2**7 * jnp.abs(small).max() < jnp.abs(middle).max()
  np.testing.assert_array_equal((small + middle) + large, matrix)


def test_no_map_is_the_map_of_ones():
  x, _, *tables = problem()
  x = x.astype(jnp.bfloat16)
  ones = jnp.tile(jnp.eye(32), (3, 1, 1))
  codes = [
    refine(x, m, *tables, implementation="interpret").codes for m in (None, ones)
  ]
  assert (np.asarray(codes[0]) != np.asarray(codes[1])).mean() < 1e-3


def test_tables_that_do_not_belong_together_are_refused():
  x, matrix, gram, cross = problem()
  with pytest.raises(ValueError, match="gram beside cross, got cross alone"):
    kernel.refine(x, matrix, None, cross)
  for how in ({"changes": 2}, {"rounds_up": True}):
    for tables in ((gram, cross), (None, None)):
      with pytest.raises(ValueError, match="expected gram alone for a rule of"):
        kernel.refine(x, matrix, *tables, **how)
  with pytest.raises(ValueError, match=r"packed, of shape \(3, 528\)"):
    full = one_code.unpack_symmetric(gram)
    kernel.refine(x, matrix, full, full)
  with pytest.raises(NotImplementedError, match="float32 or bfloat16, got float16"):
    kernel.refine(x.astype(jnp.float16), implementation="interpret")


def launches(function, *arguments):
  """Kernels that a function starts."""
  equations = jax.make_jaxpr(function)(*arguments).eqns
  return sum(each.primitive.name == "pallas_call" for each in equations)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("form", "rows", "dtype", "count"),
  [
    ("codes", 9, jnp.bfloat16, 1),
    *slow(("planes", 9, jnp.float32, 1), ("values", 70, jnp.bfloat16, 1)),
    *slow(("float8", 70, jnp.bfloat16, 1)),
    ("codes", 70, jnp.float32, 2),
  ],
)
def test_linears_of_one_input_share_a_launch(form, rows, dtype, count):
  x, *first = problem()
  _, *second = problem(seed=3)
  x = x[:rows].astype(dtype)
  tables = [kernel.Tables(*first), kernel.Tables(*second)]
  how = {"form": form, "implementation": "interpret"}
  run = functools.partial(kernel.refine_for, **how)
  assert launches(run, x, tables) == count
  together = jax.jit(run)(x, tables)
  apart = [refine(x, t.matrix, t.gram, t.cross, **how) for t in tables]
  as_bits = lambda tree: [np.asarray(a).view(np.uint8) for a in jax.tree.leaves(tree)]
  jax.tree.map(np.testing.assert_array_equal, as_bits(together), as_bits(apart))
  assert not all(
    np.array_equal(*pair) for pair in zip(*map(as_bits, apart), strict=True)
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("rows", "dtype"), [*slow((5, jnp.float32)), (70, jnp.bfloat16)]
)
def test_float8_by_blocks_are_those_in_order(rows, dtype):
  x, *tables = problem(rows=rows)
  x = jnp.concatenate([x, x[:, :32]], axis=1).astype(dtype)
  tables = [jnp.concatenate([table, table[:1]]) for table in tables]
  for implementation in ("interpret", "xla"):
    how = {"implementation": implementation}
    in_order, by_blocks = (
      refine(x, *tables, form=form, **how) for form in ("float8", "float8 by blocks")
    )
    assert by_blocks.is_by_blocks and not in_order.is_by_blocks
    back = by_blocks.in_order()
    jax.tree.map(np.testing.assert_array_equal, back, in_order)
    jax.tree.map(np.testing.assert_array_equal, in_order.by_blocks(), by_blocks)
    np.testing.assert_array_equal(back.decoded(), by_blocks.decoded())


@pytest.mark.slow
def test_a_program_walks_over_its_tiles_for_every_linear():
  x, *first = problem(rows=180)
  _, *second = problem(seed=3)
  tables = [kernel.Tables(*first), kernel.Tables(*second)]
  run = functools.partial(kernel.launch, x.astype(jnp.bfloat16), tables, form="values")
  # Three tiles, the last one cut: one by one, or two and one.
  alone, walked = (
    run(tile=kernel.Tile(64, repeats, 4, split=True), interpret=True)
    for repeats in (1, 2)
  )
  jax.tree.map(np.testing.assert_array_equal, walked, alone)


@pytest.mark.slow
def test_linears_with_other_tables_take_their_own_launch():
  x, *tables = problem()
  mixed = [kernel.Tables(*tables), kernel.Tables(tables[0], None, None)]
  refined = kernel.refine_for(x[:5], mixed, implementation="interpret")
  want = refine(x[:5], *tables, implementation="interpret")
  nearest = refine(x[:5], tables[0], implementation="interpret")
  jax.tree.map(np.testing.assert_array_equal, refined, [want, nearest])


@pytest.mark.parametrize(
  ("rows", "dtype", "share"),
  [(1, jnp.bfloat16, 0.01), *slow((3, jnp.float32, 1e-3), (5, jnp.float32, 1e-3))],
)
def test_the_kernel_normalizes_few_rows_itself(rows, dtype, share):
  x, *_ = problem(blocks=36)
  weight = jax.random.uniform(jax.random.key(1), (x.shape[1],), minval=0.5)
  later = fused_inputs.Normalized(7 * x[2 : 2 + rows].astype(dtype), weight, 5.0)
  is_there = isinstance(fused_inputs.for_kernel(later), fused_inputs.Normalized)
  assert is_there == (rows <= fused_inputs.SINGLE_ROWS)
  got = refine(later, form="values", implementation="interpret")
  made = elementwise.rms_norm(later.rows, weight, 5.0)
  want = refine(made, form="values", implementation="interpret")
  got, want = (np.asarray(a, np.float32) for a in (got, want))
  # Sums in another order may round an input, and at a tie its code, the other way.
  assert (got != want).mean() < share
  np.testing.assert_allclose(got, want, rtol=0.51, atol=0.51)


RECOVERY = mlp_recovery.MlpRecovery(*map(jnp.float32, (0.05, -0.03, 0.02, 1.7)))


@pytest.mark.parametrize(
  ("rows", "dtype", "recovery", "share"),
  [
    (2, jnp.float32, None, 2e-3),
    # The plain product rounds its sigmoid to bfloat16 in the reference.
    *slow((70, jnp.bfloat16, None, 0.02), (70, jnp.bfloat16, RECOVERY, 2e-3)),
    (70, jnp.float32, RECOVERY, 2e-3),
  ],
)
def test_the_kernel_makes_gated_products_itself(rows, dtype, recovery, share):
  gate, *_ = problem()
  up, *tables = problem(seed=4)
  parts = gate[:rows].astype(dtype), up[:rows].astype(dtype)
  later = fused_inputs.GatedProduct(*parts, recovery)
  got = refine(later, *tables, implementation="interpret")
  want = refine(later.array(), *tables, implementation="interpret")
  assert (mxfp4.unpack(got.codes) != mxfp4.unpack(want.codes)).mean() < share
  assert (got.scales == want.scales).mean() > 0.98


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blocks_that_are_not_finite_are_marked(dtype):
  x, _, *tables = problem()
  x = x[:5].at[1, 3].set(jnp.nan).at[2, 40].set(jnp.inf).astype(dtype)
  got = refine(x, None, *tables, implementation="interpret")
  broken = np.zeros((5, 3), bool)
  broken[[1, 2], [0, 1]] = True
  np.testing.assert_array_equal(got.scales == mxfp4.NOT_FINITE, broken)
  values = refine(x, None, *tables, form="values", implementation="interpret")
  is_nan = np.isnan(values.astype(jnp.float32))
  np.testing.assert_array_equal(is_nan, broken.repeat(32, 1))


def test_values_are_those_of_the_codes_for_every_upper_half():
  upper = np.arange(1 << 16, dtype=np.uint32)
  every = (upper << 16).view(np.float32)
  with np.errstate(invalid="ignore"):
    every = every[np.abs(every) < 8]
  rng = np.random.default_rng(0)
  every = np.resize(rng.permutation(every), (-(-every.size // 31), 31))
  # Bits below the upper half decide nothing; the last column makes the exponent 0.
  every.view(np.uint32)[::2] |= rng.integers(0, 1 << 16, 31, dtype=np.uint32)
  block = np.concatenate([every, np.full((len(every), 1), 4.0, np.float32)], axis=1)
  for exponent in (0, -100, 100):
    x = jnp.asarray(np.ldexp(block, exponent).astype(np.float32))
    got, same = jax.jit(functools.partial(tile._nearest, interpret=True))(x)
    index, shared = jax.jit(functools.partial(codec.encode, has_subnormals=True))(x)
    np.testing.assert_array_equal(same, shared)
    assert (np.asarray(same) == exponent).all()
    want = codec.copy_sign(codec.magnitude(index), x)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(jnp.signbit(got), jnp.signbit(want))
