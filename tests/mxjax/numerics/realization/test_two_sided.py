"""GPTQ along both axes."""

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.numerics.realization import code_descent, gptq, two_sided
from tests import refusals
from tests.cases import slow

ROWS, SIZE = 48, 16
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def second_moment(rng, width, rank):
  """Of 300 correlated vectors, mean diagonal 1."""
  x = rng.standard_normal((300, rank)) @ rng.standard_normal((rank, width))
  x += 0.3 * rng.standard_normal((300, width))
  moment = x.T @ x
  return moment * width / np.trace(moment)


@pytest.fixture
def problem(float64):
  """Weights `[2, 32, 48]`, Hessian of the inputs, moment of the gradients, float64."""
  rng = np.random.default_rng(0)
  weight = rng.standard_normal((2, 32, ROWS))
  return weight, second_moment(rng, 64, 20), second_moment(rng, ROWS, 6)


def solved(problem, *, moment=None, passes=0):
  weight, hessian, own = map(jnp.asarray, problem)
  factor = gptq.factor(hessian)
  rows = gptq.factor(own if moment is None else jnp.asarray(moment))
  coupled = two_sided.coupling(rows.upper)
  return two_sided.reconstruct(
    *(weight, factor.upper, coupled, hessian, factor.damping), passes=passes
  )


def damped(matrix):
  return matrix + 0.01 * np.trace(matrix) / len(matrix) * np.eye(len(matrix))


def oracle(weight, hessian, moment):
  """Groups of rows around conditional optima, each column by column, from inverses."""
  targets, decoded = weight.reshape(64, -1), np.zeros((64, weight.shape[-1]))
  hessian, moment = damped(hessian), damped(moment)
  for first in range(0, targets.shape[1], SIZE):
    rows = slice(first, first + SIZE)
    # Given the errors of all rows before, this group's best ones minimize the loss.
    later = slice(first, None)
    pull = np.linalg.solve(moment[later, later], moment[later, :first])
    error = (targets - decoded)[:, :first]
    moved = targets[:, rows] + (error @ pull.T)[:, :SIZE]
    work = moved.copy()
    for j in range(64):
      if j % 32 == 0:
        largest = np.abs(work[j : j + 32]).max(0)
        scale = 2.0 ** (np.floor(np.log2(largest)) - 2)
      grid = np.concatenate([-MAGNITUDES[:0:-1], MAGNITUDES])[:, None] * scale
      value = grid[np.abs(grid - work[j]).argmin(0), np.arange(work.shape[1])]
      decoded[j, rows] = value
      inverse = np.linalg.inv(hessian[j:, j:])
      work[j:] -= np.outer(inverse[:, 0] / inverse[0, 0], work[j] - value)
  return decoded


def test_groups_are_rounded_around_their_conditional_optima(problem):
  found = solved(problem)
  np.testing.assert_array_equal(
    np.asarray(found.decoded).reshape(64, ROWS), oracle(*problem)
  )


def test_the_joint_loss_falls_and_that_of_rows_alone_rises(problem):
  weight, hessian, moment = map(jnp.asarray, problem)
  alone = gptq.reconstruct(weight, gptq.factor(hessian).upper).decoded
  joint = solved(problem).decoded
  loss = lambda decoded: float(two_sided.loss(weight, decoded, hessian, moment))
  assert loss(joint) < 0.6 * loss(alone)
  rows = [float(gptq.reconstruction_loss(weight, d, hessian)) for d in (joint, alone)]
  assert rows[0] > rows[1]


def test_descent_inside_a_group_lowers_the_joint_loss(problem):
  weight, hessian, moment = map(jnp.asarray, problem)
  losses = [
    float(two_sided.loss(weight, solved(problem, passes=n).decoded, hessian, moment))
    for n in (0, 2)
  ]
  assert losses[1] < losses[0]


def test_outputs_without_correlation_are_rounded_alone(problem):
  weight, hessian, _ = map(jnp.asarray, problem)
  factor = gptq.factor(hessian)
  alone = gptq.reconstruct(weight, factor.upper)
  alone = code_descent.descend(weight, alone, hessian, factor.damping, passes=2)
  found = solved(problem, moment=np.diag(np.arange(1.0, ROWS + 1)), passes=2)
  for ours, theirs in zip(found, alone, strict=True):
    np.testing.assert_array_equal(ours, theirs)


