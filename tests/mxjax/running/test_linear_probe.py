"""The record of one linear."""

import jax.numpy as jnp
import numpy as np

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.running.linear_probe import linear_record
from tests.mxjax import quantized


def test_a_dead_linear_has_errors_of_zero():
  rng = np.random.default_rng(0)
  inputs = LinearInputs([jnp.asarray(rng.standard_normal((1, 2, 32, 16)), jnp.float32)])
  weight = jnp.zeros((64, 64), jnp.float32)
  record = linear_record(weight, quantized.leaf(rng, weight, "rtn"), inputs)
  errors = {name: value for name, value in record.items() if name.startswith("error")}
  assert len(errors) == 4 and set(errors.values()) == {0.0}
