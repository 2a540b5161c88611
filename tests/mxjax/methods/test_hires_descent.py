"""Options of hires-descent and hires-next in a whole build of a linear."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax import methods
from mxjax.calibration import fisher
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.layers.linear import linear as apply_linear
from mxjax.methods.hires import searched_map, stage1
from mxjax.methods.program import fold
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import two_sided
from mxjax.numerics.shaping import map_descent, map_fit

ROWS = 64
ONE_SIDED = methods.get("hires-descent:weighting=fisher:recover=none")


@pytest.mark.parametrize(
  ("name", "documented"),
  [
    (
      "hires-next",
      "hires-descent:weighting=fisher:chart=geometric:max_condition=32:damping=0.1"
      ":refit_maps=true:changes=2:two_sided=true:recover=none+tune",
    ),
    (
      "hires-rotated",
      "hires-next:use_interaction=false:use_balance=false:candidates=1:map_steps=300"
      ":map_fits=16",
    ),
    (
      "map-search",
      "hires-descent:chart=geometric:max_condition=1024:candidates=84"
      ":use_interaction=false:use_balance=false",
    ),
    ("map-descent", "map-search:map_steps=300"),
  ],
)
def test_a_method_is_another_one_with_the_options_of_the_documents(name, documented):
  named = dataclasses.replace(methods.get(documented), name=name)
  assert named == methods.METHODS[name]


@pytest.fixture(scope="module")
def calibrated():
  """A weight `[64, 64]`, inputs with gradients of rank 3 at its outputs, their rows."""
  rng = np.random.default_rng(0)
  weight = jnp.asarray(rng.standard_normal((ROWS, 64)), jnp.float32)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  mixing, directions = draw(64, 64), draw(3, ROWS)
  chunks, gradients = [], []
  for _ in range(2):
    chunks.append(mxfp4.to_blocks(jnp.asarray(draw(128, 64) @ mixing))[None])
    noise = 0.1 * draw(128, ROWS)
    gradients.append(jnp.asarray(draw(128, 3) @ directions + noise)[None])
  inputs = LinearInputs(chunks).for_linear("one", gradients=gradients)
  rows = jnp.concatenate([mxfp4.from_blocks(chunk[0]) for chunk in chunks])
  return weight, fisher.weighted(inputs), rows


@pytest.fixture(scope="module")
def linear(calibrated):
  return calibrated[:2]


def joint_loss(linear, program):
  """tr(B D H D') in the coordinates of the map that the program finds."""
  weight, inputs = linear
  blocks = mxfp4.weight_blocks(weight)
  input_map = program.shape(blocks, inputs).input_map
  folded = fold(blocks, input_map)
  result = program.quantize_weight(folded, inputs, input_map).weight
  hessian = input_map.conjugate(inputs.hessian())
  moment = fisher.gradient_moment(inputs)
  return float(two_sided.loss(folded, result.decoded, hessian, moment))


@pytest.mark.slow
def test_two_sided_rounding_lowers_the_loss_over_outputs(linear, float64):
  both = dataclasses.replace(ONE_SIDED, two_sided=True)
  assert joint_loss(linear, both) < 0.8 * joint_loss(linear, ONE_SIDED)


@pytest.mark.slow
def test_charts_and_their_cap_are_options(linear, float64):
  weight, inputs = linear
  blocks, plain = mxfp4.weight_blocks(weight), {"use_interaction": False}
  plain |= {"use_balance": False}
  make = lambda **options: np.asarray(
    dataclasses.replace(ONE_SIDED, **plain, **options)
    .shape(blocks, inputs)
    .input_map.matrix
  )
  paper, capped = make(), make(max_condition=1.5)
  geometric, both = make(chart="geometric"), make(chart="geometric", max_condition=1.5)
  conditions = [np.linalg.cond(m.astype(float)).max() for m in (capped, both)]
  assert max(conditions) <= 1.5001 < np.linalg.cond(paper.astype(float)).max()
  for one, other in ((paper, geometric), (paper, capped), (capped, both)):
    assert np.abs(one - other).max() > 1e-4
  np.testing.assert_array_equal(make(max_condition=8), paper)


REFIT = dataclasses.replace(ONE_SIDED, refit_maps=True)


def realized(calibrated, program):
  """The leaf, its operator error on the calibration inputs, and its record."""
  weight, inputs, x = calibrated
  leaf, record = program.quantize_linear(weight, inputs)
  exact = x @ weight.T
  error = jnp.square(apply_linear(x, leaf) - exact).sum() / jnp.square(exact).sum()
  return leaf, float(error), record


@pytest.mark.slow
def test_the_hessian_is_damped_as_much_as_asked(calibrated, float64):
  plain, damped = ONE_SIDED, dataclasses.replace(ONE_SIDED, damping=0.1)
  leaves, _, records = zip(
    *(realized(calibrated, program) for program in (plain, damped)), strict=True
  )
  assert [record["damping"] for record in records] == pytest.approx([0.01, 0.1])
  assert (leaves[0].weight.codes != leaves[1].weight.codes).any()


def test_refitted_maps_lower_the_error_of_the_outputs(calibrated, float64):
  before, error, _ = realized(calibrated, ONE_SIDED)
  after, refitted, record = realized(calibrated, REFIT)
  np.testing.assert_array_equal(after.weight.codes, before.weight.codes)
  # The map has taken over what a block's inputs predict.
  crosses = [np.abs(leaf.rounding.cross).sum() for leaf in (after, before)]
  assert crosses[0] < 0.1 * crosses[1]
  assert refitted < 0.97 * error
  assert record["refit_errors"][1] < 0.9 * record["refit_errors"][0]


def test_the_rule_of_a_few_codes_lowers_the_error_of_the_outputs(calibrated, float64):
  few = dataclasses.replace(REFIT, changes=4)
  up = dataclasses.replace(few, rounds_up=True)
  leaves, errors, records = zip(
    *(realized(calibrated, program) for program in (REFIT, few, up)), strict=True
  )
  for leaf, record in zip(leaves[1:], records[1:], strict=True):
    np.testing.assert_array_equal(leaf.weight.codes, leaves[0].weight.codes)
    np.testing.assert_array_equal(leaf.input_map.matrix, leaves[0].input_map.matrix)
    assert record == records[0]
  assert errors[1] < 0.98 * errors[0] and errors[2] < 0.98 * errors[1]
  assert [leaf.rounding.changes for leaf in leaves[1:]] == [4, 4]
  assert [leaf.rounding.rounds_up for leaf in leaves[1:]] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["nearest", "sensitivity"])
