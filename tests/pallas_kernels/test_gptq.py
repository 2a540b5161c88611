import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.numerics.realization import gptq
from mxjax.pallas_kernels import gptq as kernel


def problem(rows=70, blocks=3, seed=0):
  """Heavy-tailed weights and correlated inputs."""
  rng = np.random.default_rng(seed)
  d = 32 * blocks
  x = rng.standard_normal((4 * d, d)) @ (np.eye(d) + 0.3 * rng.standard_normal((d, d)))
  hessian = jnp.asarray(x.T @ x / len(x), jnp.float32)
  weight = jnp.asarray(rng.standard_t(4, (blocks, 32, rows)), jnp.float32)
  return weight, hessian, gptq.factor(hessian).upper


def test_the_kernel_reaches_the_loss_of_the_reference():
  weight, hessian, upper = problem()
  got = kernel.reconstruct(weight, upper, implementation="interpret")
  want = kernel.reconstruct(weight, upper, implementation="xla")
  assert (np.asarray(got.codes) != np.asarray(want.codes)).mean() < 2e-3
  loss = lambda r: float(gptq.reconstruction_loss(weight, r.decoded, hessian))
  nearest = loss(gptq.round_to_nearest(weight))
  assert loss(want) < 0.9 * nearest
  assert abs(loss(got) - loss(want)) <= 2e-3 * loss(want)
  np.testing.assert_array_equal(
    mxfp4.decode(got.tensor(), jnp.float32), mxfp4.from_blocks(got.decoded)
  )


def test_one_group_equals_a_float64_column_loop():
  weight, _, upper = problem(rows=33, blocks=1, seed=1)
  codes, exponent, error = jax.jit(kernel.launch, static_argnames="interpret")(
    weight[0], upper, interpret=True
  )
  w, u = np.asarray(weight[0], np.float64), np.asarray(upper, np.float64)
  top = np.frexp(np.abs(w).max(0))[1] - 3
  np.testing.assert_array_equal(exponent, top)
  values = np.array(mxfp4.MAGNITUDES)
  middles = (values[1:] + values[:-1]) / 2
  wrong = 0
  for j in range(32):
    scaled = np.abs(w[j]) / 2.0**top
    index = (scaled[:, None] >= middles[None]).sum(1)
    wrong += (np.asarray(codes[j]) != index + 8 * np.signbit(w[j])).sum()
    e = (w[j] - np.copysign(values[index], w[j]) * 2.0**top) / u[j, j]
    w[j:] -= u[j, j:, None] * e[None]
    np.testing.assert_allclose(np.asarray(error[j])[:20], e[:20], atol=1e-4)
  assert wrong == 0


def test_what_the_kernel_cannot_take_is_refused():
  weight, _, upper = problem()
  rules = mxfp4.Rules(tie_rule="even")
  with pytest.raises(NotImplementedError, match="paper's rules"):
    kernel.reconstruct(weight, upper, rules, implementation="interpret")
