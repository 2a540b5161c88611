"""The descent of a block's map, against its definitions in float64 and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg

from mxjax.numerics import mxfp4
from mxjax.numerics.realization import gptq
from mxjax.numerics.shaping import map_descent, reference_chart

pytestmark = pytest.mark.usefixtures("float64")

BLOCKS, ROWS, TOKENS = 2, 48, 96


@pytest.fixture(scope="module")
def problem():
  """A map M, N, inputs and weights with loud channels, and their moments A and B."""
  rng = np.random.default_rng(3)
  x = rng.standard_normal((BLOCKS, 32, TOKENS))
  x[:, [3, 20]] *= 12
  weight = rng.standard_t(5, (BLOCKS, 32, ROWS)) * 0.05
  with jax.enable_x64(True):
    x, weight = (jnp.asarray(each, jnp.float32) for each in (x, weight))
    moments = [
      reference_chart.block_moment(each) / each.shape[-1] for each in (x, weight)
    ]
    matrix = reference_chart.geometric_chart(*moments, max_condition=64.0)
    return matrix, jnp.linalg.inv(matrix).mT, x, weight, *moments


def descended(problem, steps, **options):
  matrix, inverse, x, weight, activation, of_weight = problem
  kappa = map_descent.compensated_moment(matrix, activation)
  x = options.pop("inputs", x)
  return map_descent.descend(
    matrix, inverse, kappa, x, weight, of_weight, steps=steps, **options
  )


def mapped(problem):
  """What L and its slope are functions of: N B N', kappa, M x and N w."""
  matrix, inverse, x, weight, activation, of_weight = problem
  kappa = map_descent.compensated_moment(matrix, activation)
  found = (
    inverse @ of_weight @ inverse.mT,
    kappa,
    matrix @ x.astype(jnp.float64),
    inverse @ weight.astype(jnp.float64),
  )
  return [each.astype(jnp.float32) for each in found]


def rotation(seed):
  rng = np.random.default_rng(seed)
  found = np.linalg.qr(rng.standard_normal((BLOCKS, 32, 32)))[0]
  return jnp.asarray(found, jnp.float32)


def rounded(problem, turn):
  """The rounded inputs and weights of a rotation; inputs to nearest."""
  _, _, x, weight = mapped(problem)
  inputs = mxfp4.round_blocks(jnp.einsum("bij,bjn->bin", turn, x))
  folded = np.einsum("bij,bjn->bin", turn, weight)
  floor = np.asarray(mxfp4.block_exponent(jnp.asarray(folded)))
  tried = []
  for step in (0, 1):
    scale = np.exp2(floor + step)[:, None]
    size = np.abs(folded) / scale
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    near = grid[np.abs(size[..., None] - grid).argmin(-1)]
    tried.append(np.copysign(near, folded) * scale)
  error = [np.square(each - folded).sum(1, keepdims=True) for each in tried]
  return np.asarray(inputs, float), np.where(error[1] < error[0], *tried[::-1])


def loss(problem, turn, codes):
  """L in float64 with the codes that are given, from where outputs are computed."""
  gram, kappa, x, weight = (np.asarray(each, float) for each in mapped(problem))
  inputs, folded = codes
  turn = np.asarray(turn, float)
  # Turned back: what reaches the outputs of the block.
  error = turn.swapaxes(1, 2) @ inputs - x
  of_inputs = np.einsum("bin,bij,bjn->b", error, gram, error) / TOKENS
  difference = folded - turn @ weight
  return of_inputs + kappa * np.square(difference).sum((1, 2)) / ROWS


def test_the_loss_is_that_of_both_operands(problem):
  turn = rotation(0)
  found, _ = map_descent.loss_and_slope(turn, *mapped(problem), changes=0)
  np.testing.assert_allclose(
    found, loss(problem, turn, rounded(problem, turn)), rtol=1e-4
  )


def test_the_slope_is_that_of_the_outputs_where_codes_are_held(problem):
  """By central differences of the float64 loss, along rotations."""
  turn = np.asarray(rotation(1), float)
  single = jnp.asarray(turn, jnp.float32)
  _, slope = map_descent.loss_and_slope(single, *mapped(problem), changes=0)
  slope = np.asarray(slope, float)
  codes = rounded(problem, single)
  rng = np.random.default_rng(2)
  for _ in range(4):
    way = rng.standard_normal((32, 32))
    skew = way - way.T
    at = lambda size, skew=skew: loss(problem, linalg.expm(size * skew) @ turn, codes)
    expected = (at(1e-5) - at(-1e-5)) / 2e-5
    np.testing.assert_allclose((slope * skew).sum((1, 2)), expected, rtol=2e-3)


def test_inputs_are_refined_in_the_metric_of_the_turned_weights(problem):
  """There each changed code lowers the loss; in another metric many would raise it."""
  turn = rotation(5)
  nearest, one, two = (
    np.asarray(map_descent.loss_and_slope(turn, *mapped(problem), changes=n)[0])
    for n in (0, 1, 2)
  )
  assert (one < 0.95 * nearest).all()
  assert (two < one).all()


def test_the_scale_rule_is_that_of_the_inputs_alone(problem):
  even = mxfp4.Rules(scale_rule="even")
  for changes, is_same in ((None, True), (0, False)):
    ours, theirs = (
      np.asarray(map_descent.loss_and_slope(*arguments, changes=changes)[0])
      for arguments in (
        (rotation(6), *mapped(problem)),
        (rotation(6), *mapped(problem), even),
      )
    )
    assert (ours == theirs).all() == is_same


