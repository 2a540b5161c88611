"""Stage I from activations to T against the golden float64 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.numerics.shaping import input_maps, local_interaction, reference_chart

CASES = "gauss heavy corr sparse wide_scale zeroX outlier zeroW rank1".split()


def rel(got, expected, tolerance):
  scale = max(np.abs(expected).max(), 1e-300)
  assert np.abs(np.asarray(got) - expected).max() <= tolerance * scale


def pairs(matrix):
  rows, columns = np.triu_indices(32, 1)
  return np.asarray(matrix)[..., rows, columns]


def anchor_from(x, w, parity, chart):
  """Fold statistics of one block, by the library's own pieces."""
  rotation = input_maps.hadamard(32, jnp.float64)
  inverse = jnp.linalg.inv(chart).T  # V = W P^-1, so feature-major V = P^-T W

  def moments(rows, chart):
    blocks = jnp.asarray(rows.T[None])
    y = chart @ blocks[0].astype(jnp.float64)
    rotated = (rotation @ chart)[None].astype(jnp.float32)
    error = local_interaction.rotated_error_moment(blocks, rotated)
    return y @ y.T / len(rows), local_interaction.unrotate(error)[0] / len(rows)

  folds = []
  for fold in (0, 1):
    of_x, cross_x = moments(x[parity == fold], chart)
    of_w, cross_w = moments(w[fold::2], inverse)
    folds.append((of_x, of_w, cross_x, cross_w.T))
  stacked = [jnp.stack(part)[:, None] for part in zip(*folds, strict=True)]
  return local_interaction.AnchorStatistics(*stacked)


@pytest.mark.parametrize("case", CASES)
def test_golden_chart(vectors, float64, case):
  x, w = vectors[f"shape/{case}/X"], vectors[f"shape/{case}/W"]
  a = reference_chart.block_moment(jnp.asarray(x.T[None])) / len(x)
  b = reference_chart.block_moment(jnp.asarray(w.T[None])) / len(w)
  chart = reference_chart.reference_chart(a, b)[0]
  rel(chart, vectors[f"shape/{case}/P_ref"], 1e-9)
  assert abs(float(jnp.linalg.det(chart)) - 1) < 1e-9
  assert float(jnp.linalg.cond(chart)) <= 8 * (1 + 1e-9)


@pytest.mark.parametrize("case", CASES)
def test_golden_anchor_statistics(vectors, float64, case):
  name = f"shape/{case}/"
  chart = jnp.asarray(vectors[name + "P_ref"])
  anchor = anchor_from(
    vectors[name + "X"], vectors[name + "W"], vectors[name + "x_parity"], chart
  )
  rel(anchor.activation[:, 0], vectors[name + "C_folds"], 1e-9)
  rel(anchor.weight[:, 0], vectors[name + "C_W_folds"], 1e-9)
  # Float32 transforms may flip codes whose margin is at rounding level.
  rel(anchor.activation_cross[:, 0], vectors[name + "K_X_folds"], 2e-3)
  rel(anchor.weight_cross[:, 0], vectors[name + "K_W_folds"], 2e-3)
  safe = vectors[name + "marginX"].min() > 1e-5
  if safe and vectors[name + "marginW"].min() > 1e-5:
    rel(anchor.activation_cross[:, 0], vectors[name + "K_X_folds"], 1e-5)


def golden_anchor(vectors, name):
  arrays = [
    jnp.asarray(vectors[name + part][:, None].astype(np.float64))
    for part in ("C_folds", "C_W_folds", "K_X_folds", "K_W_folds")
  ]
  return local_interaction.AnchorStatistics(*arrays)


@pytest.mark.parametrize("case", CASES)
def test_golden_pairs_given_the_statistics(vectors, float64, case):
  name = f"shape/{case}/"
  got = local_interaction.solve_pairs(golden_anchor(vectors, name))
  for field, golden in (
    ("mean", "pbar"),
    ("threshold", "delta"),
    ("unprojected", "z"),
    ("projected", "v"),
  ):
    modes = getattr(got, field)
    stacked = np.stack([pairs(modes.reciprocal[0]), pairs(modes.directed[0])], -1)
    rel(stacked, vectors[name + golden], 1e-12)
  rel(pairs(got.relative_curvature[0]), vectors[name + "qhat"], 1e-12)
  rel(got.mean_curvature[0], vectors[name + "qbar"], 1e-12)
  rel(got.interaction[0], vectors[name + "K"], 1e-12)
  rel(local_interaction.correction(got.interaction)[0], vectors[name + "G"], 1e-12)
  chart = jnp.asarray(vectors[name + "P_ref"])[None]
  transform = local_interaction.shaping_transform(chart, got.interaction)
  rel(transform[0], vectors[name + "T"], 1e-12)
  rel(jnp.linalg.inv(transform)[0], vectors[name + "T_inv"], 1e-11)
  assert float(jnp.linalg.norm(got.interaction[0], 2)) <= 1 / 8


