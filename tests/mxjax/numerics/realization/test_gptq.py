import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.numerics.realization import gptq

CASES = ["d32", "d96", "d64_lowrank", "d64_dead", "d64_zeroH"]


def blocks_of(array):
  return mxfp4.to_blocks(jnp.asarray(array))


@pytest.mark.parametrize("case", CASES)
def test_golden_codes_in_float64(vectors, float64, case):
  name = f"gptq/{case}/"
  weight = blocks_of(vectors[name + "W"].astype(np.float64))
  factor = gptq.factor(jnp.asarray(vectors[name + "H"]))
  result = gptq.reconstruct(weight, factor.upper)
  tensor = result.tensor()
  codes, golden = mxfp4.unpack(tensor.codes), vectors[name + "codes"]
  # The sign of a zero depends on the order of zero-valued updates.
  nonzero = (golden & 7) > 0
  np.testing.assert_array_equal(codes[nonzero], golden[nonzero])
  np.testing.assert_array_equal(codes & 7, golden & 7)
  np.testing.assert_array_equal(tensor.scales, vectors[name + "exps"])
  decoded = mxfp4.from_blocks(result.decoded)
  np.testing.assert_array_equal(decoded, vectors[name + "decoded"])
  assert float(factor.damping) == 0.01


@pytest.mark.parametrize("case", ["d32", "d96", "d64_lowrank", "d64_dead"])
def test_float32_reaches_the_loss_and_beats_rtn(vectors, case):
  name = f"gptq/{case}/"
  weight = blocks_of(vectors[name + "W"])
  hessian = jnp.asarray(vectors[name + "H"].astype(np.float32))
  result = gptq.reconstruct(weight, gptq.factor(hessian).upper)
  nearest = gptq.round_to_nearest(weight)
  loss = gptq.reconstruction_loss(weight, result.decoded, hessian)
  rtn = gptq.reconstruction_loss(weight, nearest.decoded, hessian)
  exact, _, exact_rtn = vectors[name + "loss"]
  assert float(loss) <= 1.02 * exact
  np.testing.assert_allclose(rtn, exact_rtn, rtol=1e-4)
  assert loss < rtn


def test_the_factor_inverts_the_damped_hessian(float64):
  rng = np.random.default_rng(0)
  x = rng.standard_normal((3, 100, 32))
  hessian = jnp.asarray(np.einsum("bni,bnj->bij", x, x) / 100)
  upper, damping = gptq.factor(hessian)
  mean = jnp.trace(hessian, axis1=1, axis2=2)[:, None, None] / 32
  inverted = upper.mT @ upper @ (hessian + 0.01 * mean * jnp.eye(32)[None])
  np.testing.assert_allclose(np.asarray(inverted) - np.eye(32), 0, atol=1e-9)
  np.testing.assert_array_equal(np.tril(upper[0], -1), 0)
  np.testing.assert_array_equal(damping, 0.01)


def test_damping_is_raised_and_reported_when_the_hessian_is_indefinite():
  rng = np.random.default_rng(1)
  basis = np.linalg.qr(rng.standard_normal((32, 32)))[0]
  spectrum = np.ones(32)
  spectrum[0] = -0.05  # needs damping above 5 % of the mean diagonal
  hessian = jnp.asarray(basis @ np.diag(spectrum) @ basis.T, jnp.float32)
  upper, damping = gptq.factor(hessian)
  np.testing.assert_allclose(damping, 0.1, rtol=1e-6)
  assert bool(jnp.isfinite(upper).all())
  hopeless = gptq.factor(hessian - 40 * jnp.eye(32, dtype=jnp.float32))
  assert np.isnan(float(hopeless.damping))


def test_local_reconstruction_is_gptq_of_each_block_alone():
  rng = np.random.default_rng(2)
  weight = jnp.asarray(rng.standard_normal((3, 32, 20)).astype(np.float32))
  x = rng.standard_normal((3, 64, 32)).astype(np.float32)
  hessian = jnp.asarray(np.einsum("bni,bnj->bij", x, x) / 64)
  together = gptq.reconstruct_local(weight, gptq.factor(hessian).upper)
  for b in range(3):
    alone = gptq.reconstruct(weight[b : b + 1], gptq.factor(hessian[b]).upper)
    np.testing.assert_array_equal(together.codes[b], alone.codes[0])


