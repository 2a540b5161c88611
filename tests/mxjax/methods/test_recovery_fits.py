import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics.recovery import mlp_recovery, value_recovery


@pytest.mark.parametrize("case", ["rand", "const", "zero"])
def test_golden_value_fits(vectors, float64, case):
  v, target = (
    jnp.asarray(vectors[f"attn/{case}/{k}"])[:, None, :] for k in ("v", "vstar")
  )
  fit = value_recovery.solve(value_recovery.moments(v, target))
  got = np.array([fit.scale[0], fit.offset[0]])
  np.testing.assert_allclose(got, vectors[f"attn/{case}/ab"], rtol=1e-10, atol=1e-12)
  narrow = jax.tree.map(lambda a: a.astype(jnp.float32), fit)
  applied = value_recovery.apply(v.astype(jnp.bfloat16), narrow)
  assert applied.dtype == jnp.bfloat16
  expected = vectors[f"attn/{case}/applied_bf16"]
  # The vector applies to float32 values; bfloat16 inputs add their own rounding.
  tolerance = 2.0**-7 * (np.abs(expected) + np.abs(np.asarray(v[:, 0])))
  difference = np.abs(np.asarray(applied[:, 0]).astype(np.float64) - expected)
  assert (difference <= tolerance + 1e-30).all()


@pytest.mark.parametrize("layer", [0, 1])
def test_golden_toy_value_fits(vectors, float64, layer):
  v, target = (jnp.asarray(vectors[f"toy/L{layer}/{k}"]) for k in ("v", "vstar"))
  fit = value_recovery.solve(value_recovery.moments(v, target))
  got = np.stack([fit.scale, fit.offset], -1)
  np.testing.assert_allclose(got, vectors[f"toy/L{layer}/ab"], rtol=1e-9, atol=1e-12)


def test_moments_of_parts_add_to_the_whole(float64):
  rng = np.random.default_rng(0)
  v, t = (jnp.asarray(rng.standard_normal((6, 10, 3, 4))) for _ in range(2))
  parts = [value_recovery.moments(v[s], t[s]) for s in (slice(0, 2), slice(2, 6))]
  total = jax.tree.map(lambda a, b: a + b, *parts)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12),
    total,
    value_recovery.moments(v, t),
  )


def test_value_fit_is_the_least_squares_minimum(float64):
  rng = np.random.default_rng(1)
  v = jnp.asarray(rng.standard_normal((50, 1, 4)))
  t = 1.1 * v + 0.05 + 0.1 * jnp.asarray(rng.standard_normal((50, 1, 4)))
  fit = value_recovery.solve(value_recovery.moments(v, t))
  loss = lambda a, b: float(((a * v + b - t) ** 2).sum())
  best = loss(fit.scale[0], fit.offset[0])
  for da, db in ((1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3)):
    assert best < loss(fit.scale[0] + da, fit.offset[0] + db)


@pytest.mark.parametrize("case", ["agg", "agg2"])
def test_golden_aggregates(vectors, float64, case):
  cells = jnp.asarray(vectors[f"mlp/{case}/theta_c"].astype(np.float64))
  theta = mlp_recovery.aggregate(cells)
  np.testing.assert_allclose(theta, vectors[f"mlp/{case}/theta"], rtol=1e-12)
  assert float(jnp.abs(theta).sum()) <= 1 / 8


def cells_of(array, residues=8, quarters=4):
  """[sequences, T, hidden] to [hidden, 32, tokens] in (residue, quarter) order."""
  sequences, length, hidden = array.shape
  parts = array.reshape(sequences // residues, residues, quarters, -1, hidden)
  return parts.transpose(4, 1, 2, 0, 3).reshape(hidden, residues * quarters, -1)


@pytest.mark.parametrize("layer", [0, 1])
def test_golden_toy_mlp_fit(vectors, float64, layer):
  name = f"toy/L{layer}/"
  arrays = [jnp.asarray(vectors[name + k]) for k in ("g", "u", "gstar", "ustar")]
  weights = mlp_recovery.column_weights(jnp.asarray(vectors[name + "down/W"]))
  np.testing.assert_allclose(weights, vectors[name + "omega"], rtol=1e-12)
  deviation = mlp_recovery.gate_deviation(mlp_recovery.gate_moments(arrays[0]))
  np.testing.assert_allclose(deviation, vectors[name + "sigma_g"], rtol=1e-12)
  sums = mlp_recovery.cell_moments(*(cells_of(a) for a in arrays), weights)
  estimates = mlp_recovery.solve_cells(sums, deviation)
  np.testing.assert_allclose(estimates, vectors[name + "theta_c"], atol=1e-8)
  theta = mlp_recovery.aggregate(estimates)
  np.testing.assert_allclose(theta, vectors[name + "theta"], atol=1e-8)
  recovery = mlp_recovery.MlpRecovery(
    *(a.astype(jnp.float32) for a in (*theta, deviation))
  )
  corrected = mlp_recovery.apply(arrays[0][:2], arrays[1][:2], recovery)
  np.testing.assert_allclose(corrected, vectors[name + "mbar"], atol=2e-6, rtol=1e-5)


def test_zero_coefficients_change_nothing():
  rng = np.random.default_rng(2)
  g, u = (jnp.asarray(rng.standard_normal((4, 8)).astype(np.float32)) for _ in "gu")
  zero = jnp.zeros((), jnp.float32)
  recovery = mlp_recovery.MlpRecovery(zero, zero, zero, jnp.ones((), jnp.float32))
  np.testing.assert_allclose(
    mlp_recovery.apply(g, u, recovery), jax.nn.silu(g) * u, rtol=1e-6
  )


def test_errors_of_zero_targets_are_absolute_and_finite(float64):
  zeros = jnp.zeros((8, 2, 4))
  sums = value_recovery.moments(zeros + 0.5, zeros)
  before, after = value_recovery.errors(sums, value_recovery.solve(sums))
  assert (float(before), float(after)) == (16.0, 16.0)
  hidden = jnp.zeros((32, 4, 8))
  cells = mlp_recovery.cell_moments(*[hidden] * 4, weights=jnp.ones(32))
  errors = mlp_recovery.linearized_errors(cells, jnp.float64(1), jnp.zeros(3))
  assert tuple(map(float, errors)) == (0.0, 0.0)