@pytest.mark.parametrize("kind", ["active", "inactive"])
def test_golden_ball_projection(vectors, float64, kind):
  factor = {"active": 1.0, "inactive": 0.01}[kind]
  folds = []
  for part in ("C", "C_W", "K_X", "K_W"):
    scale = factor if part.startswith("K") else 1.0
    both = np.stack([vectors[f"pair/f{f}/{part}"] for f in (0, 1)])[:, None]
    folds.append(jnp.asarray(both.astype(np.float64) * scale))
  got = local_interaction.solve_pairs(local_interaction.AnchorStatistics(*folds))
  rel(got.interaction[0], vectors[f"pair/K_{kind}"], 1e-12)
  z = np.stack([pairs(m[0]) for m in got.unprojected], -1)
  rel(z, vectors[f"pair/z_{kind}"], 1e-12)


def test_golden_spectral_cap(vectors, float64):
  matrices = jnp.asarray(vectors["cap/S"].astype(np.float64))
  eigenvalues, eigenvectors = jnp.linalg.eigh(matrices)
  for bound in (8, 2):
    got = reference_chart.spectral_cap(jnp.log(eigenvalues), eigenvectors, bound)
    expected = vectors[f"cap/P{bound}"]
    rel(got, expected, 1e-9)
    assert float(jnp.linalg.cond(got).max()) <= bound * (1 + 1e-9)
    np.testing.assert_allclose(jnp.linalg.det(got), 1.0, rtol=1e-9)


def spent(chart, a, b):
  """What scales spend on activations times what they spend on weights, by block."""
  back = jnp.linalg.inv(chart)
  trace = lambda product: jnp.trace(product, axis1=-2, axis2=-1)
  return trace(chart @ a @ chart.mT) * trace(back.mT @ b @ back)


def test_the_geometric_chart_spends_least(float64):
  rng = np.random.default_rng(0)
  # Outliers make the moments lean to different sides.
  sides = np.exp(rng.standard_normal((2, 6, 32, 1)) * 1.5)
  x, w = rng.standard_normal((2, 6, 32, 200)) * sides
  a, b = (
    reference_chart.ridge(reference_chart.block_moment(jnp.asarray(m)) / 200)
    for m in (x, w)
  )
  # The ridge is added again inside: none of what follows depends on it.
  chart = reference_chart.geometric_chart(a, b, 1e9)
  a, b = map(reference_chart.ridge, (a, b))
  roots = jnp.sqrt(jnp.linalg.eigvals(a @ b).real).sum(-1)
  np.testing.assert_allclose(spent(chart, a, b), roots**2, rtol=1e-9)
  np.testing.assert_allclose(jnp.linalg.det(chart), 1.0, rtol=1e-9)
  np.testing.assert_allclose(chart, chart.mT, atol=1e-12)
  paper = reference_chart.reference_chart(a, b, 1e9)
  assert (spent(paper, a, b) > 1.01 * spent(chart, a, b)).all()


def test_the_geometric_chart_is_capped(float64):
  a = jnp.diag(jnp.exp(jnp.linspace(-3.0, 3.0, 32)))[None]
  chart = reference_chart.geometric_chart(a, jnp.linalg.inv(a))
  assert float(jnp.linalg.cond(chart)[0]) <= reference_chart.MAX_CONDITION * (1 + 1e-9)
  wide = reference_chart.geometric_chart(a, jnp.linalg.inv(a), 32.0)
  assert 8.1 < float(jnp.linalg.cond(wide)[0]) <= 32 * (1 + 1e-9)


def test_hadamard_refuses_other_sizes():
  with pytest.raises(ValueError, match="power of two, got 48"):
    input_maps.hadamard(48)


def test_solvers_refuse_float32():
  moment = jnp.eye(32, dtype=jnp.float32)[None]
  with pytest.raises(TypeError, match="reference_chart: expected float64"):
    reference_chart.reference_chart(moment, moment)
  with pytest.raises(TypeError, match="geometric_chart: expected float64"):
    reference_chart.geometric_chart(moment, moment)


def test_block_layout_round_trips():
  x = jnp.arange(6 * 64, dtype=jnp.float32).reshape(6, 64)
  blocks = mxfp4.to_blocks(x)
  assert blocks.shape == (2, 32, 6)
  assert float(blocks[1, 3, 4]) == float(x[4, 35])
  np.testing.assert_array_equal(jax.jit(mxfp4.from_blocks)(blocks), x)