def test_refitted_maps_leave_the_other_rules_alone(calibrated, float64, rule):
  plain, changed = (
    dataclasses.replace(program, rounding=rule) for program in (ONE_SIDED, REFIT)
  )
  before, after = (realized(calibrated, program)[0] for program in (plain, changed))
  for ours, theirs in zip(
    jax.tree.leaves(after.rounding), jax.tree.leaves(before.rounding), strict=True
  ):
    np.testing.assert_array_equal(ours, theirs)
  assert np.abs(after.input_map.matrix - before.input_map.matrix).max() > 1e-3


SEARCHED = dataclasses.replace(
  ONE_SIDED, candidates=24, use_interaction=False, use_balance=False
)


@pytest.mark.slow
def test_each_block_takes_the_candidate_with_the_smallest_error(calibrated, float64):
  weight, inputs, _ = calibrated
  blocks = mxfp4.weight_blocks(weight)
  found, record = SEARCHED.shape(blocks, inputs)
  first, best = np.asarray(record["map_losses"])
  assert (best <= first).all() and (best < 0.99 * first).any()
  assert len({*record["map_candidate"]}) > 1
  # The same map comes from a search that ends with the chosen candidate.
  last = max(record["map_candidate"])
  again, same = dataclasses.replace(SEARCHED, candidates=last + 1).shape(blocks, inputs)
  assert same == record
  np.testing.assert_array_equal(again.matrix, found.matrix)
  place = record["map_candidate"].index(last)
  fewer, others = dataclasses.replace(SEARCHED, candidates=last).shape(blocks, inputs)
  assert np.asarray(others["map_losses"])[1, place] > best[place]
  assert np.abs(fewer.matrix - found.matrix)[place].max() > 1e-3


@pytest.mark.slow
def test_a_map_without_a_finite_error_is_never_chosen(calibrated, float64, monkeypatch):
  weight, inputs, _ = calibrated
  blocks = mxfp4.weight_blocks(weight)
  measure = searched_map.map_search.losses

  def overflowing(*arguments, **named):
    losses = measure(*arguments, **named)
    return losses.at[0].set(np.nan).at[1:, 0].set(last)

  monkeypatch.setattr(searched_map.map_search, "losses", overflowing)
  last = 1.0
  _, record = SEARCHED.shape(blocks, inputs)
  assert 0 not in record["map_candidate"]
  # Of the first block nothing is left.
  last = np.inf
  with pytest.raises(FloatingPointError, match="block 0: .* 24 maps .* none, in 1 of"):
    SEARCHED.shape(blocks, inputs)


@pytest.mark.slow
def test_searched_maps_lower_the_error_of_the_outputs(calibrated, float64):
  one, searched = (
    realized(calibrated, dataclasses.replace(SEARCHED, candidates=n))[1]
    for n in (1, 24)
  )
  assert searched < 0.99 * one


