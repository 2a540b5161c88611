import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.pallas_kernels import recovery
from tests.pallas_kernels import ptx_machine

MLP = MlpRecovery(*(jnp.float32(v) for v in (0.05, -0.03, 0.02, 1.7)))
VALUES = ValueRecovery(jnp.float32([1.1, 0.9, 1.0]), jnp.float32([0.1, -0.2, 0.0]))


def draw(shape, dtype, seed=0):
  return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype) * 4


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_product_equals_the_reference_to_one_rounding(dtype):
  gate, up = draw((3, 7, 96), dtype), draw((3, 7, 96), dtype, seed=1)
  run = lambda how: recovery.gated_product(gate, up, MLP, implementation=how)
  got, want = run("interpret"), run("xla")
  assert got.shape == gate.shape and got.dtype == dtype
  tolerance = 4 * float(jnp.finfo(dtype).eps)
  np.testing.assert_allclose(
    np.asarray(got, np.float64), np.asarray(want, np.float64), tolerance, 1e-6
  )


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_values_equal_the_reference_to_one_rounding(has_bias):
  values = draw((2, 9, 3, 48), jnp.bfloat16)
  bias = draw((144,), jnp.bfloat16, seed=2) if has_bias else None
  run = lambda how: recovery.recover_values(values, VALUES, bias, implementation=how)
  got, want = run("interpret"), run("xla")
  assert got.shape == values.shape and got.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.asarray(got, np.float64), np.asarray(want, np.float64), 0.01, 0.01
  )
  by_hand = np.asarray(values, np.float64)
  by_hand += np.asarray(bias, np.float64).reshape(3, 48) if has_bias else 0
  by_hand = by_hand * [[1.1], [0.9], [1.0]] + [[0.1], [-0.2], [0.0]]
  np.testing.assert_allclose(np.asarray(got, np.float64), by_hand, 0.01, 0.01)


@pytest.mark.parametrize("name", ["gated_product", "recover_values"])
def test_a_gradient_is_that_of_the_reference(name):
  """A model with recovery is tuned by its gradients, on a GPU too."""
  values, bias = draw((2, 3, 3, 32), jnp.bfloat16), draw((96,), jnp.bfloat16, seed=2)
  run, operands = {
    "gated_product": (recovery.gated_product, (values, values[::-1], MLP)),
    "recover_values": (recovery.recover_values, (values, VALUES, bias)),
  }[name]

  def gradient(how):
    loss = lambda *a: jnp.square(run(*a, implementation=how).astype(jnp.float32)).sum()
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*operands)

  jax.tree.map(np.testing.assert_array_equal, gradient("interpret"), gradient("xla"))


def test_operands_that_disagree_are_refused():
  gate = jnp.ones((2, 32))
  with pytest.raises(NotImplementedError, match="agree in shape and dtype"):
    recovery.gated_product(gate, gate[:1], MLP, implementation="interpret")


def test_silu_in_ptx_is_within_a_few_units_of_float32():
  """Every bfloat16 from -87 up, and what lies behind: the sign, infinity and NaN."""
  halves = np.arange(1 << 16, dtype=np.uint16)
  x = (halves.astype(np.uint32) << 16).view(np.float32)
  x = x[np.isfinite(x) & (x >= -87)]
  got = ptx_machine.run(recovery.silu_ptx(), x.view(np.uint32)).view(np.float32)
  exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
  # The exponential of -87 is off by 87 roundings of its exponent.
  bound = 2.0**-22 + np.maximum(-x, 0) * 2.0**-23
  assert (abs(got - exact) <= bound * abs(exact) + 2.0**-126).all()
  ends = np.float32([-1e9, np.inf, np.nan])
  got = ptx_machine.run(recovery.silu_ptx(), ends.view(np.uint32)).view(np.float32)
  np.testing.assert_array_equal(got, np.float32([0, np.inf, np.nan]))
  plain = recovery.silu(jnp.asarray(x), interpret=True)
  np.testing.assert_allclose(plain, exact, 1e-5, 1e-37)
