"""Local errors and running costs of a quantized tiny model."""

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.calibration.calibration import Calibration
from mxjax.evaluation.measures.cost import running_cost
from mxjax.evaluation.measures.local_errors import local_errors
from mxjax.numerics import mxfp4
from mxjax.run.quantize import quantize

RULES = ("nearest", "sensitivity", "full")


@pytest.fixture(scope="module")
def built(tiny_model, tiny_params, tiny_tokens):
  """A model by activation rule, without recovery, and one with it."""
  calib = Calibration(tiny_model, tiny_tokens[:3])
  make = lambda name: quantize(tiny_params, calib, name, check=False, probe=False)
  plain = {rule: make(f"hires:rounding={rule}:recover=none") for rule in RULES}
  return plain | {"recovered": make("hires")}


@pytest.fixture(scope="module")
def found(built, tiny_model, tiny_params, tiny_tokens):
  measure = lambda made: local_errors(tiny_model, tiny_params, made, tiny_tokens[3:])
  return {name: measure(made) for name, made in built.items()}


@pytest.mark.slow
def test_each_rule_is_best_at_its_own_objective(found):
  nearest, sensitivity, full = (found[rule] for rule in RULES)
  assert nearest["local_sensitivity"] == nearest["local_mismatch"] == 1.0
  assert nearest["codes_per_block"] == 0.0
  assert sensitivity["local_sensitivity"] < full["local_sensitivity"]
  assert full["local_mismatch"] < sensitivity["local_mismatch"] < 1.05
  assert full["local_mismatch"] < 1.0
  assert 0 < full["codes_per_block"] <= 1
  assert full["edited_elements"] == full["codes_per_block"] / 32
  assert (full["sequences"], full["length"]) == (2, 32)


@pytest.mark.slow
def test_the_objectives_are_those_of_the_definition(
  built, tiny_model, tiny_params, tiny_tokens
):
  """One linear by hand: outputs of 32-column blocks, in float64."""
  found = local_errors(tiny_model, tiny_params, built["full"], tiny_tokens[3:4])
  hidden = tiny_model.embed(tiny_params, jnp.asarray(tiny_tokens[3:4]))
  sums = np.zeros((2, 2))
  for index in range(2):
    name = tiny_model.layer_name(index)
    exact, ours = tiny_params[name], built["full"][name]
    hidden, taps = tiny_model.layer_with_taps(exact, hidden)
    for (block, part), tap in tiny_model.projection_taps.items():
      leaf = ours[block][part]["weight"]
      x = np.asarray(taps[tap], np.float32).reshape(-1, leaf.shape[1])
      mapped = leaf.input_map.apply(mxfp4.to_blocks(jnp.asarray(x)))
      weight = np.asarray(exact[block][part]["weight"], np.float64)
      matrix = np.asarray(leaf.input_map.matrix, np.float64)
      folded = np.linalg.solve(matrix.swapaxes(1, 2), mxfp4.to_blocks(weight))
      real = np.asarray(mxfp4.decode(leaf.weight, jnp.float32), np.float64)
      real = mxfp4.to_blocks(real)
      exact_out = np.einsum("bim,bin->bmn", folded, np.asarray(mapped, np.float64))
      for row, operand in enumerate(
        (leaf.rounding.round(mapped, leaf.rules), mxfp4.round_blocks(mapped))
      ):
        got = np.einsum("bim,bin->bmn", real, np.asarray(operand, np.float64))
        moved = np.asarray(operand - mapped, np.float64)
        own = np.einsum("bim,bin->bmn", real, moved)
        elements = x.shape[0] * leaf.shape[0]
        sums[row] += (
          np.square(own).sum() / elements,
          np.square(got - exact_out).sum() / elements,
        )
  ratio = sums[0] / sums[1]
  got = found["local_sensitivity"], found["local_mismatch"]
  np.testing.assert_allclose(got, ratio, rtol=2e-3)


@pytest.mark.slow
def test_the_error_of_layers_sees_recovery_and_the_objectives_do_not(
  built, found, tiny_model, tiny_params, tiny_tokens
):
  ours, plain = found["recovered"], found["full"]
  assert ours["layer_mse"] != plain["layer_mse"]
  assert ours["local_mismatch"] == plain["local_mismatch"]
  hidden = tiny_model.embed(tiny_params, jnp.asarray(tiny_tokens[3:]))
  errors = []
  for name in map(tiny_model.layer_name, range(2)):
    output = tiny_model.layer(tiny_params[name], hidden)
    error = tiny_model.layer(built["recovered"][name], hidden) - output
    errors.append(np.square(np.asarray(error, np.float64)).mean())
    hidden = output
  assert ours["layer_mse"] == pytest.approx(np.mean(errors), rel=0.02)


def test_a_float_model_has_no_local_errors(tiny_model, tiny_params, tiny_tokens):
  with pytest.raises(ValueError, match="quantized linears in layers_0, got none"):
    local_errors(tiny_model, tiny_params, tiny_params, tiny_tokens)


def test_costs_are_positive(tiny_model, tiny_params, tiny_tokens):
  few = dict(warm_ups=1, runs=2, new_tokens=3)
  cost = running_cost(tiny_model, tiny_params, tiny_tokens[0], **few)
  assert cost["forward_ms"] > 0 and cost["tokens_per_second"] > 0
