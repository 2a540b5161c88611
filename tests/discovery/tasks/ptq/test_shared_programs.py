"""What candidates share of compiled programs, and that sharing changes no bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.discovery.core import candidate_source
from mxjax.discovery.core.task import Call, Status
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.tasks.ptq import candidate, edit_templates, payload, phases
from mxjax.discovery.tasks.ptq import task as ptq
from mxjax.methods.program import fold
from mxjax.numerics import mxfp4

TASK = ptq.PtqTask(model="random:0", calibration=[8, 32], windows=[2, 32])
INTERFACE = TASK.interface
SOURCE = INTERFACE.default_source()
WIDTHS = 2
"""Different widths of the inputs of linears: 64 and 96."""


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


def test_an_activation_rule_is_compiled_once_for_a_width(executor):
  fit, measure = TASK.open("fit"), TASK.open("measure")
  counts = []
  phases.operator_errors.clear_cache()  # Other tests have models of these widths.
  for rounds in (1, 2):
    call = edited(executor, "one-code", {"rounds": rounds})
    _, operands = fit.run(call, executor.artifacts, b"")
    before = phases._rounded._cache_size(), phases.operator_errors._cache_size()
    measure.run(call, executor.artifacts, operands)
    after = phases._rounded._cache_size(), phases.operator_errors._cache_size()
    counts.append(np.subtract(after, before).tolist())
  # Two layers of seven linears each; the second rule finds the errors compiled.
  assert counts == [[WIDTHS, 1], [WIDTHS, 0]]


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