def test_the_loss_is_a_trace(problem):
  weight, hessian, moment = problem
  decoded = np.zeros_like(weight)
  flat = weight.reshape(64, ROWS)
  expected = np.trace(moment @ flat.T @ hessian @ flat)
  found = two_sided.loss(*map(jnp.asarray, (weight, decoded, hessian, moment)))
  np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
  ("rows", "size"), [(576, 16), (24, 8), (9, 1), (1536, 32), (12288, 256)]
)
def test_groups_divide_the_rows(rows, size):
  assert two_sided.group_size(rows) == size


def exact_problem(blocks, rows, size=1.0):
  """Weights, U and H, float32, whose sums and quotients are exact in any order."""
  rng = np.random.default_rng(blocks)
  width = 32 * blocks
  sparse = lambda values: (
    rng.choice(values, (width, width)) * (rng.random((width, width)) < 8 / width)
  )
  largest = rng.integers(64, 128, (blocks, 1, rows))
  weight = np.round(rng.uniform(-largest, largest, (blocks, 32, rows))) / 16 * size
  upper = np.diag(rng.choice([0.5, 1, 2], width)) + np.triu(sparse([-1, 0, 0, 1]), 1)
  inputs = sparse([-1, 0, 0, 1])
  hessian = inputs @ inputs.T + 2 * np.eye(width)
  hessian[5] = hessian[:, 5] = 0  # A feature that no input excites.
  return tuple(jnp.asarray(a, jnp.float32) for a in (weight, upper, hessian))


@pytest.mark.parametrize("passes", [0, *slow(1), 3])
@pytest.mark.parametrize(
  ("blocks", "rows", "size"),
  [*slow((1, 8, 1), (2, 16, 2.0**-50)), (3, 16, 1), (6, 40, 2.0**40)],
)
def test_the_cpu_kernel_has_the_bits_of_exact_sums(blocks, rows, size, passes):
  weight, upper, hessian = exact_problem(blocks, rows, size)
  # A power of two of the trace keeps the damped diagonal exact.
  damping = jnp.float32(0.25 * 32 * blocks / float(jnp.trace(hessian)))
  found = [
    two_sided.round_rows(
      *(weight, upper, hessian, damping),
      scales="searched",
      passes=passes,
      implementation=implementation,
    )
    for implementation in ("native", "xla")
  ]
  for ours, theirs in zip(*found, strict=True):
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == theirs.dtype
  starts = two_sided.round_rows(weight, upper, hessian, damping, scales="searched")
  has_moved = (np.asarray(starts.codes) != np.asarray(found[0].codes)).any()
  assert has_moved == (passes > 0)
  # The search took both of its exponents.
  raised = np.asarray(found[0].exponent) - np.asarray(
    gptq.reconstruct(weight, upper).exponent
  )
  assert {0, 1} <= set(raised[0].tolist())


def test_the_cpu_kernel_ends_at_the_same_loss(problem):
  weight, hessian, moment = (jnp.asarray(a, jnp.float32) for a in problem)
  upper = gptq.factor(hessian, damping=0.1).upper
  coupled = two_sided.coupling(gptq.factor(moment).upper)
  found = [
    two_sided.reconstruct(
      *(weight, upper, coupled, hessian, jnp.float32(0.1)),
      scales="searched",
      passes=3,
      implementation=implementation,
    )
    for implementation in ("native", "xla", None)
  ]
  losses = [float(two_sided.loss(weight, f.decoded, hessian, moment)) for f in found]
  np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)
  np.testing.assert_array_equal(found[2].codes, found[0].codes)


def test_the_cpu_kernel_refuses_what_it_does_not_know(float64):
  weight, rest = np.zeros((2, 32, 8), np.float32), jnp.eye(64, dtype=jnp.float32)

  def call(weight=weight, scales="searched", **rules):
    how = {"scales": scales, **rules, "implementation": "native"}
    return lambda: two_sided.round_rows(jnp.asarray(weight), rest, rest, 0.1, **how)

  refusals.check(
    [
      (call(scales="fresh"), "searches exponents"),
      (call(rules=mxfp4.Rules(tie_rule="even")), "ties away from zero"),
      (call(np.zeros((2, 32, 12), np.float32)), "n in 8s"),
      (call(weight.astype(float)), "float32"),
    ],
    NotImplementedError,
  )
