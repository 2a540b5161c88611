"""What candidates share of compiled programs, and that sharing changes no bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.discovery.core import candidate_source
from mxjax.discovery.core.task import Call, Status
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.tasks.ptq import (
  candidate,
  candidate_codes,
  edit_templates,
  payload,
  phases,
)
from mxjax.discovery.tasks.ptq import task as ptq
from mxjax.methods.program import fold
from mxjax.numerics import mxfp4
from tests.cases import slow

TASK = ptq.PtqTask(model="random:0", calibration=[8, 32], windows=[2, 32])
INTERFACE = TASK.interface
SOURCE = INTERFACE.default_source()


@pytest.fixture(scope="module")
def executor():
  return LocalExecutor(TASK)


def edited(executor, name, params=None):
  card = next(t for t in edit_templates.EDIT_TEMPLATES if t.id == name)
  source = card.edit(SOURCE, params or dict(card.params[0]))
  traced = executor.trace(source)
  assert traced.status == Status.OK, traced.detail
  plan = candidate_source.admit(source, INTERFACE).plan
  return Call(traced.computation, plan, {}).active(INTERFACE)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "params"),
  [
    ("one-code", [{"rounds": 1}, {"rounds": 2}]),
    ("weight-exponent", [{"first": 1, "second": -1}]),
    ("value-affine", [{}]),
  ],
)
def test_a_hook_is_compiled_once_whatever_it_runs_on(executor, name, params):
  fit, measure = TASK.open("fit"), TASK.open("measure")
  counts = []
  candidate_codes._run_units.clear_cache()  # Other tests run the same hooks.
  for each in params:
    call = edited(executor, name, each)
    before = candidate_codes._run_units._cache_size()
    _, operands = fit.run(call, executor.artifacts, b"")
    measure.run(call, executor.artifacts, operands)
    counts.append(candidate_codes._run_units._cache_size() - before)
  assert counts == [1] * len(params)


@pytest.mark.slow
def test_the_errors_of_another_rule_are_compiled_already(executor):
  fit, measure = TASK.open("fit"), TASK.open("measure")
  counts = []
  phases.operator_errors.clear_cache()  # Other tests have models of these widths.
  for rounds in (1, 2):
    call = edited(executor, "one-code", {"rounds": rounds})
    _, operands = fit.run(call, executor.artifacts, b"")
    before = phases.operator_errors._cache_size()
    measure.run(call, executor.artifacts, operands)
    counts.append(phases.operator_errors._cache_size() - before)
  assert counts == [1, 0]


@pytest.mark.parametrize("units", [1, 16, 21])
def test_any_number_of_units_have_their_own_results(units):
  rng = np.random.default_rng(0)
  rows, scale = rng.normal(size=(units, 3, 4)), rng.normal(size=units)
  function = lambda row, by: (row * by, row.sum() + by)
  products, sums = candidate_codes.map_units(
    function, rows.astype(np.float32), scale.astype(np.float32)
  )
  np.testing.assert_allclose(products, rows * scale[:, None, None], rtol=1e-6)
  np.testing.assert_allclose(sums, rows.sum((1, 2)) + scale, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, *slow(40, 128), 300])
def test_an_encoder_sees_every_column_with_the_tables_of_its_block(executor, columns):
  rng = np.random.default_rng(columns)
  narrow = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  blocks, gram, cross = narrow(3, 32, columns), narrow(3, 32, 32), narrow(3, 32, 32)
  gram = gram @ gram.mT
  call = edited(executor, "one-code", {"rounds": 1})
  function = executor.artifacts.batched(call.computation["encode_act"])
  codes, exponent = candidate_codes.encoded(function, blocks, gram, cross)
  for index in range(3):
    expected = function(blocks[index].T, gram[index], cross[index])
    np.testing.assert_array_equal(codes[index].T, expected[0])
    np.testing.assert_array_equal(exponent[index], expected[1])


@pytest.mark.parametrize("traced", [False, True])
def test_illegal_payloads_of_activations_are_nan_and_only_they(traced):
  def function(rows, gram, cross):
    codes = jnp.where(rows > 2, 200, 7).astype(jnp.uint8)
    return codes, mxfp4.block_exponent(rows.T)

  blocks = jnp.ones((2, 32, 5), jnp.float32).at[1, 3, 4].set(3)
  table = jnp.zeros((2, 32, 32), jnp.float32)
  rule = candidate.HookRounding(table, table, function)
  run = lambda x: rule.round(x, mxfp4.PAPER_RULES)
  values = (jax.jit(run) if traced else run)(blocks)
  expected = np.zeros((2, 32, 5), bool)
  expected[1, :, 4] = True
  np.testing.assert_array_equal(np.isnan(values), expected)


@pytest.mark.slow
def test_errors_in_one_program_or_in_two_are_the_same_bits(executor):
  call = edited(executor, "one-code", {"rounds": 2})
  _, operands = TASK.open("fit").run(call, executor.artifacts, b"")
  model, params = TASK.options.load()
  rule = candidate.activation_rule(executor.artifacts, call.computation["encode_act"])
  made = payload.to_params(payload.from_bytes(operands), params, model, rule)
  rng = np.random.default_rng(0)
  for block, name in model.projection_taps:
    leaf = made["layers_0"][block][name]["weight"]
    weight = params["layers_0"][block][name]["weight"].astype(jnp.float32)
    folded = fold(mxfp4.to_blocks(weight), leaf.input_map)
    mapped = jnp.asarray(rng.normal(size=(len(folded), 32, 40)), jnp.float32)

    @jax.jit
    def together(leaf, folded, mapped):
      rounded = leaf.rounding.round(mapped, leaf.rules)
      operands = leaf.weight, folded, mapped, rounded
      return rounded, phases.operator_errors(*({"x": each} for each in operands))

    apart = phases.rounded(leaf, mapped)
    errors = phases.operator_errors(
      *({"x": each} for each in (leaf.weight, folded, mapped, apart))
    )
    expected = together(leaf, folded, mapped)
    jax.tree.map(np.testing.assert_array_equal, (apart, errors), expected)
    assert errors["x"]["activation"] > 0


def test_fits_that_measure_alike_share_their_program(executor):
  paths = [(0, "self_attn", "q_proj")]
  fits = [
    candidate.CandidateProgram(
      edited(executor, name), executor.artifacts, paths, phases.default_identities()
    ).recover[0]
    for name in ("value-affine", "value-shift", "mlp-three")
  ]
  assert fits[0].fit != fits[1].fit
  assert fits[0] == fits[1] != fits[2]
  assert hash(fits[0]) == hash(fits[1])
