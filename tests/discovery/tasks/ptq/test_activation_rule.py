"""The PTQ task whose A4 rule is that of HiRes, whatever the program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.discovery.core.candidate_source import admit
from mxjax.discovery.core.task import Call
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.tasks.ptq import interface
from mxjax.discovery.tasks.ptq.task import PtqTask
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import one_code
from mxjax.numerics.realization.activation_quantizers import OneCode

OPTIONS = {"model": "random:0", "calibration": [8, 32], "windows": [2, 32]}
TASK = PtqTask(**OPTIONS, activation_rule="one_code")
OWN_RULE = """
def encode_act(block, gram, cross):
  exponent = block_exponent(block) + 2
  return nearest_codes(block, exponent), exponent
"""


def values(source):
  executor, outcomes = LocalExecutor(TASK), []
  traced = executor.trace(source)
  call = Call(traced.computation, admit(source, TASK.interface).plan, {})
  on_done = lambda index, outcome, seconds: outcomes.append(outcome)
  executor.run([call.active(TASK.interface)], on_done)
  return outcomes[0].values


@pytest.mark.slow
def test_a_program_runs_with_the_rule_of_hires_and_its_own_is_not_called():
  model, params = TASK.options.load()
  calib = mxjax.Calibration(model, TASK.options.tokens("fit"))
  nearest = mxjax.quantize(params, calib, "rtn", check=False, probe=False)

  def with_rule(leaf, exact):
    if not isinstance(leaf, QuantizedLinear):
      return leaf
    decoded = mxfp4.to_blocks(mxfp4.decode(leaf.weight, jnp.float32))
    wide = mxfp4.to_blocks(exact.astype(jnp.float32))
    gram, cross = one_code.tables(wide, decoded)
    rule = OneCode(one_code.pack_symmetric(gram), cross)
    return dataclasses.replace(leaf, rounding=rule)

  is_leaf = lambda node: isinstance(node, QuantizedLinear)
  refined = jax.tree.map(with_rule, nearest, params, is_leaf=is_leaf)
  tokens = TASK.options.tokens("measure")
  expected = np.log(perplexity(model, refined, tokens).values[0])
  assert expected != np.log(perplexity(model, nearest, tokens).values[0])
  source = TASK.interface.default_source()
  measured = values(source)
  assert measured["log_ppl"] == pytest.approx(expected, abs=1e-12)
  assert values(source + OWN_RULE) == measured


def test_nothing_proposes_or_asks_about_a_rule_that_is_frozen():
  frozen = set(interface.INTERFACE.names) - set(TASK.interface.names)
  assert frozen == {"encode_act"}
  assert all(frozen.isdisjoint(t.hooks) for t in TASK.edit_templates)
  assert len(TASK.edit_templates) < len(PtqTask(**OPTIONS).edit_templates)
  assert all(frozen.isdisjoint(names) for names in TASK.regimes.values())


def test_an_unknown_rule_is_refused():
  with pytest.raises(ValueError, match="activation_rule to be one of program, one_"):
    PtqTask(activation_rule="two_codes")
