import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics.realization import one_code
from mxjax.pallas_kernels.mosaic import device, refinement
from mxjax.pallas_kernels.refinement import one_code as kernel
from tests.pallas_kernels.refinement.test_one_code import objective, problem

interpreted = pytest.mark.skipif(
  device.obstacle() is not None, reason=str(device.obstacle())
)
refine = jax.jit(
  kernel.refine, static_argnames=("form", "implementation", "changes", "rounds_up")
)


@pytest.fixture(autouse=True)
def mosaic(monkeypatch):
  monkeypatch.setenv("MXJAX_PALLAS_BACKEND", "mosaic")


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
  got = refine(x, *tables, implementation="interpret")
  jax.tree.map(np.testing.assert_array_equal, got, want)


@interpreted
@pytest.mark.slow
def test_the_kernel_reaches_the_objective_of_the_reference():
  x, *tables = problem(blocks=2)
  x = x.astype(jnp.bfloat16)
  got, want = (refine(x, *tables, implementation=how) for how in ("interpret", "xla"))
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
  got = refine(x, matrix, gram, implementation="interpret", **how)
  jax.tree.map(np.testing.assert_array_equal, got, want)


@interpreted
@pytest.mark.slow
def test_linears_of_a_shared_launch_have_their_own_tables():
  x, *_ = problem(blocks=2)
  x = x.astype(jnp.bfloat16)
  tables = [kernel.Tables(*problem(blocks=2, seed=seed)[1:]) for seed in (1, 2)]
  how = {"form": "float8", "implementation": "interpret"}
  together = kernel.refine_for(x, tables, **how)
  alone = [kernel.refine_for(x, [each], **how)[0] for each in tables]
  jax.tree.map(np.testing.assert_array_equal, together, alone)
  assert (np.asarray(alone[0].values) != np.asarray(alone[1].values)).any()


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("form", ["values", "float8"])
def test_without_tables_it_is_the_encoder(form):
  x, *_ = problem(blocks=2)
  x = x.astype(jnp.bfloat16).at[1, 3].set(jnp.nan)
  how = functools.partial(refine, x, form=form)
  got, want = (how(implementation=i) for i in ("interpret", "xla"))
  if form == "float8":
    np.testing.assert_array_equal(got.scales, want.scales)
    got, want = got.decoded(), want.decoded()
  np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (got, want)))
  assert np.isnan(np.asarray(got, np.float32)[1, :32]).all()


def test_linears_of_one_input_share_a_launch(monkeypatch):
  x, launched = jnp.ones((64, 64), jnp.bfloat16), []

  def launch(x, tables, **how):
    launched.append(len(tables))
    return [(x,) for _ in tables]

  monkeypatch.setattr(refinement, "obstacle", lambda x, form: None)
  monkeypatch.setattr(refinement, "launch", launch)
  tables = [kernel.Tables(*problem(blocks=2)[1:]), kernel.Tables(None, None, None)]
  how = {"form": "values", "implementation": "interpret"}
  for together, want in ((tables[:1] * 3, [3]), (tables, [1, 1])):
    launched.clear()
    made = kernel.refine_for(x, together, **how)
    assert (launched, len(made)) == (want, len(together))


def test_what_it_cannot_take_is_refused_in_one_sentence():
  run = functools.partial(kernel.refine, implementation="interpret")
  x = jnp.ones((64, 64), jnp.bfloat16)
  for wrong in (x[:63], x[:, :32], x.astype(jnp.float32)):
    with pytest.raises(NotImplementedError, match="64 rows or more"):
      run(wrong)
  with pytest.raises(NotImplementedError, match="does not write planes"):
    run(x, form="planes")
