import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.numerics.realization import one_code
from mxjax.pallas_kernels.mosaic import device, refinement
from mxjax.pallas_kernels.products import float8
from mxjax.pallas_kernels.refinement import one_code as kernel
from tests.pallas_kernels.refinement.test_one_code import objective, problem

interpreted = pytest.mark.skipif(
  device.obstacle() is not None, reason=str(device.obstacle())
)
refine = jax.jit(
  kernel.refine, static_argnames=("form", "implementation", "changes", "rounds_up")
)


def launch(x, tables, form="codes"):
  """What `kernel.refine_for` returns, by the Mosaic form."""
  made = refinement.launch(x, tables, form=form, interpret=True)
  of_parts = {"codes": mxfp4.MXTensor, "float8": float8.Float8Inputs}
  return [of_parts[form](*parts) if form in of_parts else parts[0] for parts in made]


def interpret(x, matrix=None, gram=None, cross=None, *, form="codes", **how):
  return launch(x, [kernel.Tables(matrix, gram, cross, **how)], form)[0]


@interpreted
@pytest.mark.slow
def test_exact_arithmetic_gives_the_codes_of_the_reference_ties_included():
  rng = np.random.default_rng(1)
  x = jnp.asarray(rng.integers(-12, 13, (70, 64)) / 2.0, jnp.bfloat16)
  permutation = np.stack([np.eye(32)[rng.permutation(32)] for _ in range(2)])
  matrix = jnp.asarray(permutation, jnp.float32)
  draw = lambda: jnp.asarray(rng.integers(-2, 3, (2, 32, 4)), jnp.float32)
  gram, cross = one_code.tables(draw(), draw())
  tables = matrix, one_code.pack_symmetric(gram), cross
  want = refine(x, *tables, implementation="xla")
  nearest = refine(x, matrix, implementation="xla")
  assert (np.asarray(want.codes) != np.asarray(nearest.codes)).mean() > 0.01
  got = interpret(x, *tables)
  jax.tree.map(np.testing.assert_array_equal, got, want)


@interpreted
@pytest.mark.slow
def test_the_kernel_reaches_the_objective_of_the_reference():
  x, *tables = problem(blocks=2)
  x = x.astype(jnp.bfloat16)
  got, want = interpret(x, *tables), refine(x, *tables, implementation="xla")
  reached, scale = objective(got, x, *tables)
  reference, _ = objective(want, x, *tables)
  # Products that differ in the last bit may choose between codes as good as equal.
  assert (np.abs(reached - reference) <= 1e-5 * scale).all()
  np.testing.assert_array_equal(got.scales, want.scales)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "alone"])
def test_several_changes_are_exact_where_arithmetic_is(is_mapped):
  rng = np.random.default_rng(1)
  x = jnp.asarray(rng.integers(-15, 16, (70, 64)) / 2.0, jnp.bfloat16)
  permutation = np.stack([np.eye(32)[rng.permutation(32)] for _ in range(2)])
  matrix = jnp.asarray(permutation, jnp.float32) if is_mapped else None
  draw = lambda: jnp.asarray(rng.integers(-2, 3, (2, 32, 4)), jnp.float32)
  gram = one_code.pack_symmetric(one_code.tables(draw(), draw())[0])
  how = {"changes": 3, "rounds_up": True}
  want = refine(x, matrix, gram, implementation="xla", **how)
  got = interpret(x, matrix, gram, **how)
  jax.tree.map(np.testing.assert_array_equal, got, want)


@interpreted
@pytest.mark.slow
def test_linears_of_a_shared_launch_have_their_own_tables():
  x, *_ = problem(blocks=2)
  x = x.astype(jnp.bfloat16)
  tables = [kernel.Tables(*problem(blocks=2, seed=seed)[1:]) for seed in (1, 2)]
  together = launch(x, tables, "float8")
  alone = [launch(x, [each], "float8")[0] for each in tables]
  jax.tree.map(np.testing.assert_array_equal, together, alone)
  assert (np.asarray(alone[0].values) != np.asarray(alone[1].values)).any()


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("form", ["values", "float8"])
def test_without_tables_it_is_the_encoder(form):
  x, *_ = problem(blocks=2)
  x = x.astype(jnp.bfloat16).at[1, 3].set(jnp.nan)
  got, want = interpret(x, form=form), refine(x, form=form, implementation="xla")
  if form == "float8":
    np.testing.assert_array_equal(got.scales, want.scales)
    got, want = got.decoded(), want.decoded()
  np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (got, want)))
  assert np.isnan(np.asarray(got, np.float32)[1, :32]).all()
