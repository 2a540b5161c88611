"""LAPACK calls of one program, one after the other."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.discovery.tasks.ptq.programs import hires as evolved
from mxjax.methods.baselines import batquant
from mxjax.methods.hires import stage1
from mxjax.numerics import lapack
from mxjax.numerics.shaping import local_interaction, reference_chart
from tests import hlo


def calls_and_free_pairs(function, *operands):
  """LAPACK calls of a compiled function, and pairs that do not wait for each other."""
  text = jax.jit(function).lower(*operands).compile().as_text()
  program = hlo.Program(text)
  entry = program.computations[program.entry]

  @functools.cache
  def before(name):
    direct = entry[name].operands if name in entry else ()
    return frozenset(direct).union(*map(before, direct))

  calls = [name for name, one in entry.items() if "lapack_" in one.rest]
  assert text.count('custom_call_target="lapack_') == len(calls)
  pairs = itertools.combinations(calls, 2)
  return calls, [p for p in pairs if p[0] not in before(p[1]) | before(p[0])]


def moments(blocks, dtype):
  return jax.ShapeDtypeStruct((blocks, 32, 32), dtype)


CHARTS = functools.partial(stage1._charts, max_condition=8.0)


@pytest.mark.parametrize(
  ("function", "count", "least"),
  [
    (functools.partial(CHARTS, chart=reference_chart.reference_chart), 2, 7),
    (functools.partial(CHARTS, chart=reference_chart.geometric_chart), 2, 7),
    (local_interaction.shaping_transform, 2, 1),
  ],
)
def test_decompositions_of_blocks_wait_for_each_other(float64, function, count, least):
  calls, free = calls_and_free_pairs(function, *[moments(48, jnp.float64)] * count)
  assert len(calls) >= least
  assert not free


def test_decompositions_of_the_evolved_hires_wait_for_each_other(float64):
  sums = jax.ShapeDtypeStruct((18, 4, 32, 32), jnp.float64)
  solve = lambda x, w: jax.vmap(lambda x, w: evolved.solve_chart(x, w, None))(x, w)
  # Programs are written for JAX as it comes.
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    calls, free = calls_and_free_pairs(solve, sums, sums)
  assert len(calls) >= 7
  assert not free


def test_the_inverses_of_batquant_wait_for_each_other():
  factors = moments(1, jnp.float32), moments(18, jnp.float32)
  invert = lambda shared, private: batquant._operators.__wrapped__(
    batquant.Learnable(shared, private, *[jnp.ones(1)] * 2)
  )
  calls, free = calls_and_free_pairs(invert, *factors)
  assert len(calls) >= 4
  assert not free


def test_without_a_dependency_they_do_not():
  """What the tests above look for is there to be found."""
  both = lambda a, b: (jnp.linalg.inv(a), jnp.linalg.inv(b))
  assert calls_and_free_pairs(both, *[moments(18, jnp.float32)] * 2)[1]


def test_what_waits_keeps_its_bits():
  x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
  x[0, :3] = np.nan, np.inf, -0.0
  for earlier in (x, jnp.zeros(2), jnp.full(2, jnp.inf)):
    got = lapack.after(jnp.asarray(x), jnp.asarray(earlier))
    np.testing.assert_array_equal(np.asarray(got).view(np.int32), x.view(np.int32))
