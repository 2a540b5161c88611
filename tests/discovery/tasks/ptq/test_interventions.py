"""What a control changes in a candidate, and what it refuses because nothing would."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.discovery.core import candidate_source
from mxjax.discovery.core.task import Call, ContractError, Status
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.tasks.ptq import edit_templates
from mxjax.discovery.tasks.ptq import task as ptq
from mxjax.discovery.tasks.ptq.candidate import CandidateProgram
from mxjax.discovery.tasks.ptq.interface import INTERFACE
from mxjax.discovery.tasks.ptq.phases import default_identities
from mxjax.discovery.tasks.ptq.structure.interventions import TOLD, behaviours

TASK = ptq.PtqTask(model="random:0", calibration=[8, 32], windows=[2, 32])
FITTED = """
import jax
import jax.numpy as jnp
PLAN = {'attention': True, 'mlp': True}
def recover_value(sums):
  return sums[0, :2]
def recover_mlp(sums):
  return sums[0, :4]
"""
LINEARS = [(0, "self_attn", "q_proj"), (1, "self_attn", "q_proj")]


@functools.cache
def executor():
  return LocalExecutor(TASK)


def call(source, **change):
  completed = candidate_source.with_functions(
    source, TASK.interface.default_source(), replace=False
  )
  traced = executor().trace(completed)
  assert traced.status == Status.OK, traced.detail
  return Call(
    traced.computation, candidate_source.admit(source, TASK.interface).plan, change
  )


def fits(paths=LINEARS, hooks=()):
  """The recovery fits of a program whose coefficients are the first of its sums."""
  change = {"kind": "shuffle_stats", "hooks": [*hooks]} if hooks else {}
  program = CandidateProgram(
    call(FITTED, **change), executor().artifacts, paths, default_identities()
  )
  return program.recover


def coefficients(leaf):
  return np.stack([*vars(leaf).values()], -1)


@pytest.mark.slow
def test_a_head_is_told_the_sums_of_its_neighbour(float64):
  sums = jnp.asarray(np.random.default_rng(0).normal(size=(3, 32, 32)))
  plain, shuffled = (
    coefficients(fits(hooks=hooks)[0].solve(sums)[0])
    for hooks in ((), ("recover_value",))
  )
  np.testing.assert_array_equal(shuffled, np.roll(plain, 1, axis=0))
  assert (shuffled != plain).all()


@pytest.mark.slow
def test_an_mlp_is_told_the_sums_of_the_layer_before(float64):
  layers = jnp.asarray(np.random.default_rng(0).normal(size=(3, 32, 32)))
  plain, shuffled = (
    [coefficients(fit.solve(sums)[0]) for sums in layers]
    for fit in (fits()[1], fits(hooks=["recover_mlp"])[1])
  )
  np.testing.assert_array_equal(shuffled[1:], plain[:-1])
  np.testing.assert_array_equal(shuffled[0], [0, 0, 0, 1])


def test_a_control_of_one_recovery_leaves_the_other(float64):
  sums = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32, 32)))
  value, mlp = fits(hooks=["recover_mlp"])
  np.testing.assert_array_equal(
    coefficients(value.solve(sums)[0]), coefficients(fits()[0].solve(sums)[0])
  )
  _, untouched = fits(hooks=["recover_value"])
  np.testing.assert_array_equal(
    coefficients(untouched.solve(sums[0])[0]), sums[0, 0, :4].astype(np.float32)
  )
  assert not np.array_equal(coefficients(mlp.solve(sums[0])[0]), sums[0, 0, :4])


def test_a_unit_without_a_neighbour_is_a_contract_error(float64):
  with pytest.raises(ContractError, match="recover_value: .* got 1 unit"):
    fits(hooks=["recover_value"])[0].solve(jnp.zeros((1, 32, 32)))
  with pytest.raises(ContractError, match="recover_mlp: .* got one layer"):
    fits(LINEARS[:1], hooks=["recover_mlp"])


@pytest.mark.parametrize(
  "hook", ["encode_weight", "measure_value", "tables", "arrange"]
)
def test_a_hook_that_no_control_can_change_is_a_contract_error(hook):
  change = {"kind": "shuffle_stats", "hooks": ["transform", hook]}
  with pytest.raises(ContractError, match=rf"cannot change \['{hook}'\]"):
    behaviours(Call({}, {}, change))


def test_every_neighbour_control_of_an_edit_changes_what_a_hook_is_told():
  told = {
    hook
    for template in edit_templates.EDIT_TEMPLATES
    for control in template.controls
    if control.intervention["kind"] == "shuffle_stats"
    for hook in control.intervention["hooks"]
  }
  assert {"recover_value", "recover_mlp"} < told <= {*TOLD}
  assert {hook.name for hook in INTERFACE.hooks} > {*TOLD}


def test_a_scope_cannot_divide_an_edit_of_a_recovery():
  edited = call(FITTED)
  before = call("import jax\nimport jax.numpy as jnp\nPLAN = {'mlp': True}\n")

  def scoped(parent):
    plain = {"computation": parent.computation, "plan": parent.plan}
    change = {"kind": "scope", "part": "even", "parent": plain}
    return behaviours(edited._replace(intervention=change))

  with pytest.raises(ContractError, match="divide an edit of the attention and mlp"):
    scoped(before)
  assert scoped(edited)(1, "mlp").hooks == edited.computation


@pytest.mark.parametrize("change", [{"kind": "magic"}, {"part": "even"}])
def test_an_unknown_intervention_is_a_contract_error(change):
  with pytest.raises(ContractError, match="unknown intervention"):
    behaviours(Call({}, {}, change))
