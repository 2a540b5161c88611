"""Hadamards are Hadamards, and Cayley steps stay orthogonal while they descend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics.shaping import orthogonal


@pytest.mark.parametrize("order", [1, 2, 4, 12, 20, 28, 36, 60, 64, 576, 1536])
def test_orders_with_a_known_hadamard(order):
  matrix = orthogonal.hadamard_any(order)
  assert matrix is not None
  np.testing.assert_allclose(matrix @ matrix.T, np.eye(order), atol=1e-12)
  np.testing.assert_allclose(np.abs(matrix), 1 / np.sqrt(order), rtol=1e-12)


@pytest.mark.parametrize(
  ("order", "kind"), [(24, "hadamard"), (6, "random orthogonal")]
)
def test_random_rotations_are_orthogonal_and_say_what_they_are(order, kind):
  matrix, found = orthogonal.random_rotation(order, seed=3)
  assert found == kind
  np.testing.assert_allclose(matrix @ matrix.T, np.eye(order), atol=1e-12)
  other, _ = orthogonal.random_rotation(order, seed=4)
  assert np.abs(matrix - other).max() > 0.1


def test_a_hundred_cayley_steps_stay_orthogonal_and_descend():
  """Minimizes the l1 norm of rotated heavy-tailed rows, in float32."""
  rng = np.random.default_rng(0)
  rows = jnp.asarray(rng.standard_t(3, (64, 32)), jnp.float32)
  loss = lambda m: jnp.abs(rows @ m).mean()
  matrix, _ = orthogonal.random_rotation(32, 0)
  matrix = jnp.asarray(matrix, jnp.float32)
  velocity, first = jnp.zeros_like(matrix), float(loss(matrix))
  for step in range(100):
    rate = jnp.float32(1.5 * (1 - step / 100))
    slope = jax.grad(loss)(matrix)
    matrix, velocity = orthogonal.cayley_step(matrix, velocity, slope, rate)
    assert float(jnp.abs(matrix.T @ matrix - jnp.eye(32)).max()) < 1e-4
  assert float(loss(matrix)) < 0.97 * first


def test_a_renewed_matrix_is_orthogonal_and_near():
  rng = np.random.default_rng(1)
  matrix, _ = orthogonal.random_rotation(32, 1)
  bent = jnp.asarray(matrix + 1e-4 * rng.standard_normal((32, 32)), jnp.float32)
  new = orthogonal.renewed(bent)
  np.testing.assert_allclose(new.T @ new, np.eye(32), atol=1e-5)
  np.testing.assert_allclose(new, bent, atol=2e-3)
