"""Reductions over what a linear reads, in the dtype in which it was captured."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.calibration import linear_inputs
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.numerics import implementations, mxfp4


def view(dtype, tokens=40):
  draw = jax.random.normal(jax.random.key(0), (3, 2, 32, tokens), jnp.bfloat16)
  return LinearInputs([draw[:2].astype(dtype), draw[2:].astype(dtype)])


@pytest.fixture
def on_gpu(monkeypatch):
  monkeypatch.setattr(implementations, "target_platform", lambda: "gpu")


def test_on_a_cpu_the_captured_dtype_does_not_move_a_bit(float64):
  narrow, wide = view(jnp.bfloat16), view(jnp.float32)
  for read in (
    LinearInputs.hessian,
    LinearInputs.moment,
    lambda inputs: inputs.sample(7),
    lambda inputs: inputs.probe(5),
  ):
    got, want = read(narrow), read(wide)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
  assert narrow.hessian_products == "float32"


def test_on_a_gpu_bfloat16_inputs_are_multiplied_as_they_are(on_gpu):
  inputs = view(jnp.bfloat16).for_linear("q_proj")
  x = np.concatenate([inputs.sequence(i).reshape(64, -1) for i in range(3)], axis=1)
  want = x.astype(np.float64) @ x.T.astype(np.float64) / x.shape[1]
  # Products are exact; a sum of 120 terms rounds at most 120 times.
  bound = 120 * 2.0**-24 * (np.abs(x) @ np.abs(x).T / x.shape[1])
  assert (np.abs(inputs.hessian() - want) <= bound).all()
  assert inputs.hessian_products == "bfloat16"
  twin = inputs.for_linear("k_proj")
  assert twin.hessian() is inputs.hessian()
  step = lambda carry, blocks: linear_inputs._hessian_step(
    carry, blocks, jnp.int32(0), mxfp4.PAPER_RULES
  )
  traced = jax.make_jaxpr(step)(jnp.zeros((64, 64)), inputs._chunks[0][0])
  [product] = [eqn for eqn in traced.eqns if "dot" in eqn.primitive.name]
  assert {operand.aval.dtype for operand in product.invars} == {jnp.dtype(jnp.bfloat16)}
  assert product.outvars[0].aval.dtype == jnp.float32


def test_inputs_that_bfloat16_cannot_hold_keep_float32_products(on_gpu):
  weights = jax.random.uniform(jax.random.key(1), (3, 40), minval=0.5)
  for inputs in (view(jnp.float32), view(jnp.bfloat16).weighted(weights)):
    again = LinearInputs([jnp.asarray(c, jnp.float32) for c in inputs._chunks])
    again.token_weights = inputs.token_weights
    np.testing.assert_array_equal(inputs.hessian(), again.hessian())
    assert inputs.hessian_products == "float32"
