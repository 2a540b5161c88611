"""The identities of the nearest-plane engine and of the transform of WUSH."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg

from mxjax.methods.baselines import wush
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import gptq
from mxjax.numerics.shaping import input_maps, nearest_plane

pytestmark = pytest.mark.usefixtures("float64")

BLOCKS, ROWS, TOKENS = 3, 40, 300
WIDTH = 32 * BLOCKS


@pytest.fixture(scope="module")
def problem():
  """Heavy-tailed weights and correlated inputs with two loud channels."""
  rng = np.random.default_rng(0)
  weight = rng.standard_t(5, (ROWS, WIDTH)) * 0.05
  mix = np.eye(WIDTH) + 0.4 * rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)
  x = rng.standard_normal((TOKENS, WIDTH)) @ mix
  x[:, [5, 70]] *= 15
  return weight, x, x.T @ x / TOKENS


def factor_of(hessian):
  return nearest_plane.upper_cholesky(jnp.asarray(hessian), jnp.float64(0.01))


def rounded(weight, hessian, basis, rules=mxfp4.PAPER_RULES):
  """Codes and transforms of weights `[rows, d]`."""
  blocks = mxfp4.to_blocks(jnp.asarray(weight))
  return wush.round_blocks(blocks, factor_of(hessian), rules, basis)


def test_the_factor_is_the_cholesky_factor_of_the_damped_hessian(problem):
  _, _, hessian = problem
  damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(WIDTH)
  np.testing.assert_allclose(factor_of(hessian), linalg.cholesky(damped), rtol=1e-9)


@pytest.mark.parametrize("scale_rule", ["floor", "rceil"])
def test_without_a_transform_it_is_gptq_on_reversed_columns(problem, scale_rule):
  weight, _, hessian = problem
  rules = mxfp4.Rules(scale_rule=scale_rule)
  result, transforms = rounded(weight, hessian, "identity", rules)
  flipped = mxfp4.to_blocks(jnp.asarray(weight[:, ::-1].copy()))
  upper = gptq.factor(jnp.asarray(hessian[::-1, ::-1].copy())).upper
  reverse = gptq.reconstruct(flipped, upper, rules)
  np.testing.assert_array_equal(result.codes, reverse.codes[::-1, ::-1])
  np.testing.assert_array_equal(result.exponent, reverse.exponent[::-1])
  assert (np.asarray(transforms, np.float32) == np.eye(32)).all()


def test_both_operands_are_flat_and_equally_large(problem):
  """T S T' and W~'W~ / m have constant diagonals, equal up to the damping."""
  weight, _, hessian = problem
  factor = factor_of(hessian)
  last = jnp.int32(BLOCKS - 1)
  target = nearest_plane.target(factor, jnp.asarray(weight.T), last)
  lattice = nearest_plane.plane(target.gram, target.factor, ROWS, dtype=jnp.float64)
  transform, triangle = np.asarray(lattice.transform), np.asarray(target.factor)
  inputs = transform @ triangle.T @ triangle @ transform.T
  folded = np.linalg.solve(transform.T, np.linalg.solve(triangle, target.value))
  outputs = folded @ folded.T / ROWS
  for moment in (inputs, outputs):
    np.testing.assert_allclose(np.diag(moment), moment[0, 0], rtol=1e-9)
  assert 0.9 < outputs[0, 0] / inputs[0, 0] < 1
  # Both are H Diag H: the Hadamard diagonalizes them.
  rotation = np.asarray(input_maps.hadamard(32, jnp.float64))
  for moment in (inputs, outputs):
    rotated = rotation @ moment @ rotation
    off = rotated - np.diag(np.diag(rotated))
    assert np.abs(off).max() < 1e-9 * np.abs(rotated).max()


def decoded_native(result, transforms):
  """Decoded weights `[rows, d]` in the original coordinates: c = T'z."""
  wide = np.asarray(transforms.astype(jnp.float64))
  native = np.einsum("bij,bim->bjm", wide, np.asarray(result.decoded))
  return native.reshape(WIDTH, ROWS).T


def test_wush_lowers_the_loss_of_hadamard_and_that_of_identity(problem):
  weight, x, hessian = problem
  error = {}
  for basis in ("identity", "hadamard", "wush"):
    gap = decoded_native(*rounded(weight, hessian, basis)) - weight
    error[basis] = np.square(gap @ x.T).sum() / np.square(weight @ x.T).sum()
  assert error["wush"] < error["hadamard"]
  assert error["wush"] < 0.5 * error["identity"]


def test_the_stored_transform_is_the_one_the_codes_were_made_for(problem):
  """bfloat16 transforms: rounding T after the codes would cost accuracy."""
  weight, _, hessian = problem
  result, transforms = rounded(weight, hessian, "wush")
  assert transforms.dtype == jnp.bfloat16
  blocks = mxfp4.to_blocks(jnp.asarray(weight))
  folded = input_maps.BlockDense(transforms).fold(blocks)
  # The last block is the first one rounded: nothing has been compensated in it.
  exponent = mxfp4.block_exponent(folded[-1])
  np.testing.assert_array_equal(result.exponent[-1], exponent)
  mxfp4.check_legal(result.tensor())


def test_zero_weights_stay_zero(problem):
  weight, _, hessian = problem
  result, transforms = rounded(0 * weight, hessian, "wush")
  assert (np.asarray(result.codes) & 7 == 0).all()
  assert np.isfinite(np.asarray(transforms.astype(jnp.float32))).all()
