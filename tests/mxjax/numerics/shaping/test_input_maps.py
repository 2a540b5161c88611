"""Every map against its matrix, written from the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg

from mxjax.numerics.shaping import input_maps

pytestmark = pytest.mark.usefixtures("float64")

BLOCKS = 2
WIDTH = 32 * BLOCKS


def orthogonal(rng, size):
  return np.linalg.qr(rng.standard_normal((size, size)))[0]


def case(name):
  """A map and its T `[d, d]`, by another route than the map's own."""
  rng = np.random.default_rng(0)
  match name:
    case "dense":
      matrices = rng.standard_normal((BLOCKS, 32, 32))
      return input_maps.BlockDense(jnp.asarray(matrices)), linalg.block_diag(*matrices)
    case "hadamard-32":
      rotation = linalg.hadamard(32) / np.sqrt(32)
      return input_maps.Hadamard(32), linalg.block_diag(rotation, rotation)
    case "hadamard-64 with signs":
      signs = rng.choice([-1, 1], WIDTH)
      matrix = linalg.hadamard(64) / 8 * signs
      return input_maps.Hadamard(64, jnp.asarray(signs, jnp.int8)), matrix
    case "kronecker":
      shared = np.eye(8) + 0.3 * rng.standard_normal((8, 8))
      private = np.eye(4) + 0.3 * rng.standard_normal((BLOCKS, 4, 4))
      made = input_maps.Kronecker(jnp.asarray(shared), jnp.asarray(private))
      return made, linalg.block_diag(*[np.kron(b, shared) for b in private]).T
    case "two-level":
      inter, intra = orthogonal(rng, BLOCKS), orthogonal(rng, 32)
      made = input_maps.TwoLevel(jnp.asarray(inter), jnp.asarray(intra))
      return made, np.kron(inter.T, intra.T)


CASES = ["dense", "hadamard-32", "hadamard-64 with signs", "kronecker", "two-level"]


@pytest.mark.parametrize("name", CASES)
def test_apply_fold_and_conjugate_are_those_of_the_matrix(name):
  made, matrix = case(name)
  rng = np.random.default_rng(1)
  x, w = rng.standard_normal((WIDTH, 20)), rng.standard_normal((WIDTH, 12))
  blocks = lambda a: jnp.asarray(a).reshape(BLOCKS, 32, -1)
  flat = lambda a: np.asarray(a).reshape(WIDTH, -1)
  np.testing.assert_allclose(flat(made.apply(blocks(x))), matrix @ x, atol=1e-10)
  folded = np.linalg.solve(matrix.T, w)
  np.testing.assert_allclose(flat(made.fold(blocks(w))), folded, atol=1e-9)
  hessian = x @ x.T
  conjugated = made.conjugate(jnp.asarray(hessian))
  np.testing.assert_allclose(conjugated, matrix @ hessian @ matrix.T, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_the_product_is_preserved_in_float32_under_jit(name):
  made, _ = case(name)
  rng = np.random.default_rng(2)
  draw = lambda n: jnp.asarray(rng.standard_normal((BLOCKS, 32, n)), jnp.float32)
  x, w = draw(20), draw(12)
  stored = jax.tree.map(
    lambda a: a.astype(jnp.float32) if a.dtype == jnp.float64 else a, made
  )
  mapped = jax.jit(lambda m, x: m.apply(x))(stored, x)
  folded = stored.fold(w.astype(jnp.float64)).astype(jnp.float32)
  product = jnp.einsum("bin,bim->nm", mapped, folded)
  exact = jnp.einsum("bin,bim->nm", x, w)
  error = jnp.sqrt(jnp.square(product - exact).mean() / jnp.square(exact).mean())
  assert float(error) < 1e-5


def test_a_matrix_follows_a_map(float64):
  rng = np.random.default_rng(0)
  matrix, first, x = (jnp.asarray(rng.standard_normal((2, 32, 32))) for _ in range(3))
  both = input_maps.followed(input_maps.BlockDense(first), matrix)
  np.testing.assert_allclose(both.apply(x), matrix @ (first @ x), rtol=1e-12)
  np.testing.assert_array_equal(input_maps.followed(None, matrix).matrix, matrix)
  wide = input_maps.Hadamard(64)
  with pytest.raises(ValueError, match="Hadamard, which mixes blocks"):
    input_maps.followed(wide, matrix)
