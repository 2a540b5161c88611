import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import projections

BOUNDS = {"blog8": 0.5 * np.log(8.0), "beighth": 0.125}


@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("bound", BOUNDS)
def test_golden_projections_by_both_algorithms(vectors, float64, width, bound):
  x = jnp.asarray(vectors[f"proj/x{width}"].astype(np.float64))
  expected = vectors[f"proj/x{width}_{bound}"]
  tolerance = 1e-12 * max(1.0, float(jnp.abs(x).max()))
  for project in (
    projections.project_zero_sum_box,
    projections.project_zero_sum_box_bisection,
  ):
    got = project(x, float(BOUNDS[bound]))
    np.testing.assert_allclose(got, expected, atol=tolerance)


ROWS = [
  st.lists(st.floats(-50, 50, width=32), min_size=n, max_size=n) for n in (2, 7, 32)
]


# Compiled once for a length, and not for each example.
project, bisect = (
  jax.jit(function)
  for function in (
    projections.project_zero_sum_box,
    projections.project_zero_sum_box_bisection,
  )
)


@hypothesis.given(st.one_of(*ROWS), st.floats(0.01, 4.0))
@hypothesis.settings(max_examples=60, deadline=None)
def test_projection_is_feasible_and_optimal(row, bound):
  from mxjax.numerics import precision

  with precision.float64_scope():
    x = jnp.asarray(np.asarray(row, np.float64))
    z = np.asarray(project(x, bound))
    slow = bisect(x, bound)
    np.testing.assert_allclose(z, slow, atol=1e-9)
    assert abs(z.sum()) < 1e-9
    assert np.abs(z).max() <= bound + 1e-12
    # Optimality: <x - z, w - z> <= 0 for feasible w.
    rng = np.random.default_rng(0)
    for _ in range(5):
      w = rng.uniform(-bound, bound, len(row))
      w = np.asarray(project(jnp.asarray(w), bound))
      assert (np.asarray(x) - z) @ (w - z) <= 1e-7


def test_project_ball_keeps_the_inside_and_scales_the_outside():
  x = jnp.asarray([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0]], jnp.float32)
  got = projections.project_ball(x, 1.0)
  np.testing.assert_allclose(got, [[0.6, 0.8], [0.03, 0.04], [0, 0]], rtol=1e-6)


def test_soft_threshold_of_zero_is_zero():
  x = jnp.asarray([-2.0, -0.5, 0.0, 0.5, 2.0], jnp.float32)
  got = projections.soft_threshold(x, jnp.full(5, 1.0, jnp.float32))
  np.testing.assert_array_equal(got, [-1, 0, 0, 0, 1])
