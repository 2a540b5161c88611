"""Each rotation of TORQ does what it is for, by brute force."""

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.numerics.shaping import two_level


def test_the_angle_equalizes_and_the_printed_one_does_not(float64):
  pair = np.diag([4.0, 1.0])
  angle = float(two_level.equalizing_angle(4.0, 1.0, 0.0))
  turn = lambda a: np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]])
  np.testing.assert_allclose(np.diag(turn(angle).T @ pair @ turn(angle)), 2.5)
  pair[0, 1] = pair[1, 0] = 0.3
  printed = 0.5 * np.arctan2(2 * 0.3, 4.0 - 1.0)
  spread = np.diag(turn(printed).T @ pair @ turn(printed))
  assert spread.max() > 4.0


@pytest.mark.parametrize("blocks", [2, 5, 18])
def test_all_blocks_get_the_same_energy(float64, blocks):
  rng = np.random.default_rng(blocks)
  factor = rng.standard_normal((blocks, 40)) * rng.lognormal(0, 1.5, (blocks, 1))
  covariance = jnp.asarray(factor @ factor.T / 40)
  rotation, deviation = two_level.equalize(covariance)
  energies = np.diag(rotation.T @ covariance @ rotation)
  np.testing.assert_allclose(energies, energies.mean(), rtol=2e-4)
  assert float(deviation) <= two_level.ENERGY_TOLERANCE
  np.testing.assert_allclose(rotation.T @ rotation, np.eye(blocks), atol=1e-10)


def test_the_covariance_of_blocks_is_averaged_over_positions(float64):
  rng = np.random.default_rng(0)
  x = rng.standard_normal((50, 3, 32))
  hessian = x.reshape(50, 96).T @ x.reshape(50, 96) / 50
  expected = np.einsum("nak,nbk->ab", x, x) / (50 * 32)
  got = two_level.block_covariance(jnp.asarray(hessian))
  np.testing.assert_allclose(got, expected, atol=1e-7)


def test_occupancy_counts_magnitudes():
  rows = jnp.asarray([[0.1, -0.6, 6.5, 2.4]], jnp.float32)
  expected = np.zeros(8)
  expected[[0, 1, 7, 4]] = 0.25
  np.testing.assert_allclose(two_level.occupancy(rows)[0], expected, atol=1e-7)


def test_the_best_angle_is_that_of_brute_force():
  rng = np.random.default_rng(1)
  u = (rng.standard_t(3, 300) * 2).astype(np.float32)
  v = (rng.standard_t(3, 300) * 0.3).astype(np.float32)
  angle, loss = two_level.best_angle(jnp.asarray(u), jnp.asarray(v))

  def loss_at(a):
    rows = np.stack([u * np.cos(a) - v * np.sin(a), u * np.sin(a) + v * np.cos(a)])
    shares = two_level.occupancy(jnp.asarray(rows, jnp.float32))
    return float(two_level.unevenness(shares).sum())

  grid = np.arange(0, two_level.ANGLES, 16) * (np.pi / 2 / two_level.ANGLES)
  brute = np.array([loss_at(a) for a in grid])
  assert loss_at(float(angle)) == pytest.approx(float(loss), abs=1e-3)
  assert float(loss) <= brute.min() + 1e-3
  assert float(loss) < 0.8 * brute[0]


def test_pairs_are_disjoint_and_take_the_least_even_columns():
  rng = np.random.default_rng(2)
  shares = rng.dirichlet(np.ones(8) * 4, 32)
  pairs = np.asarray(two_level.choose_pairs(shares))
  assert len(set(pairs.ravel())) == 2 * two_level.PAIRS
  uneven = np.square(shares - 1 / 8).sum(1)
  worst = np.argsort(-uneven)[: 2 * two_level.PAIRS]
  assert set(pairs.ravel()) == set(worst)


@pytest.mark.slow
def test_rotating_positions_lowers_the_unevenness_and_stays_orthogonal():
  rng = np.random.default_rng(3)
  rows = rng.standard_normal((32, 600)) * rng.lognormal(0, 1, (32, 1))
  rotation, losses = two_level.even_out(jnp.asarray(rows, jnp.float32))
  np.testing.assert_allclose(rotation.T @ rotation, np.eye(32), atol=1e-12)
  assert losses[-1] < 0.96 * losses[0]
  # The reported loss is that of the strict encoder's own codes.
  turned = jnp.asarray((rows.T @ rotation).T, jnp.float32)
  exponent = mxfp4.block_exponent(turned)
  index = np.asarray(mxfp4.magnitude_index(turned, exponent[None, :]))
  shares = np.stack([np.bincount(row, minlength=8) / 600 for row in index])
  assert np.square(shares - 1 / 8).sum() < losses[0]
