"""Linears of a finished build, taken by programs that differ only in recovery."""

import dataclasses

import jax
import numpy as np
import pytest

from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.layers.linear import Transformed
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods import finished_linears, recovery
from mxjax.methods.hires import stage3
from mxjax.numerics.realization.activation_quantizers import Unrounded
from mxjax.run.quantize import run
from tests.cases import slow


def draw(seed):
  return np.random.default_rng(seed).integers(0, 61, (3, 32)).astype(np.int32)


def built(model, params, program, **changes):
  program = dataclasses.replace(program, **changes)
  return run(params, Calibration(model, draw(0)), program, check=False)


@pytest.mark.slow
def test_a_reused_build_is_the_program_itself(tiny_model, tiny_params):
  build = lambda program: built(tiny_model, tiny_params, program)
  program = dataclasses.replace(methods.RTN, recover=methods.HIRES.recover)
  got = build(finished_linears.reuse(program, build(methods.RTN).params))
  alone = build(program)
  assert got.record.program == alone.record.program
  for block, name in (("self_attn", "value_recovery"), ("mlp", "mlp_recovery")):
    left, right = (p.params["layers_1"][block][name] for p in (got, alone))
    for field in dataclasses.fields(left):
      a, b = getattr(left, field.name), getattr(right, field.name)
      np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  ("name", "other", "is_equal"),
  [
    ("hires", "hires:recover=none", True),
    ("hires", "hires:recover=attention+mlp-parent", True),
    ("rtn", "rtn+r", True),
    ("hires", "hires:use_balance=false", False),
    ("hires", "hires:rounding=nearest", False),
    ("hires", "hires:weighting=fisher", False),
    ("wush", "wush+r", False),
    ("rtn", "gptq", False),
  ],
)
def test_only_equal_linears_have_equal_build_keys(name, other, is_equal):
  first, second = (
    finished_linears.build_key(methods.get(each)) for each in (name, other)
  )
  assert (first == second) == is_equal
  assert finished_linears.build_key(methods.FOCUS) is None
  # Tuned with one recovery installed, and so none of a program with another.
  assert finished_linears.build_key(methods.get("rtn+r+tune")) is None


@pytest.mark.slow
def test_fits_before_encoding_see_unrounded_inputs(tiny_model, tiny_params):
  """Their coefficients differ from the deployed fit's, and the leaves stay legal."""
  early, late = (
    built(tiny_model, tiny_params, methods.RTN, name=name, recover=recover)
    for name, recover in (
      ("early", stage3.parse("attention-unrounded+mlp-unrounded")),
      ("late", methods.HIRES.recover),
    )
  )
  scale = lambda r: r.params["layers_0"]["self_attn"]["value_recovery"].scale
  assert np.abs(np.asarray(scale(early) - scale(late))).max() > 1e-4
  leaf = early.params["layers_0"]["mlp"]["up_proj"]["weight"]
  assert isinstance(leaf, QuantizedLinear)
  assert not isinstance(leaf.rounding, Unrounded)
  changed = recovery.unrounded(early.params["layers_0"])
  assert isinstance(changed["mlp"]["up_proj"]["weight"].rounding, Unrounded)


@pytest.mark.slow
def test_before_both_encodings_there_is_next_to_nothing_to_recover(
  tiny_model, tiny_params
):
  """The coefficients are those of the identity, up to rounding; with A4 or W4 not.

  Of WUSH, whose maps are as HiRes' and whose build is short.
  """
  recovered = {
    on: built(
      tiny_model,
      tiny_params,
      methods.WUSH,
      name=on,
      recover=stage3.parse(f"attention-{on}+mlp-{on}"),
    ).params["layers_0"]
    for on in ("unencoded", "unrounded")
  }

  def distance(layer):
    value, mlp = layer["self_attn"]["value_recovery"], layer["mlp"]["mlp_recovery"]
    parts = value.scale - 1, value.offset, mlp.gate_shift, mlp.gate_scale, mlp.up_scale
    return max(float(np.abs(np.asarray(part)).max()) for part in parts)

  assert distance(recovered["unencoded"]) < 1e-5
  assert distance(recovered["unrounded"]) > 1e-3


@pytest.mark.parametrize("method", [*slow("hires:recover=none"), "rtn"])
def test_a_layer_before_both_encodings_computes_what_the_float_layer_does(
  method, tiny_model, tiny_params
):
  program = methods.get(method)
  layer = built(tiny_model, tiny_params, program).params["layers_0"]
  float_layer = tiny_params["layers_0"]
  before = recovery.unencoded(layer, float_layer)
  hidden = jax.random.normal(jax.random.key(3), (2, 16, 64))
  got, want, encoded = (
    np.asarray(tiny_model.layer(one, hidden)) for one in (before, float_layer, layer)
  )
  assert np.abs(got - want).max() < 1e-4 < np.abs(encoded - want).max()
  leaf = before["mlp"]["up_proj"]["weight"]
  assert isinstance(leaf, Transformed) == (method != "rtn")