def test_codes_and_decoded_weights_agree():
  rng = np.random.default_rng(3)
  weight = jnp.asarray(rng.standard_normal((2, 32, 8)).astype(np.float32))
  nearest = gptq.round_to_nearest(weight)
  for result in (nearest, gptq.reconstruct(weight, jnp.eye(64, dtype=jnp.float32))):
    decoded = mxfp4.decode(result.tensor(), jnp.float32)
    np.testing.assert_array_equal(decoded, mxfp4.from_blocks(result.decoded))
  encoded = mxfp4.encode(mxfp4.from_blocks(weight))
  np.testing.assert_array_equal(nearest.tensor().codes, encoded.codes)


def column_loop(weight, hessian, *, scales, order):
  """GPTQ one column at a time on a whole inverse Hessian, in numpy float64."""
  rows, width = weight.shape
  damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(width)
  inverse = np.linalg.inv(damped[np.ix_(order, order)])
  upper = np.linalg.cholesky(inverse).T
  grid = np.array(mxfp4.MAGNITUDES)
  current = weight[:, order].copy()
  panel_view = current.copy()
  exponent_of = lambda block: np.floor(np.log2(np.abs(block).max(1))) - 2
  decoded = np.zeros_like(weight)
  exponents = np.stack([exponent_of(b) for b in np.split(weight, width // 32, 1)], 1)
  for step, column in enumerate(order):
    if step % 128 == 0:
      panel_view = current.copy()
    if scales != "static" and step % 32 == 0:
      source = current if scales == "fresh" else panel_view
      exponents[:, column // 32] = exponent_of(source[:, step : step + 32])
    scale = 2.0 ** exponents[:, column // 32]
    scaled = np.abs(current[:, step]) / scale
    nearest = grid[(scaled[:, None] >= (grid[1:] + grid[:-1]) / 2).sum(1)]
    decoded[:, column] = np.copysign(nearest, current[:, step]) * scale
    error = (current[:, step] - decoded[:, column]) / upper[step, step]
    current[:, step + 1 :] -= error[:, None] * upper[step, step + 1 :]
  return decoded


def test_each_scale_source_is_that_of_a_column_loop(float64):
  rng = np.random.default_rng(4)
  weight = rng.standard_t(4, (24, 192))
  x = rng.standard_normal((400, 192)) + rng.standard_normal((400, 1))
  hessian, exponents = x.T @ x / 400, {}
  upper = gptq.factor(jnp.asarray(hessian)).upper
  for scales in ("fresh", "lagged", "static"):
    result = gptq.reconstruct(blocks_of(weight), upper, scales=scales)
    expected = column_loop(weight, hessian, scales=scales, order=np.arange(192))
    np.testing.assert_array_equal(mxfp4.from_blocks(result.decoded), expected)
    exponents[scales] = np.asarray(result.exponent)
  assert (exponents["fresh"] != exponents["static"]).any()
  assert (exponents["fresh"] != exponents["lagged"]).any()
  # In the first panel of 128 columns nothing has been written back yet.
  np.testing.assert_array_equal(exponents["lagged"][:4], exponents["static"][:4])
  assert (exponents["lagged"][4:] != exponents["static"][4:]).any()


def test_columns_in_order_of_activation_keep_their_blocks(float64):
  rng = np.random.default_rng(5)
  weight = rng.standard_normal((24, 96))
  x = rng.standard_normal((300, 96)) * rng.uniform(0.2, 3, 96)
  hessian = x.T @ x / 300
  order = gptq.descending_curvature(jnp.asarray(hessian))
  assert (np.diff(np.diag(hessian)[order]) <= 0).all()
  permuted = jnp.asarray(hessian[np.ix_(order, order)])
  upper = gptq.factor(permuted).upper
  result = gptq.reconstruct_ordered(blocks_of(weight), upper, order)
  expected = column_loop(weight, hessian, scales="static", order=np.asarray(order))
  np.testing.assert_array_equal(mxfp4.from_blocks(result.decoded), expected)
  decoded = mxfp4.decode(result.tensor(), jnp.float32)
  np.testing.assert_array_equal(decoded, expected.astype(np.float32))