@pytest.mark.slow
def test_the_best_candidate_descends(calibrated, float64):
  """Its losses go down, and the descent knows the rule of the activations."""
  weight, inputs, _ = calibrated
  blocks = mxfp4.weight_blocks(weight)
  start = dataclasses.replace(SEARCHED, candidates=2)
  before, searched = start.shape(blocks, inputs)
  assert "descent_losses" not in searched
  ends = []
  for changes in (0, 2):
    descending = dataclasses.replace(start, changes=changes, map_steps=40)
    after, record = descending.shape(blocks, inputs)
    first, last = np.asarray(record["descent_losses"])
    assert (last < 0.95 * first).all()
    ends.append(last)
    # A rotation of the same map: what it makes of distances is the same.
    if changes == 0:
      assert record["map_candidate"] == searched["map_candidate"]
      ours, theirs = (np.asarray(each.matrix, float) for each in (after, before))
      np.testing.assert_allclose(
        ours.swapaxes(1, 2) @ ours, theirs.swapaxes(1, 2) @ theirs, rtol=1e-4, atol=1e-5
      )
      assert np.abs(ours - theirs).max() > 1e-2
  assert (ends[1] < ends[0]).all()


def test_a_descent_sees_every_output_row(float64):
  """More rows than candidates are compared by: the loss that it starts from has all."""
  rng = np.random.default_rng(1)
  rows = 2 * searched_map.ROWS + 8
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  # Large where the comparison of candidates does not look.
  weight = draw(rows, 32) * jnp.where(jnp.arange(rows) % 3 == 0, 1, 20)[:, None]
  blocks, inputs = mxfp4.weight_blocks(weight), LinearInputs([draw(1, 1, 32, 64)])
  start = methods.get("map-search:candidates=1")
  matrix = start.shape(blocks, inputs).input_map.matrix.astype(jnp.float64)
  inverse = jnp.linalg.inv(matrix).mT
  moment = stage1.output_moment(blocks, inputs, stage1.weight_moments(blocks))
  single = lambda array: array.astype(jnp.float32)
  loss, _ = map_descent.loss_and_slope(
    jnp.eye(32, dtype=jnp.float32)[None],
    single(inverse @ moment @ inverse.mT),
    single(map_descent.compensated_moment(matrix, inputs.moment())),
    single(matrix) @ inputs.sample(64),
    single(inverse) @ blocks,
  )
  record = dataclasses.replace(start, map_steps=2).shape(blocks, inputs).record
  np.testing.assert_allclose(record["descent_losses"][0], loss, rtol=1e-3)


def test_maps_that_descend_lower_the_error_of_the_outputs(calibrated, float64):
  searched, descended = (
    realized(calibrated, dataclasses.replace(SEARCHED, candidates=2, map_steps=n))[1]
    for n in (0, 100)
  )
  assert descended < 0.97 * searched


def test_a_map_is_fitted_to_the_weights_that_it_folds(calibrated, float64):
  """The fit follows the map, on what that folds, and its loss is in the record."""
  weight, inputs, _ = calibrated
  blocks = mxfp4.weight_blocks(weight)
  fitting = dataclasses.replace(methods.HIRES_DESCENT, map_fits=4)
  start = methods.HIRES_DESCENT.shape(blocks, inputs).input_map
  made = fitting.shape(blocks, inputs)
  matrix = np.asarray(start.matrix, float)
  moment = jnp.asarray(matrix @ inputs.moment() @ matrix.swapaxes(1, 2), jnp.float32)
  found = map_fit.fit(fold(blocks, start), moment, turns=4)
  expected = np.asarray(found.correction) @ matrix
  np.testing.assert_allclose(made.input_map.matrix, expected, rtol=1e-4, atol=1e-6)
  before, after = made.record["fit_losses"]
  np.testing.assert_allclose(before, found.before, rtol=1e-4)
  assert (np.asarray(after) < 0.9 * np.asarray(before)).all()
  plain, fitted = (realized(calibrated, p)[1] for p in (methods.HIRES_DESCENT, fitting))
  assert fitted < plain


@pytest.mark.slow
@pytest.mark.parametrize(
  ("options", "sign"),
  [
    ({"rounding": "nearest"}, 1),
    ({"changes": 2}, -1),
    ({"activations": "float"}, -1),
  ],
)
def test_candidates_are_measured_under_the_rule_of_the_model(
  calibrated, float64, options, sign
):
  weight, inputs, _ = calibrated
  losses = [
    np.asarray(program.shape(mxfp4.weight_blocks(weight), inputs).record["map_losses"])
    for program in (SEARCHED, dataclasses.replace(SEARCHED, **options))
  ]
  assert (np.sign(losses[1] - losses[0]) == sign).all()
