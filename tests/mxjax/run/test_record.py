"""Records of linears that are not like others."""

import math
import types

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import one_code
from mxjax.numerics.realization.activation_quantizers import FewCodes, Nearest
from mxjax.run.record import linear_record


@pytest.mark.parametrize("zero", ["weight", "inputs"])
def test_a_linear_without_outputs_has_no_errors(zero):
  """The run folder holds records as JSON, which has no NaN."""
  draw = np.random.default_rng(0).standard_normal
  scale = lambda name: float(zero != name)
  weight = jnp.asarray(scale("weight") * draw((48, 64)), jnp.float32)
  x = jnp.asarray(scale("inputs") * draw((7, 64)), jnp.float32)
  inputs = types.SimpleNamespace(
    hessian_products=None, probe=lambda count: mxfp4.to_blocks(x)
  )
  leaf = QuantizedLinear(mxfp4.encode(weight), None, Nearest())
  record = linear_record(weight, leaf, inputs)
  numbers = {name: value for name, value in record.items() if type(value) is float}
  assert all(map(math.isfinite, numbers.values())), numbers
  assert record["error_final"] == record["error_rtn"] == 0


def test_edits_are_counted_from_the_nearest_codes_of_the_rules_own_exponents():
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((2, 1, 32, 128)), jnp.float32)
  weight = jnp.eye(32)
  rule = FewCodes(one_code.pack_symmetric(jnp.eye(32)[None]), 2, rounds_up=True)
  leaf = QuantizedLinear(mxfp4.encode(weight), None, rule)
  record = linear_record(weight, leaf, LinearInputs([x]))
  # Where outputs are inputs the nearest codes are the best.
  assert record["edit_rate"] == 0
  assert record["error_final"] == record["error_mapped_nearest"]
  assert record["error_final"] < record["error_rtn"]
  assert record["rounding"] == "few codes"
  floor = QuantizedLinear(leaf.weight, None, Nearest())
  assert (
    record["saturated_activations"]
    < 0.5 * (linear_record(weight, floor, LinearInputs([x]))["saturated_activations"])
  )