def test_the_rate_falls_along_half_a_cosine(problem):
  """The second of two steps has half of the first one's rate, in each plane."""
  first, second = (
    np.asarray(descended(problem, steps, changes=0).rotation, float) for steps in (1, 2)
  )
  for block in range(BLOCKS):
    turned = linalg.logm(second[block] @ first[block].T).real
    assert np.abs(turned).max() == pytest.approx(map_descent.RATE / 2, rel=0.06)


def test_kappa_is_the_mean_of_squared_pivots_of_any_rotation(problem):
  matrix, *_, activation, _ = problem
  found = map_descent.compensated_moment(matrix, activation)
  turned = np.asarray(rotation(4), float) @ np.asarray(matrix)
  ridged = np.asarray(reference_chart.ridge(activation))
  for block in range(BLOCKS):
    moment = turned[block] @ ridged[block] @ turned[block].T
    # The diagonal of GPTQ's factor has the inverse pivots.
    upper = gptq.factor(jnp.asarray(moment), damping=0.0).upper
    mean = np.exp(-2 * np.log(np.diag(upper)).mean())
    assert found[block] == pytest.approx(mean, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [0, 1, None])
def test_a_descent_lowers_the_loss_by_a_rotation(problem, changes):
  found = descended(problem, 60, changes=changes)
  assert (found.after < 0.9 * found.before).all()
  np.testing.assert_allclose(
    found.rotation @ found.rotation.mT,
    np.tile(np.eye(32, dtype=np.float32), (BLOCKS, 1, 1)),
    atol=1e-5,
  )
  inputs = mapped(problem)
  again, _ = map_descent.loss_and_slope(found.rotation, *inputs, changes=changes)
  np.testing.assert_allclose(again, found.after, rtol=1e-4)


def test_a_step_turns_every_plane_against_its_slope(problem):
  """The first one of Adam is as large in all of them; the second sees other tokens."""
  found = np.asarray(descended(problem, 1, changes=0).rotation)
  assert (np.abs(found - np.eye(32)).max((1, 2)) > 0).all()
  parts = [each[..., :: map_descent.PARTS] for each in mapped(problem)[2:]]
  identity = jnp.tile(jnp.eye(32, dtype=jnp.float32), (BLOCKS, 1, 1))
  _, slope = map_descent.loss_and_slope(
    identity, *mapped(problem)[:2], *parts, changes=0
  )
  skew = np.asarray(slope - slope.mT)
  for block in range(BLOCKS):
    expected = linalg.expm(-map_descent.RATE * np.sign(skew[block]))
    np.testing.assert_allclose(found[block], expected, atol=2e-3)


def test_every_token_has_its_turn(problem):
  """Those of the second part count from the second step on."""
  x = problem[2]
  others = x.at[..., 1 :: map_descent.PARTS].multiply(-3)
  for steps in (1, 2):
    ours, theirs = (
      np.asarray(descended(problem, steps, changes=0, inputs=inputs).rotation)
      for inputs in (x, others)
    )
    assert (ours != np.eye(32)).any()
    assert (ours == theirs).all() == (steps == 1)


def test_a_map_that_ends_worse_stays_as_it_is(problem, monkeypatch):
  """By a long step from where a descent ended."""
  turn = descended(problem, 60, changes=0).rotation.astype(jnp.float64)
  best = [turn @ each for each in problem[:2]]
  monkeypatch.setattr(map_descent, "RATE", 0.1)
  # A number of steps that no other test takes is compiled with that rate.
  found = descended((*best, *problem[2:]), 5, changes=0)
  np.testing.assert_array_equal(found.rotation, np.tile(np.eye(32), (BLOCKS, 1, 1)))
  np.testing.assert_array_equal(found.after, found.before)


def test_a_map_without_a_finite_loss_stays_as_it_is(problem):
  """As inputs near the end of float32 have none."""
  matrix, inverse, x, *_ = problem
  found = descended(problem, 2, inputs=x.at[0].multiply(1e30))
  np.testing.assert_array_equal(found.rotation[0], np.eye(32))
  assert not np.isfinite(found.after[0])
  assert np.isfinite(found.after[1])
  # And where there is nothing to round at all.
  zeros = [jnp.zeros_like(each) for each in problem[2:]]
  found = descended((matrix, inverse, *zeros), 2)
  np.testing.assert_array_equal(found.rotation, np.tile(np.eye(32), (BLOCKS, 1, 1)))


def test_inputs_that_are_not_rounded_have_no_part_in_it(problem):
  x = problem[2]
  ours, theirs = (
    descended(problem, 3, changes=None, inputs=inputs) for inputs in (x, 5 * x)
  )
  np.testing.assert_array_equal(ours.rotation, theirs.rotation)


def test_one_token_is_enough(problem):
  found = descended(problem, 2, inputs=problem[2][..., :1])
  assert np.isfinite(found.rotation).all()


def test_single_precision_has_no_place_where_pivots_are_computed(problem):
  single = (each.astype(jnp.float32) for each in (problem[0], problem[4]))
  with pytest.raises(TypeError, match="compensated_moment: .*float64"):
    map_descent.compensated_moment(*single)
